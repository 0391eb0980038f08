"""Claims about `rankbook._cache`: a watch is folded into whole, true topologies."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook import EventType, Slot, State, v1
from rankbook._cache import WatchFold
from rankbook.convert import to_model
from rankbook.model import Engine


def head(name: str, revision: int, generation: str, present: int) -> v1.Engine:
    return v1.Engine(
        engine_id=name,
        group="g",
        revision=revision,
        generation=generation,
        epoch=int(generation[1:]),
        present=present,
        state=v1.STATE_FORMING,
        layout=v1.Layout(pp_size=1, tp_size=4, num_layers=8),
    )


def worker(name: str, generation: str, tp_rank: int, payload: bytes) -> v1.WorkerRecord:
    return v1.WorkerRecord(
        group="g",
        engine_id=name,
        generation=generation,
        slot=v1.Slot(tp_rank=tp_rank),
        layers=v1.Layers(end_layer=8),
        layout=v1.Layout(pp_size=1, tp_size=4, num_layers=8),
        handshake=v1.Handshake(format="t", payload=payload),
        process=v1.Process(boot_id="b"),
    )


@dataclass
class Truth:
    """A book of one's own: what is in it, and what a watcher of it is sent.

    Written after the contract of Watch in calls.proto, not after the fold.
    """

    book_id: str = "book-1"
    revision: int = 1
    generation: dict = field(default_factory=dict)
    changed: dict = field(default_factory=dict)
    began: dict = field(default_factory=dict)
    gone: dict = field(default_factory=dict)
    cells: dict = field(default_factory=dict)
    emptied: dict = field(default_factory=dict)
    horizon: int = 0

    def put(self, name: str, tp_rank: int, payload: bytes) -> None:
        self.revision += 1
        if name not in self.cells:
            self._begin(name, self.generation.get(name, 0) + 1)
        self.cells[name][tp_rank] = (payload, self.revision)
        self.emptied[name].pop(tp_rank, None)
        self.changed[name] = self.revision

    def _begin(self, name: str, generation: int) -> None:
        self.generation[name] = generation
        self.began[name] = self.revision
        self.cells[name], self.emptied[name] = {}, {}
        self.gone.pop(name, None)

    def restart(self, name: str, payload: bytes) -> None:
        self.revision += 1
        self._begin(name, self.generation.get(name, 0) + 1)
        self.cells[name][0] = (payload, self.revision)
        self.changed[name] = self.revision

    def take(self, name: str, tp_rank: int) -> None:
        if tp_rank not in self.cells.get(name, {}):
            return
        self.revision += 1
        del self.cells[name][tp_rank]
        self.emptied[name][tp_rank] = self.revision
        self.changed[name] = self.revision
        if not self.cells[name]:
            del self.cells[name]
            self.gone[name] = self.revision

    def forget(self) -> None:
        """Drops every tombstone; a resume from before gets the full state."""
        self.gone.clear()
        self.horizon = self.revision

    def lose(self) -> None:
        """Another book with nothing in it."""
        fresh = Truth(book_id=self.book_id + "'")
        self.__dict__.update(fresh.__dict__)

    def event(self, name: str, since: int) -> v1.WatchEvent:
        generation = f"g{self.generation[name]}"
        whole = since < self.began[name]
        news = {rank: cell for rank, cell in self.cells[name].items() if whole or cell[1] > since}
        return v1.WatchEvent(
            type=v1.EVENT_TYPE_MODIFIED if since else v1.EVENT_TYPE_ADDED,
            engine=head(name, self.changed[name], generation, len(self.cells[name])),
            workers=[worker(name, generation, r, c[0]) for r, c in sorted(news.items())],
            statuses=[v1.WorkerStatus(revision=c[1]) for _, c in sorted(news.items())],
            removed_slots=[]
            if whole
            else [v1.Slot(tp_rank=r) for r, at in self.emptied[name].items() if at > since],
            replace=bool(since and whole),
        )

    def messages(self, resume: tuple[int, str]) -> list[v1.WatchResponse]:
        """What a watch from a resume point gets until it is synced."""
        since, book_id = resume
        reset = since == 0 or book_id != self.book_id or since < self.horizon
        if reset:
            since = 0
        events = [
            self.event(name, since) for name in sorted(self.cells) if self.changed[name] > since
        ]
        if not reset:
            events += [
                v1.WatchEvent(
                    type=v1.EVENT_TYPE_REMOVED,
                    engine=head(name, at, f"g{self.generation[name]}", 0),
                )
                for name, at in sorted(self.gone.items())
                if at > since
            ]
        parts = [
            v1.WatchResponse(events=[event], book_revision=since, book_id=self.book_id)
            for event in events
        ]
        parts.append(v1.WatchResponse(book_revision=self.revision, book_id=self.book_id))
        parts[0].reset = reset
        parts[-1].synced = True
        return parts

    def topologies(self) -> dict:
        return {
            name: (
                f"g{self.generation[name]}",
                {Slot(tp_rank=rank): payload for rank, (payload, _) in cells.items()},
            )
            for name, cells in self.cells.items()
        }


def seen(topologies) -> dict:
    return {
        name: (
            topology.engine.generation,
            {w.slot: w.handshake.payload for w in topology.workers},
        )
        for name, topology in topologies.items()
    }


names = st.sampled_from(["a", "b"])
ranks = st.integers(0, 2)
payloads = st.binary(max_size=2)
steps = st.one_of(
    # More of this than of the rest, or there is seldom anything to take away.
    *[st.tuples(st.just("put"), names, ranks, payloads)] * 4,
    st.tuples(st.just("take"), names, ranks),
    st.tuples(st.just("restart"), names, payloads),
    st.tuples(st.just("take"), names, ranks),
    st.tuples(st.just("forget")),
    st.tuples(st.just("lose")),
)
# After some steps the watcher reads: a number of messages before its stream is
# cut, or all of them.
plays = st.lists(st.tuples(st.lists(steps, max_size=6), st.one_of(st.none(), st.integers(0, 3))))


@settings(max_examples=250, deadline=None)
@given(plays)
def test_whatever_happens_and_however_often_it_is_cut_a_synced_fold_is_the_book(play):
    truth, fold, mirror = Truth(), WatchFold(), {}
    for happened, cut in [*play, ([], None)]:
        for name, *values in happened:
            getattr(truth, name)(*values)
        for response in truth.messages(fold.resume)[:cut]:
            for event in fold.fold(response):
                _check(event, mirror)
        if cut is None:
            if fold.out_of_step:
                fold.restart()
                for response in truth.messages(fold.resume):
                    for event in fold.fold(response):
                        _check(event, mirror)
            assert fold.synced
            assert not fold.out_of_step
            assert seen(fold.topologies) == truth.topologies()
            # Who only followed the events knows the same.
            assert seen(mirror) == truth.topologies()
        else:
            fold.disconnected()


def _check(event, mirror) -> None:
    name = event.topology.engine.engine_id
    if event.type is EventType.REMOVED:
        assert mirror.pop(name, None) is not None
        assert event.topology.workers == ()
        return
    assert (event.type is EventType.ADDED) == (name not in mirror)
    workers = event.topology.workers
    assert {w.generation for w in workers} <= {event.topology.engine.generation}
    assert len(workers) == event.topology.engine.present
    assert [w.slot for w in workers] == sorted(w.slot for w in workers)
    mirror[name] = event.topology


@given(st.lists(steps, max_size=12))
def test_nothing_new_is_no_event(happened):
    truth, fold = Truth(), WatchFold()
    for name, *values in happened:
        getattr(truth, name)(*values)
    for response in truth.messages(fold.resume):
        fold.fold(response)
    fold.restart()
    assert [e for r in truth.messages(fold.resume) for e in fold.fold(r)] == []


def whole(name: str, revision: int, ranks: dict, *, kind=v1.EVENT_TYPE_ADDED, present=None):
    return v1.WatchEvent(
        type=kind,
        engine=head(name, revision, "g1", len(ranks) if present is None else present),
        workers=[worker(name, "g1", r, p) for r, p in ranks.items()],
        statuses=[v1.WorkerStatus(revision=revision) for _ in ranks],
    )


def response(*events, revision=1, synced=False, reset=False, book="b"):
    return v1.WatchResponse(
        events=events, book_revision=revision, book_id=book, synced=synced, reset=reset
    )


def test_an_engine_in_several_parts_is_one_event_once_it_is_whole():
    fold = WatchFold()
    first = whole("a", 5, {0: b"0", 1: b"1"}, present=3)
    rest = whole("a", 5, {2: b"2"}, kind=v1.EVENT_TYPE_MODIFIED, present=3)
    assert fold.fold(response(first, reset=True)) == ()
    (event,) = fold.fold(response(rest, revision=5, synced=True))
    assert event.type is EventType.ADDED
    assert event.changed == (Slot(tp_rank=0), Slot(tp_rank=1), Slot(tp_rank=2))
    assert len(event.topology.workers) == 3


def test_an_unsynced_revision_is_no_resume_point():
    fold = WatchFold()
    fold.fold(response(whole("a", 5, {0: b""}), revision=9, reset=True))
    assert fold.resume == (0, "")
    fold.fold(response(revision=9, synced=True))
    assert fold.resume == (9, "b")
    fold.fold(response(revision=12, synced=True))
    assert fold.resume == (12, "b")


def test_a_change_of_an_engine_never_seen_is_not_guessed_at():
    fold = WatchFold(from_revision=7, book_id="b")
    part = whole("a", 8, {1: b"1"}, kind=v1.EVENT_TYPE_MODIFIED, present=2)
    assert fold.fold(response(part, revision=8, synced=True)) == ()
    assert fold.out_of_step
    assert fold.resume == (7, "b")
    fold.restart()
    assert fold.resume == (0, "")
    events = fold.fold(
        response(
            whole("a", 8, {0: b"0", 1: b"1"}),
            whole("old", 3, {0: b""}),
            revision=8,
            synced=True,
            reset=True,
        )
    )
    assert [e.topology.engine.engine_id for e in events] == ["a"]
    assert set(fold.topologies) == {"a", "old"}


def test_a_change_of_another_generation_without_replace_is_not_mixed_in():
    fold = WatchFold()
    fold.fold(response(whole("a", 2, {0: b"0"}), revision=2, synced=True, reset=True))
    stray = v1.WatchEvent(
        type=v1.EVENT_TYPE_MODIFIED,
        engine=head("a", 3, "g2", 2),
        workers=[worker("a", "g2", 1, b"1")],
        statuses=[v1.WorkerStatus(revision=3)],
    )
    assert fold.fold(response(stray, revision=3, synced=True)) == ()
    assert fold.out_of_step
    assert fold.topologies["a"].engine.generation == "g1"


def test_what_a_reset_does_not_bring_back_is_removed_once_it_is_synced():
    fold = WatchFold()
    fold.fold(
        response(
            *(whole(name, 2, {0: b"0"}) for name in "abcd"), revision=2, synced=True, reset=True
        )
    )
    assert fold.fold(response(whole("d", 2, {0: b"0"}), revision=9, reset=True)) == ()
    events = fold.fold(response(revision=9, synced=True))
    assert [(e.type, e.topology.engine.engine_id) for e in events] == [
        (EventType.REMOVED, name) for name in "abc"
    ]
    assert all(e.topology.engine.state is State.GONE for e in events)
    # Nobody said how they ended: their processes may still run.
    assert all(e.topology.engine.lapsed for e in events)
    assert events[0].removed == (Slot(),)


def test_a_removed_engine_comes_with_what_the_registry_says_of_its_end():
    fold = WatchFold()
    fold.fold(response(whole("a", 2, {0: b"0"}), revision=2, synced=True, reset=True))
    last = head("a", 4, "g1", 0)
    last.state = v1.STATE_GONE
    last.successor.engine_id, last.successor.epoch = "a", 2
    removed = v1.WatchEvent(type=v1.EVENT_TYPE_REMOVED, engine=last)
    (event,) = fold.fold(response(removed, revision=4, synced=True))
    assert event.topology.engine == to_model(last, Engine)
    assert event.topology.engine.successor.epoch == 2
    assert fold.topologies == {}


def test_a_snapshot_is_not_changed_by_what_comes_after_it():
    fold = WatchFold()
    fold.fold(response(whole("a", 2, {0: b"0"}), revision=2, synced=True, reset=True))
    snapshot = fold.topologies
    fold.fold(response(whole("b", 3, {0: b"0"}), revision=3, synced=True))
    assert set(snapshot) == {"a"}
