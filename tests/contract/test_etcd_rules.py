"""The rules of a book hold on every server that shares it over etcd.

The machine of the core's own rules plays against three servers with a copy of
the book each, over one real etcd. Whichever is asked decides on its copy, which
may be behind; the store refuses what was decided on an old one, and then, or
where it would refuse a client itself, the server gets what it lacks and decides
anew. What one commits comes to the others by their watches, some at once and
some later. The copies are folded by the servers' own code.

Times to live are the machine's: what a server hears of a lease the others know
at once, as they would by the lease's key.

RANKBOOK_EXAMPLES=500 looks for longer, each time at others.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from tests.unit.core.desk import EPOCH_S, Desk
from tests.unit.core.test_rules import TOMBSTONE_S, BookMachine

from rankbook import v1
from rankbook.errors import RankbookError
from rankbook_server.books import Books
from rankbook_server.core.book import Book, BookLimits, Decision, Instant
from rankbook_server.core.ops import MAX_TXN_OPS, Commit, Txn
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.replica import Replica
from rankbook_server.store import Compacted
from rankbook_server.store.etcd import EtcdStore
from rankbook_server.wave import Command, Outcome

from .etcd_server import EtcdNode, program_or_give_up
from .opened import build, fresh_prefix

T = TypeVar("T")
SERVERS = 3
EXAMPLES = os.environ.get("RANKBOOK_EXAMPLES", "")


class DeskClock:
    """A desk's time, for the servers at it."""

    def __init__(self, desk: SharedDesk) -> None:
        self._desk = desk

    def mono(self) -> float:
        return self._desk.mono_s

    def unix(self) -> float:
        return EPOCH_S + self._desk.mono_s

    def now(self) -> Instant:
        return self._desk.now

    def new_id(self) -> str:
        return self._desk.ids()


