"""Whether an engine is drained, where consumers report to whichever server they like.

Each server knows the reports that it was given. Over a store of its own that is
all of them. Over a shared store each server tells the others, in a small key of
its own (`StoredServer`):

    which engines that drain have transfers in flight, as it was told
    up to which revision it knows the book, so which drains it has answered for

The key is on a lease of the store's and is kept alive; it is written anew only
when it says something else. Without drains that is never. It stays for a while
when its server dies: longer than a report counts, so whoever reported there has
reported elsewhere by then.

A server that is asked reads what the others say, from the store itself and not
from a copy that may be behind. An engine is drained once every server has
answered for this very drain and none knows of a transfer. Nobody reads otherwise.

A server beside another program serves that program alone. There may be
thousands over one store, so such a one says nothing before something is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping

import structlog
from google.protobuf.message import DecodeError

from rankbook import v1
from rankbook.errors import Reason, Unavailable
from rankbook_server.clock import Clock
from rankbook_server.core.decision import Instant
from rankbook_server.peers import FORGET_S, Peers
from rankbook_server.registry import Registry
from rankbook_server.store.base import SharedStore

__all__ = ["LOOK_S", "WORD_BYTES", "WORD_TTL_S", "Drains", "Words"]

_RENEW_S = 10.0
WORD_TTL_S = FORGET_S + 1.5 * _RENEW_S
"""How long a server's word is kept without being repeated, in seconds. After a
death at least as long is left of it as a report counts."""
LOOK_S = 0.25
"""How often a call that waits looks at the words of others, in seconds."""
_GAP_S = 1.0
# Between two writes of the key.
_GATHER_S = 0.05
# Reports and changes of so long go together.
_LEAST_S = 0.001
# Less is no wait where a clock is coarse.
_RETRY_S = 0.5
_VOUCH_S = 2.0
# A put takes milliseconds; a client that is kept waiting renews no lease meanwhile.
_LOST_S = _RENEW_S + 2.0
# So long after the store lost a word, other words may be missing too.
WORD_BYTES = 256 * 1024
"""Most bytes of a server's word: room for three thousand engines with names of twenty
characters, or three hundred with the longest. Well below what a transaction may have."""
_MOST_COUNT = 2**32 - 1
_VERSION = 1

_Start = tuple[str, str, str]
# Namespace, engine and generation.

Words = Mapping[str, v1.StoredServer]
"""What other servers say, by their boot id."""


class Drains:
    """Knows what is in flight, also elsewhere. For one event loop."""

    def __init__(
        self,
        registry: Registry,
        peers: Peers,
        clock: Clock,
        store: SharedStore | None,
        *,
        alone: bool = False,
        word_bytes: int = WORD_BYTES,
    ) -> None:
        """Says and reads nothing yet.

        Args:
            registry: The book.
            peers: What was reported here.
            clock: Time.
            store: Where several servers share the book; None where this is the only one.
            alone: This server serves nobody but its own process.
            word_bytes: Most bytes of what it tells the others.
        """
        self._registry = registry
        self._peers = peers
        self._clock = clock
        self._store = store
        self._alone = alone
        self._word_bytes = word_bytes
        self._wanted = not alone
        self._draining: set[tuple[str, str]] = set()
        self._stirred = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: v1.StoredServer | None = None
        # Of that, what is in flight; None where it says that it does not know all.
        self._told: frozenset[_Start] | None = frozenset()
        self._said_book_id = ""
        self._said_s = self._held_s = self._failed_s = self._lost_s = float("-inf")
        self._vouching: set[asyncio.Future[None]] = set()
        self._reading = asyncio.Lock()
        self._read_s = float("-inf")
        self._words: Words | Unavailable = {}
        self._log = structlog.get_logger("rankbook.drains")

    # ------------------------------------------------------------- life cycle

    def start(self) -> list[asyncio.Task[None]]:
        """Starts to speak, where there are others; returns the task, which never ends."""
        if self._store is None:
            return []
        self._task = asyncio.create_task(self._speak(self._store), name="drains")
        return [self._task]

    def wake(self) -> None:
        """Has it look whether there is something to say: the store is there."""
        self._stirred.set()

    async def close(self) -> None:
        """Ends it. What others must still know of reports here stays for its time."""
        if self._store is None or self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._peers.forget(self._clock.now())
        # The connections of a server's own process end with it.
        if self._said is not None and (self._alone or not self._peers.connections):
            with contextlib.suppress(Unavailable):
                await self._store.withdraw(self._registry.boot_id)

    # ---------------------------------------------------------------- reports

    def report(self, request: v1.ReportPeersRequest, namespace: str) -> set[str]:
        """Takes a report in; returns the engines whose transfers in flight changed.

        Raises:
            RankbookError: As `Peers.report`.
        """
        changed = self._peers.report(request, namespace, self._registry.now())
        if self._peers.connections and not self._wanted:
            self._wanted = True
            self._stirred.set()
        elif any((namespace, engine_id) in self._draining for engine_id in changed):
            self._stirred.set()
        return changed

    def is_heard(self, request: v1.ReportPeersRequest, namespace: str) -> bool:
        """Whether the others know of a report what they must."""
        if self._store is None or not request.peers:
            return True
        # The word must outlive the report, should this server die now.
        if self._clock.mono() + FORGET_S > self._held_s:
            return False
        told, draining = self._told, self._draining
        if told is None or not draining:
            return True
        engines = self._registry.book(namespace).engines
        return not any(
            peer.transfers_in_flight
            and (namespace, peer.engine_id) in draining
            and (namespace, peer.engine_id, peer.generation) not in told
            and engines[peer.engine_id].head.generation == peer.generation
            for peer in request.peers
        )

    async def vouch(self, request: v1.ReportPeersRequest, namespace: str) -> None:
        """Returns once the others know of a report what they must: that this server
        takes reports, and that an engine which drains has transfers in flight.

        Raises:
            Unavailable: The store is away. The report counts here; its process must
                report to another server.
        """
        if self.is_heard(request, namespace):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._vouching.add(future)
        self._stirred.set()
        try:
            async with asyncio.timeout(_VOUCH_S):
                await future
        except TimeoutError:
            raise Unavailable(
                f"the store {self._registry.store_description} did not take in {_VOUCH_S:g} s that "
                "peers are reported here: report them again, or at another server",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={"store": self._registry.store_description},
            ) from None
        finally:
            self._vouching.discard(future)

    # ---------------------------------------------------------------- answers

    async def listen(self, since_s: float) -> Words | None:
        """Reads what the others say; None where that cannot be read now.

        Args:
            since_s: After this instant of the monotonic clock. Whoever asks at the
                same time shares a read.
        """
        if self._store is None:
            return {}
        async with self._reading:
            if self._read_s <= since_s:
                began_s = self._clock.mono()
                self._words = await self._read(self._store)
                self._read_s = began_s
            return None if isinstance(self._words, Unavailable) else self._words

    async def _read(self, store: SharedStore) -> Words | Unavailable:
        if not self._registry.available:
            return Unavailable("the store is away", reason=Reason.STORE_UNAVAILABLE)
        held_s = self._held_s
        try:
            raw = dict(await store.announced())
        except Unavailable as error:
            return error
        boot_id = self._registry.boot_id
        if raw.pop(boot_id, None) is None and self._clock.mono() < held_s:
            self._lose()
        words: dict[str, v1.StoredServer] = {}
        for server_id, value in raw.items():
            try:
                words[server_id] = v1.StoredServer.FromString(value)
            except DecodeError:
                # A word that means nothing answers for nothing.
                words[server_id] = v1.StoredServer()
        return words

    def count(self, namespace: str, engine: v1.Engine, words: Words | None) -> tuple[int, bool]:
        """Transfers in flight from an engine's current start, at any server.

        Args:
            namespace: The engine's.
            engine: The engine.
            words: What the others say; None where it is not known.

        Returns:
            How many are reported, and whether that is all: everybody who may have
            one had the time to say so.
        """
        now = self._registry.now()
        self._peers.forget(now)
        started = engine.start_revision
        flying = self._peers.in_flight(namespace, engine.engine_id, engine.generation)
        whole = self._is_complete(now) or started > self._registry.loaded_revision
        if self._store is None:
            return flying, whole
        state = self._registry.book(namespace).engines.get(engine.engine_id)
        if words is None or state is None or now.mono_s < self._lost_s + _LOST_S:
            return flying, False
        for word in words.values():
            whole = whole and (
                word.version == _VERSION
                and word.book_id == self._registry.book_id
                and word.revision >= state.head_revision
                and (word.complete or started > word.loaded_revision)
            )
            flying += sum(
                one.transfers_in_flight
                for one in word.flying
                if one.engine_id == engine.engine_id
                and one.generation == engine.generation
                and one.namespace == namespace
            )
        return min(flying, _MOST_COUNT), whole

    def _is_complete(self, now: Instant) -> bool:
        """Whether every process that was connected before the start has reported since."""
        opened_s = self._registry.opened_s
        return self._alone or (opened_s is not None and now.mono_s - opened_s >= FORGET_S)

    # --------------------------------------------------------------- speaking

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Takes note of drains; see `replica.Listener`."""
        engines = self._registry.book(namespace).engines
        for engine_id in engine_ids:
            engine = engines.get(engine_id)
            if engine is not None and engine.live and engine.head.HasField("drain"):
                self._draining.add((namespace, engine_id))
                self._stirred.set()
            elif self._draining:
                self._draining.discard((namespace, engine_id))

    async def _speak(self, store: SharedStore) -> None:
        """Keeps this server's word with the store, without end."""
        while True:
            due_s = self._due_s()
            if due_s <= self._clock.mono():
                await self._say(store)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s(due_s)):
                    await self._stirred.wait()
                    if not self._vouching:
                        await asyncio.sleep(_GATHER_S)
            self._stirred.clear()

    def _wait_s(self, due_s: float) -> float | None:
        now = self._clock.now()
        if self._draining or (self._wanted and not self._is_complete(now)):
            # Reports run out, and a start gets old, without a word.
            due_s = min(due_s, now.mono_s + _GAP_S)
        return None if due_s == float("inf") else max(due_s - now.mono_s, _LEAST_S)

    def _due_s(self) -> float:
        """When there is something to say next."""
        if not self._wanted:
            return float("inf")
        if not self._registry.loaded_revision:
            return self._clock.mono() + _GAP_S
        due_s, said = self._said_s + _RENEW_S, self._said
        if said is None or self._vouching:
            due_s = float("-inf")
        else:
            word, newest, _ = self._compose()
            if newest > said.revision or _says(word) != _says(said):
                due_s = self._said_s + _GAP_S
        return max(due_s, self._failed_s + _RETRY_S)

    def _compose(self) -> tuple[v1.StoredServer, int, bool]:
        """What is to be said, the revision that it must be of at least, and whether it
        names all that it should."""
        registry, now = self._registry, self._registry.now()
        self._peers.forget(now)
        word = v1.StoredServer(
            version=_VERSION,
            boot_id=registry.boot_id,
            book_id=registry.book_id,
            revision=registry.revision,
            loaded_revision=registry.loaded_revision,
            complete=self._is_complete(now),
        )
        newest = size = 0
        for namespace, engine_id in sorted(self._draining):
            engine = registry.book(namespace).engines.get(engine_id)
            if engine is None:
                continue
            newest = max(newest, engine.head_revision)
            generation = engine.head.generation
            count = self._peers.in_flight(namespace, engine_id, generation)
            if not count:
                continue
            size += len(namespace) + len(engine_id) + len(generation) + 24
            if size > self._word_bytes:
                # Then it answers for none: whoever drains waits.
                word.complete, word.loaded_revision = False, registry.revision
                return word, newest, False
            word.flying.add(
                namespace=namespace,
                engine_id=engine_id,
                generation=generation,
                transfers_in_flight=count,
            )
        return word, newest, True

    async def _say(self, store: SharedStore) -> None:
        word, newest, whole = self._compose()
        said = self._said
        if said is not None and newest <= said.revision and _says(word) == _says(said):
            # To keep it alive writes nothing.
            word = said
        began_s = self._clock.mono()
        vouching, self._vouching = self._vouching, set()
        # Whatever the answer, the store may hold this one from now on.
        self._said, self._told = None, frozenset()
        try:
            kept = await store.announce(
                self._registry.boot_id, word.SerializeToString(deterministic=True), WORD_TTL_S
            )
        except Unavailable as error:
            if self._failed_s <= self._said_s:
                self._log.warning("the others are not told of drains", error=error.message)
            self._failed_s = self._clock.mono()
            for future in vouching:
                if not future.done():
                    future.set_exception(error)
            return
        if not kept and began_s < self._held_s and word.book_id == self._said_book_id:
            self._lose()
        self._said, self._said_s, self._said_book_id = word, began_s, word.book_id
        self._held_s = began_s + WORD_TTL_S
        self._told = _starts(word) if whole else None
        for future in vouching:
            if not future.done():
                future.set_result(None)

    def _lose(self) -> None:
        """Notes that the store does not have what it must have: what others said may
        be missing too."""
        self._log.error("the store has lost what servers told each other of drains")
        self._lost_s = self._clock.mono()
        self._said_s = float("-inf")
        self._stirred.set()


def _starts(word: v1.StoredServer) -> frozenset[_Start]:
    """What a word says is in flight."""
    return frozenset((one.namespace, one.engine_id, one.generation) for one in word.flying)


def _says(word: v1.StoredServer) -> tuple[object, ...]:
    """A word without the revision, which alone is no reason to write."""
    return word.book_id, word.complete, list(word.flying)
