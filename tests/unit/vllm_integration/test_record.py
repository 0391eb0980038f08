"""A record says what vLLM says, and nothing that was not said."""

import subprocess
import sys

import pytest
from tests.unit.vllm_integration.facts import facts

from rankbook.errors import BadRecord
from rankbook.model import Address, ExtraLayer, LayerKind, Role, Slot
from rankbook_vllm.config import load
from rankbook_vllm.record import (
    NO_METADATA,
    Start,
    addresses_of,
    base_name,
    layer_index,
    layers_of,
    role_of,
    worker_record,
)

START = Start("01JD", 3)


def record(made, extra=None):
    return worker_record(made, START, load(extra, {}), "boot-1")


def test_a_record_carries_the_facts_of_its_worker():
    made = record(facts(1), {"group": "prefill-a", "labels": {"zone": "a"}, "namespace": "ns"})
    assert made.namespace == "ns"
    assert (made.group, made.engine_id, made.generation) == ("prefill-a", "prefill-a-0", "01JD")
    assert made.role is Role.PRODUCER
    assert made.slot == Slot(1, 0, 0)
    assert (made.layers.start_layer, made.layers.end_layer) == (2, 4)
    assert made.layers.names == ("model.layers.2.self_attn.attn", "model.layers.3.self_attn.attn")
    assert made.handshake.payload == b"payload of pp1 tp0"
    assert (made.process.boot_id, made.process.hostname, made.process.pid) == (
        "boot-1",
        "node-7",
        4711,
    )
    assert made.labels == {"zone": "a"}


def test_group_and_replica_default_to_the_engine_id_without_its_dp_ending():
    made = record(facts(engine_id="prefill-a-0_dp3", dp_rank=3))
    assert (made.group, made.replica, made.dp_rank) == ("prefill-a-0", "prefill-a-0", 3)
    assert base_name("x_dp12") == "x"
    assert base_name("x_dp1_y") == "x_dp1_y"


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", Role.PRODUCER), ("kv_consumer", Role.CONSUMER), ("kv_both", Role.BOTH)],
)
def test_every_role_of_vllm_has_one_of_ours(kv_role, role):
    assert role_of(kv_role) is role


def test_an_unknown_role_is_an_error_that_names_it():
    with pytest.raises(BadRecord, match="kv_helper"):
        role_of("kv_helper")


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.31.self_attn.attn", 31),
        ("language_model.model.layers.0.linear_attn", 0),
        ("model.decoder.layers.5.encoder_attn.attn", 5),
        ("model.layers2.attn", None),
        ("", None),
    ],
)
def test_a_layers_index_is_the_number_that_stands_alone(name, index):
    assert layer_index(name) == index


def test_the_range_is_the_stages_and_not_the_span_of_the_names():
    # Layers 0 and 2 have no KV cache.
    layers = layers_of(["model.layers.1.attn"], (0, 3), 6, LayerKind.OTHER)
    assert (layers.start_layer, layers.end_layer) == (0, 3)
    assert layers.extra == ()


def test_an_empty_stage_has_an_empty_range_and_no_names():
    layers = layers_of([], (2, 2), 4, LayerKind.OTHER)
    assert (layers.start_layer, layers.end_layer, layers.names) == (2, 2, ())


def test_an_mtp_layer_behind_the_last_stage_is_counted_apart():
    names = ["model.layers.60.self_attn.attn", "model.layers.61.self_attn.attn"]
    layers = layers_of(names, (60, 61), 61, LayerKind.MTP)
    assert layers.end_layer == 61
    assert layers.extra == (ExtraLayer(61, LayerKind.MTP),)
    assert layers.names == tuple(names)


def test_a_draft_model_with_layers_from_zero_is_counted_behind_the_models_own():
    names = ["model.layers.3.attn", "draft_model.model.layers.0.attn"]
    layers = layers_of(names, (2, 4), 4, LayerKind.DRAFT)
    assert layers.extra == (ExtraLayer(4, LayerKind.DRAFT),)


def test_a_cache_of_another_stages_layer_is_an_error_that_names_it():
    with pytest.raises(BadRecord, match=r"model\.layers\.1\.attn"):
        layers_of(["model.layers.1.attn"], (2, 4), 4, LayerKind.OTHER)


def test_configured_addresses_come_first_and_no_host_twice():
    configured = (Address("rdma", "192.168.7.1", 18515, "ib0"),)
    assert addresses_of(configured, "10.0.0.5", "10.0.0.5") == (
        *configured,
        Address("tcp", "10.0.0.5", 0, "node"),
    )
    assert addresses_of((), "10.0.0.5", "[2001:db8::1]") == (
        Address("tcp", "10.0.0.5", 0, "node"),
        Address("tcp", "2001:db8::1", 0, "advertised"),
    )


def test_a_configured_host_replaces_the_one_that_was_found():
    made = record(facts(), {"host": "203.0.113.9"})
    assert made.addresses == (Address("tcp", "203.0.113.9", 0, "node"),)


def test_a_connector_without_metadata_publishes_an_empty_payload():
    from rankbook.model import Handshake

    made = record(facts(handshake=Handshake(NO_METADATA)))
    assert (made.handshake.format, made.handshake.payload) == ("vllm.none", b"")


def test_an_engine_id_the_book_does_not_take_is_an_error_before_anything_is_sent():
    with pytest.raises(BadRecord) as caught:
        record(facts(engine_id="team/prefill"), {"group": "g", "replica": "r"})
    assert caught.value.metadata["field"] == "engine_id"


def test_the_helpers_need_neither_vllm_nor_torch():
    code = (
        "import sys, rankbook_vllm.config, rankbook_vllm.record, rankbook_vllm.seal;"
        "sys.exit(bool({'vllm', 'torch', 'grpc._channel'} & set(sys.modules) - {'grpc._channel'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
