"""A shared store in memory, several registries over it, and a loop whose time jumps.

Nothing here waits for real: where nobody has anything to do, time goes on to the
next moment that somebody waits for. A test that nobody can bring to its end
fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

from tests.unit.core.desk import record, registration
from tests.unit.server.turns import Ask

from rankbook import v1
from rankbook.errors import RankbookError, Reason, Unavailable
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.ops import Commit, Txn
from rankbook_server.registry import Registry, RegistryLimits
from rankbook_server.rpc.calls import Calls
from rankbook_server.rpc.status import boundary
from rankbook_server.store import Compacted, MemoryStore
from rankbook_server.store.base import Presence, Snapshot, not_open

UNIX_S = 1_700_000_000.0


START_S = 1000.0
LONGEST_S = 3600.0
MOST_TURNS = 20_000


class _Selector(selectors.DefaultSelector):
    """Moves time instead of waiting for it."""

    loop: WarpLoop
    turns = 0

    def select(self, timeout: float | None = None) -> Any:
        loop = self.loop
        found = super().select(0)
        self.turns += 1
        if not found and timeout:
            loop.now_s += timeout
            self.turns = 0
        if not found and timeout is None:
            loop.give_up("everybody waits, and nothing is to come")
        if self.turns == MOST_TURNS:
            loop.give_up("somebody turns round and round")
        if loop.now_s > START_S + LONGEST_S:
            loop.give_up("it does not come to its end")
        return found


class WarpLoop(asyncio.SelectorEventLoop):
    """A loop whose time jumps from one thing to do to the next."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.trouble = ""
        self._main: asyncio.Task[None] | None = None
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def give_up(self, trouble: str) -> None:
        """Ends the test."""
        if self._main is None or self.trouble:
            raise AssertionError(self.trouble or trouble)
        self.trouble = trouble
        self._main.cancel()

    def play(self, body: Coroutine[Any, Any, None]) -> None:
        """Runs a test to its end."""
        self._main = self.create_task(body)
        try:
            self.run_until_complete(self._main)
            self.run_until_complete(self.shutdown_asyncgens())
            # A test may expect to be cancelled, but not by this.
            assert not self.trouble, self.trouble
        except asyncio.CancelledError:
            raise AssertionError(self.trouble) from None
        finally:
            self.close()

    def time(self) -> float:
        return self.now_s


class WarpClock:
    """The loop's time, for what takes time by argument."""

    def __init__(self, loop: WarpLoop, name: str) -> None:
        self._loop, self._name, self._count = loop, name, 0

    def mono(self) -> float:
        return self._loop.now_s

    def unix(self) -> float:
        return UNIX_S + self._loop.now_s

    def now(self) -> Instant:
        return Instant(self.mono(), self.unix())

    def new_id(self) -> str:
        self._count += 1
        return f"{self._name}-{self._count}"


class SharedMemoryStore(MemoryStore):
    """What every server's `Line` ends at. Time decides which leases live."""

    def __init__(self, loop: WarpLoop, **bounds: int) -> None:
        self._clock = WarpClock(loop, "book")
        self._loop = loop
        self._waiting: set[asyncio.Future[None]] = set()
        super().__init__(self._clock.mono, self._clock.new_id, **bounds)
        self._words: dict[str, tuple[bytes, float, str]] = {}
        self.words_written = 0
        """Words that were not the same as before."""

    def words(self) -> dict[str, bytes]:
        """What each server says, as far as it has not run out."""
        now_s = self._clock.mono()
        return {name: word for name, (word, ends_s, _) in self._words.items() if ends_s > now_s}

    def say(self, server_id: str, word: bytes, ttl_s: float) -> bool:
        """Keeps a word; returns whether the one before, for this book, was still kept."""
        before = self.words().get(server_id)
        kept = before is not None and self._words[server_id][2] == self.book_id
        self.words_written += before != word
        self._words[server_id] = word, self._clock.mono() + ttl_s, self.book_id
        return kept

    def lose(self, *server_ids: str) -> None:
        """Forgets words: those of these servers, or all."""
        for server_id in server_ids or tuple(self._words):
            self._words.pop(server_id, None)

    def stir(self) -> None:
        """Has everybody look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, at_most_s: float | None = None) -> None:
        """Waits until something may have changed."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(future)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await future

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        results = await super().commit(txns)
        self.stir()
        return results

    async def touch(self, leases: Mapping[str, float]) -> Any:
        made = await super().touch(leases)
        self.stir()
        return made

    async def drop(self, lease_ids: Iterable[str]) -> None:
        await super().drop(lease_ids)
        self.stir()

    @property
    def revision(self) -> int:
        return self._revision

    def since(self, revision: int) -> list[Commit]:
        """Commits above a revision.

        Raises:
            Compacted: They are forgotten.
        """
        history = self._opened()
        if revision < history.floor:
            raise Compacted(revision, history.floor)
        return [c for c in history._commits if c.revision > revision]

    def forget(self) -> None:
        """Forgets the history, as etcd's compaction does."""
        self._opened().restart(self._revision)

    def replace(self) -> None:
        """Puts another, empty book in the place of this one."""
        self._book_id = self._new_id()
        self._entries.clear()
        self._leases.clear()
        self._revision += 1
        self._opened().restart(self._revision)
        self.stir()


