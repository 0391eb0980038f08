"""Two engines of the book as comparisons and plans see them."""

import dataclasses

import pytest

from rankbook.errors import Incomplete, TransferError
from rankbook.model import (
    Compat,
    CoreRecord,
    Engine,
    ExtraLayer,
    KvCache,
    LayerKind,
    Layout,
    Model,
    Process,
    Role,
    Stage,
    State,
    Topology,
    WorkerStatus,
)
from rankbook.pairing import peer_side, plan_side
from rankbook.transfer import compare_peers, plan_transfer

MODEL = Model("tiny", "bfloat16", "auto", 8, 32)
KV = KvCache(block_size=32, layout="LBHNC", attention_backend="CPU")
CONNECTOR = "NixlPushConnector"


@pytest.fixture
def topology(made):
    """Makes an engine whose stages have `spans`, one worker a slot."""

    def build(
        engine_id="prefill-a-0",
        spans=((0, 6), (6, 8)),
        tp_size=2,
        *,
        role=Role.PRODUCER,
        core=True,
        factors=None,
        extra=(),
        pcp_size=1,
        dcp_size=1,
        **changes,
    ):
        layout = Layout(len(spans), tp_size, 8, pcp_size, dcp_size)
        records = []
        for record in made.grid(pp_size=len(spans), tp_size=tp_size, engine_id=engine_id):
            pp_rank = record.slot.pp_rank
            start, end = spans[pp_rank]
            layers = dataclasses.replace(
                record.layers,
                start_layer=start,
                end_layer=end,
                extra=tuple(one for rank, one in extra if rank == pp_rank),
            )
            parts = {
                "role": role,
                "layout": layout,
                "layers": layers,
                "model": MODEL,
                "kv": KV,
                "compat": Compat("c0ffee", factors or {}),
            }
            records.append(dataclasses.replace(record, **(parts | changes)))
        engine = Engine(
            namespace="default",
            engine_id=engine_id,
            group="prefill-a",
            replica=engine_id,
            dp_rank=0,
            role=role,
            state=State.READY,
            generation="g1",
            epoch=1,
            revision=7,
            start_revision=5,
            layout=layout,
            present=len(records),
            declared=len(records),
            stages=tuple(Stage(pp, *span) for pp, span in enumerate(spans)),
            core=CoreRecord(process=Process("core"), connector=CONNECTOR) if core else None,
            compat_hashes=("c0ffee",),
        )
        statuses = tuple(WorkerStatus(b"\1" * 32, 6, "lease") for _ in records)
        return Topology(engine, tuple(records), statuses)

    return build


def nobody(whole):
    engine = dataclasses.replace(whole.engine, state=State.GONE)
    return dataclasses.replace(whole, engine=engine, workers=(), statuses=())


def test_a_comparison_reads_each_fact_from_where_the_book_has_it(topology):
    side = peer_side(topology())
    assert (side.engine_id, side.role, side.connector) == ("prefill-a-0", "PRODUCER", CONNECTOR)
    assert (side.pp_size, side.tp_size, side.pcp_size, side.dcp_size) == (2, 2, 1, 1)
    assert (side.num_layers, side.stages) == (8, ((0, 6), (6, 8)))
    assert (side.model, side.dtype, side.kv_cache_dtype) == ("tiny", "bfloat16", "auto")
    assert (side.total_num_kv_heads, side.head_size, side.is_mla) == (8, 32, False)
    assert (side.block_size, side.kv_layout, side.attention_backend) == (32, "LBHNC", "CPU")
    assert side.handshake_format == "test"
    assert side.compat_hashes == {"c0ffee"}


def test_a_plan_reads_each_fact_from_where_the_book_has_it(topology):
    side = plan_side(topology())
    assert (side.engine_id, side.tp_size, side.num_layers) == ("prefill-a-0", 2, 8)
    assert side.stages == ((0, 6), (6, 8))
    assert (side.total_num_kv_heads, side.is_mla, side.block_size) == (8, False, 32)
    assert (side.pcp_size, side.dcp_size) == (1, 1)


@pytest.mark.parametrize("side", [peer_side, plan_side])
def test_extra_layers_of_every_stage_are_in_once_each(topology, side):
    draft, mtp = ExtraLayer(9, LayerKind.DRAFT), ExtraLayer(8, LayerKind.MTP)
    extra = side(topology(extra=((1, draft), (0, mtp)))).extra
    # Two ranks hold each.
    assert [(one.index, one.pp_rank, one.kind) for one in extra] == [(8, 0, "MTP"), (9, 1, "DRAFT")]


@pytest.mark.parametrize("side", [peer_side, plan_side])
def test_an_engine_without_workers_is_incomplete_and_named(topology, side):
    with pytest.raises(Incomplete, match="GONE") as caught:
        side(nobody(topology()))
    assert caught.value.metadata["engine_id"] == "prefill-a-0"


def test_what_a_record_does_not_state_is_left_empty(topology):
    side = peer_side(topology(model=None, kv=None, compat=None, handshake=None, core=False))
    assert (side.model, side.dtype, side.block_size, side.head_size) == ("", "", 0, 0)
    assert (side.handshake_format, side.connector, dict(side.factors)) == ("", "", {})


def test_what_is_not_stated_breaks_no_rule(topology):
    bare = topology("decode-a-0", ((0, 8),), role=Role.CONSUMER, model=None, kv=None, compat=None)
    assert compare_peers(peer_side(topology()), peer_side(bare)).compatible


@pytest.mark.parametrize(
    ("factors", "enforced", "permuted"),
    [
        ({}, True, False),
        ({"enforce_handshake_compat": "False"}, False, False),
        ({"enforce_handshake_compat": "true"}, True, False),
        ({"enable_permute_local_kv": "True"}, True, True),
    ],
)
def test_factors_switch_rules_whatever_their_case(topology, factors, enforced, permuted):
    side = peer_side(topology(factors=factors))
    assert (side.enforce_compat, side.permute_kv) == (enforced, permuted)


def test_two_engines_of_the_book_make_a_plan(topology):
    producer, consumer = topology(), topology("decode-a-0", ((0, 8),), role=Role.CONSUMER)
    plan = plan_transfer(plan_side(producer), plan_side(consumer), "push")
    read = {
        (part.pp_rank, part.tp_rank, part.start_layer, part.end_layer)
        for rank in plan.consumers
        for part in rank.read
    }
    assert {(pp, start, end) for pp, _, start, end in read} == {(0, 0, 6), (1, 6, 8)}


def test_a_layout_that_no_plan_can_be_made_for_is_an_error(topology):
    with pytest.raises(TransferError):
        plan_transfer(
            plan_side(topology(tp_size=2)),
            plan_side(topology("decode-a-0", ((0, 8),), tp_size=3, role=Role.CONSUMER)),
            "push",
        )
