"""Claims about the client while the registry is away: every wait ends, with a typed error."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time

import pytest

import rankbook

# A busy machine may add this much to a deadline.
SLACK_S = 0.4


@pytest.fixture
def black_hole():
    """The address of something that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def nobody():
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def timed(call):
    before = time.monotonic()
    with pytest.raises(rankbook.RankbookError) as caught:
        call()
    return caught.value, time.monotonic() - before


def test_a_black_hole_costs_a_caller_its_deadline_and_no_more(black_hole):
    with rankbook.Client(black_hole) as client:
        for timeout_s in (0.3, 0.6):
            error, took = timed(lambda: client.status(timeout_s=timeout_s))  # noqa: B023
            assert isinstance(error, rankbook.Unavailable)
            assert black_hole in error.message
            assert timeout_s - 0.05 <= took <= timeout_s + SLACK_S


def test_a_black_hole_costs_a_loop_nothing_and_its_caller_the_deadline(black_hole):
    async def run() -> None:
        async with rankbook.AsyncClient(black_hole) as client:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            before = time.monotonic()
            with pytest.raises(rankbook.Unavailable):
                await client.status(timeout_s=0.5)
            assert time.monotonic() - before <= 0.5 + SLACK_S
            ticking.cancel()
            assert ticks >= 20

    asyncio.run(run())


def test_nobody_there_is_said_well_before_the_deadline(nobody):
    with rankbook.Client(nobody, timeout_s=30) as client:
        error, took = timed(client.status)
        assert isinstance(error, rankbook.Unavailable)
        assert error.exit_code == 4
        assert took < 5


def test_who_or_what_is_not_there_is_said_once_and_in_words(rankbookd, nobody):
    server = rankbookd()
    reached = {
        nobody: f"no registry answers at {nobody}: Connection refused; is rankbookd running",
        server.http: f"no registry answers at {server.http}: what listens there speaks no gRPC",
        "no-such-host.invalid:7420": "the name cannot be looked up (",
    }
    for endpoint, words in reached.items():
        with rankbook.Client(endpoint, timeout_s=5) as client:
            error, _ = timed(client.status)
        assert words in error.message
        assert error.message.count(endpoint) == 1
    both = f"{nobody},{server.http}"
    with rankbook.Client(both, timeout_s=5) as client:
        error, _ = timed(client.status)
    # Of several, each has its own cause.
    assert f"{nobody}: Connection refused; {server.http}: what listens there" in error.message


def test_nobody_there_is_said_by_a_watch_too(nobody):
    with rankbook.Client(nobody, timeout_s=1) as client:
        error, took = timed(lambda: next(client.watch()))
        assert isinstance(error, rankbook.Unavailable)
        assert took < 10


def test_a_frozen_registry_costs_a_caller_its_deadline(rankbookd):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client:
        client.status()
        server.pause()
        error, took = timed(lambda: client.status(timeout_s=0.5))
        assert isinstance(error, rankbook.DeadlineExceeded)
        assert took <= 0.5 + SLACK_S
        error, took = timed(lambda: client.status(timeout_s=0.3))
        assert isinstance(error, rankbook.DeadlineExceeded | rankbook.Unavailable)
        assert took <= 0.3 + SLACK_S
        server.resume()
        assert client.status(timeout_s=10).version


def test_a_frozen_registry_costs_an_asyncio_caller_its_deadline(rankbookd):
    server = rankbookd()

    async def run() -> None:
        async with rankbook.AsyncClient(server.grpc) as client:
            await client.status()
            server.pause()
            before = time.monotonic()
            with pytest.raises(rankbook.DeadlineExceeded):
                await client.status(timeout_s=0.5)
            assert time.monotonic() - before <= 0.5 + SLACK_S
            server.resume()
            assert (await client.status(timeout_s=10)).version

    asyncio.run(run())


@pytest.mark.parametrize("way", ["kill", "pause"])
def test_with_two_endpoints_a_call_goes_on_at_the_other_one(rankbookd, way):
    first, second = rankbookd(), rankbookd()
    with rankbook.Client([first.grpc, second.grpc], timeout_s=4) as client:
        boot_id = client.status().boot_id
        getattr(first, way)()
        assert client.status().boot_id != boot_id


def test_with_two_endpoints_asyncio_calls_go_on_at_the_other_one(rankbookd):
    first, second = rankbookd(), rankbookd()

    async def run() -> None:
        async with rankbook.AsyncClient([first.grpc, second.grpc], timeout_s=4) as client:
            boot_id = (await client.status()).boot_id
            first.kill()
            assert (await client.status()).boot_id != boot_id
            second.kill()
            first.start_again(same_port=True)
            assert (await client.status()).boot_id

    asyncio.run(run())