class Line:
    """A server's way to the store, which can be broken at every place."""

    most_bytes = 1024 * 1024

    def __init__(self, store: SharedMemoryStore) -> None:
        self.store = store
        self.down = ""
        """What every call fails with, while not empty; watches break too."""
        self.full = ""
        """What commits, touches and drops fail with."""
        self.mute = ""
        """What touches and drops fail with."""
        self.deaf = False
        """Watches of commits stand still."""
        self.blind = False
        """Watches of leases stand still."""
        self.still = False
        """Nothing is answered and nothing comes."""
        self.lose_replies = 0
        """So many commits are kept, and then fail with an unknown outcome."""
        self.before_commit: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Awaited once, before the next commit is made."""
        self.delay_s = 0.0
        """How late every answer comes."""
        self.snapshot_delay_s = 0.0
        """How late a snapshot comes."""
        self.commits: list[list[Txn]] = []
        self.snapshots = 0
        self._book_id = ""
        self._open = False

    @property
    def book_id(self) -> str:
        return self._book_id

    @property
    def description(self) -> str:
        return "shared:"

    async def open(self) -> None:
        self._check(opened=True)
        await self.store.open()
        self._book_id, self._open = self.store.book_id, True

    async def close(self) -> None:
        self._open = False
        self.store.stir()

    async def snapshot(self) -> Snapshot:
        await self._ask()
        self.snapshots += 1
        snapshot = await self.store.snapshot()
        await self._late()
        await asyncio.sleep(self.snapshot_delay_s)
        return snapshot

    async def last_revision(self) -> int:
        await self._ask()
        await self._late()
        return self.store.revision

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        await self._ask()
        self._check(self.full)
        if (before := self.before_commit) is not None:
            self.before_commit = None
            await before()
        self._check(self.full)
        self.commits.append(list(txns))
        results = await self.store.commit(txns)
        await self._late()
        if self.lose_replies:
            self.lose_replies -= 1
            raise away("no answer came; whether it was written is not known")
        return results

    async def touch(self, leases: Mapping[str, float]) -> Any:
        await self._ask()
        self._check(self.mute or self.full)
        made = await self.store.touch(leases)
        await self._late()
        return made

    async def drop(self, lease_ids: Iterable[str]) -> None:
        await self._ask()
        self._check(self.mute or self.full)
        await self.store.drop(lease_ids)
        await self._late()

    async def live(self) -> Mapping[str, float]:
        await self._ask()
        return await self.store.live()

    async def watch(self, from_revision: int) -> AsyncIterator[Commit]:
        seen = from_revision
        while self._open:
            self._check()
            if not (self.deaf or self.still):
                for commit in self.store.since(seen):
                    self._check()
                    seen = commit.revision
                    yield commit
            await self.store.wait()

    async def presence(self) -> AsyncIterator[Presence]:
        await self._ask()
        live = frozenset(await self.store.live())
        yield Presence(live, anew=True)
        while self._open:
            self._check()
            now = await self.store.live()
            if not (self.blind or self.still) and live != frozenset(now):
                was, live = live, frozenset(now)
                yield Presence(live - was, was - live)
                continue
            await self.store.wait(min(now.values(), default=None))

    async def announce(self, server_id: str, word: bytes, ttl_s: float) -> bool:
        self._check(self.mute or self.full)
        kept = self.store.say(server_id, word, ttl_s)
        await self._late()
        return kept

    async def announced(self) -> Mapping[str, bytes]:
        await self._ask()
        words = self.store.words()
        await self._late()
        return words

    async def withdraw(self, server_id: str) -> None:
        self._check(self.mute or self.full)
        self.store.lose(server_id)

    def heal(self) -> None:
        """Mends whatever was broken."""
        self.down = self.full = self.mute = ""
        self.deaf = self.blind = self.still = False
        self.delay_s = self.snapshot_delay_s = 0.0
        self.store.stir()

    async def _ask(self) -> None:
        self._check()
        await asyncio.sleep(0)
        while self.still:
            await self.store.wait()
        self._check()

    async def _late(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
            self._check()

    def _check(self, trouble: str = "", *, opened: bool = False) -> None:
        if self.down or trouble:
            raise away(self.down or trouble)
        if opened:
            return
        if not self._open:
            raise not_open(self.description)
        if self._book_id != self.store.book_id:
            raise away("another book is in this one's place: open the store again")


def away(why: str) -> Unavailable:
    return Unavailable(why, reason=Reason.STORE_UNAVAILABLE, metadata={"store": "shared:"})


class Server:
    """A registry with its line, and the calls that a client makes."""

    def __init__(self, loop: WarpLoop, store: SharedMemoryStore, name: str, **limits: Any) -> None:
        self.clock = WarpClock(loop, name)
        self.line = Line(store)
        values: dict[str, Any] = {"book": BookLimits(), **limits}
        self.registry = Registry(
            self.line,
            self.clock,
            RegistryLimits(**values),
            contain=lambda call: boundary(call, self.clock.new_id),
        )
        nobody = cast(Any, None)
        self._calls = Calls(self.registry, nobody, nobody, nobody, nobody, self.clock, "")

    async def __aenter__(self) -> Server:
        await self.registry.open()
        self.registry.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.registry.close()

    @property
    def book(self) -> Book:
        return self.registry.book("default")

    def call(self, ask: Ask) -> asyncio.Future[Any]:
        """Queues a call at once."""
        request = ask.request
        return (
            self.registry.submit(ask.name, "default", cast(Any, ask.decide), subject=ask.subject)
            if request is not None
            else cast(Any, None)
        )

    def register(self, *records: v1.WorkerRecord, **kind: Any) -> asyncio.Future[Any]:
        return self.call(Ask("register_workers", registration(*records, **kind)))

    async def renew(self, lease_id: str, ttl_s: float = 0.0) -> v1.LeaseStatus:
        """Renews, as the call does."""
        renewal = v1.LeaseRenewal(lease_id=lease_id)
        if ttl_s:
            renewal.ttl.FromMilliseconds(round(1000 * ttl_s))
        request = v1.RenewLeasesRequest(leases=[renewal])
        reply = cast(Any, await self._calls.answer("renew_leases", request, None))
        status: v1.LeaseStatus = reply.leases[0]
        return status

    def kept(self) -> dict[str, Any]:
        """All that the book holds and that outlives the process, with revisions."""
        engines = {
            name: (
                str(engine.head),
                engine.head_revision,
                engine.revision,
                {s: (str(w.stored), w.write_revision) for s, w in engine.slots.items()},
            )
            for name, engine in self.book.engines.items()
        }
        leases = {n: (str(e.stored), sorted(e.holds)) for n, e in self.book.leases.items()}
        return {"engines": engines, "leases": leases, "facts": str(self.book.facts)}


class Cluster:
    """Servers over one store."""

    def __init__(self, loop: WarpLoop, count: int, **limits: Any) -> None:
        self.loop = loop
        self.store = SharedMemoryStore(loop)
        self.servers = [Server(loop, self.store, f"s{number}", **limits) for number in range(count)]
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Cluster:
        for server in self.servers:
            await self._stack.enter_async_context(server)
        await self.level()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def level(self) -> None:
        """Waits until every server that follows has everything."""
        for server in self.servers:
            await within(5.0, lambda s=server: s.registry.revision >= self.store.revision)  # type: ignore[misc]
        await asyncio.sleep(0.01)

    def freeze(self, seconds: float) -> None:
        """Lets time go by in which this process did not run."""
        self.loop.now_s += seconds


async def within(seconds: float, holds: Callable[[], bool]) -> None:
    """Waits until something holds, in the loop's time."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds
    while not holds():
        assert loop.time() < ends, "it did not come to hold in time"
        await asyncio.sleep(0.01)


async def settled(future: asyncio.Future[Any]) -> Any:
    """A reply, or the error in place of it."""
    try:
        return await future
    except RankbookError as error:
        return error


def play(count: int, script: Callable[[Cluster], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Runs a test on servers of its own."""

    async def run(loop: WarpLoop) -> None:
        async with Cluster(loop, count, **limits) as cluster:
            await script(cluster)

    loop = WarpLoop()
    loop.play(run(loop))


def worker(tp: int = 0, engine_id: str = "e_dp0", **kind: Any) -> v1.WorkerRecord:
    """A record of an engine of two workers."""
    return record(0, tp, engine_id=engine_id, pp_size=1, **kind)
