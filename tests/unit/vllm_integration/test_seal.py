"""The engine core seals only an engine that is whole, and only what the book has too."""

import dataclasses
import hashlib
import itertools
import pickle

import pytest
from tests.unit.vllm_integration.facts import LAYOUT, facts

from rankbook import v1
from rankbook.convert import to_message
from rankbook.errors import BadRecord, Conflict, Incomplete, Reason, Refused
from rankbook.model import Engine, Layout, Role, Slot, State, Topology, WorkerStatus
from rankbook_vllm.config import load
from rankbook_vllm.record import Start, worker_record
from rankbook_vllm.seal import Note, check_grid, differences, note_of, sealed_slots, slots_of

START = Start("01JD", 1)


def record_of(made, boot_id=None, start=START):
    boot_id = boot_id or f"boot-{made.slot.pp_rank}-{made.slot.tp_rank}"
    return worker_record(made, start, load(None, {}), boot_id)


def note(made, start=START):
    return note_of(record_of(made, start=start), made.worker_rank, start)


def merge(*made):
    """What vLLM's engine core hands over: one dictionary, the last answer wins."""
    out = {}
    for item in made:
        out[(item.slot.pp_rank, item.slot.tp_rank)] = (note(item),)
    return out


def check(notes, layout, served=None):
    return check_grid(notes, layout, served or {})


def topology(*records, generation="01JD"):
    engine = Engine(
        namespace="default",
        engine_id="prefill-a-0",
        group="prefill-a-0",
        replica="prefill-a-0",
        dp_rank=0,
        role=Role.PRODUCER,
        state=State.COMPLETE,
        generation=generation,
        epoch=1,
        revision=7,
        start_revision=5,
        layout=LAYOUT,
        present=len(records),
        declared=2,
    )
    statuses = tuple(
        WorkerStatus(bytes([number]) * 32, 6, "lease") for number in range(len(records))
    )
    return Topology(engine, records, statuses)


def test_a_note_survives_the_way_to_the_engine_core():
    sent = note(facts(1))
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert sent.published().slot == Slot(1, 0, 0)


def test_a_note_carries_no_payload():
    assert b"payload of" not in pickle.dumps(note(facts(1)))


def test_a_whole_engine_comes_out_in_slot_order():
    whole = check(merge(facts(1), facts(0)), LAYOUT)
    assert [item.slot for item in whole.notes] == [Slot(0), Slot(1)]
    assert whole.start == START
    assert whole.problems == ()


def test_an_uneven_split_and_an_empty_stage_are_whole():
    layout = Layout(pp_size=3, tp_size=1, num_layers=4)
    stages = [(0, 3), (3, 3), (3, 4)]
    made = [facts(pp, layout=layout, stage=stage) for pp, stage in enumerate(stages)]
    assert len(check(merge(*made), layout).notes) == 3


def test_a_missing_rank_is_named():
    with pytest.raises(Incomplete) as caught:
        check(merge(facts(0)), LAYOUT)
    assert caught.value.metadata["missing"] == "pp1 tp0"


def test_no_answer_at_all_names_every_rank():
    with pytest.raises(Incomplete, match="pp0 tp0, pp1 tp0"):
        check({}, LAYOUT)


def test_many_missing_ranks_are_counted_and_not_listed_without_end():
    layout = Layout(pp_size=8, tp_size=8, num_layers=8)
    with pytest.raises(Incomplete, match=r"64 of 64 .* and 48 more"):
        check({}, layout)


def test_a_key_claimed_twice_shows_though_the_merge_hid_one_answer():
    # The second stage's worker answers as the first one, and its answer wins.
    first, second = facts(0), facts(0, worker_rank=1)
    with pytest.raises(Conflict, match="claimed twice, by the workers of rank 0 and 1"):
        check(merge(first, second), LAYOUT)


def test_two_answers_for_one_slot_in_one_message_are_a_conflict():
    notes = {(0, 0): (note(facts(0)), note(facts(0, worker_rank=1))), (1, 0): (note(facts(1)),)}
    with pytest.raises(Conflict, match="rank 0 and 1"):
        check(notes, LAYOUT)


def test_an_executor_that_counts_its_ranks_otherwise_is_no_conflict():
    made = [facts(0, worker_rank=1), facts(1, worker_rank=0)]
    assert len(check(merge(*made), LAYOUT).notes) == 2


def test_metadata_under_another_slots_key_is_an_error_that_names_both():
    with pytest.raises(BadRecord, match=r"under key \(1, 0\) is of pp0 tp0"):
        check({(0, 0): (note(facts(0)),), (1, 0): (note(facts(0)),)}, LAYOUT)


def test_a_rank_outside_the_grid_is_an_error_that_names_it():
    outside = dataclasses.replace(note(facts(1)), slot=Slot(2, 0, 0))
    with pytest.raises(BadRecord, match="pp2 tp0, outside the grid of 2 x 1 x 1"):
        check({(2, 0): (outside,)}, LAYOUT)