class Copy:
    """A server's copy of the book, its store, and its watch."""

    def __init__(self, desk: SharedDesk, url: str) -> None:
        clock = DeskClock(desk)
        self._desk = desk
        self._books = Books(clock, desk.limits, 4)
        news = LivenessNews(clock)
        self.replica = Replica(self._books, clock, news, LeaseKeys(self._books, news))
        self.store: EtcdStore = build(url)
        self._watch: AsyncIterator[Commit] | None = None

    @property
    def book(self) -> Book:
        return self._books.get("default")

    @property
    def revision(self) -> int:
        return self.replica.revision

    async def open(self) -> None:
        await self.store.open()
        await self.replica.load(self.store)

    async def close(self) -> None:
        await self.break_watch()
        await self.store.close()

    async def break_watch(self) -> None:
        """The next look begins another, from the last revision that is here."""
        if self._watch is not None:
            await self._watch.aclose()  # type: ignore[attr-defined]
            self._watch = None

    async def read_anew(self) -> None:
        """Takes a snapshot in place of what is here."""
        await self.replica.load(self.store)

    async def catch_up(self) -> None:
        """Folds in what the watch brings, up to the store's last revision."""
        last = await self.store.last_revision()
        while self.revision < last:
            try:
                if self._watch is None:
                    self._watch = self.store.watch(self.revision)
                async for commit in self._watch:
                    assert self.replica.fold_commit(commit), "a commit came too late"
                    if self.revision >= last:
                        break
            except Compacted:
                self._desk.seen["compacted"] += 1
                self._watch = None
                await self.read_anew()

    def folded(self, decision: Decision[Any], revision: int) -> None:
        """Folds in what was committed here."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        outcome = Outcome(Command("call", "default", future), self.book, decision)
        self.replica.fold([outcome], [revision], own=True)


class SharedDesk(Desk):
    """A desk at which several servers sit; `book` is that of one with everything."""

    def __init__(
        self,
        limits: BookLimits,
        node: EtcdNode,
        loop: asyncio.AbstractEventLoop,
        seen: Counter[str],
    ) -> None:
        self._loop = loop
        self._copies: list[Copy] = []
        self._heard: dict[str, float] = {}
        self._ended: dict[str, None] = {}
        self.chance = random.Random(0)
        self.seen = seen
        super().__init__(limits)
        url = node.url(fresh_prefix())
        self._urls = [url] * SERVERS
        self._copies = [Copy(self, url) for url in self._urls]
        self._hand = self._copies[0]
        for copy in self._copies:
            self._run(copy.open())
        self.revision = self._hand.revision

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        for copy in self._copies:
            self._run(copy.close())

    @property  # type: ignore[override]
    def book(self) -> Book:
        return self._hand.book

    @book.setter
    def book(self, _: Book) -> None:
        """The books are the servers'."""

    def with_everything(self) -> list[Copy]:
        """Servers that have the last commit."""
        return [copy for copy in self._copies if copy.revision == self.revision]

    # ---------------------------------------------------------------- deciding

    def call(self, name: str, request: Message) -> Any:
        """Has one of the servers decide; checks that the decision is pure."""
        copy = self.chance.choice(self._copies)
        while True:
            self._tell(copy)
            before = self.kept(copy.book)
            sent = request.SerializeToString(deterministic=True)
            decide = getattr(copy.book, name)
            refusal, decision = None, None
            try:
                decision = decide(request, self.now)
            except RankbookError as error:
                refusal = error
            assert request.SerializeToString(deterministic=True) == sent, "the request was changed"
            assert self.kept(copy.book) == before, "deciding changed the book"
            if self._commit(copy, decision):
                break
        self._hear(copy)
        self._sit_down(copy)
        if refusal is not None:
            raise refusal
        assert decision is not None
        return decision.reply(copy.revision if decision.txn is None else self.revision)

    def _commit(self, copy: Copy, decision: Decision[Any] | None) -> bool:
        """Commits what a server decided, if it had everything; else it gets it."""
        is_behind = copy.revision < self.revision
        if decision is None or decision.txn is None:
            if self._run(copy.store.last_revision()) <= copy.revision:
                assert not is_behind
                return True
            self.seen["refusals on an old copy"] += 1
        else:
            assert 0 < len(decision.txn.ops) <= MAX_TXN_OPS
            txn = Txn(decision.txn.ops, away=decision.expired, base=copy.revision)
            (revision,) = self._run(copy.store.commit([txn]))
            assert (revision is None) == is_behind
            if revision is not None:
                self.revision = revision
                self.notes.extend(decision.notes)
                self._run(self._fold(copy, decision, revision))
                return True
            self.seen["writes on an old copy"] += 1
        self._run(copy.catch_up())
        return False

    async def _fold(self, copy: Copy, decision: Decision[Any], revision: int) -> None:
        # The watch may be faster than the answer.
        if self.chance.random() < 0.3:
            await copy.catch_up()
        copy.folded(decision, revision)

    def _sit_down(self, copy: Copy) -> None:
        """Lets some of the others get what they lack, and takes one with everything."""
        for other in self._copies:
            if other is not copy and self.chance.random() < 0.5:
                self._run(other.catch_up())
                self._tell(other)
        self._hand = self.chance.choice(self.with_everything())

    def _until_none(self, step: Callable[[Instant], Decision[None] | None]) -> int:
        name, count = step.__name__, 0
        copy = self.chance.choice(self._copies)
        while True:
            self._tell(copy)
            decision = getattr(copy.book, name)(self.now)
            if not self._commit(copy, decision):
                continue
            self._hear(copy)
            if decision is None:
                self._sit_down(copy)
                return count
            count += 1

    def save(self) -> None:
        """Writes times to live down that a renewal changed, as the next tick does."""
        while self._hand.book.unsaved:
            assert self._commit(self._hand, self._hand.book.expire(self.now))
            self._hear(self._hand)

    # ------------------------------------------------------------------ leases

    def renew(self, *lease_ids: str, ttl_s: float = 0.0) -> tuple[v1.LeaseStatus, ...]:
        """As the call does: whoever does not know a lease gets what it lacks first."""
        copy = self._hand = self.chance.choice(self._copies)
        self._tell(copy)
        statuses = super().renew(*lease_ids, ttl_s=ttl_s)
        if any(status.state != v1.LEASE_STATE_ALIVE for status in statuses) or ttl_s:
            self._run(copy.catch_up())
            self._tell(copy)
            statuses = super().renew(*lease_ids, ttl_s=ttl_s)
        self._hear(copy)
        # What is looked at next is a book with everything.
        self._run(copy.catch_up())
        self._tell(copy)
        return statuses

    def _tell(self, copy: Copy) -> None:
        """Has a server know what the others heard."""
        book = copy.book
        # Which leases ended is remembered by whoever saw it; the shadow has one memory.
        book.ended.update((name, None) for name in self._ended if name not in book.leases)
        for lease_id, entry in book.leases.items():
            deadline = self._heard.get(lease_id)
            if deadline is not None and not entry.stored.ended:
                entry.deadline = deadline
                book.schedule(entry)

    def _hear(self, copy: Copy) -> None:
        """Keeps what a server heard."""
        self._ended.update(copy.book.ended)
        for lease_id, entry in copy.book.leases.items():
            if not entry.stored.ended:
                self._heard[lease_id] = entry.deadline
        for other in self.with_everything():
            self._tell(other)

    def stall(self) -> None:
        """Every server gives every lease its time, as after a stall of them all."""
        for copy in self._copies:
            copy.book.grant_grace(self.now)
        self._hear(self._hand)

    # ---------------------------------------------------------------- restarts

    def rebuilt(self, seed: int | None = None) -> Book:
        """A book read anew from the store, its keys in any order."""
        snapshot = self._run(self._hand.store.snapshot())
        assert snapshot.revision == self.revision
        self.store = {entry.key: (entry.value, entry.revision) for entry in snapshot.entries}
        return super().rebuilt(seed)

    def restart(self, seed: int | None = None) -> None:
        """All servers are killed, and others start."""
        self.close()
        self._ended.clear()
        self._copies = [Copy(self, url) for url in self._urls]
        for copy in self._copies:
            self._run(copy.open())
        self._hand = self._copies[0]
        self._hear(self._hand)

    def disturb(self, how: str, node: EtcdNode) -> None:
        """Does something to one server that its clients need not notice."""
        copy = self.chance.choice(self._copies)
        if how == "reads the book anew":
            self._run(copy.read_anew())
        else:
            self._run(copy.break_watch())
        if how == "comes back after a compaction":
            body = {"revision": self.revision, "physical": True}
            if self.revision > int(self._compacted):
                node.call("/v3/kv/compaction", body)
                self._compacted = self.revision
        self._tell(copy)
        self._hand = self.chance.choice(self.with_everything())

    _compacted = 0

    def level(self) -> None:
        """Lets every server get everything."""
        for copy in self._copies:
            self._run(copy.catch_up())
            self._tell(copy)


