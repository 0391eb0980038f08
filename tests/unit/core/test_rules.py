"""The rules of a book, held against a shadow under random interleavings.

Each step does what a worker, a core, an operator, time or a crash may do, asks
the shadow what must come of it, and compares. What must hold at every revision
is an invariant named after its rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.core.desk import Desk
from tests.unit.core.shadow import Shadow, Slot

from rankbook import v1
from rankbook.convert import duration
from rankbook.errors import RankbookError
from rankbook_server.core.book import Book, BookLimits
from rankbook_server.core.engine import EngineState

TOMBSTONE_S = 30.0
ENGINES = ("a_dp0", "b_dp0")
GENERATIONS = ("g1", "g2", "g3", "g4")
# Sizes of each generation: pp, tp, layers.
GRIDS = {"g1": (2, 1, 3), "g2": (1, 2, 3), "g3": (2, 2, 4), "g4": (1, 1, 2)}
BOOTS = ("p", "q", "agent")
KEYS = ("k1", "k2", "k3", "k4")
CORES = ("core-1", "core-2", "p")

engines = st.sampled_from(ENGINES)
generations = st.sampled_from(("g1", "g1", "g1", "g2", "g2", "g3", "g4"))
boots = st.sampled_from(BOOTS)
told = st.sampled_from(("unknown", "right", "right", "right", "over", "under"))
numbers = st.sampled_from(("next", "next", "next", "same", "low"))
payloads = st.sampled_from((b"x", b"x", b"y", b""))


class BookMachine(RuleBasedStateMachine):
    """One namespace, three engines, four starts, a few processes."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(BookLimits(tombstone_ttl_s=TOMBSTONE_S))
        self.shadow = Shadow()
        self.shadow.now = self.desk.mono_s
        self.sequences: dict[str, int] = {}
        self.sent: list[tuple[Callable[[Any], Any], Any]] = []
        self.seen: dict[str, tuple[int, bytes]] = {}
        self.epochs: dict[str, int] = {}
        self.lowest = 0
        self.namespace_epochs: dict[str, set[tuple[str, int]]] = {}

    # ------------------------------------------------------------------ words

    def number(self, who: str, kind: str) -> int:
        last = self.sequences.get(who, 0)
        if kind == "next":
            last += 1
            self.sequences[who] = last
        return max(1, last - 1 if kind == "low" else last)

    def epoch(self, name: str, generation: str, kind: str) -> int:
        engine = self.shadow.engines.get(name)
        right = engine.tokens.get(generation, 0) if engine else 0
        return {"unknown": 0, "right": right, "over": right + 1, "under": max(0, right - 1)}[kind]

    def record(
        self, name: str, generation: str, slot: Slot, boot: str, payload: bytes, twist: str
    ) -> v1.WorkerRecord:
        pp_size, tp_size, num_layers = GRIDS[generation]
        cut = num_layers // 2 + (twist == "cut")
        spans = [(0, num_layers)] if pp_size == 1 else [(0, cut), (cut, num_layers)]
        start, end = spans[slot[0]]
        if twist == "short":
            end = max(start, end - 1)
        return v1.WorkerRecord(
            namespace="default",
            group="other" if twist == "group" else "prefill",
            # Two starts that claim one place, for the problems engines make each other.
            replica="same" if generation in ("g2", "g4") else name.partition("_dp")[0],
            engine_id=name,
            generation=generation,
            dp_rank=int(name[-1]),
            role=v1.ROLE_PRODUCER,
            layout=v1.Layout(
                pp_size=pp_size,
                tp_size=tp_size + (twist == "size"),
                pcp_size=1,
                dcp_size=1,
                num_layers=num_layers,
            ),
            slot=v1.Slot(pp_rank=slot[0], tp_rank=slot[2]),
            layers=v1.Layers(start_layer=start, end_layer=end),
            handshake=v1.Handshake(format="test", payload=payload),
            process=v1.Process(boot_id=boot),
            addresses=[v1.Address(host="10.0.0.1", port=5600 + slot[0])],
            labels={"zone": payload.decode() or "none"},
        )

    def ask(self, name: str, request: Any, reasons: set[str]) -> Any:
        """Calls; the answer must be the shadow's: a reply, or one of its reasons."""
        refusal: RankbookError | None = None
        reply = None
        try:
            reply = self.desk.call(name, request)
        except RankbookError as error:
            refusal = error
        if refusal is None:
            assert not reasons, f"passed, expected {reasons}: {request}"
        else:
            found = str(refusal.reason)
            assert found in reasons, f"{found} {refusal}, expected {reasons}"
        return reply

    def send(self, how: Callable[[Any], Any], request: Any) -> None:
        self.sent.append((how, request))
        how(request)

    # ----------------------------------------------------------------- starts

    @rule(name=engines, generation=generations)
    def begin(self, name: str, generation: str) -> None:
        request = v1.BeginGenerationRequest(engine_id=name, generation=generation)
        self.send(self.do_begin, request)

    def do_begin(self, request: v1.BeginGenerationRequest) -> None:
        epoch, reasons = self.shadow.begin(request)
        reply = self.ask("begin_generation", request, reasons)
        if reply is not None:
            assert reply.epoch == epoch
            assert 0 < reply.revision <= self.desk.revision

    @rule(
        name=engines,
        generation=generations,
        data=st.data(),
        payload=payloads,
        twist=st.sampled_from(("", "", "", "", "", "", "short", "cut", "size", "group")),
        number=numbers,
        known=told,
        key=st.sampled_from(KEYS),
        by_id=st.integers(0, 4),
        ttl_s=st.sampled_from((4, 10)),
    )
    def register(
        self,
        name: str,
        generation: str,
        data: st.DataObject,
        payload: bytes,
        twist: str,
        number: str,
        known: str,
        key: str,
        by_id: int,
        ttl_s: int,
    ) -> None:
        pp_size, tp_size, _ = GRIDS[generation]
        slots = [(pp, 0, tp) for pp in range(pp_size) for tp in range(tp_size)]
        chosen = data.draw(
            st.lists(st.sampled_from(slots), min_size=1, max_size=len(slots), unique=True)
        )
        boot = data.draw(boots)
        lease = v1.LeaseRequest(lease_key=key, ttl=duration(ttl_s))
        if not by_id:
            past = [*self.shadow.leases, *self.shadow.ended, "never"]
            lease = v1.LeaseRequest(lease_id=data.draw(st.sampled_from(sorted(past))))
        request = v1.RegisterWorkersRequest(
            records=[self.record(name, generation, slot, boot, payload, twist) for slot in chosen],
            lease=lease,
            sequence=self.number(boot, number),
            epoch=self.epoch(name, generation, known),
        )
        self.send(self.do_register, request)

    @rule(name=engines, generation=generations, key=st.sampled_from(KEYS))
    def register_every_rank(self, name: str, generation: str, key: str) -> None:
        """The usual: a start that goes well, or the same one coming back."""
        pp_size, tp_size, _ = GRIDS[generation]
        slots = [(pp, 0, tp) for pp in range(pp_size) for tp in range(tp_size)]
        request = v1.RegisterWorkersRequest(
            records=[self.record(name, generation, slot, "agent", b"x", "") for slot in slots],
            lease=v1.LeaseRequest(lease_key=key),
            sequence=self.number("agent", "next"),
            epoch=self.epoch(name, generation, "right"),
        )
        self.send(self.do_register, request)

    def do_register(self, request: v1.RegisterWorkersRequest) -> None:
        reasons, repeat = self.shadow.may_register(request)
        before, first = self.desk.revision, request.records[0]
        reply = self.ask("register", request, reasons)
        if reply is None:
            return
        engine = self.shadow.engines.get(first.engine_id)
        if repeat:
            assert engine is not None
            slots = [engine.slots[_slot(record.slot)] for record in request.records]
            newest = max(slots, key=lambda held: held.written)
            # rule 6: the first reply, and nothing changed.
            assert self.desk.revision == before
            assert reply.revision == newest.written
            assert reply.lease.lease_id in {held.lease for held in slots}
            assert list(reply.record_digests) == [held.digest for held in slots]
            assert reply.epoch == engine.epoch
            self.shadow.touch(reply.lease.lease_id)
            return
        assert reply.revision == self.desk.revision == before + 1
        old = self.shadow.engines.get(first.engine_id)
        retired = old is not None and bool(old.live())
        self.shadow.register(request, reply)
        if old is not self.shadow.engines[first.engine_id] and retired:
            assert self.desk.notes[-1].event == "generation_retired_alive"

    @precondition(lambda self: any(e.live() for e in self.shadow.engines.values()))
    @rule(
        data=st.data(),
        payload=payloads,
        withdraw=st.booleans(),
        number=numbers,
        known=told,
        own=st.integers(0, 5),
    )
    def update(
        self,
        data: st.DataObject,
        payload: bytes,
        withdraw: bool,
        number: str,
        known: str,
        own: int,
    ) -> None:
        name = data.draw(
            st.sampled_from(sorted(n for n, e in self.shadow.engines.items() if e.live()))
        )
        engine = self.shadow.engines[name]
        slot, held = data.draw(st.sampled_from(sorted(engine.live().items(), key=lambda i: i[0])))
        boot = held.boot if own else data.draw(boots)
        request = v1.UpdateWorkerRequest(
            record=self.record(name, engine.generation, slot, boot, payload, ""),
            withdraw_payload=withdraw,
            sequence=self.number(boot, number),
            epoch=self.epoch(name, engine.generation, known),
        )
        self.send(self.do_update, request)

    def do_update(self, request: v1.UpdateWorkerRequest) -> None:
        reasons, repeat = self.shadow.may_update(request)
        before = self.desk.revision
        reply = self.ask("update", request, reasons)
        if reply is None:
            return
        held = self.shadow.engines[request.record.engine_id].slots[_slot(request.record.slot)]
        if repeat:
            assert self.desk.revision == before
            assert reply.revision == held.written
        else:
            assert reply.revision == self.desk.revision == before + 1
            self.shadow.update(request, reply.revision)
        assert reply.record_digest == held.digest

    # ------------------------------------------------------------------- ends

    @rule(
        name=engines,
        boot=st.sampled_from((*BOOTS, "core-1", "stranger")),
        number=numbers,
        one=st.booleans(),
        known=told,
        data=st.data(),
    )
    def deregister(
        self, name: str, boot: str, number: str, one: bool, known: str, data: st.DataObject
    ) -> None:
        engine = self.shadow.engines.get(name)
        held = sorted(engine.live().items(), key=lambda item: item[0]) if engine else []
        slot, generation = (0, 0, 0), "g1"
        if engine is not None and held and data.draw(st.integers(0, 3)):
            slot, worker = data.draw(st.sampled_from(held))
            boot, generation = worker.boot, engine.generation
        request = v1.DeregisterRequest(
            engine_id=name,
            generation=generation,
            boot_id=boot,
            slots=[v1.Slot(pp_rank=slot[0], tp_rank=slot[2])] if one else [],
            sequence=self.number(boot, number),
            epoch=self.epoch(name, generation, known),
        )
        self.send(self.do_deregister, request)

    def do_deregister(self, request: v1.DeregisterRequest) -> None:
        reasons, slots, core = self.shadow.may_deregister(request)
        before = self.desk.revision
        reply = self.ask("deregister", request, reasons)
        if reply is None:
            return
        assert reply.removed == len(slots)
        assert self.desk.revision == before + bool(slots or core)
        if slots or core:
            self.shadow.deregister(request, slots, core)

    @precondition(lambda self: self.shadow.leases or self.shadow.ended)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        names = sorted([*self.shadow.leases, *self.shadow.ended, "never"])
        request = v1.RevokeLeaseRequest(lease_id=data.draw(st.sampled_from(names)))
        self.send(self.do_revoke, request)

    def do_revoke(self, request: v1.RevokeLeaseRequest) -> None:
        lease_id = request.lease_id
        held, ended = lease_id in self.shadow.leases, lease_id in self.shadow.ended
        reply = self.ask("revoke_lease", request, set() if held or ended else {"LEASE_NOT_FOUND"})
        if reply is not None:
            assert reply.removed == (self.shadow.end_lease(lease_id, ran_out=False) if held else 0)

    @precondition(lambda self: self.shadow.engines)
    @rule(name=engines, right=st.integers(0, 3))
    def evict(self, name: str, right: int) -> None:
        engine = self.shadow.engines.get(name)
        epoch = engine.epoch + (right == 0) if engine is not None and right < 2 else 0
        self.send(self.do_evict, v1.EvictEngineRequest(engine_id=name, epoch=epoch))

    def do_evict(self, request: v1.EvictEngineRequest) -> None:
        engine = self.shadow.visible(request.engine_id)
        reasons = set() if engine else {"ENGINE_NOT_FOUND"}
        if engine and request.epoch and request.epoch != engine.epoch:
            reasons = {"EPOCH_FENCED"}
        before = self.desk.revision
        reply = self.ask("evict", request, reasons)
        if reply is None:
            return
        assert engine is not None
        again = engine.evicted
        assert self.desk.revision == before + (not again)
        assert reply.removed == (0 if again else self.shadow.evict(request.engine_id))

    # ------------------------------------------------------------------- core

    @precondition(lambda self: any(e.complete() for e in self.shadow.engines.values()))
    @rule(core=st.sampled_from(("core-1", "core-1", "core-2")), own=st.booleans())
    def seal_what_is_complete(self, core: str, own: bool) -> None:
        """The usual: the core of a whole engine seals it, or comes back."""
        for name, engine in self.shadow.engines.items():
            if engine.complete():
                request = self.seal_of(name, core, self.number(core, "next"))
                if own:
                    request.lease.lease_key = core
                self.send(self.do_seal, request)

    def seal_of(self, name: str, core: str, sequence: int) -> v1.SealEngineRequest:
        engine = self.shadow.engines[name]
        return v1.SealEngineRequest(
            engine_id=name,
            generation=engine.generation,
            slots=[
                v1.SealedSlot(
                    slot=v1.Slot(pp_rank=slot[0], tp_rank=slot[2]),
                    boot_id=boot,
                    record_digest=digest,
                )
                for slot, (boot, digest) in sorted(engine.present().items())
            ],
            core=v1.CoreRecord(
                process=v1.Process(boot_id=core),
                addresses=[v1.Address(host="10.0.0.9", port=8000)],
            ),
            sequence=sequence,
        )

    @precondition(lambda self: any(e.live() for e in self.shadow.engines.values()))
    @rule(
        data=st.data(),
        core=st.sampled_from(CORES),
        number=numbers,
        key=st.sampled_from((*KEYS, "", "c1", "c2", "c3")),
        twist=st.sampled_from(("", "", "", "", "boot", "digest", "less")),
        address=st.sampled_from(("10.0.0.9", "10.0.0.9", "10.0.0.8")),
        known=told,
    )
    def seal(
        self,
        data: st.DataObject,
        core: str,
        number: str,
        key: str,
        twist: str,
        address: str,
        known: str,
    ) -> None:
        whole = [n for n, e in self.shadow.engines.items() if e.complete()]
        live = [n for n, e in self.shadow.engines.items() if e.live()]
        name = data.draw(st.sampled_from(sorted(whole or live)))
        engine = self.shadow.engines[name]
        request = self.seal_of(name, core, self.number(core, number))
        request.epoch = self.epoch(name, engine.generation, known)
        request.core.addresses[0].host = address
        if key:
            request.lease.lease_key = key
        if twist == "boot":
            request.slots[0].boot_id = "stranger"
        elif twist == "digest":
            request.slots[-1].record_digest = bytes(32)
        elif twist == "less":
            del request.slots[-1]
        self.send(self.do_seal, request)

    def do_seal(self, request: v1.SealEngineRequest) -> None:
        reasons, repeat = self.shadow.may_seal(request)
        before = self.desk.revision
        reply = self.ask("seal", request, reasons)
        if reply is None:
            return
        engine = self.shadow.engines[request.engine_id]
        if repeat:
            assert self.desk.revision == before
            assert reply.revision == engine.core.written
            self.shadow.touch(reply.lease.lease_id)
        else:
            assert reply.revision == self.desk.revision == before + 1
            self.shadow.seal(request, reply)
        assert reply.seal.number == engine.seals
        assert reply.epoch == engine.epoch

    @precondition(lambda self: self.shadow.engines)
    @rule(name=engines, undo=st.booleans(), reason=st.sampled_from(("", "upgrade")))
    def drain(self, name: str, undo: bool, reason: str) -> None:
        request = v1.DrainEngineRequest(engine_id=name, undo=undo, reason=reason)
        self.send(self.do_drain, request)

    def do_drain(self, request: v1.DrainEngineRequest) -> None:
        engine = self.shadow.visible(request.engine_id)
        reasons = set() if engine else {"ENGINE_NOT_FOUND"}
        if engine and not engine.live() and not request.undo:
            reasons = {"ENGINE_GONE"}
        reply = self.ask("drain", request, reasons)
        if reply is not None:
            assert engine is not None
            engine.draining = not request.undo
            assert v1.State.Name(reply.state) == f"STATE_{engine.state()}"

    # ---------------------------------------------------------- time, crashes

    @rule(seconds=st.sampled_from((1.0, 3.0, 3.0, 5.0, 11.0)), tick=st.booleans())
    def time_passes(self, seconds: float, tick: bool) -> None:
        self.desk.mono_s += seconds
        self.shadow.now += seconds
        if tick:
            self.tick()

    @rule()
    def tick(self) -> None:
        due = self.desk.book.next_deadline()
        steps = self.desk.expire()
        assert not steps or (due is not None and due <= self.desk.mono_s)
        self.shadow.expire()

    @rule(data=st.data(), ttl_s=st.sampled_from((0.0, 0.0, 0.0, 4.0, 20.0)))
    def renew(self, data: st.DataObject, ttl_s: float) -> None:
        names = sorted([*self.shadow.leases, *self.shadow.ended, "never"])
        lease_id = data.draw(st.sampled_from(names))
        before = self.desk.kept()
        (status,) = self.desk.renew(lease_id, ttl_s=ttl_s)
        state, granted = self.shadow.renew(lease_id, ttl_s)
        assert v1.LeaseState.Name(status.state) == f"LEASE_STATE_{state}"
        assert status.ttl.seconds == granted
        assert self.desk.kept() == before

    @rule()
    def everybody_renews(self) -> None:
        for lease_id in sorted(self.shadow.leases):
            self.desk.renew(lease_id)
            self.shadow.renew(lease_id, 0.0)

    @rule(far=st.booleans())
    def sweep(self, far: bool) -> None:
        if far:
            self.time_passes(TOMBSTONE_S + 1, tick=True)
        self.desk.sweep()
        self.shadow.sweep(TOMBSTONE_S)

    @rule(asleep_s=st.sampled_from((1.0, 25.0)))
    def rule_8_a_stall_ends_no_lease(self, asleep_s: float) -> None:
        """After the registry stood still every lease has its full time again."""
        self.time_passes(asleep_s, tick=False)
        self.desk.book.grant_grace(self.desk.now)
        self.shadow.grace()
        for lease_id, lease in self.shadow.leases.items():
            if self.shadow.alive(lease_id):
                assert self.desk.book.leases[lease_id].deadline == self.desk.mono_s + lease.ttl_s

    @rule(seed=st.integers(0, 2**16), away_s=st.sampled_from((0.0, 25.0)))
    def restart(self, seed: int, away_s: float) -> None:
        """kill -9, and another process reads the store, its keys in any order."""
        self.time_passes(away_s, tick=False)
        self.desk.restart(seed)
        self.shadow.ended.clear()
        for lease_id, lease in self.shadow.leases.items():
            # A changed time to live is kept by the next tick, which may not have come.
            kept = self.desk.book.leases[lease_id].ttl_s
            assert kept in (lease.ttl_s, lease.saved_ttl_s)
            lease.ttl_s = lease.saved_ttl_s = kept
        self.shadow.grace()

    # --------------------------------------------------------------- replays

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def rule_6_a_delayed_duplicate_brings_nothing_back(self, data: st.DataObject) -> None:
        """Any earlier request, once more: slots it would fill stay as they are."""
        how, request = data.draw(st.sampled_from(self.sent), label="replayed")
        forgotten = isinstance(request, v1.RegisterWorkersRequest) and (
            request.records[0].generation
            not in getattr(self.shadow.engines.get(request.records[0].engine_id), "tokens", ())
        )
        before = {name: set(self.live(name)) for name in ENGINES}
        first_time = self.never_accepted(request)
        how(request)
        if not forgotten and not first_time:
            for name in ENGINES:
                assert set(self.live(name)) <= before[name], "a duplicate brought a record back"

    def never_accepted(self, request: Any) -> bool:
        """Whether a registration never passed for its slots: then it is no duplicate."""
        if not isinstance(request, v1.RegisterWorkersRequest):
            return False
        first = request.records[0]
        engine = self.shadow.engines.get(first.engine_id)
        if engine is None or engine.generation != first.generation:
            return True
        return any(
            engine.slots.get(_slot(r.slot)) is None
            or engine.slots[_slot(r.slot)].last.get(r.process.boot_id, 0) < request.sequence
            for r in request.records
        )

    def live(self, name: str) -> list[tuple[Slot, str]]:
        return [(view.slot, view.record.process.boot_id) for view in self.desk.book.workers(name)]

    # ------------------------------------------------------------- invariants

    @invariant()
    def the_book_is_as_the_shadow_says(self) -> None:
        book, shadow = self.desk.book, self.shadow
        assert set(book.engines) == set(shadow.engines)
        assert list(book.engine_ids()) == sorted(n for n, e in shadow.engines.items() if e.epoch)
        assert set(book.leases) == set(shadow.leases)
        assert book.worker_count == sum(len(e.live()) for e in shadow.engines.values())
        for name, engine in shadow.engines.items():
            state = v1.State.Name(book.state(name)).removeprefix("STATE_")
            assert state == (engine.state() if engine.epoch else "UNSPECIFIED"), name
            found = {v.slot: v for v in book.workers(name)}
            assert list(found) == sorted(engine.live())
            for slot, held in engine.live().items():
                assert found[slot].record.SerializeToString(deterministic=True) == held.record
                assert found[slot].status.record_digest == held.digest
                assert found[slot].status.lease_id == held.lease
                assert found[slot].status.asleep == held.asleep
            head = book.engine(name)
            if head is not None:
                assert head.state == book.state(name)
                assert head.generation == engine.generation
                assert head.seal.number == engine.seals
                assert head.lapsed == engine.lapsed
                assert head.HasField("core") == engine.core.live
                assert [_slot(s) for s in head.asleep] == sorted(
                    s for s, w in engine.live().items() if w.asleep
                )

    @invariant()
    def rule_1_never_a_mixed_answer(self) -> None:
        for name in self.desk.book.engine_ids():
            head = self.desk.engine(name)
            found = self.desk.book.workers(name)
            assert {view.record.generation for view in found} <= {head.generation}
            assert head.present == len(found)

    @invariant()
    def rule_2_epochs_never_go_back(self) -> None:
        book = self.desk.book
        assert book.epoch_floor == self.shadow.floor >= self.lowest
        self.lowest = book.epoch_floor
        for name, engine in self.shadow.engines.items():
            held = book.engines[name].head
            assert held.epoch == engine.epoch
            assert held.last_epoch == engine.last_epoch
            assert held.last_epoch >= self.epochs.get(name, 0)
            self.epochs[name] = held.last_epoch
            for generation, epoch in engine.tokens.items():
                # One epoch never names two starts of one engine, dropped ones included.
                starts = self.namespace_epochs.setdefault(name, set())
                starts.add((generation, epoch))
        for starts in self.namespace_epochs.values():
            assert len({epoch for _, epoch in starts}) == len(starts)

    @invariant()
    def rule_3_sizes_are_declared_never_counted(self) -> None:
        for name in self.desk.book.engine_ids():
            head, engine = self.desk.engine(name), self.shadow.engines[name]
            pp, tp, num_layers = engine.grid
            assert (head.layout.pp_size, head.layout.tp_size) == (pp, tp)
            assert head.layout.num_layers == num_layers
            assert head.declared == pp * tp
            assert [_slot(s) for s in head.missing] == engine.missing()

    @invariant()
    def rule_4_layers_are_proven(self) -> None:
        for name in self.desk.book.engine_ids():
            head, engine = self.desk.engine(name), self.shadow.engines[name]
            errors = [p for p in head.problems if p.severity == v1.SEVERITY_ERROR]
            assert bool(errors) == engine.contradicts()
            if head.state in (v1.STATE_COMPLETE, v1.STATE_READY, v1.STATE_DRAINING):
                held = [n for s in head.stages for n in range(s.start_layer, s.end_layer)]
                assert sorted(held) == list(range(head.layout.num_layers))

    @invariant()
    def rule_5_one_holder_a_slot(self) -> None:
        book = self.desk.book
        for name in book.engine_ids():
            found = [view.slot for view in book.workers(name)]
            assert len(found) == len(set(found))
            for view in book.workers(name):
                assert (name, view.slot) in book.leases[view.status.lease_id].holds
        held = [pair for entry in book.leases.values() for pair in entry.holds]
        assert len(held) == len(set(held)), "two leases keep one record"

    @invariant()
    def rule_9_revisions_never_go_back(self) -> None:
        """A change that readers see has a revision of its own; nothing else has."""
        for name in list(self.seen):
            if self.desk.book.engine(name) is None:
                revision, _ = self.seen.pop(name)
                assert self.desk.book.horizon_revision >= revision
        for name in self.desk.book.engine_ids():
            now = self.desk.engine(name).revision, visible(self.desk.book, name)
            before = self.seen.get(name)
            if before is not None:
                assert now[0] >= before[0]
                assert (now[1] != before[1]) == (now[0] > before[0]), name
            assert now[0] <= self.desk.revision
            self.seen[name] = now

    @invariant()
    def rule_10_what_was_acknowledged_is_kept(self) -> None:
        """A book read anew says the same, whatever the order of the keys."""
        book, fresh = self.desk.book, self.desk.rebuilt(seed=self.desk.revision)
        assert self.desk.kept(fresh) == self.desk.kept(book)
        assert list(fresh.engine_ids()) == list(book.engine_ids())
        for name in book.engine_ids():
            assert fresh.engine(name) == book.engine(name), "what was kept up is not what is"
            assert fresh.workers(name) == book.workers(name)
            assert sorted(fresh.emptied(name)) == sorted(book.emptied(name))
            assert fresh.neighbours.rivals(name) == book.neighbours.rivals(name)
        assert fresh.groups == book.groups
        assert fresh.tombstones == book.tombstones
        assert fresh.unused == book.unused
        assert fresh.worker_count == book.worker_count

    @invariant()
    def sums_are_what_a_count_from_nothing_gives(self) -> None:
        for name, engine in self.desk.book.engines.items():
            anew = EngineState(name, "default")
            anew.fold_head(engine.head, engine.head_revision)
            for slot, state in engine.slots.items():
                anew.fold_worker(slot, state.stored, state.write_revision)
            assert anew.derive(lambda _: []).SerializeToString(deterministic=True) == (
                _bare(engine.derive(lambda _: []))
            )
            assert (anew.bytes, anew.digest(), anew.order()) == (
                engine.bytes,
                engine.digest(),
                engine.order(),
            )


def _slot(slot: v1.Slot) -> Slot:
    return (slot.pp_rank, slot.pcp_rank, slot.tp_rank)


NEIGHBOURS = ("PLACE_TAKEN_TWICE", "SPLIT_ENGINE", "DUPLICATE_ADDRESS")


def _bare(engine: v1.Engine) -> bytes:
    """An engine without what comes from other engines."""
    bare = v1.Engine()
    bare.CopyFrom(engine)
    own = [p for p in bare.problems if p.reason not in NEIGHBOURS]
    del bare.problems[:]
    bare.problems.extend(own)
    return bare.SerializeToString(deterministic=True)


def visible(book: Book, name: str) -> bytes:
    """What readers see of an engine, but for when it changed."""
    engine = book.engine(name)
    assert engine is not None
    bare = v1.Engine.FromString(_bare(engine))
    bare.ClearField("revision")
    bare.ClearField("change_time")
    records = [view.status.record_digest for view in book.workers(name)]
    return bare.SerializeToString(deterministic=True) + b"".join(records)


BookMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestBook = BookMachine.TestCase
