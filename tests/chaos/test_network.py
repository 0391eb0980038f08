"""The proxies of the chaos test do what a cut, a delay and a reset are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from .network import Network


class Echo:
    """A server that answers each line with itself, and counts."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.got = asyncio.Event()
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.lines.append(line)
                self.got.set()
                writer.write(line)
        except ConnectionError:
            pass
        finally:
            writer.close()


Scene = Callable[[Network, Echo, int], Awaitable[None]]


def play(scene: Scene) -> None:
    """Runs a scene with a network in which `a` dials `b`."""

    async def run() -> None:
        network, echo = Network(), Echo()
        async with await echo.start():
            port = await network.listen("a", "b", ("127.0.0.1", echo.port))
            async with asyncio.timeout(20):
                await scene(network, echo, port)
            await network.close()

    asyncio.run(run())


async def is_silent(reader: asyncio.StreamReader) -> bool:
    """Whether nothing comes for a while that is long on loopback."""
    try:
        async with asyncio.timeout(0.2):
            await reader.readline()
    except TimeoutError:
        return True
    return False


def test_bytes_pass_in_order_and_the_end_passes() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = [b"%d%s\n" % (n, b"x" * 50_000) for n in range(40)]
        writer.writelines(sent)
        assert [await reader.readline() for _ in sent] == sent
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert network.passed_bytes == 2 * sum(map(len, sent))

    play(scene)


def test_a_cut_holds_one_direction_and_delivers_when_healed() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"1\n")
        assert await reader.readline() == b"1\n"
        network.cut("b", "a")
        echo.got.clear()
        writer.write(b"2\n")
        await echo.got.wait()
        assert await is_silent(reader)
        network.heal("b", "a")
        assert await reader.readline() == b"2\n"
        network.cut("a", "b")
        writer.write(b"3\n")
        assert await is_silent(reader)
        assert echo.lines == [b"1\n", b"2\n"]
        network.heal("a", "b")
        assert await reader.readline() == b"3\n"
        writer.close()

    play(scene)


def test_no_connection_comes_about_while_a_direction_is_cut() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        network.cut("b", "a")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"early\n")
        assert await is_silent(reader)
        assert echo.lines == []
        network.heal("b", "a")
        assert await reader.readline() == b"early\n"
        writer.close()

    play(scene)


def test_what_was_sent_before_the_sender_ended_arrives_after_the_cut() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"1\n")
        await echo.got.wait()
        network.cut("a", "b")
        writer.write(b"late\n")
        writer.close()
        await writer.wait_closed()
        echo.got.clear()
        network.heal("a", "b")
        await echo.got.wait()
        assert echo.lines == [b"1\n", b"late\n"]

    play(scene)


def test_a_delay_is_of_one_direction_and_keeps_the_order() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        network.slow("a", "b", 0.3)
        started = loop.time()
        writer.write(b"1\n")
        await asyncio.sleep(0.05)
        network.slow("a", "b", 0)
        writer.write(b"2\n")
        assert await reader.readline() == b"1\n"
        assert loop.time() - started >= 0.3
        assert await reader.readline() == b"2\n"
        writer.close()

    play(scene)


def test_a_reset_breaks_what_is_open_and_nothing_else() -> None:
    async def scene(network: Network, echo: Echo, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"1\n")
        assert await reader.readline() == b"1\n"
        assert network.reset("b", "a") == 1
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"2\n")
        assert await reader.readline() == b"2\n"
        writer.close()

    play(scene)


def test_who_dials_is_read_from_the_first_bytes() -> None:
    async def run() -> None:
        network, echo = Network(), Echo()

        def sniff(first: bytes) -> str | None:
            return first.partition(b"\n")[0].decode() if b"\n" in first else None

        async with await echo.start():
            port = await network.listen("?", "b", ("127.0.0.1", echo.port), sniff)
            network.aliases["4711"] = "c"
            network.cut("c", "b")
            async with asyncio.timeout(20):
                one, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"47")
                await asyncio.sleep(0.05)
                writer.write(b"11\n")
                other, writer2 = await asyncio.open_connection("127.0.0.1", port)
                writer2.write(b"d\n")
                assert await other.readline() == b"d\n"
                assert await is_silent(one)
                network.heal("c", "b")
                assert await one.readline() == b"4711\n"
                writer.close()
                writer2.close()
            await network.close()

    asyncio.run(run())