class EtcdBookMachine(BookMachine):
    """The core's machine over several servers' books."""

    def __init__(self, node: EtcdNode, loop: asyncio.AbstractEventLoop, seen: Counter[str]) -> None:
        super().__init__()
        self._node = node
        limits = BookLimits(tombstone_ttl_s=TOMBSTONE_S)
        self.desk: SharedDesk = SharedDesk(limits, node, loop, seen)
        self.shadow.now = self.desk.mono_s

    @initialize(chance=st.randoms(use_true_random=False))
    def who_does_what(self, chance: random.Random) -> None:
        self.desk.chance = chance

    @precondition(lambda self: self.desk.revision > 0)
    @rule(
        how=st.sampled_from(
            ("reads the book anew", "loses its watch", "comes back after a compaction")
        )
    )
    def one_server(self, how: str) -> None:
        self.desk.disturb(how, self._node)

    @rule(data=st.data(), ttl_s=st.sampled_from((0.0, 0.0, 0.0, 4.0, 20.0)))
    def renew(self, data: st.DataObject, ttl_s: float) -> None:
        """A time to live that changes is another server's with the next tick only."""
        super().renew(data, ttl_s)
        self.desk.save()
        for lease in self.shadow.leases.values():
            lease.saved_ttl_s = lease.ttl_s

    @rule(asleep_s=st.sampled_from((1.0, 25.0)))
    def rule_8_a_stall_ends_no_lease(self, asleep_s: float) -> None:
        self.time_passes(asleep_s, tick=False)
        self.desk.stall()
        self.shadow.grace()

    @invariant()
    def every_server_that_has_everything_says_the_same(self) -> None:
        first, *others = self.desk.with_everything()
        for other in others:
            self.same(first, other)

    def same(self, one: Copy, other: Copy) -> None:
        mine, theirs = one.book, other.book
        assert one.revision == other.revision
        assert self.desk.kept(mine) == self.desk.kept(theirs)
        assert list(mine.engine_ids()) == list(theirs.engine_ids())
        for name in mine.engine_ids():
            assert mine.engine(name) == theirs.engine(name)
            assert mine.workers(name) == theirs.workers(name)
            assert sorted(mine.emptied(name)) == sorted(theirs.emptied(name))
        assert mine.groups == theirs.groups
        assert mine.tombstones == theirs.tombstones
        assert mine.worker_count == theirs.worker_count
        now_s = self.desk.mono_s
        assert {n: e.lives(now_s) for n, e in mine.leases.items()} == {
            n: e.lives(now_s) for n, e in theirs.leases.items()
        }

    def teardown(self) -> None:
        try:
            self.desk.level()
            assert len(self.desk.with_everything()) == SERVERS
            self.every_server_that_has_everything_says_the_same()
        finally:
            self.desk.close()


@pytest.fixture(scope="module")
def own_etcd() -> Iterator[EtcdNode]:
    """A node where nobody else writes, so that revisions have no gaps."""
    with EtcdNode(binary=program_or_give_up()) as node:
        yield node


@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_the_rules_of_a_book_hold_on_every_server_over_etcd(own_etcd: EtcdNode) -> None:
    loop = asyncio.new_event_loop()
    seen: Counter[str] = Counter()
    try:
        run_state_machine_as_test(
            lambda: EtcdBookMachine(own_etcd, loop, seen),
            settings=settings(
                max_examples=int(EXAMPLES or 30),
                stateful_step_count=40,
                derandomize=not EXAMPLES,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.close()
    # Else it shows nothing of what it is for.
    assert seen["writes on an old copy"] > 5, seen
    assert seen["refusals on an old copy"] > 5, seen
    assert seen["compacted"] > 0, seen
