"""Which rank holds what, and who may pair, as reported of other systems.

Answers of a running registry; tests/unit/transfer has the same cases and many
more without one. The numbers in the docstrings are public reports; README.md
lists them all.
"""

from __future__ import annotations

import dataclasses

import pytest

import rankbook
from rankbook import (
    Compat,
    EngineFilter,
    EventType,
    ExtraLayer,
    KvCache,
    LayerKind,
    Layers,
    Layout,
    Model,
    Requirement,
    Role,
    State,
    v1,
)


@pytest.fixture
def client(shared_rankbookd):
    with rankbook.Client(shared_rankbookd.grpc) as one:
        yield one


@pytest.fixture
def publish(client, made, engine_id):
    """Signs a whole engine in: `publish(stages, tp_size, **fields)` gives its name."""
    count = 0

    def make(stages, tp_size=1, *, extra=(), seal=False, name="", **fields):
        nonlocal count
        count += 1
        name = name or f"{engine_id}-{count}"
        layout = Layout(
            pp_size=len(stages), tp_size=tp_size, num_layers=max(end for _, end in stages)
        )
        given = {"group": f"{engine_id}-group", "model": Model("m", total_num_kv_heads=8), **fields}
        for pp, (start, end) in enumerate(stages):
            last = pp == len(stages) - 1
            layers = Layers(start, end, extra=tuple(extra) if last else ())
            records = [
                dataclasses.replace(
                    made.record(name, pp, tp), layout=layout, layers=layers, **given
                )
                for tp in range(tp_size)
            ]
            client.register_workers(records, sequence=1, lease_key=f"{name}-{pp}", ttl_s=120)
        topology = client.get_topology(name, require=Requirement.COMPLETE)
        if seal:
            core = made.core(f"{name}-core")
            client.seal_engine(name, "g1", made.seal_slots(topology), core)
        return name

    return make


def reads(plan, consumer_stage=0, tp_rank=0):
    """(producer stage, producer TP rank, layers, heads) that a consumer rank reads."""
    (one,) = [c for c in plan.consumers if (c.pp_rank, c.tp_rank) == (consumer_stage, tp_rank)]
    return [
        (r.pp_rank, r.tp_rank, (r.start_layer, r.end_layer), (r.start_head, r.end_head))
        for r in one.read
    ]


def layers_read(plan, consumer_stage=0):
    return [(stage, layers) for stage, _, layers, _ in reads(plan, consumer_stage)]


def planned(client, producer, **layout):
    return client.plan_transfer(producer, consumer_layout=v1.ConsumerLayout(**layout)).plan


def test_a_pipelined_producer_is_one_engine_with_its_own_split(client, publish):
    """vllm-project/vllm#52913, #40674, #22430: a producer with pp_rank above 0 was refused.

    Two stages by two ranks: four workers, and each stage's own layers.
    """
    name = publish([(0, 31), (31, 61)], 2)
    topology = client.get_topology(name, require=Requirement.COMPLETE)
    found = [
        (w.slot.pp_rank, w.slot.tp_rank, w.layers.start_layer, w.layers.end_layer)
        for w in topology.workers
    ]
    assert found == [(0, 0, 0, 31), (0, 1, 0, 31), (1, 0, 31, 61), (1, 1, 31, 61)]


@pytest.mark.parametrize("counts", [(15, 15, 16, 15), (16, 15, 15, 15)])
def test_only_published_ranges_decide_who_is_read(client, publish, counts):
    """61 layers over 4 stages, as vLLM 0.32 splits them and as a user's launch note does.

    Both are right, the plan follows what was published, and division by the
    number of stages gives neither.
    """
    stages, start = [], 0
    for count in counts:
        stages.append((start, start + count))
        start += count
    name = publish(stages)
    plan = planned(client, name, tp_size=1)
    assert layers_read(plan) == list(enumerate(stages))


def test_a_draft_layer_of_the_last_stage_is_planned_and_its_lack_is_told(client, publish):
    """vllm-project/vllm-ascend#4892: decode knew neither the partition 33,28 nor the MTP layer.

    With the extra layer published, the consumer's last stage reads it too.
    Without it the 61 layers are planned all the same, and the comparison says
    that the draft layer is absent.
    """
    stages = [(0, 33), (33, 61)]
    mtp = ExtraLayer(61, LayerKind.MTP)
    producer = publish(stages, extra=[mtp])
    without = publish(stages)
    consumer = publish([(0, 30), (30, 61)], extra=[mtp], role=Role.CONSUMER)
    plan = client.plan_transfer(producer, consumer_engine_id=consumer).plan
    assert layers_read(plan, 0) == [(0, (0, 30))]
    assert layers_read(plan, 1) == [(0, (30, 33)), (1, (33, 61)), (1, (61, 62))]
    plan = client.plan_transfer(without, consumer_engine_id=consumer).plan
    assert layers_read(plan, 1) == [(0, (30, 33)), (1, (33, 61))]
    told = client.compare_peers(without, consumer).factors
    assert [(f.name, f.producer, f.consumer) for f in told if f.name == "extra_layers"] == [
        ("extra_layers", "", "61:MTP")
    ]