def test_workers_of_two_starts_are_a_conflict_that_names_both():
    notes = {(0, 0): (note(facts(0)),), (1, 0): (note(facts(1), Start("01JE")),)}
    with pytest.raises(Conflict, match="01JD, 01JE") as caught:
        check(notes, LAYOUT)
    assert caught.value.reason is Reason.IDENTITY_CONFLICT


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([(0, 2), (3, 4)], r"no stage holds the layers \[2, 3\)"),
        ([(0, 3), (2, 4)], r"two stages hold the layers \[2, 3\)"),
        ([(0, 2), (2, 3)], r"no stage holds the layers \[3, 4\)"),
        ([(1, 2), (2, 4)], r"no stage holds the layers \[0, 1\)"),
    ],
)
def test_layers_that_leave_a_hole_or_overlap_are_an_error_that_names_them(stages, said):
    made = [facts(pp, stage=stage) for pp, stage in enumerate(stages)]
    with pytest.raises(Refused, match=said) as caught:
        check(merge(*made), LAYOUT)
    assert caught.value.reason is Reason.ENGINE_INVALID


def test_two_ranges_in_one_stage_are_an_error():
    layout = Layout(pp_size=1, tp_size=2, num_layers=4)
    made = [
        facts(0, tp_rank=0, layout=layout, stage=(0, 4)),
        facts(0, tp_rank=1, layout=layout, stage=(0, 3)),
    ]
    with pytest.raises(Refused, match=r"stage 0 hold \[0, 4\) and \[0, 3\)"):
        check(merge(*made), layout)


def test_a_worker_of_other_sizes_is_an_error():
    other = facts(1, layout=Layout(pp_size=2, tp_size=2, num_layers=4))
    with pytest.raises(BadRecord, match="declares"):
        check(merge(facts(0), other), LAYOUT)


def test_a_worker_that_could_not_publish_is_a_problem_and_no_missing_rank():
    failed = Note(Slot(1), 1, START, problem="engine_id is 'a/b'")
    whole = check({(0, 0): (note(facts(0)),), (1, 0): (failed,)}, LAYOUT)
    assert whole.problems == ("pp1 tp0: engine_id is 'a/b'",)


def test_metadata_served_otherwise_than_published_is_a_problem_that_names_the_key():
    served = {(0, 0): b"payload of pp0 tp0", (1, 0): b"payload of an older life"}
    (problem,) = check(merge(facts(0), facts(1)), LAYOUT, served).problems
    assert problem.startswith("key (1, 0)")
    served[(1, 0)] = b"payload of pp1 tp0"
    assert check(merge(facts(0), facts(1)), LAYOUT, served).problems == ()


def test_pcp_ranks_of_one_key_travel_together():
    layout = Layout(pp_size=1, tp_size=2, num_layers=4, pcp_size=2)
    notes = {
        (0, tp): tuple(
            note(
                facts(layout=layout, stage=(0, 4), slot=Slot(0, pcp, tp), worker_rank=pcp * 2 + tp)
            )
            for pcp in range(2)
        )
        for tp in range(2)
    }
    slots = [item.slot for item in check(notes, layout).notes]
    assert slots == [Slot(0, pcp, tp) for pcp, tp in itertools.product(range(2), range(2))]


def test_a_book_that_agrees_has_no_differences_and_gives_the_slots_to_seal():
    whole = check(merge(facts(0), facts(1)), LAYOUT)
    book = topology(record_of(facts(0)), record_of(facts(1)))
    assert differences(whole, book) == ()
    assert [(slot.slot, slot.boot_id) for slot in sealed_slots(book)] == [
        (Slot(0), "boot-0-0"),
        (Slot(1), "boot-1-0"),
    ]
    assert [slot.boot_id for slot in slots_of(whole)] == ["boot-0-0", "boot-1-0"]
    assert sealed_slots(book)[1].record_digest == b"\x01" * 32


def test_the_digest_is_that_of_the_record_in_deterministic_serialisation():
    message = to_message(record_of(facts(1)), v1.WorkerRecord)
    expected = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
    assert note(facts(1)).record_digest == expected


def test_every_difference_is_named_with_both_values():
    whole = check(merge(facts(0), facts(1)), LAYOUT)
    from rankbook.model import Handshake

    book = topology(
        record_of(facts(0), boot_id="boot-x"),
        record_of(facts(1, handshake=Handshake("vllm.nixl", 14, b"other"))),
    )
    assert differences(whole, book) == (
        "pp0 tp0 process.boot_id: core 'boot-0-0', book 'boot-x'",
        "pp1 tp0 handshake.payload: other bytes",
    )


def test_a_worker_missing_in_the_book_and_one_too_many_are_named():
    whole = check(merge(facts(0), facts(1)), LAYOUT)
    assert differences(whole, topology(record_of(facts(0)))) == ("pp1 tp0: not in the book",)
    wide = Layout(pp_size=2, tp_size=2, num_layers=4)
    stray = record_of(facts(1, tp_rank=1, layout=wide))
    book = topology(record_of(facts(0)), record_of(facts(1)), stray)
    assert differences(whole, book) == ("pp1 tp1: in the book only",)


def test_another_generation_in_the_book_is_the_only_difference_named():
    whole = check(merge(facts(0), facts(1)), LAYOUT)
    assert differences(whole, topology(generation="01JE")) == ("generation: core 01JD, book 01JE",)
