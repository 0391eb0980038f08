"""Room for bytes: what all requests and all replies together may take.

Bounds on the number of calls say little when one of them may be megabytes. A
request over the bound is refused at once. A reply waits for its turn, since
replies leave by themselves as clients take them; those of clients that take
nothing are given up once others have waited for them for long enough.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rankbook.errors import Overloaded, Reason
from rankbook.limits import MAX_REPLY_BYTES

__all__ = [
    "MAX_REPLY_ROOM",
    "MAX_REQUEST_ROOM",
    "SMALL_REPLY_BYTES",
    "Held",
    "ReplyRoom",
    "RequestRoom",
    "Turn",
]

MAX_REQUEST_ROOM = 64 * 1024 * 1024
"""Bytes of all requests that are not answered yet."""
MAX_REPLY_ROOM = 128 * 1024 * 1024
"""Bytes of all large replies that their clients have not taken yet."""
SMALL_REPLY_BYTES = 32 * 1024
"""A reply of so many bytes needs no room: the bounds on calls are enough."""
WAIT_S = 10.0
"""How long a reply waits for room, and may keep others waiting, in seconds."""


class RequestRoom:
    """Room for requests. For one event loop."""

    def __init__(self, bound: int = MAX_REQUEST_ROOM) -> None:
        """Begins empty; `bound` is in bytes."""
        self._bound = bound
        self._taken = 0

    def take(self, size: int) -> None:
        """Takes room for a request of `size` bytes, to be given back once.

        Raises:
            Overloaded: There is not so much left; nothing was taken.
        """
        if self._taken + size > self._bound:
            raise Overloaded(
                f"the requests in hand take {self._taken} bytes, and {size} more would be over "
                f"the {self._bound} this server holds: try again later",
                reason=Reason.TOO_MANY_CALLS,
                metadata={
                    "limit": "bytes of requests",
                    "value": self._taken + size,
                    "bound": self._bound,
                },
            )
        self._taken += size

    def give(self, size: int) -> None:
        """Gives room back."""
        self._taken -= size


class Held:
    """Room that one reply has taken. Give it back with `ReplyRoom.give`."""

    __slots__ = ("drop", "since_s", "size")

    def __init__(self, size: int, since_s: float, drop: Callable[[], object]) -> None:
        """Notes what is held, since when, and how its call is ended."""
        self.size = size
        self.since_s = since_s
        self.drop = drop


class ReplyRoom:
    """Room for large replies, first come first served. For one event loop."""

    def __init__(self, bound: int = MAX_REPLY_ROOM, wait_s: float = WAIT_S) -> None:
        """Begins empty.

        Args:
            bound: Bytes altogether; one reply alone may be larger.
            wait_s: Longest wait for room, and how long a reply that others
                wait for may be on its way, in seconds.
        """
        self._bound = bound
        self._wait_s = wait_s
        self._taken = 0
        # Oldest first.
        self._held: dict[Held, None] = {}
        self._queue: deque[tuple[Held, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, size: int, drop: Callable[[], object]) -> Held:
        """Takes room for a reply of `size` bytes, once there is some.

        Args:
            size: Bytes.
            drop: Ends the call whose reply it is; called when its client has
                taken nothing for too long and others wait.

        Raises:
            Overloaded: There was none in time.
        """
        loop = asyncio.get_running_loop()
        held = Held(size, loop.time(), drop)
        if not self._queue and self._fits(size):
            self._enter(held, loop.time())
            return held
        turn: asyncio.Future[None] = loop.create_future()
        entry = (held, turn)
        self._queue.append(entry)
        self._look_later()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except (asyncio.CancelledError, TimeoutError) as end:
            if held in self._held:
                # Its turn came in the same moment.
                self.give(held)
            else:
                self._queue.remove(entry)
                self._admit()
            if isinstance(end, asyncio.CancelledError):
                raise
            raise Overloaded(
                f"replies of {self._taken} bytes are on their way to clients that take them "
                f"slowly, and no more than {self._bound} may be: try again later",
                reason=Reason.TOO_MANY_CALLS,
                metadata={"limit": "bytes of replies", "bound": self._bound},
            ) from None
        return held

    @property
    def is_tight(self) -> bool:
        """Whether a reply of the largest size would have to wait now."""
        return bool(self._queue) or not self._fits(MAX_REPLY_BYTES)

    def shrink(self, held: Held, size: int) -> None:
        """Gives back what a reply turned out not to need."""
        if held in self._held and size < held.size:
            self._taken -= held.size - size
            held.size = size
            self._admit()

    def give(self, held: Held) -> None:
        """Gives room back, once; a second call has no effect."""
        if self._held.pop(held, self) is None:
            self._taken -= held.size
            self._admit()

    def _fits(self, size: int) -> bool:
        return not self._held or self._taken + size <= self._bound

    def _enter(self, held: Held, now_s: float) -> None:
        held.since_s = now_s
        self._held[held] = None
        self._taken += held.size

    def _admit(self) -> None:
        now_s = asyncio.get_running_loop().time()
        while self._queue and self._fits(self._queue[0][0].size):
            held, turn = self._queue.popleft()
            self._enter(held, now_s)
            if not turn.done():
                turn.set_result(None)

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._wait_s / 4, self._look)

    def _look(self) -> None:
        """Ends calls whose clients take nothing while others wait."""
        self._timer = None
        if not self._queue:
            return
        late_s = asyncio.get_running_loop().time() - self._wait_s / 2
        for held in [held for held in self._held if held.since_s <= late_s]:
            held.drop()
        self._look_later()


class Turn:
    """One watch's turn to make a message and to write it.

    A message that is made and waits takes as much memory as one on its way. So
    none is made before the stream is free and, where room is tight, before
    there is room for the largest.
    """

    def __init__(
        self, room: ReplyRoom, drop: Callable[[], object], stream: asyncio.Lock | None = None
    ) -> None:
        """Takes nothing yet.

        Args:
            room: Room for replies.
            drop: Ends the call, as in `ReplyRoom.take`.
            stream: Held by who writes to the stream; None where the watch has
                a stream of its own.
        """
        self._room = room
        self._drop = drop
        self._stream = stream
        self._entered = False
        self._held: Held | None = None

    async def enter(self) -> None:
        """Waits for the turn; a second call before `leave` has no effect.

        Raises:
            Overloaded: There was no room in time.
        """
        if self._entered:
            return
        if self._stream is not None:
            await self._stream.acquire()
        self._entered = True
        if self._room.is_tight:
            self._held = await self._room.take(MAX_REPLY_BYTES, self._drop)

    async def fit(self, size: int) -> None:
        """Holds room for a message of `size` bytes that was made in this turn.

        Raises:
            Overloaded: There was no room in time.
        """
        if self._held is not None:
            self._room.shrink(self._held, size)
        elif size > SMALL_REPLY_BYTES:
            self._held = await self._room.take(size, self._drop)

    def leave(self) -> None:
        """Ends the turn; a second call has no effect."""
        if not self._entered:
            return
        self._entered = False
        if self._held is not None:
            self._room.give(self._held)
            self._held = None
        if self._stream is not None:
            self._stream.release()