def test_a_producer_waits_for_every_stage_that_contacts_it(client, publish):
    """vllm-project/vllm#56033: a producer freed its blocks before the second stage had read them.
    sgl-project/sglang#37175: buffers were paired by position and layers went astray.

    Four stages to two: layers are absolute, each consumer stage reads two of
    the producer's, and each producer rank waits for both.
    """
    name = publish([(0, 16), (16, 31), (31, 46), (46, 61)])
    plan = planned(client, name, tp_size=1, pp_size=2, layers=[31, 30])
    assert layers_read(plan, 0) == [(0, (0, 16)), (1, (16, 31))]
    assert layers_read(plan, 1) == [(2, (31, 46)), (3, (46, 61))]
    for one in plan.consumers:
        assert [rank.pp_rank for rank in one.contact] == [0, 1, 2, 3]
    assert [one.consumer_count for one in plan.producers] == [2, 2, 2, 2]


def test_stage_borders_need_not_line_up(client, publish):
    """RBLN-SW/vllm-rbln#857: a reader used its own stage's index on the other side's stages."""
    name = publish([(0, 20), (20, 40)])
    plan = planned(client, name, tp_size=1, pp_size=2, layers=[30, 10])
    assert layers_read(plan, 0) == [(0, (0, 20)), (1, (20, 30))]
    assert layers_read(plan, 1) == [(1, (30, 40))]


def test_heads_of_a_draft_layer_are_not_guessed_from_the_models(client, publish):
    """RBLN-SW/vllm-rbln#1058: a draft layer has other heads; the band was in range, and wrong."""
    name = publish([(0, 4)], 2, extra=[ExtraLayer(4, LayerKind.DRAFT)])
    plan = planned(client, name, tp_size=2)
    assert reads(plan, 0, 1) == [(0, 1, (0, 4), (4, 8)), (0, 1, (4, 5), (0, 0))]


def test_more_ranks_than_heads_share_heads(client, publish):
    """vllm-project/vllm#45330, sgl-project/sglang#32247: sizes stopped scaling at TP above the
    number of KV heads."""
    name = publish([(0, 4)], model=Model("m", total_num_kv_heads=2))
    plan = planned(client, name, tp_size=4)
    assert [reads(plan, 0, tp) for tp in range(4)] == [
        [(0, 0, (0, 4), (head, head + 1))] for head in (0, 0, 1, 1)
    ]


def test_one_replica_is_read_and_every_replica_is_notified(client, publish):
    """vllm-project/vllm#27274: with MLA one rank was read, the others never freed their blocks."""
    mla = Model("m", total_num_kv_heads=1, is_mla=True)
    name = publish([(0, 4)], 8, model=mla)
    plan = planned(client, name, tp_size=2)
    assert [len(one.read) for one in plan.consumers] == [1, 1]
    notified = sorted(rank.tp_rank for one in plan.consumers for rank in one.contact)
    assert notified == list(range(8))


def test_tp_sizes_that_do_not_divide_have_no_plan(client, publish):
    """SGLang, TP 6 to TP 4: divided without a check."""
    name = publish([(0, 4)], 6, model=Model("m", total_num_kv_heads=12))
    with pytest.raises(rankbook.TransferError) as caught:
        planned(client, name, tp_size=4)
    assert caught.value.reason == rankbook.Reason.TP_NOT_DIVISIBLE
    assert {"6", "4"} <= set(map(str, caught.value.metadata.values()))


def test_peers_that_cannot_work_are_told_before_any_request(client, publish):
    """sgl-project/sglang#15674, llm-d#2433: a pair that could not work was refused at its
    first transfer, or never."""
    push = Compat("sha256:1", {"connector": "NixlConnector", "transfer_mode": "pull"})
    kv = KvCache(block_size=16)
    producer = publish([(0, 4)], 6, compat=push, kv=kv, model=Model("m", total_num_kv_heads=12))
    consumer = publish(
        [(0, 4)],
        4,
        compat=push,
        kv=KvCache(block_size=24),
        role=Role.CONSUMER,
        model=Model("m", total_num_kv_heads=12, head_size=64),
    )
    verdict = client.compare_peers(producer, consumer)
    assert not verdict.compatible
    told = {one.reason: (one.producer, one.consumer) for one in verdict.reasons}
    assert told["TP_NOT_DIVISIBLE"] == ("6", "4")
    assert all(one.message for one in verdict.reasons)


