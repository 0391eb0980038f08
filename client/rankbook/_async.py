"""The asyncio face of the client. It sends; what it decides, it asks the brain."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from rankbook import _channel, _scripts
from rankbook._retry import RetryPolicy
from rankbook._wire_async import AsyncWire
from rankbook.model import (
    CoreRecord,
    EngineFilter,
    PeerConnection,
    Registered,
    Requirement,
    Sealed,
    SealedSlot,
    Slot,
    Status,
    Topology,
    WatchEvent,
)

if TYPE_CHECKING:
    from rankbook import v1
    from rankbook._calls import Record, Script
    from rankbook._replies import (
        Drained,
        EngineList,
        Evicted,
        PlanReply,
        RenewReply,
        StalePeer,
        Updated,
    )

__all__ = ["AsyncClient"]

T = TypeVar("T")


class AsyncClient:
    """A client of the registry for asyncio.

    All calls of a client share one stream, opened by the first call and
    reopened as needed; with several endpoints it goes to the next one when one
    fails. It belongs to the event loop of its first call; a call from another
    loop, or in a forked child, raises `BadRequest`.

    Every method raises `Unavailable` when no registry answers,
    `DeadlineExceeded` when one was reached and did not answer in time, and
    `BadRequest` for an id or a number that is none. `timeout_s` is the longest
    wait in seconds; None takes the client's own.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | None = None,
        *,
        namespace: str | None = None,
        timeout_s: float = 5.0,
        tls: _channel.TLS | None = None,
        token: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Takes note of where the registry is; opens nothing.

        Args:
            endpoints: `host:port`, several of them, or one text with commas.
                Default: `RANKBOOK_SERVER`, else 127.0.0.1:7420.
            namespace: Default: `RANKBOOK_NAMESPACE`, else "default".
            timeout_s: Longest wait of one call, in seconds, where the call
                itself names none; a `wait_s` comes on top.
            tls: Absent: no TLS.
            token: Sent with every call. Default: `RANKBOOK_TOKEN`, else none.
            retry: Default: `RetryPolicy()`.

        Raises:
            BadRequest: An argument is malformed.
        """
        self._settings = _channel.Settings.make(
            endpoints, namespace=namespace, timeout_s=timeout_s, tls=tls, token=token, retry=retry
        )
        self._wire = AsyncWire(self._settings)

    @property
    def namespace(self) -> str:
        """The namespace of every call."""
        return self._settings.namespace

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the registry is looked for, in order."""
        return tuple(str(endpoint) for endpoint in self._settings.endpoints)

    async def close(self) -> None:
        """Ends the stream, every watch, and every call that still waits. Twice is fine."""
        await self._wire.close()

    async def __aenter__(self) -> Self:
        """The client itself; nothing is opened yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the client."""
        await self.close()

    async def _run(self, script: Script[T], timeout_s: float | None) -> T:
        return await self._wire.run(script, timeout_s)

    async def begin_generation(
        self, engine_id: str, generation: str, *, timeout_s: float | None = None
    ) -> int:
        """Reserves the epoch of a start; the same token gives the same epoch.

        Raises:
            Fenced: The token is of a start that a newer one replaced.
            Overloaded: The namespace holds as many engines as it may.
        """
        return await self._run(
            _scripts.begin_generation(self.namespace, engine_id, generation), timeout_s
        )

    async def register_workers(
        self,
        records: Sequence[Record],
        *,
        sequence: int,
        lease_key: str | None = None,
        lease_id: str | None = None,
        ttl_s: float | None = None,
        epoch: int = 0,
        timeout_s: float | None = None,
    ) -> Registered:
        """Signs workers in under one lease.

        More than one registration may hold are cut into several under one
        lease, with `sequence`, `sequence + 1` and so on; each is atomic, all
        together are not. One of `lease_key` and `lease_id` is needed. `ttl_s` is
        a wish, 2 to 300 s, 10 by default; the reply's lease has what was granted.

        Raises:
            BadRecord: A record breaks a rule; nothing was sent.
            LimitExceeded: A value is over its limit; nothing was sent.
            Fenced: A newer start took over.
            Conflict: Another live holder has a slot, or other sizes were declared.
            Refused: The sequence was used, or the lease has ended.
            NotFound: The registry never granted `lease_id`.
        """
        return await self._run(
            _scripts.register_workers(
                self.namespace,
                records,
                sequence=sequence,
                lease_key=lease_key,
                lease_id=lease_id,
                ttl_s=ttl_s,
                epoch=epoch,
            ),
            timeout_s,
        )

    async def renew_leases(
        self,
        lease_ids: Sequence[str],
        *,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> RenewReply:
        """Renews leases; a dead or fenced one is a status of the reply, no error.

        `ttl_s` asks for another time to live, 2 to 300 s; None keeps the granted one.
        """
        return await self._run(
            _scripts.renew_leases(self.namespace, lease_ids, ttl_s=ttl_s), timeout_s
        )

    async def update_worker(
        self,
        record: Record,
        *,
        sequence: int,
        epoch: int = 0,
        withdraw_payload: bool = False,
        timeout_s: float | None = None,
    ) -> Updated:
        """Changes a record as a whole, or takes only its payload out.

        Raises:
            BadRecord: The record breaks a rule; nothing was sent.
            NotFound: The process holds no such record.
            Fenced: A newer start took over.
            Refused: The sequence was used.
        """
        return await self._run(
            _scripts.update_worker(
                self.namespace,
                record,
                sequence=sequence,
                epoch=epoch,
                withdraw_payload=withdraw_payload,
            ),
            timeout_s,
        )

    async def deregister(
        self,
        engine_id: str,
        generation: str,
        boot_id: str,
        *,
        sequence: int,
        slots: Sequence[Slot] = (),
        epoch: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Takes a process's records out (all, or those of `slots`); returns how many there were.

        Raises:
            NotFound: The process never held any such record.
            Fenced: A newer start took over.
            Refused: The sequence was used.
        """
        return await self._run(
            _scripts.deregister(
                self.namespace,
                engine_id,
                generation,
                boot_id,
                sequence=sequence,
                slots=slots,
                epoch=epoch,
            ),
            timeout_s,
        )

    async def revoke_lease(self, lease_id: str, *, timeout_s: float | None = None) -> int:
        """Ends a lease with every record under it; returns how many there were.

        Raises:
            NotFound: The registry never granted it; ended before is no error.
        """
        return await self._run(_scripts.revoke_lease(self.namespace, lease_id), timeout_s)

    async def seal_engine(
        self,
        engine_id: str,
        generation: str,
        slots: Sequence[SealedSlot | v1.SealedSlot],
        core: CoreRecord | v1.CoreRecord,
        *,
        sequence: int = 1,
        epoch: int = 0,
        lease_key: str | None = None,
        lease_id: str | None = None,
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Sealed:
        """Turns COMPLETE into READY. Without a lease the core hangs on the first worker's.

        Raises:
            SealMismatch: The book has something else; `metadata` lists it.
            Incomplete: Slots are missing.
            Fenced: A newer start took over.
            NotFound: The engine, or the lease, is unknown.
        """
        return await self._run(
            _scripts.seal_engine(
                self.namespace,
                engine_id,
                generation,
                slots,
                core,
                sequence=sequence,
                epoch=epoch,
                lease_key=lease_key,
                lease_id=lease_id,
                ttl_s=ttl_s,
            ),
            timeout_s,
        )

    async def report_peers(
        self, boot_id: str, peers: Sequence[PeerConnection], *, timeout_s: float | None = None
    ) -> tuple[StalePeer, ...]:
        """Tells which engines this process is connected to; returns those that are not current.

        Replaces what the process told before; forgotten after 30 s without a repeat.

        Raises:
            LimitExceeded: There are more than 4,096 of them; nothing was sent.
            Overloaded: The registry remembers as many processes as it may.
        """
        return await self._run(_scripts.report_peers(self.namespace, boot_id, peers), timeout_s)

    async def drain_engine(
        self,
        engine_id: str,
        *,
        undo: bool = False,
        reason: str = "",
        requested_by: str = "",
        deadline_s: float = 0,
        wait_s: float = 0,
        timeout_s: float | None = None,
    ) -> Drained:
        """Sets or clears the drain flag; with `wait_s` waits for transfers to end.

        Args:
            engine_id: The engine.
            undo: Clears the flag.
            reason: Why, at most 1,024 characters.
            requested_by: Who asks, at most 253 characters.
            deadline_s: Seconds for which transfers are waited for; 0: without end.
            wait_s: Seconds for which this call may wait, up to 60; 0: not at all.
            timeout_s: Longest wait for the answer, beside `wait_s`.

        Raises:
            LimitExceeded: A wait or a text is too long; nothing was sent.
            NotFound: No such engine.
            Gone: It is dead, so there is nothing to drain.
        """
        return await self._run(
            _scripts.drain_engine(
                self.namespace,
                engine_id,
                undo=undo,
                reason=reason,
                requested_by=requested_by,
                deadline_s=deadline_s,
                wait_s=wait_s,
            ),
            timeout_s,
        )

    async def evict_engine(
        self,
        engine_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        requested_by: str = "",
        timeout_s: float | None = None,
    ) -> Evicted:
        """Takes an engine out and fences its start; `epoch` 0 means the current one.

        Raises:
            NotFound: No such engine.
            Fenced: `epoch` is no longer the current one; nothing was taken out.
        """
        return await self._run(
            _scripts.evict_engine(
                self.namespace, engine_id, epoch=epoch, reason=reason, requested_by=requested_by
            ),
            timeout_s,
        )

    async def get_topology(
        self,
        engine_id: str,
        *,
        require: Requirement = Requirement.READY,
        generation: str = "",
        wait_s: float = 0,
        min_revision: int = 0,
        known_revision: int = 0,
        known_book_id: str = "",
        without_payload: bool = False,
        slots: Sequence[Slot] = (),
        timeout_s: float | None = None,
    ) -> Topology | None:
        """The engine with its workers; None: `known_revision` of `known_book_id` is current.

        Args:
            engine_id: The engine.
            require: What it must be.
            generation: Only this start.
            wait_s: How long the registry may wait for it to be so, up to 300.
            min_revision: Never an answer from an older book.
            known_revision: Revision that the caller has.
            known_book_id: Book that the caller has it from.
            without_payload: Leaves the payloads out.
            slots: Only these workers; empty means all.
            timeout_s: Longest wait for the answer, beside `wait_s`.

        Raises:
            LimitExceeded: `wait_s` is above 300; nothing was sent.
            NotFound: No such engine.
            Incomplete: It is not what was required.
            Gone: It, or the start asked for, is dead.
        """
        return await self._run(
            _scripts.get_topology(
                self.namespace,
                engine_id,
                require=require,
                generation=generation,
                wait_s=wait_s,
                min_revision=min_revision,
                known_revision=known_revision,
                known_book_id=known_book_id,
                without_payload=without_payload,
                slots=slots,
            ),
            timeout_s,
        )

    async def get_group(
        self,
        group: str,
        *,
        require: Requirement = Requirement.READY,
        generation: str = "",
        wait_s: float = 0,
        min_revision: int = 0,
        known_revision: int = 0,
        known_book_id: str = "",
        without_payload: bool = False,
        slots: Sequence[Slot] = (),
        timeout_s: float | None = None,
    ) -> tuple[Topology, ...] | None:
        """Every engine of a group that is as required; None: not modified.

        The arguments are those of `get_topology`; engines that are GONE are left out.

        Raises:
            NotFound: No such group.
            Incomplete: None of its engines is what was required.
        """
        return await self._run(
            _scripts.get_group(
                self.namespace,
                group,
                require=require,
                generation=generation,
                wait_s=wait_s,
                min_revision=min_revision,
                known_revision=known_revision,
                known_book_id=known_book_id,
                without_payload=without_payload,
                slots=slots,
            ),
            timeout_s,
        )

    async def list_engines(
        self,
        filter: EngineFilter = EngineFilter(),  # noqa: B008
        *,
        min_revision: int = 0,
        timeout_s: float | None = None,
    ) -> EngineList:
        """Engines without their workers, by engine_id; all pages."""
        return await self._run(
            _scripts.list_engines(self.namespace, filter, min_revision=min_revision), timeout_s
        )

    def watch(
        self,
        filter: EngineFilter = EngineFilter(),  # noqa: B008
        *,
        from_revision: int = 0,
        book_id: str = "",
        without_payload: bool = False,
    ) -> AsyncIterator[WatchEvent]:
        """Engines now, then every change, for as long as the caller goes on.

        Every event's topology is whole. The first connection is waited for as
        long as a call is; after it, the watch reconnects and resumes by itself
        and never misses a removal. Read slowly it grows nowhere: it gets the
        newest state of what changed meanwhile.

        Args:
            filter: Which engines.
            from_revision: Only what changed after this revision.
            book_id: The book that revision is of.
            without_payload: Leaves the payloads out.

        Raises:
            BadRequest: The filter has an id that is none.
        """
        request = _scripts.watch_request(self.namespace, filter, without_payload=without_payload)
        return self._wire.watch(request, from_revision, book_id)

    async def plan_transfer(
        self,
        producer_engine_id: str,
        *,
        consumer_engine_id: str | None = None,
        consumer_layout: v1.ConsumerLayout | None = None,
        mode: str | None = None,
        timeout_s: float | None = None,
    ) -> PlanReply:
        """Who reads what from whom; one of the two consumers is needed.

        `mode` is "pull", "push", or None for the producer's own.

        Raises:
            TransferError: No plan exists; `metadata` has both values.
            NotFound: One of the engines is unknown.
            Incomplete: One of them has empty slots.
            Gone: One of them is dead.
            LimitExceeded: The plan would be too large to answer.
        """
        return await self._run(
            _scripts.plan_transfer(
                self.namespace,
                producer_engine_id,
                consumer_engine_id=consumer_engine_id,
                consumer_layout=consumer_layout,
                mode=mode,
            ),
            timeout_s,
        )

    async def compare_peers(
        self, producer_engine_id: str, consumer_engine_id: str, *, timeout_s: float | None = None
    ) -> v1.Comparison:
        """Whether two engines may pair, with every rule that is broken.

        Raises:
            NotFound: One of the engines is unknown.
            Incomplete: One of them has empty slots.
            Gone: One of them is dead.
        """
        return await self._run(
            _scripts.compare_peers(self.namespace, producer_engine_id, consumer_engine_id),
            timeout_s,
        )

    async def status(self, *, timeout_s: float | None = None) -> Status:
        """How the registry does."""
        return await self._run(_scripts.status(self.namespace), timeout_s)
