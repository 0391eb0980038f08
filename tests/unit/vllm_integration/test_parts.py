"""A plan carried out with lists for caches: every worker gets its own heads of its own layers."""

import dataclasses
import itertools

import pytest
from tests.unit.vllm_integration.facts import facts

from rankbook.errors import Incompatible, Incomplete, TransferError
from rankbook.model import (
    Engine,
    Layout,
    Model,
    Role,
    Slot,
    Stage,
    State,
    Topology,
    WorkerStatus,
)
from rankbook.pairing import plan_side
from rankbook.transfer import Rank, plan_transfer
from rankbook_vllm.config import load
from rankbook_vllm.parts import readers_of, share_of, worker_of
from rankbook_vllm.record import Facts, Start, worker_record


def names_of(start, end):
    return tuple(f"model.layers.{index}.self_attn.attn" for index in range(start, end))


def topology(engine_id, split, tp_size, heads=4, *, is_mla=False, extra=(), without=()):
    """An engine whose stages have `split` layers each."""
    layout = Layout(pp_size=len(split), tp_size=tp_size, num_layers=sum(split))
    starts = [sum(split[:stage]) for stage in range(len(split))]
    records = []
    for stage, tp_rank in itertools.product(range(len(split)), range(tp_size)):
        start, end = starts[stage], starts[stage] + split[stage]
        last = stage == len(split) - 1
        made: Facts = dataclasses.replace(
            facts(stage, tp_rank=tp_rank, layout=layout, stage=(start, end)),
            engine_id=engine_id,
            layer_names=tuple(
                name
                for name in (*names_of(start, end), *(extra if last else ()))
                if name not in without
            ),
            model=Model("tiny", "float32", "auto", heads, 32, is_mla),
        )
        records.append(worker_record(made, Start("01JD"), load(None, {}), f"boot-{stage}{tp_rank}"))
    engine = Engine(
        namespace="default",
        engine_id=engine_id,
        group=engine_id,
        replica=engine_id,
        dp_rank=0,
        role=Role.BOTH,
        state=State.READY,
        generation="01JD",
        epoch=1,
        revision=7,
        start_revision=5,
        layout=layout,
        present=len(records),
        declared=len(records),
        stages=tuple(Stage(i, starts[i], starts[i] + n) for i, n in enumerate(split)),
    )
    statuses = tuple(WorkerStatus(b"\x01" * 32, 6, "lease") for _ in records)
    return Topology(engine, tuple(records), statuses)


def heads_of(tp_rank, tp_size, heads):
    """KV heads of a rank as vLLM's QKVParallelLinear loads them."""
    if tp_size <= heads:
        return list(range(heads))[tp_rank * heads // tp_size :][: heads // tp_size]
    return [tp_rank // (tp_size // heads)]


def caches_of(record, heads):
    """A worker's caches: by name, in each a label for every head."""
    held = heads_of(record.slot.tp_rank, record.layout.tp_size, heads)
    return {name: [f"{name} head {head}" for head in held] for name in record.layers.names}


SPLITS = [(5,), (3, 2), (1, 4), (2, 1, 2), (0, 5)]
SIZES = [(1, 4), (2, 4), (4, 4), (4, 2), (8, 2)]  # TP ranks, KV heads


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(("from_split", "to_split"), list(itertools.product(SPLITS, SPLITS)))
def test_every_worker_reads_its_own_heads_of_its_own_layers(from_split, to_split, heads):
    sizes = [tp for tp, of in SIZES if of == heads] + [1, 2]
    for from_tp, to_tp in itertools.product(sizes, sizes):
        producer = topology("prefill", from_split, from_tp, heads)
        consumer = topology("decode", to_split, to_tp, heads)
        plan = plan_transfer(plan_side(producer), plan_side(consumer))
        for record in consumer.workers:
            wanted = caches_of(record, heads)
            got = {name: [None] * len(held) for name, held in wanted.items()}
            for part in share_of(plan, producer, consumer, record.slot).read:
                theirs = caches_of(worker_of(producer, part.rank), heads)
                for name in part.names:
                    given = theirs[name][part.heads]
                    assert got[name][part.into] == [None] * len(given)  # nothing is read twice
                    got[name][part.into] = given
            assert got == wanted


@pytest.mark.parametrize("from_tp", [1, 2, 4])
@pytest.mark.parametrize("to_tp", [1, 2, 4])
def test_a_worker_is_told_by_as_many_as_say_that_they_contact_it(from_tp, to_tp):
    producer = topology("prefill", (3, 2), from_tp)
    consumer = topology("decode", (1, 4), to_tp)
    plan = plan_transfer(plan_side(producer), plan_side(consumer))
    shares = [share_of(plan, producer, consumer, record.slot) for record in consumer.workers]
    for record in producer.workers:
        here = Rank(record.slot.pp_rank, record.slot.tp_rank)
        contacts = sum(here in share.contact for share in shares)
        assert readers_of(plan, producer, record.slot) == contacts > 0


def test_latent_attention_is_read_whole_from_one_rank():
    producer = topology("prefill", (3, 2), 2, is_mla=True)
    consumer = topology("decode", (5,), 2, is_mla=True)
    plan = plan_transfer(plan_side(producer), plan_side(consumer))
    share = share_of(plan, producer, consumer, Slot(0, 0, 1))
    assert [(part.layers, part.heads, part.into) for part in share.read] == [
        (range(3), slice(None), slice(None)),
        (range(3, 5), slice(None), slice(None)),
    ]


DRAFT = ("draft_model.model.layers.0.self_attn.attn",)


def test_a_draft_models_layer_is_named_and_goes_whole_between_equal_tp_sizes():
    producer = topology("prefill", (3, 2), 2, extra=DRAFT)
    consumer = topology("decode", (5,), 2, extra=DRAFT)
    plan = plan_transfer(plan_side(producer), plan_side(consumer))
    *_, draft = share_of(plan, producer, consumer, Slot()).read
    assert (draft.layers, draft.names, draft.heads) == (range(5, 6), DRAFT, slice(None))


def test_a_draft_models_heads_over_other_tp_sizes_are_not_guessed():
    producer = topology("prefill", (3, 2), 2, extra=DRAFT)
    consumer = topology("decode", (5,), 1, extra=DRAFT)
    plan = plan_transfer(plan_side(producer), plan_side(consumer))
    with pytest.raises(TransferError, match="layer 5 is a draft model's") as caught:
        share_of(plan, producer, consumer, Slot())
    assert caught.value.reason == "HEADS_UNKNOWN"


def test_a_producer_without_a_cache_that_is_needed_is_refused_by_its_name():
    name = "model.layers.4.self_attn.attn"
    producer = topology("prefill", (3, 2), 1, without=(name,))
    consumer = topology("decode", (5,), 1)
    plan = plan_transfer(plan_side(producer), plan_side(consumer))
    with pytest.raises(Incompatible, match=name):
        share_of(plan, producer, consumer, Slot())


def test_a_rank_that_is_not_there_is_named():
    producer = topology("prefill", (3, 2), 1)
    with pytest.raises(Incomplete, match="prefill has no worker pp1 tp1"):
        worker_of(producer, Rank(1, 1))