def test_both_sides_have_their_own_number_of_dp_ranks_and_state_them(client, publish, engine_id):
    """vllm-project/router#222: the same DP size was forced on both sides.
    sgl-project/sglang#22901: a rank was derived from an id, and was wrong.

    Four DP engines and two: all ready. A DP rank is what its record says,
    whatever the engine's name looks like.
    """
    for side, count in (("p", 4), ("d", 2)):
        for dp in range(count):
            publish(
                [(0, 4)],
                name=f"{engine_id}-{side}_dp{dp}",
                group=f"{engine_id}-{side}",
                dp_rank=dp,
                seal=True,
            )
    for side, count in (("p", 4), ("d", 2)):
        found = client.get_group(f"{engine_id}-{side}")
        assert [t.engine.dp_rank for t in found] == list(range(count))
        assert {t.engine.state for t in found} == {State.READY}
        assert all(t.engine.problems == () for t in found)
    odd = publish([(0, 4)], name=f"{engine_id}-odd_dp7", dp_rank=2)
    engine = client.get_topology(odd, require=Requirement.COMPLETE).engine
    assert engine.dp_rank == 2


def test_sixteen_engines_that_all_say_dp_rank_zero_are_told(client, publish, engine_id):
    """vllm-project/vllm#51531: every worker registered dp_rank 0 and was answered 400.

    They are kept apart by their names, and each says who claims its place.
    """
    names = [
        publish([(0, 4)], name=f"{engine_id}_dp{number}", replica=engine_id) for number in range(16)
    ]
    for name in names:
        engine = client.get_topology(name, require=Requirement.COMPLETE).engine
        (problem,) = engine.problems
        assert problem.reason == "PLACE_TAKEN_TWICE"
        assert problem.metadata["dp_rank"] == "0"


def test_a_decode_of_one_version_is_shown_producers_of_that_version_only(client, publish):
    """llm-d#499: a rolling update paired prefill and decode of two versions.

    Two groups of compatibility live at once. Asking, listing and watching by
    one hash shows its engines only, and an engine that moves over leaves.
    """
    kinds = {n: Compat(f"sha256:{n}", {"vllm_version": f"0.3{n}.0"}) for n in (1, 2)}
    old, new = publish([(0, 4)], compat=kinds[1]), publish([(0, 4)], compat=kinds[2])
    decode = publish([(0, 4)], compat=kinds[2], role=Role.CONSUMER)
    group = client.get_topology(old, require=Requirement.COMPLETE).engine.group
    wanted = EngineFilter(group=group, role=Role.PRODUCER, compat_hash="sha256:2")
    assert [e.engine_id for e in client.list_engines(wanted).engines] == [new]
    assert client.compare_peers(new, decode).compatible
    refused = client.compare_peers(old, decode)
    assert [(f.name, f.producer, f.consumer) for f in refused.factors] == [
        ("vllm_version", "0.31.0", "0.32.0")
    ]
    assert not refused.compatible
    watch = client.watch(wanted)
    assert next(watch).topology.engine.engine_id == new
    (record,) = client.get_topology(new, require=Requirement.COMPLETE).workers
    client.update_worker(dataclasses.replace(record, compat=kinds[1]), sequence=2)
    event = next(watch)
    watch.close()
    assert (event.type, event.topology.engine.engine_id) == (EventType.REMOVED, new)


def test_an_engine_whose_layers_do_not_add_up_is_never_usable(client, made, engine_id):
    """NVIDIA/TensorRT-LLM#7117: one size per stage, and their sum is the model.

    Holes, overlaps and stages that disagree: INVALID with the layers named,
    no topology, no plan.
    """
    layout = Layout(pp_size=2, tp_size=1, num_layers=40)
    splits = {
        ((0, 20), (21, 40)): "LAYERS_HOLE",
        ((0, 20), (19, 40)): "LAYERS_OVERLAP",
        ((0, 20), (20, 39)): "LAYERS_HOLE",
    }
    for number, (split, named) in enumerate(splits.items()):
        name = f"{engine_id}-{number}"
        for pp, (start, end) in enumerate(split):
            one = dataclasses.replace(
                made.record(name, pp), layout=layout, layers=Layers(start, end)
            )
            client.register_workers([one], sequence=1, lease_key=f"{name}-{pp}", ttl_s=60)
        engine = client.get_topology(name, require=Requirement.ANY).engine
        assert engine.state is State.INVALID
        assert [problem.reason for problem in engine.problems] == [named]
        # Nothing to wait for: it is answered well before the wait is over.
        with pytest.raises(rankbook.Refused) as caught:
            client.get_topology(name, require=Requirement.COMPLETE, wait_s=60, timeout_s=5)
        assert caught.value.reason is rankbook.Reason.ENGINE_INVALID
        with pytest.raises(rankbook.Refused):
            planned(client, name, tp_size=1)