def test_an_endpoint_that_is_down_from_the_start_is_passed_over(rankbookd, nobody, black_hole):
    server = rankbookd()
    with rankbook.Client([nobody, black_hole, server.grpc], timeout_s=10) as client:
        assert client.status().version


def test_a_watch_goes_on_at_the_other_endpoint(rankbookd, made):
    first, second = rankbookd(), rankbookd()
    with rankbook.Client(second.grpc) as other:
        other.register_workers([made.record("there")], sequence=1, lease_key="k", ttl_s=60)
    with (
        rankbook.Client([first.grpc, second.grpc]) as client,
        rankbook.TopologyView(client) as view,
    ):
        view.wait_synced(10)
        assert view.get("there") is None
        first.kill()
        made.eventually(lambda: view.get("there") is not None, 5, "the other one's engine")


def test_a_call_survives_a_quick_restart_of_the_registry(rankbookd, tmp_path):
    server = rankbookd(store=f"sqlite:{tmp_path}/book.db")
    policy = rankbook.RetryPolicy(attempts=20, max_s=0.5)
    with rankbook.Client(server.grpc, timeout_s=10, retry=policy) as client:
        boot_id = client.status().boot_id
        server.kill()
        server.start_again(same_port=True)
        assert client.status().boot_id != boot_id


def test_calls_under_load_end_well_or_with_a_typed_error_whenever_the_registry_is_killed(
    rankbookd, tmp_path
):
    server = rankbookd(store=f"sqlite:{tmp_path}/book.db")
    over = threading.Event()
    answered: queue.Queue = queue.Queue()
    others: queue.Queue = queue.Queue()
    times: queue.Queue = queue.Queue()

    def ask(client: rankbook.Client) -> None:
        while not over.is_set():
            before = time.monotonic()
            try:
                client.renew_leases(["l"], timeout_s=1)
                answered.put(None)
            except (rankbook.Unavailable, rankbook.DeadlineExceeded):
                pass
            except BaseException as error:
                others.put(error)
                raise
            finally:
                times.put(time.monotonic() - before)

    with rankbook.Client(server.grpc) as client:
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            for _ in range(60):
                answered.get(timeout=10)
            server.kill()
            server.start_again(same_port=True)
        for _ in range(60):
            answered.get(timeout=10)
        over.set()
        for thread in threads:
            thread.join(3)
        assert not any(thread.is_alive() for thread in threads)
    assert others.empty()
    assert max(times.get() for _ in range(times.qsize())) < 1 + SLACK_S


def test_asyncio_calls_under_load_end_well_or_with_a_typed_error(rankbookd, tmp_path):
    server = rankbookd(store=f"sqlite:{tmp_path}/book.db")

    async def run() -> None:
        over = asyncio.Event()
        answered: asyncio.Queue = asyncio.Queue()

        async def ask(client: rankbook.AsyncClient) -> None:
            while not over.is_set():
                with contextlib.suppress(rankbook.Unavailable, rankbook.DeadlineExceeded):
                    await client.renew_leases(["l"], timeout_s=1)
                    answered.put_nowait(None)

        async with (
            rankbook.AsyncClient(server.grpc) as client,
            asyncio.timeout(40),
            asyncio.TaskGroup() as group,
        ):
            for _ in range(6):
                group.create_task(ask(client))
            for _ in range(3):
                for _ in range(60):
                    await answered.get()
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start_again, same_port=True)
            for _ in range(60):
                await answered.get()
            over.set()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "is_said"),
    [(rankbook.NotFound("never granted"), False), (rankbook.Unavailable("away"), True)],
)
def test_a_registration_that_stops_says_so_only_where_its_lease_outlives_it(
    shared_rankbookd, made, engine_id, registration, monkeypatch, caplog, error, is_said
):
    one = registration(
        [made.record(engine_id)], endpoints=shared_rankbookd.grpc, mode="thread", ttl_s=60
    )
    one.start()
    one.wait_registered(10)

    # A registry that restarted no longer knows which leases have ended.
    def revoke_lease(self, lease_id, *, timeout_s=None):
        raise error

    monkeypatch.setattr(rankbook.Client, "revoke_lease", revoke_lease)
    one.stop()
    assert ("left to run out" in caplog.text) is is_said
