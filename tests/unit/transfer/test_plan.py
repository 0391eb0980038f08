"""A plan covers every layer and head once and agrees with vLLM stage by stage."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbook.errors import BadRequest, LimitExceeded, Reason, TransferError
from rankbook.transfer import (
    ExtraLayer,
    Plan,
    PlanSide,
    Rank,
    Read,
    TransferMode,
    absent_extra_layers,
    partition_layers,
    plan_transfer,
)
from rankbook.transfer.ratios import head_range

Cases = dict[str, list[dict[str, Any]]]


def make_side(name: str = "prefill", **values: Any) -> PlanSide:
    given: dict[str, Any] = {"engine_id": name, "tp_size": 1, "total_num_kv_heads": 8}
    given |= values
    given.setdefault("stages", ((0, 4),))
    given.setdefault("num_layers", max(end for _, end in given["stages"]))
    return PlanSide(**given)


def ranges_of(*counts: int) -> tuple[tuple[int, int], ...]:
    return tuple(partition_layers(sum(counts), len(counts), ",".join(map(str, counts))))


def reads_of(plan: Plan, pp_rank: int = 0, tp_rank: int = 0) -> tuple[Read, ...]:
    (found,) = (c for c in plan.consumers if (c.pp_rank, c.tp_rank) == (pp_rank, tp_rank))
    return found.read


def layers_by_stage(reads: tuple[Read, ...]) -> dict[int, tuple[int, int]]:
    return {read.pp_rank: (read.start_layer, read.end_layer) for read in reads}


# Agreement with vLLM.


def test_each_stage_of_a_plan_repeats_the_recorded_answers_of_vllm(vllm_cases: Cases) -> None:
    agreed, refused = 0, 0
    plans: dict[tuple[Any, ...], Plan | TransferError] = {}
    for case in vllm_cases["tp"]:
        local, remote, expect = case["local"], case["remote"], case["expect"]
        own = {name: size for name, size in local.items() if name != "tp_rank"}
        key = (*own.values(), *remote.values(), case["is_mla"], case["total_num_kv_heads"])
        if key not in plans:
            model = {
                "is_mla": case["is_mla"],
                "total_num_kv_heads": case["total_num_kv_heads"],
                "num_layers": 7,
            }
            try:
                plans[key] = plan_transfer(
                    make_side("remote", **remote, **model, stages=((0, 3), (3, 3), (3, 7))),
                    make_side("local", **own, **model, stages=((0, 5), (5, 7))),
                )
            except TransferError as error:
                plans[key] = error
        plan = plans[key]
        if isinstance(plan, TransferError):
            assert case["error"]
            refused += 1
            continue
        assert not case["error"]
        for consumer in plan.consumers:
            if consumer.tp_rank != local["tp_rank"]:
                continue
            for stage, has_layers in ((0, consumer.pp_rank == 0), (1, False), (2, True)):
                contact = [one.tp_rank for one in consumer.contact if one.pp_rank == stage]
                assert contact == expect["handshake_target_ranks"]
                read = [one.tp_rank for one in consumer.read if one.pp_rank == stage]
                assert read == (expect["mapping"]["source_ranks"] if has_layers else [])
        contacted = {rank.tp_rank for one in plan.consumers for rank in one.contact}
        for producer in plan.producers:
            assert producer.tp_rank in contacted
            assert producer.consumer_count == 2 * expect["consumer_count"]
        agreed += 1
    assert (agreed, refused) == (761, 294)


# Scenarios from public reports; the number is the scenario's.


def test_52_published_ranges_are_used_whatever_split_made_them() -> None:
    consumer = make_side("decode", stages=((0, 61),))
    for counts in ((15, 15, 16, 15), (16, 15, 15, 15)):
        stages = ranges_of(*counts)
        plan = plan_transfer(make_side(stages=stages), consumer)
        assert layers_by_stage(reads_of(plan)) == dict(enumerate(stages))


def test_53_layers_of_a_later_stage_are_absolute() -> None:
    producer = make_side(stages=ranges_of(31, 30), tp_size=2)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=2))
    assert reads_of(plan, tp_rank=1) == (
        Read(0, 1, 0, 31, 4, 8),
        Read(1, 1, 31, 61, 4, 8),
    )


def test_54_a_producer_waits_for_both_consumer_stages() -> None:
    producer = make_side(stages=((0, 16), (16, 31), (31, 46), (46, 61)))
    plan = plan_transfer(producer, make_side("decode", stages=((0, 31), (31, 61))))
    assert [read.pp_rank for read in reads_of(plan, 0)] == [0, 1]
    assert [read.pp_rank for read in reads_of(plan, 1)] == [2, 3]
    for consumer in plan.consumers:
        assert consumer.contact == tuple(Rank(stage, 0) for stage in range(4))
        assert consumer.expected_completions == 2
    assert [one.consumer_count for one in plan.producers] == [2, 2, 2, 2]


def test_55_stage_borders_need_not_line_up() -> None:
    producer = make_side(stages=((0, 20), (20, 40)))
    plan = plan_transfer(producer, make_side("decode", stages=((0, 30), (30, 40))))
    assert layers_by_stage(reads_of(plan, 0)) == {0: (0, 20), 1: (20, 30)}
    assert layers_by_stage(reads_of(plan, 1)) == {1: (30, 40)}


def test_51_a_draft_layer_of_the_last_stage_is_in_the_plan_and_its_absence_is_told() -> None:
    stages = ranges_of(33, 28)
    producer = make_side(stages=stages, extra=(ExtraLayer(61, 1, "DRAFT"),))
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=1))
    assert reads_of(plan) == (
        Read(0, 0, 0, 33, 0, 8),
        Read(1, 0, 33, 61, 0, 8),
        Read(1, 0, 61, 62, 0, 0),
    )
    assert plan.consumers[0].expected_completions == 2
    without = make_side(stages=stages)
    consumer = make_side("decode", stages=((0, 61),), extra=(ExtraLayer(61, 0, "DRAFT"),))
    plan = plan_transfer(without, consumer)
    assert layers_by_stage(reads_of(plan)) == {0: (0, 33), 1: (33, 61)}
    assert absent_extra_layers(without, consumer) == (ExtraLayer(61, 0, "DRAFT"),)
    assert absent_extra_layers(producer, consumer) == ()


def test_51_a_consumer_without_a_draft_model_reads_no_draft_layer() -> None:
    producer = make_side(extra=(ExtraLayer(4, 0, "DRAFT"),))
    plan = plan_transfer(producer, make_side("decode"))
    assert reads_of(plan) == (Read(0, 0, 0, 4, 0, 8),)


def test_51_each_consumer_stage_reads_only_the_extra_layers_it_holds() -> None:
    extra = (ExtraLayer(4, 1, "MTP"), ExtraLayer(5, 1, "MTP"))
    producer = make_side(stages=((0, 2), (2, 4)), extra=extra)
    consumer = make_side(
        "decode",
        stages=((0, 2), (2, 4)),
        extra=(ExtraLayer(5, 0, "MTP"), ExtraLayer(4, 1, "MTP"), ExtraLayer(6, 1, "MTP")),
    )
    plan = plan_transfer(producer, consumer)
    assert reads_of(plan, 0) == (Read(0, 0, 0, 2, 0, 8), Read(1, 0, 5, 6, 0, 8))
    assert reads_of(plan, 1) == (Read(1, 0, 2, 4, 0, 8), Read(1, 0, 4, 5, 0, 8))
    assert [one.expected_completions for one in plan.consumers] == [2, 1]


def test_56_heads_of_a_draft_layer_are_never_computed_from_the_model() -> None:
    for kind, heads in (("DRAFT", (0, 0)), ("OTHER", (0, 0)), ("MTP", (4, 8))):
        producer = make_side(tp_size=2, extra=(ExtraLayer(4, 0, kind),))
        plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=2))
        (extra,) = (one for one in reads_of(plan, tp_rank=1) if one.start_layer == 4)
        assert (extra.start_head, extra.end_head) == heads


def test_58_ranks_beyond_the_heads_share_a_head_of_one_producer() -> None:
    producer = make_side(total_num_kv_heads=2)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=4))
    assert [reads_of(plan, tp_rank=rank) for rank in range(4)] == [
        (Read(0, 0, 0, 4, head, head + 1),) for head in (0, 0, 1, 1)
    ]
    assert [one.consumer_count for one in plan.producers] == [4]


def test_58_of_replicated_heads_one_copy_is_read_and_all_are_notified() -> None:
    producer = make_side(total_num_kv_heads=8, tp_size=16)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=8))
    for rank, consumer in enumerate(plan.consumers):
        assert [one.tp_rank for one in consumer.contact] == [2 * rank, 2 * rank + 1]
        assert consumer.read == (Read(0, 2 * rank, 0, 4, rank, rank + 1),)


def test_59_of_mla_one_copy_is_read_and_all_are_notified() -> None:
    producer = make_side(tp_size=8, is_mla=True, total_num_kv_heads=1)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=2))
    assert [reads_of(plan, tp_rank=rank) for rank in (0, 1)] == [
        (Read(0, 0, 0, 4, 0, 1),),
        (Read(0, 4, 0, 4, 0, 1),),
    ]
    notified = sorted(rank.tp_rank for one in plan.consumers for rank in one.contact)
    assert notified == list(range(8))
    assert all(one.expected_completions == 1 for one in plan.consumers)
    assert all(one.consumer_count == 1 for one in plan.producers)


def test_61_tp_sizes_that_do_not_divide_are_refused_with_both() -> None:
    producer = make_side(tp_size=6)
    with pytest.raises(ValueError) as caught:
        plan_transfer(producer, PlanSide.for_layout(producer, tp_size=4))
    assert isinstance(caught.value, TransferError)
    assert caught.value.reason is Reason.TP_NOT_DIVISIBLE
    assert caught.value.metadata == {"consumer_tp_size": "4", "producer_tp_size": "6"}
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    "stages", [((0, 20), (19, 40)), ((0, 20), (21, 40)), ((0, 20), (20, 39)), ((20, 0), (0, 40))]
)
def test_70_stages_that_overlap_or_leave_a_hole_have_no_plan(
    stages: tuple[tuple[int, int], ...],
) -> None:
    with pytest.raises(TransferError) as caught:
        make_side(stages=stages, num_layers=40)
    assert caught.value.reason is Reason.LAYERS_NOT_COVERED
    assert "40" in caught.value.message


# Counts.


def test_in_push_every_stage_and_every_writer_is_awaited() -> None:
    producer = make_side(stages=((0, 2), (2, 2), (2, 4)), tp_size=4)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=2), "push")
    assert [one.expected_completions for one in plan.consumers] == [3 * 2, 3 * 2]
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=8), TransferMode.PUSH)
    assert {one.expected_completions for one in plan.consumers} == {3}


def test_in_pull_an_empty_stage_is_contacted_and_not_read() -> None:
    producer = make_side(stages=((0, 2), (2, 2), (2, 4)))
    plan = plan_transfer(producer, make_side("decode"), "pull")
    (consumer,) = plan.consumers
    assert [one.pp_rank for one in consumer.contact] == [0, 1, 2]
    assert [one.pp_rank for one in consumer.read] == [0, 2]
    assert consumer.expected_completions == 2


def test_an_empty_consumer_stage_reads_nothing_and_still_notifies() -> None:
    plan = plan_transfer(make_side(), make_side("decode", stages=((0, 4), (4, 4))))
    assert plan.consumers[1].read == ()
    assert plan.consumers[1].expected_completions == 0
    assert plan.consumers[1].contact == (Rank(0, 0),)


# Context parallelism.


@pytest.mark.parametrize(
    ("producer", "consumer", "reads"),
    [
        ((4, 4), (1, 1), [[0, 1, 2, 3]]),
        ((4, 4), (2, 2), [[0, 2], [1, 3]]),
        ((2, 2), (4, 4), [[0], [1], [0], [1]]),
        ((4, 1), (2, 2), [[0], [2]]),
    ],
)
def test_token_slices_are_read_from_every_rank_that_holds_some(
    producer: tuple[int, int], consumer: tuple[int, int], reads: list[list[int]]
) -> None:
    model = {"is_mla": True, "total_num_kv_heads": 1}
    plan = plan_transfer(
        make_side(tp_size=producer[0], dcp_size=producer[1], **model),
        make_side("decode", tp_size=consumer[0], dcp_size=consumer[1], **model),
    )
    assert [[one.tp_rank for one in c.read] for c in plan.consumers] == reads


def test_pcp_with_dcp_numbers_ranks_by_pcp_and_pcp_alone_leaves_rank_zero() -> None:
    model = {"is_mla": True, "total_num_kv_heads": 1}
    sharded = make_side(pcp_size=2, dcp_size=2, **model)
    plan = plan_transfer(sharded, make_side("decode", **model))
    assert [one.tp_rank for one in plan.producers] == [0, 1]
    assert [one.tp_rank for one in reads_of(plan)] == [0, 1]
    copied = make_side(pcp_size=2, tp_size=2, **model)
    assert [one.tp_rank for one in plan_transfer(copied, sharded_off(model)).producers] == [0, 1]


def sharded_off(model: dict[str, Any]) -> PlanSide:
    return make_side("decode", tp_size=2, **model)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tp_size": 8, "dcp_size": 2, "is_mla": True}, Reason.DCP_NOT_DIVISIBLE),
        ({"tp_size": 2, "dcp_size": 2}, Reason.TRANSFER_UNSUPPORTED),
        (
            {"tp_size": 2, "pcp_size": 2, "dcp_size": 2, "is_mla": True},
            Reason.TRANSFER_UNSUPPORTED,
        ),
    ],
)
def test_context_parallel_layouts_that_no_connector_knows_are_refused(
    values: dict[str, Any], reason: Reason
) -> None:
    with pytest.raises(TransferError) as caught:
        make_side(**values)
    assert caught.value.reason is reason


MLA = {"is_mla": True, "total_num_kv_heads": 1}


@pytest.mark.parametrize(
    ("producer", "consumer", "mode", "reason"),
    [
        ({"num_layers": 4}, {"stages": ((0, 5),)}, "pull", Reason.LAYERS_NOT_COVERED),
        ({"block_size": 32}, {"block_size": 16}, "pull", Reason.BLOCK_SIZE_NOT_DIVISIBLE),
        ({"block_size": 16}, {"block_size": 32}, "push", Reason.BLOCK_SIZE_NOT_DIVISIBLE),
        ({"total_num_kv_heads": 0}, {"total_num_kv_heads": 0}, "pull", Reason.HEADS_UNKNOWN),
        ({}, {"total_num_kv_heads": 4}, "pull", Reason.TRANSFER_UNSUPPORTED),
        ({}, {"is_mla": True}, "pull", Reason.TRANSFER_UNSUPPORTED),
        ({}, {"pcp_size": 2}, "pull", Reason.TRANSFER_UNSUPPORTED),
        (
            {"pcp_size": 2, **MLA},
            {"tp_size": 2, "dcp_size": 2, **MLA},
            "pull",
            Reason.TRANSFER_UNSUPPORTED,
        ),
        (
            {"tp_size": 2, "dcp_size": 2, **MLA},
            {"tp_size": 2, "dcp_size": 2, **MLA},
            "push",
            Reason.TRANSFER_UNSUPPORTED,
        ),
        (
            {"tp_size": 6, "dcp_size": 6, **MLA},
            {"tp_size": 4, "dcp_size": 4, **MLA},
            "pull",
            Reason.TP_NOT_DIVISIBLE,
        ),
        ({"engine_id": "same"}, {"engine_id": "same"}, "pull", Reason.LOCAL_ENGINE),
    ],
)
def test_a_pair_without_a_plan_is_refused_with_a_reason(
    producer: dict[str, Any], consumer: dict[str, Any], mode: str, reason: Reason
) -> None:
    with pytest.raises(TransferError) as caught:
        plan_transfer(make_side(**producer), make_side(**{"name": "decode", **consumer}), mode)
    assert caught.value.reason is reason
    assert caught.value.metadata


def test_a_block_size_that_one_side_does_not_state_is_not_compared() -> None:
    producer = make_side(block_size=32)
    assert plan_transfer(producer, make_side("decode", block_size=0))
    assert plan_transfer(make_side(block_size=16), make_side("decode", block_size=32), "pull")
    assert plan_transfer(make_side(block_size=32), make_side("decode", block_size=16), "push")


def test_one_sides_word_on_heads_is_enough() -> None:
    plan = plan_transfer(make_side(total_num_kv_heads=0), make_side("decode", total_num_kv_heads=2))
    assert reads_of(plan) == (Read(0, 0, 0, 4, 0, 2),)


def test_a_mode_of_another_name_is_refused() -> None:
    with pytest.raises(BadRequest):
        plan_transfer(make_side(), make_side("decode"), "shove")


def test_a_plan_too_large_to_answer_is_refused_before_it_is_made() -> None:
    wide = make_side(tp_size=1024, stages=ranges_of(*[1] * 64), total_num_kv_heads=1024)
    with pytest.raises(LimitExceeded) as caught:
        plan_transfer(wide, PlanSide.for_layout(wide, tp_size=1024, pp_size=64))
    assert caught.value.metadata["bound"] == "262144"


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2**32 - 1},
        {"tp_size": 1, "pp_size": 2**32 - 1},
        {"tp_size": 257, "pp_size": 256},
        {"tp_size": 65_537, "layers": (61,)},
    ],
)
def test_a_layout_of_more_slots_than_an_engine_may_have_is_refused_before_it_is_made(
    layout: dict[str, Any],
) -> None:
    with pytest.raises(LimitExceeded) as caught:
        PlanSide.for_layout(make_side(stages=((0, 61),)), **layout)
    assert caught.value.metadata["bound"] == "65536"


def test_a_plan_of_many_draft_layers_is_bounded_too() -> None:
    drafts = tuple(ExtraLayer(61 + index, 0, "DRAFT") for index in range(256))
    side = make_side(stages=((0, 61),), extra=drafts)
    with pytest.raises(LimitExceeded, match="reads"):
        plan_transfer(side, PlanSide.for_layout(side, tp_size=8192))


# A consumer that is not in the book.


def test_a_layout_takes_vllms_split_unless_layers_are_given() -> None:
    producer = make_side(stages=((0, 61),))
    split = PlanSide.for_layout(producer, tp_size=2, pp_size=4)
    assert split.stages == ((0, 15), (15, 30), (30, 46), (46, 61))
    given = PlanSide.for_layout(producer, tp_size=2, layers=(33, 28))
    assert given.stages == ((0, 33), (33, 61))
    assert PlanSide.for_layout(producer, tp_size=2).stages == ((0, 61),)


@pytest.mark.parametrize(
    "layout",
    [
        {"layers": (30, 10)},
        {"layers": (70, -9)},
        {"layers": (30, 31), "pp_size": 3},
    ],
)
def test_a_layout_whose_layers_do_not_fit_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(TransferError) as caught:
        PlanSide.for_layout(make_side(stages=((0, 61),)), tp_size=1, **layout)
    assert caught.value.reason is Reason.LAYER_SPLIT_INVALID


@pytest.mark.parametrize("layout", [{"tp_size": 0}, {"tp_size": 1, "pp_size": -1}])
def test_a_layout_of_no_ranks_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        PlanSide.for_layout(make_side(), **layout)


def test_the_json_shape_is_the_documented_one() -> None:
    plan = plan_transfer(make_side(), make_side("decode"))
    assert json.loads(json.dumps(plan.as_dict())) == {
        "consumers": [
            {
                "pp_rank": 0,
                "tp_rank": 0,
                "contact": [{"pp_rank": 0, "tp_rank": 0}],
                "read": [
                    {
                        "pp_rank": 0,
                        "tp_rank": 0,
                        "start_layer": 0,
                        "end_layer": 4,
                        "start_head": 0,
                        "end_head": 8,
                    }
                ],
                "expected_completions": 1,
            }
        ],
        "producers": [{"pp_rank": 0, "tp_rank": 0, "consumer_count": 1}],
    }


# Properties of every plan.

SIZES = st.integers(1, 12)
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PlanSide, PlanSide]:
    left = draw(COUNTS.filter(any))
    borders = draw(st.lists(st.integers(0, sum(left)), max_size=4).map(sorted))
    cuts = [0, *borders, sum(left)]
    right = [end - start for start, end in pairwise(cuts)]
    is_mla = draw(st.booleans())
    small, factor = draw(SIZES), draw(st.integers(1, 6))
    tp = draw(st.permutations([small, small * factor]))
    fitting = [h for h in range(1, 73) if all(max(h, n) % min(h, n) == 0 for n in tp)]
    heads = 1 if is_mla else draw(st.sampled_from(fitting))
    model = {"is_mla": is_mla, "total_num_kv_heads": heads}
    return (
        make_side(stages=ranges_of(*left), tp_size=tp[0], **model),
        make_side("decode", stages=ranges_of(*right), tp_size=tp[1], **model),
    )


MODES = st.sampled_from(list(TransferMode))


@settings(max_examples=300)
@given(pairs(), MODES)
def test_every_layer_and_head_of_a_consumer_rank_is_read_once_from_who_holds_it(
    pair: tuple[PlanSide, PlanSide], mode: TransferMode
) -> None:
    producer, consumer = pair
    heads = producer.total_num_kv_heads
    for one in plan_transfer(producer, consumer, mode).consumers:
        taken: Counter[tuple[int, int]] = Counter()
        for read in one.read:
            held = producer.stages[read.pp_rank]
            own = head_range(read.tp_rank, producer.tp_size, heads)
            assert held[0] <= read.start_layer < read.end_layer <= held[1]
            assert own[0] <= read.start_head < read.end_head <= own[1]
            for layer in range(read.start_layer, read.end_layer):
                taken.update((layer, head) for head in range(read.start_head, read.end_head))
        needed = {
            (layer, head)
            for layer in range(*consumer.stages[one.pp_rank])
            for head in range(*head_range(one.tp_rank, consumer.tp_size, heads))
        }
        assert taken == dict.fromkeys(needed, 1)


@given(SIZES, SIZES, st.integers(1, 6), st.booleans())
def test_reads_of_a_rank_line_up_and_are_never_empty_even_for_sizes_no_model_has(
    heads: int, small: int, factor: int, producer_is_wider: bool
) -> None:
    tp = (small * factor, small) if producer_is_wider else (small, small * factor)
    producer = make_side(tp_size=tp[0], total_num_kv_heads=heads)
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=tp[1]))
    for one in plan.consumers:
        start, end = head_range(one.tp_rank, tp[1], heads)
        assert [start, *(read.end_head for read in one.read)] == [
            *(read.start_head for read in one.read),
            end,
        ]
        assert all(read.start_head < read.end_head for read in one.read)


@settings(max_examples=200)
@given(pairs(), MODES)
def test_who_is_read_is_contacted_and_producers_count_those_who_contact_them(
    pair: tuple[PlanSide, PlanSide], mode: TransferMode
) -> None:
    producer, consumer = pair
    plan = plan_transfer(producer, consumer, mode)
    contacts: defaultdict[Rank, int] = defaultdict(int)
    for one in plan.consumers:
        assert {Rank(read.pp_rank, read.tp_rank) for read in one.read} <= set(one.contact)
        assert list(one.contact) == sorted(set(one.contact))
        for rank in one.contact:
            contacts[rank] += 1
    counted = {Rank(one.pp_rank, one.tp_rank): one.consumer_count for one in plan.producers}
    assert counted == dict(contacts)
    assert min(counted.values()) >= 1
    assert len(plan.producers) == producer.pp_size * producer.tp_size
    assert len(plan.consumers) == consumer.pp_size * consumer.tp_size


@settings(max_examples=200)
@given(pairs())
def test_completions_are_own_reads_in_pull_and_all_contacts_in_push(
    pair: tuple[PlanSide, PlanSide],
) -> None:
    pull = plan_transfer(*pair, TransferMode.PULL)
    push = plan_transfer(*pair, TransferMode.PUSH)
    assert pull.producers == push.producers
    for one, other in zip(pull.consumers, push.consumers, strict=True):
        assert (one.contact, one.read) == (other.contact, other.read)
        assert one.expected_completions == len(one.read)
        assert other.expected_completions == len(one.contact)
        assert one.expected_completions <= other.expected_completions
    awaited = sum(one.consumer_count for one in push.producers)
    assert sum(one.expected_completions for one in push.consumers) == awaited
