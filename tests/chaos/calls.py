"""Calls of a publisher, each noted before it is made and with its outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import rankbook
from rankbook.model import CoreRecord, Process, Requirement, SealedSlot, State, Topology

from .cast import PublisherPlan, record
from .journal import Journal

__all__ = ["Calls"]

_numbers = itertools.count(1)
_REASONS = 200

Slots = Sequence[tuple[int, int]]


class Calls:
    """One publisher's calls, each at a server that chance picks."""

    def __init__(
        self,
        plan: PublisherPlan,
        clients: Sequence[rankbook.AsyncClient],
        journal: Journal,
        rng: random.Random,
    ) -> None:
        """Takes note of what it calls with."""
        self._plan = plan
        self._clients = clients
        self._journal = journal
        self._rng = rng

    async def _call(
        self,
        name: str,
        send: Callable[[rankbook.AsyncClient], Awaitable[Any]],
        facts: dict[str, object],
        outcome: Callable[[Any], dict[str, object]],
    ) -> Any | rankbook.RankbookError:
        number = next(_numbers)
        client = self._rng.choice(self._clients)
        self._journal.note("call", id=number, call=name, pub=self._plan.number, **facts)
        try:
            reply = await send(client)
        except rankbook.RankbookError as error:
            self._journal.note(
                "failed", id=number, reason=str(error.reason), text=error.message[:_REASONS]
            )
            return error
        self._journal.note("done", id=number, **outcome(reply))
        return reply

    async def register(
        self,
        slots: Slots,
        *,
        boot_id: str,
        generation: str,
        sequence: int,
        epoch: int,
        lease_key: str,
        ttl_s: float,
        content: int = 0,
        why: str = "",
    ) -> rankbook.Registered | rankbook.RankbookError:
        """Signs slots in; `content` is the sequence that the payload names, by default this one."""
        engine = self._plan.engine
        content = content or sequence
        records = [record(engine, slot, generation, boot_id, content) for slot in slots]
        return await self._call(
            "register",
            lambda client: client.register_workers(
                records,
                sequence=sequence,
                lease_key=lease_key,
                ttl_s=ttl_s,
                epoch=epoch,
                timeout_s=ttl_s * 0.4,
            ),
            {
                "engine": engine.engine_id,
                "gen": generation,
                "boot": boot_id,
                "slots": list(slots),
                "seq": sequence,
                "content": content,
                "epoch": epoch,
                "key": lease_key,
                "why": why,
            },
            lambda reply: {
                "rev": reply.revision,
                "epoch": reply.epoch,
                "lease": reply.lease.lease_id,
                "ttl": reply.lease.ttl_s,
                "book": reply.book_id,
                "server": reply.boot_id,
            },
        )

    async def update(
        self,
        slot: tuple[int, int],
        *,
        boot_id: str,
        generation: str,
        sequence: int,
        epoch: int,
        asleep: bool = False,
    ) -> Any:
        """Changes one slot, or takes its payload out."""
        engine = self._plan.engine
        return await self._call(
            "update",
            lambda client: client.update_worker(
                record(engine, slot, generation, boot_id, sequence),
                sequence=sequence,
                epoch=epoch,
                withdraw_payload=asleep,
                timeout_s=self._plan.ttl_s * 0.4,
            ),
            {
                "engine": engine.engine_id,
                "gen": generation,
                "boot": boot_id,
                "slots": [slot],
                "seq": sequence,
                "content": sequence,
                "epoch": epoch,
                "asleep": asleep,
            },
            lambda reply: {"rev": reply.revision, "epoch": reply.epoch},
        )

    async def renew(self, leases: Sequence[str]) -> Any:
        """Renews leases."""
        return await self._call(
            "renew",
            lambda client: client.renew_leases(leases, timeout_s=self._plan.ttl_s * 0.4),
            {"leases": list(leases)},
            lambda reply: {
                "states": [status.state.name for status in reply.statuses],
                "ttls": [status.ttl_s for status in reply.statuses],
                "server": reply.boot_id,
                "book": reply.book_id,
                "rev": reply.book_revision,
            },
        )

    async def deregister(self, *, boot_id: str, generation: str, sequence: int, epoch: int) -> Any:
        """Takes every slot of a process out."""
        engine_id = self._plan.engine.engine_id
        return await self._call(
            "deregister",
            lambda client: client.deregister(
                engine_id, generation, boot_id, sequence=sequence, epoch=epoch, timeout_s=2.0
            ),
            {
                "engine": engine_id,
                "gen": generation,
                "boot": boot_id,
                "seq": sequence,
                "epoch": epoch,
            },
            lambda removed: {"removed": removed},
        )

    async def revoke(self, lease_id: str) -> Any:
        """Ends a lease."""
        return await self._call(
            "revoke",
            lambda client: client.revoke_lease(lease_id, timeout_s=2.0),
            {"lease": lease_id},
            lambda removed: {"removed": removed},
        )

    async def begin(self, generation: str) -> Any:
        """Reserves the epoch of a start."""
        engine_id = self._plan.engine.engine_id
        return await self._call(
            "begin",
            lambda client: client.begin_generation(engine_id, generation, timeout_s=2.0),
            {"engine": engine_id, "gen": generation},
            lambda epoch: {"epoch": epoch},
        )

    async def drain(self, *, undo: bool) -> Any:
        """Sets or clears the drain flag."""
        engine_id = self._plan.engine.engine_id
        return await self._call(
            "drain",
            lambda client: client.drain_engine(engine_id, undo=undo, timeout_s=2.0),
            {"engine": engine_id, "undo": undo},
            lambda reply: {"rev": reply.revision, "state": reply.state.name},
        )

    async def evict(self, epoch: int) -> Any:
        """Takes the whole engine out."""
        engine_id = self._plan.engine.engine_id
        return await self._call(
            "evict",
            lambda client: client.evict_engine(engine_id, epoch=epoch, timeout_s=2.0),
            {"engine": engine_id, "epoch": epoch},
            lambda reply: {"rev": reply.revision, "removed": reply.removed},
        )

    async def look(self) -> Topology | None:
        """The engine as a server knows it; None where it cannot be had."""
        try:
            return await self._rng.choice(self._clients).get_topology(
                self._plan.engine.engine_id, require=Requirement.ANY, timeout_s=2.0
            )
        except rankbook.RankbookError:
            return None

    async def seal(
        self,
        seen: Topology,
        *,
        boot_id: str,
        generation: str,
        sequence: int,
        epoch: int,
        lease_key: str,
    ) -> rankbook.Sealed | rankbook.RankbookError:
        """Seals what was seen."""
        engine_id = self._plan.engine.engine_id
        slots = [
            SealedSlot(worker.slot, worker.process.boot_id, status.record_digest)
            for worker, status in zip(seen.workers, seen.statuses, strict=True)
        ]
        return await self._call(
            "seal",
            lambda client: client.seal_engine(
                engine_id,
                generation,
                slots,
                CoreRecord(process=Process(boot_id), connector="chaos"),
                sequence=sequence,
                epoch=epoch,
                lease_key=lease_key,
                ttl_s=self._plan.ttl_s,
                timeout_s=self._plan.ttl_s * 0.4,
            ),
            {
                "engine": engine_id,
                "gen": generation,
                "boot": boot_id,
                "seq": sequence,
                "epoch": epoch,
                "key": lease_key,
            },
            lambda reply: {
                "rev": reply.revision,
                "epoch": reply.epoch,
                "number": reply.seal.number,
                "lease": reply.lease.lease_id,
                "ttl": reply.lease.ttl_s,
            },
        )


def can_be_sealed(seen: Topology, generation: str) -> bool:
    """Whether an engine lacks nothing but its seal."""
    return (
        seen.engine.generation == generation
        and seen.engine.state
        in (
            State.COMPLETE,
            State.DEGRADED,
            State.DRAINING,
        )
        and seen.engine.present == seen.engine.declared
        and not seen.engine.asleep
    )
