"""What a book must say, by another road.

A second, slow and simple telling of the engine states and rules, written from
their description. It keeps plain sets, counts layers one by one, and answers a
command with the reasons that forbid it (empty: it must pass). Where several
rules forbid a command, any of them may be named.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from rankbook import v1

Slot = tuple[int, int, int]
INF = float("inf")


@dataclass
class ShadowLease:
    key: str
    ttl_s: float
    deadline: float
    uses: dict[str, int] = field(default_factory=dict)
    saved_ttl_s: float = 0.0


@dataclass
class ShadowSlot:
    """A slot of the current generation, and what each process last sent for it."""

    live: bool = False
    boot: str = ""
    record: bytes = b""
    layers: tuple[int, int] = (0, 0)
    asleep: bool = False
    lease: str = ""
    last: dict[str, int] = field(default_factory=dict)
    written: int = 0

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.record).digest()


@dataclass
class ShadowEngine:
    tokens: dict[str, int] = field(default_factory=dict)
    last_epoch: int = 0
    epoch: int = 0
    generation: str = ""
    declared: tuple[Any, ...] = ()
    grid: tuple[int, int, int] = (0, 0, 0)
    slots: dict[Slot, ShadowSlot] = field(default_factory=dict)
    was_complete: bool = False
    seals: int = 0
    sealed: dict[Slot, tuple[str, bytes]] = field(default_factory=dict)
    sealer: str = ""
    core: ShadowSlot = field(default_factory=ShadowSlot)
    borrowed: bool = False
    draining: bool = False
    evicted: bool = False
    lapsed: bool = False
    idle_since: float = INF

    def live(self) -> dict[Slot, ShadowSlot]:
        return {} if self.evicted else {s: w for s, w in self.slots.items() if w.live}

    def all_slots(self) -> set[Slot]:
        pp, tp, _ = self.grid
        return {(p, 0, t) for p in range(pp) for t in range(tp)}

    def missing(self) -> list[Slot]:
        return sorted(self.all_slots() - set(self.live()))

    def contradicts(self) -> bool:
        """Layers differ in a stage, are held twice, or, with all here, by nobody."""
        stages: dict[int, set[tuple[int, int]]] = {}
        for slot, worker in self.live().items():
            stages.setdefault(slot[0], set()).add(worker.layers)
        if any(len(ranges) > 1 for ranges in stages.values()):
            return True
        held = [layer for ranges in stages.values() for r in ranges for layer in range(*r)]
        if len(held) != len(set(held)):
            return True
        return not self.missing() and set(held) != set(range(self.grid[2]))

    def complete(self) -> bool:
        live = self.live()
        return (
            bool(live)
            and not self.missing()
            and not any(w.asleep for w in live.values())
            and not self.contradicts()
        )

    def present(self) -> dict[Slot, tuple[str, bytes]]:
        return {slot: (w.boot, w.digest) for slot, w in self.live().items()}

    def state(self) -> str:
        live = self.live()
        whole = bool(live) and not self.missing() and not any(w.asleep for w in live.values())
        if not live:
            return "GONE"
        if self.contradicts():
            return "INVALID"
        if self.was_complete and (not whole or (self.seals > 0 and not self.core.live)):
            return "DEGRADED"
        if not whole:
            return "FORMING"
        if self.draining:
            return "DRAINING"
        if self.seals and self.sealed == self.present() and self.core.live:
            return "READY"
        return "COMPLETE"


class Shadow:
    """The shadow of one namespace."""

    def __init__(self) -> None:
        self.now = 0.0
        self.floor = 0
        self.engines: dict[str, ShadowEngine] = {}
        self.leases: dict[str, ShadowLease] = {}
        self.ended: set[str] = set()

    # ---------------------------------------------------------------- helpers

    def alive(self, lease_id: str) -> bool:
        return lease_id in self.leases and self.leases[lease_id].deadline > self.now

    def lease_of(self, key: str) -> str:
        return next((n for n, e in self.leases.items() if e.key == key and self.alive(n)), "")

    def admit(self, name: str, generation: str, told: int) -> tuple[int, set[str]]:
        """The epoch of a write, or why it is fenced."""
        engine = self.engines.get(name)
        known = engine.tokens.get(generation, 0) if engine else 0
        if engine is None or not known:
            last = max(engine.last_epoch if engine else 0, self.floor)
            return last + 1, {"EPOCH_FENCED"} if told else set()
        if known < engine.epoch:
            return known, {"GENERATION_FENCED"} | ({"EPOCH_FENCED"} if told else set())
        reasons = set()
        if told and told != known:
            reasons.add("EPOCH_FENCED")
        if known == engine.epoch and engine.evicted:
            reasons.add("EVICTED")
        return known, reasons

    def visible(self, name: str) -> ShadowEngine | None:
        engine = self.engines.get(name)
        return engine if engine is not None and engine.epoch else None

    def current(self, name: str, generation: str, told: int) -> set[str]:
        """Why a write that needs a start with workers is refused."""
        engine = self.visible(name)
        if engine is None:
            return {"ENGINE_NOT_FOUND"}
        epoch, reasons = self.admit(name, generation, told)
        return reasons or ({"WORKER_NOT_FOUND"} if epoch != engine.epoch else set())

    def place(self, held: ShadowSlot, boot: str, sequence: int, same: bool) -> set[str]:
        """Why a process may not write a place: one holder, in order. `same` says
        whether the write is what stands there."""
        last = held.last.get(boot, 0)
        reasons = set()
        if held.live and held.boot == boot:
            if sequence < last or (sequence == last and not same):
                reasons = {"SEQUENCE_STALE", "SEQUENCE_REUSED"}
            return reasons
        if held.live and self.alive(held.lease):
            reasons.add("SLOT_HELD")
        if last and sequence <= last:
            reasons.add("SEQUENCE_STALE")
        return reasons

    def want_lease(self, wish: v1.LeaseRequest) -> set[str]:
        if not wish.lease_id or self.alive(wish.lease_id):
            return set()
        known = wish.lease_id in self.leases or wish.lease_id in self.ended
        return {"LEASE_ENDED" if known else "LEASE_NOT_FOUND"}

    def use_lease(self, wish: v1.LeaseRequest, granted: v1.Lease, name: str, epoch: int) -> None:
        """Takes a granted lease in, and checks that the same key means the same one."""
        lease_id = wish.lease_id or self.lease_of(wish.lease_key)
        if lease_id:
            assert granted.lease_id == lease_id
        else:
            assert granted.lease_id not in self.leases
            assert granted.lease_id not in self.ended
            for other in self.leases.values():
                if other.key == wish.lease_key:
                    other.deadline = -INF
            ttl_s = wish.ttl.seconds or 10.0
            self.leases[granted.lease_id] = ShadowLease(wish.lease_key, ttl_s, 0.0, {}, ttl_s)
        lease = self.leases[granted.lease_id]
        assert granted.ttl.seconds == lease.ttl_s
        lease.deadline = self.now + lease.ttl_s
        if lease.uses.get(name) != epoch:
            # Its new use is written, and the time to live that it has now with it.
            lease.saved_ttl_s = lease.ttl_s
        lease.uses[name] = epoch

    def touch(self, lease_id: str) -> None:
        """Whoever writes under a lease lives."""
        if self.alive(lease_id):
            self.leases[lease_id].deadline = self.now + self.leases[lease_id].ttl_s

    def settle(self) -> None:
        """What a committed change leaves behind."""
        for engine in self.engines.values():
            engine.was_complete = engine.was_complete or engine.complete()
            if not engine.epoch:
                continue
            if engine.live():
                engine.idle_since = INF
            elif engine.idle_since == INF:
                engine.idle_since = self.now

    # --------------------------------------------------------------- commands

    def begin(self, request: v1.BeginGenerationRequest) -> tuple[int, set[str]]:
        name, generation = request.engine_id, request.generation
        epoch, reasons = self.admit(name, generation, 0)
        if not reasons:
            engine = self.engines.setdefault(name, ShadowEngine(idle_since=self.now))
            engine.tokens[generation] = epoch
            engine.last_epoch = max(engine.last_epoch, epoch)
        return epoch, reasons

    def may_register(self, request: v1.RegisterWorkersRequest) -> tuple[set[str], bool]:
        """Why not, and whether it repeats what stands."""
        first = request.records[0]
        engine = self.engines.get(first.engine_id)
        epoch, reasons = self.admit(first.engine_id, first.generation, request.epoch)
        begins = engine is None or epoch != engine.epoch
        declared = _declared(first) if engine is None or begins else engine.declared
        repeats = 0
        for record in request.records:
            if _declared(record) != declared:
                reasons |= {"LAYOUT_CONFLICT", "IDENTITY_CONFLICT"}
            if engine is None or begins:
                continue
            held = engine.slots.get(_slot(record.slot), ShadowSlot())
            same = held.live and held.record == _bytes(record) and not held.asleep
            boot = record.process.boot_id
            reasons |= self.place(held, boot, request.sequence, same)
            repeats += same and held.boot == boot and held.last[boot] == request.sequence
        repeat = repeats == len(request.records)
        if not repeat:
            reasons |= self.want_lease(request.lease)
        elif engine is not None and not all(
            self.alive(engine.slots[_slot(record.slot)].lease) for record in request.records
        ):
            # What is about to go is no answer to who asks whether it stands.
            reasons.add("LEASE_ENDED")
        return reasons, repeat

    def register(
        self, request: v1.RegisterWorkersRequest, reply: v1.RegisterWorkersResponse
    ) -> None:
        """Takes an accepted registration in."""
        first = request.records[0]
        name, epoch = first.engine_id, reply.epoch
        engine = self.engines.setdefault(name, ShadowEngine())
        if epoch != engine.epoch:
            tokens = {**engine.tokens, first.generation: epoch}
            layout = first.layout
            engine = self.engines[name] = ShadowEngine(
                tokens=tokens,
                last_epoch=max(engine.last_epoch, epoch),
                epoch=epoch,
                generation=first.generation,
                declared=_declared(first),
                grid=(layout.pp_size, layout.tp_size, layout.num_layers),
            )
        self.use_lease(request.lease, reply.lease, name, epoch)
        for record in request.records:
            held = engine.slots.setdefault(_slot(record.slot), ShadowSlot())
            boot = record.process.boot_id
            if held.live and held.boot == boot and held.last[boot] == request.sequence:
                continue  # a part of the batch that was here already
            # Another process may have a slot only from one whose lease ran out.
            engine.lapsed = engine.lapsed or (held.live and held.boot != boot)
            held.live, held.asleep, held.boot = True, False, boot
            held.record = _bytes(record)
            held.layers = (record.layers.start_layer, record.layers.end_layer)
            held.lease, held.last[boot] = reply.lease.lease_id, request.sequence
            held.written = reply.revision
        self.settle()

    def may_update(self, request: v1.UpdateWorkerRequest) -> tuple[set[str], bool]:
        sent = request.record
        reasons = self.current(sent.engine_id, sent.generation, request.epoch)
        if reasons:
            return reasons, False
        engine = self.engines[sent.engine_id]
        held = engine.slots.get(_slot(sent.slot), ShadowSlot())
        boot = sent.process.boot_id
        if not held.live or held.boot != boot:
            return {"WORKER_NOT_FOUND", "SEQUENCE_STALE"}, False
        if not request.withdraw_payload and _declared(sent) != engine.declared:
            reasons |= {"LAYOUT_CONFLICT", "IDENTITY_CONFLICT"}
        wanted = _without_payload(held.record) if request.withdraw_payload else _bytes(sent)
        same = held.record == wanted and held.asleep == request.withdraw_payload
        reasons |= self.place(held, boot, request.sequence, same)
        return reasons, same and held.last[boot] == request.sequence

    def update(self, request: v1.UpdateWorkerRequest, revision: int) -> None:
        sent = request.record
        held = self.engines[sent.engine_id].slots[_slot(sent.slot)]
        if request.withdraw_payload:
            held.record, held.asleep = _without_payload(held.record), True
        else:
            held.record, held.asleep = _bytes(sent), False
            held.layers = (sent.layers.start_layer, sent.layers.end_layer)
        held.last[held.boot] = request.sequence
        held.written = revision
        self.settle()

    def may_deregister(self, request: v1.DeregisterRequest) -> tuple[set[str], list[Slot], bool]:
        """Why not, which slots it takes, and whether the core's record too."""
        reasons = self.current(request.engine_id, request.generation, request.epoch)
        if reasons:
            return reasons, [], False
        engine, boot = self.engines[request.engine_id], request.boot_id
        mine = {s for s, w in engine.live().items() if w.boot == boot}
        core = engine.core.live and engine.core.boot == boot and not request.slots
        known = boot in engine.core.last
        if request.slots:
            named = {_slot(slot) for slot in request.slots}
            if any(boot not in engine.slots.get(s, ShadowSlot()).last for s in named):
                reasons.add("WORKER_NOT_FOUND")
            mine &= named
        elif not (mine or core or known or any(boot in w.last for w in engine.slots.values())):
            reasons.add("WORKER_NOT_FOUND")
        if any(request.sequence <= engine.slots[s].last[boot] for s in mine) or (
            core and request.sequence <= engine.core.last[boot]
        ):
            reasons.add("SEQUENCE_STALE")
        return reasons, sorted(mine), core

    def deregister(self, request: v1.DeregisterRequest, slots: list[Slot], core: bool) -> None:
        engine = self.engines[request.engine_id]
        for held in [engine.slots[s] for s in slots] + ([engine.core] if core else []):
            held.live = False
            held.last[request.boot_id] = request.sequence
        self.settle()

    def end_lease(self, lease_id: str, *, ran_out: bool) -> int:
        """Takes out what a lease keeps, and the lease."""
        removed = 0
        for engine in self.engines.values():
            for held in engine.live().values():
                if held.lease == lease_id:
                    held.live = False
                    engine.lapsed = engine.lapsed or ran_out
                    removed += 1
            if engine.core.live and engine.core.lease == lease_id:
                engine.core.live = False
        del self.leases[lease_id]
        self.ended.add(lease_id)
        self.settle()
        return removed

    def expire(self) -> None:
        for lease_id in [n for n in self.leases if not self.alive(n)]:
            self.end_lease(lease_id, ran_out=True)
        for lease in self.leases.values():
            lease.saved_ttl_s = lease.ttl_s

    def renew(self, lease_id: str, ttl_s: float) -> tuple[str, float]:
        """State and time to live that a renewal is answered."""
        if not self.alive(lease_id):
            known = lease_id in self.leases or lease_id in self.ended
            return ("ENDED" if known else "UNKNOWN"), 0.0
        lease = self.leases[lease_id]
        if all(self.replaced(name, epoch) for name, epoch in lease.uses.items()):
            return "FENCED", 0.0
        lease.ttl_s = ttl_s or lease.ttl_s
        lease.deadline = self.now + lease.ttl_s
        return "ALIVE", lease.ttl_s

    def replaced(self, name: str, epoch: int) -> bool:
        engine = self.engines.get(name)
        return engine is None or engine.epoch > epoch or (engine.epoch == epoch and engine.evicted)

    def grace(self) -> None:
        for lease in self.leases.values():
            if lease.deadline != -INF:
                lease.deadline = self.now + lease.ttl_s

    def may_seal(self, request: v1.SealEngineRequest) -> tuple[set[str], bool]:
        reasons = self.current(request.engine_id, request.generation, request.epoch)
        if reasons:
            return reasons, False
        engine, boot = self.engines[request.engine_id], request.core.process.boot_id
        seen = {_slot(i.slot): (i.boot_id, i.record_digest) for i in request.slots}
        core = engine.core
        same = (
            seen == engine.sealed and boot == engine.sealer and core.record == _bytes(request.core)
        )
        if core.live and core.boot == boot and core.last[boot] == request.sequence and same:
            return (set() if self.alive(core.lease) else {"LEASE_ENDED"}), True
        if engine.borrowed and core.boot != boot:
            # A tool's seal gives way, and is still no way back for an old one.
            stale = core.last.get(boot, 0) >= request.sequence
            reasons |= {"SEQUENCE_STALE"} if stale else set()
        else:
            reasons |= self.place(core, boot, request.sequence, same)
        if engine.missing() or any(w.asleep for w in engine.live().values()):
            reasons.add("ENGINE_INCOMPLETE")
        elif engine.contradicts():
            reasons.add("ENGINE_INVALID")
        if seen != engine.present():
            reasons.add("SEAL_MISMATCH")
        return reasons | self.want_lease(request.lease), False

    def seal(self, request: v1.SealEngineRequest, reply: v1.SealEngineResponse) -> None:
        engine, boot = self.engines[request.engine_id], request.core.process.boot_id
        if request.HasField("lease"):
            self.use_lease(request.lease, reply.lease, request.engine_id, engine.epoch)
        else:
            self.touch(reply.lease.lease_id)
        seen = engine.present()
        if seen != engine.sealed or boot != engine.sealer:
            engine.seals += 1
        engine.sealed, engine.sealer = seen, boot
        core = engine.core
        core.live, core.boot, core.record = True, boot, _bytes(request.core)
        core.lease, core.last[boot] = reply.lease.lease_id, request.sequence
        core.written = reply.revision
        engine.borrowed = not request.HasField("lease")

    def evict(self, name: str) -> int:
        engine = self.engines[name]
        removed = len(engine.live())
        engine.evicted = True
        engine.lapsed = engine.lapsed or removed > 0
        engine.core = ShadowSlot()
        self.settle()
        return removed

    def sweep(self, tombstone_ttl_s: float) -> None:
        for name, engine in list(self.engines.items()):
            if engine.idle_since <= self.now - tombstone_ttl_s:
                self.floor = max(self.floor, engine.last_epoch)
                del self.engines[name]


def _slot(slot: v1.Slot) -> Slot:
    return (slot.pp_rank, slot.pcp_rank, slot.tp_rank)


def _bytes(record: v1.WorkerRecord | v1.CoreRecord) -> bytes:
    return record.SerializeToString(deterministic=True)


def _without_payload(record: bytes) -> bytes:
    bare = v1.WorkerRecord.FromString(record)
    bare.handshake.payload = b""
    return _bytes(bare)


def _declared(record: v1.WorkerRecord) -> tuple[Any, ...]:
    return (
        record.layout.SerializeToString(deterministic=True),
        record.group,
        record.replica,
        record.dp_rank,
        record.role,
    )
