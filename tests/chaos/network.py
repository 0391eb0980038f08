"""The network of a run: every link is a TCP proxy on loopback.

Nodes have names, and a cut is of one direction: `cut("server-0", "etcd-1")`
holds the bytes that server-0 sends to etcd-1, over whichever connection, and
nothing of what comes back. Held bytes are delivered when the link is healed, as
TCP would repeat them; so a write may arrive long after its sender gave up on
it. While a direction is cut no new connection comes about. Nothing is ever lost
or changed inside a connection, as in TCP.

Proxies and not the kernel's own means: these need no privilege and no module
(the delays of `tc` are missing in many kernels), hold on every machine, and
name a direction of a link by the nodes at its ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

__all__ = ["Network", "Sniff"]

_MOST_HELD = 1 << 20
_MOST_HEADER = 16_384
_DIAL_S = 5.0
_END = None
_RESET = b""

Sniff = Callable[[bytes], "str | None"]
"""Who dials, read from the first bytes of a connection; None: more are needed."""


class Network:
    """Links between named nodes. For one event loop."""

    def __init__(self) -> None:
        """Without any link."""
        self.aliases: dict[str, str] = {}
        """Other names of nodes, as connections know them."""
        self._cut: set[tuple[str, str]] = set()
        self._delays: dict[tuple[str, str], float] = {}
        self._connections: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.passed_bytes = 0
        """Bytes that were delivered, of all links."""

    async def listen(
        self, dialler: str, listener: str, upstream: tuple[str, int], sniff: Sniff | None = None
    ) -> int:
        """Makes a link; returns the port of 127.0.0.1 to dial.

        Args:
            dialler: The node that dials it; with `sniff` the name until it is known.
            listener: The node that it leads to.
            upstream: Host and port where that node listens.
            sniff: Finds out who dials, where several nodes share the link.
        """

        def accept() -> asyncio.Protocol:
            return _Connection(self, dialler, listener, upstream, sniff).near

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Ends every connection and every link."""
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.wait_closed() for server in self._servers))

    # ----------------------------------------------------------------- faults

    def cut(self, source: str, target: str) -> None:
        """Holds what `source` sends to `target`."""
        self._cut.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """Delivers what was held, and what comes."""
        self._cut.discard((source, target))
        self._turn()

    def slow(self, source: str, target: str, delay_s: float) -> None:
        """Delays what `source` sends to `target` from now on; 0 for not any more."""
        if delay_s:
            self._delays[source, target] = delay_s
        else:
            self._delays.pop((source, target), None)

    def reset(self, one: str, other: str) -> int:
        """Breaks every connection between two nodes; returns how many."""
        ends = {one, other}
        found = [c for c in self._connections if {self.name(c.dialler), c.listener} == ends]
        for connection in found:
            connection.abort()
        return len(found)

    def heal_all(self) -> None:
        """Takes every cut and every delay back."""
        self._cut.clear()
        self._delays.clear()
        self._turn()

    def is_cut(self, source: str, target: str) -> bool:
        """Whether bytes of this direction are held."""
        return (self.name(source), self.name(target)) in self._cut

    def delay_s(self, source: str, target: str) -> float:
        """How late bytes of this direction are."""
        return self._delays.get((self.name(source), self.name(target)), 0.0)

    def name(self, node: str) -> str:
        """A node's name, of any of its names."""
        return self.aliases.get(node, node)

    def _turn(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for connection in list(self._connections):
            connection.pump()

    # ------------------------------------------------------------ connections

    def add(self, connection: _Connection) -> None:
        """Takes a connection in and dials its other end once the link is whole."""
        self._connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._dial(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remove(self, connection: _Connection) -> None:
        """Forgets a connection that has ended."""
        self._connections.discard(connection)

    async def _dial(self, connection: _Connection) -> None:
        await connection.known.wait()
        if connection.aborted:
            return
        while self.is_cut(connection.dialler, connection.listener) or self.is_cut(
            connection.listener, connection.dialler
        ):
            await self._changed.wait()
        host, port = connection.upstream
        try:
            async with asyncio.timeout(_DIAL_S):
                far, _ = await asyncio.get_running_loop().create_connection(
                    lambda: connection.far, host, port
                )
            if connection.aborted:
                far.abort()
        except (OSError, TimeoutError):
            connection.abort()


class _Connection:
    """One connection of a link: its two ends and its two directions."""

    def __init__(
        self,
        network: Network,
        dialler: str,
        listener: str,
        upstream: tuple[str, int],
        sniff: Sniff | None,
    ) -> None:
        self.network = network
        self.dialler = dialler
        self.listener = listener
        self.upstream = upstream
        self.sniff = sniff
        self.known = asyncio.Event()
        self.aborted = False
        if sniff is None:
            self.known.set()
        self.near = _End(self)
        self.far = _End(self)
        self.near.sends = _Direction(self, self.near, self.far, forward=True)
        self.far.sends = _Direction(self, self.far, self.near, forward=False)

    def pump(self) -> None:
        """Delivers what may be delivered now."""
        self.near.sends.pump()
        self.far.sends.pump()

    def abort(self) -> None:
        """Breaks the connection at both ends."""
        self.aborted = True
        self.network.remove(self)
        self.known.set()
        for end in (self.near, self.far):
            if end.transport is not None:
                end.transport.abort()

    def identify(self, first: bytes, *, whole: bool) -> None:
        """Finds out who dials, if the first bytes say it."""
        assert self.sniff is not None
        found = self.sniff(first)
        if found is None and len(first) < _MOST_HEADER and not whole:
            return
        self.dialler = found or self.dialler
        self.known.set()


class _Direction:
    """What one end sends, on its way to the other."""

    def __init__(
        self, connection: _Connection, source: _End, target: _End, *, forward: bool
    ) -> None:
        self._connection = connection
        self._source = source
        self._target = target
        self._forward = forward
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None
        self.blocked = False
        self.over = False

    def _ends(self) -> tuple[str, str]:
        c = self._connection
        return (c.dialler, c.listener) if self._forward else (c.listener, c.dialler)

    def feed(self, data: bytes | None) -> None:
        """Takes bytes, `_END` or `_RESET`."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._connection.network.delay_s(*self._ends())
        if self._queue:
            due_s = max(due_s, self._queue[-1][0])
        self._queue.append((due_s, data))
        self._held += len(data or b"")
        if self._forward and not self._connection.known.is_set():
            self._connection.identify(b"".join(d for _, d in self._queue if d), whole=not data)
        if self._held > _MOST_HELD and self._source.transport is not None:
            with contextlib.suppress(RuntimeError):
                self._source.transport.pause_reading()
        self.pump()

    def pump(self) -> None:
        """Delivers what is due and not held."""
        network = self._connection.network
        transport = self._target.transport
        if transport is None or self.blocked or not self._queue:
            return
        if network.is_cut(*self._ends()):
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._queue and not self.blocked:
            due_s, data = self._queue[0]
            if due_s > now_s:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.call_at(due_s, self.pump)
                return
            self._queue.popleft()
            if data == _RESET or (
                data is _END and (transport.is_closing() or self._target.sends.over)
            ):
                self._connection.abort()
                return
            if data is _END:
                self.over = True
                transport.write_eof()
                continue
            if transport.is_closing():
                continue
            self._held -= len(data)
            network.passed_bytes += len(data)
            transport.write(data)
        if self._held < _MOST_HELD and self._source.transport is not None:
            with contextlib.suppress(RuntimeError):
                self._source.transport.resume_reading()


class _End(asyncio.Protocol):
    """One end of a connection."""

    sends: _Direction

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self is self._connection.near:
            self._connection.network.add(self._connection)
        else:
            self._connection.pump()

    def data_received(self, data: bytes) -> None:
        self.sends.feed(data)

    def eof_received(self) -> bool:
        self.sends.feed(_END)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        if not self._connection.aborted:
            self.sends.feed(_RESET)

    def pause_writing(self) -> None:
        self._other().blocked = True

    def resume_writing(self) -> None:
        self._other().blocked = False
        self._other().pump()

    def _other(self) -> _Direction:
        """The direction that ends here."""
        connection = self._connection
        return (connection.far if self is connection.near else connection.near).sends
