"""The connector classes: vLLM's, with something added, found by vLLM's own factory."""

import importlib.util
import pickle
import warnings
from types import SimpleNamespace

import pytest

from rankbook.errors import BadRequest, Incomplete
from rankbook.model import Handshake, Layout, Slot
from rankbook_vllm.config import load
from rankbook_vllm.record import Facts, Start, worker_record
from rankbook_vllm.seal import Note, note_of

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NIXL_CONNECTOR_VERSION,
        NixlHandshakePayload,
    )

    from rankbook_vllm import _vllm, connectors

# Those whose own imports need nothing that is not installed.
NAMES = [
    "ExampleConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
]


@pytest.mark.parametrize("name", NAMES)
def test_vllms_factory_finds_a_subclass_under_the_name_it_keeps(name):
    config = KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path="rankbook_vllm.connectors",
        kv_role="kv_producer",
    )
    found = KVConnectorFactory.get_connector_class(config)
    base = KVConnectorFactory.get_connector_class_by_name(name)
    assert issubclass(found, base)
    assert found is not base
    assert found.__name__ == base.__name__
    assert supports_hma(found) == supports_hma(base)


def test_two_names_of_one_class_are_one_class_which_pickles_by_reference():
    assert connectors.NixlConnector is connectors.NixlPullConnector
    assert pickle.loads(pickle.dumps(connectors.NixlConnector)) is connectors.NixlConnector


def test_an_unknown_name_is_an_error_that_says_what_is_taken():
    with pytest.raises(AttributeError, match=r"no connector 'NixlPullConector'.* in-tree"):
        _ = connectors.NixlPullConector


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("NixlPushConnector", True),  # is PP-aware
        ("MultiConnector", True),  # hands on to its children
        ("OffloadingConnector", False),  # has the guard, and ignores metadata
        ("MooncakeConnector", False),
        ("ExampleConnector", False),
    ],
)
def test_a_connector_that_ignores_metadata_is_not_asked_about_later_stages(name, passes):
    base = KVConnectorFactory.get_connector_class_by_name(name)
    assert _vllm.passes_guard(base, [(0, 0), (1, 0)]) is passes
    assert _vllm.passes_guard(base, [(0, 0), (0, 1)]) is True


class Takes(KVConnectorBase_V1):
    def set_xfer_handshake_metadata(self, metadata):
        raise AssertionError("not to be called")


class Gives(KVConnectorBase_V1):
    def get_handshake_metadata(self):
        raise AssertionError("not to be called")


@pytest.mark.parametrize("needy", [Takes, Gives])
def test_a_connector_that_would_drop_a_stage_is_refused_by_name_with_what_to_do(needy):
    with pytest.raises(BadRequest) as caught:
        _vllm.passes_guard(needy, {(0, 0): None, (2, 1): None, (1, 0): None})
    assert f"{needy.__name__} needs its peers' handshake metadata" in str(caught.value)
    assert "of 3 it would keep the first" in str(caught.value)
    assert "pipeline_parallel_size to 1" in str(caught.value)
    assert _vllm.passes_guard(needy, [(0, 0), (0, 1)]) is True


def test_nixls_payload_is_published_as_nixl_encodes_it():
    msgspec = pytest.importorskip("msgspec")
    payload = NixlHandshakePayload("c0ffee", b"\x00agent")
    handshake = _vllm.handshake_of(payload)
    assert handshake.format == "vllm.nixl"
    assert handshake.version == NIXL_CONNECTOR_VERSION
    assert msgspec.msgpack.Decoder(NixlHandshakePayload).decode(handshake.payload) == payload


# ----------------------------------------------- the hooks, on a connector of our own


LAYOUT = Layout(pp_size=2, tp_size=1, num_layers=4)


class FakeConnector(KVConnectorBase_V1):
    """Consumes metadata of every stage, and sleeps as vLLM 0.33 asks."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls = []

    def get_handshake_metadata(self):
        return NixlHandshakePayload("c0ffee", b"agent")

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        self.calls.append(("set", metadata))

    def unregister_kv_caches(self):
        self.calls.append("unregister")

    def restore_kv_caches(self):
        self.calls.append("restore")

    def shutdown(self):
        self.calls.append("shutdown")

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return None


def vllm_config(settings=None, engine_id="prefill-a-0"):
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="FakeConnector",
            kv_role="kv_producer",
            engine_id=engine_id,
            kv_connector_extra_config={"rankbook": settings or {"endpoints": "127.0.0.1:1"}},
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=2,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            rank=0,
        ),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 4),
    )


@pytest.fixture
def scheduler():
    made = []

    def make(settings=None, engine_id="prefill-a-0"):
        connector = connectors.subclass(FakeConnector)(
            vllm_config(settings, engine_id), KVConnectorRole.SCHEDULER, None
        )
        made.append(connector)
        return connector

    yield make
    for connector in made:
        connector.shutdown()


def note(pp_rank, payload):
    facts = Facts(
        engine_id="prefill-a-0",
        dp_rank=0,
        kv_role="kv_producer",
        layout=LAYOUT,
        slot=Slot(pp_rank),
        stage_layers=(2 * pp_rank, 2 * pp_rank + 2),
        layer_names=(),
        handshake=Handshake("vllm.nixl", 14, payload),
        worker_rank=pp_rank,
    )
    start = Start("01JD")
    return note_of(worker_record(facts, start, load(None, {}), f"boot-{pp_rank}"), pp_rank, start)


def test_a_wrong_setting_stops_the_engine_at_start_and_is_named(scheduler):
    with pytest.raises(BadRequest, match="sever"):
        scheduler({"sever": "127.0.0.1:7420"})


def test_the_engine_core_hands_vllms_own_objects_on_and_nothing_of_ours(scheduler):
    connector = scheduler()
    inner = {(pp, 0): NixlHandshakePayload("c0ffee", b"agent %d" % pp) for pp in range(2)}
    connector.set_xfer_handshake_metadata_pp_aware(
        {
            key: _vllm.Carrier(value, (note(key[0], _vllm.handshake_of(value).payload),))
            for key, value in inner.items()
        }
    )
    assert connector.calls == [("set", inner)]
    assert all(connector.calls[0][1][key] is inner[key] for key in inner)


def test_a_missing_stage_stops_the_engine_before_vllms_connector_is_asked(scheduler):
    connector = scheduler()
    payload = NixlHandshakePayload("c0ffee", b"agent")
    carrier = _vllm.Carrier(payload, (note(0, _vllm.handshake_of(payload).payload),))
    with pytest.raises(Incomplete, match="pp1 tp0"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): carrier})
    assert connector.calls == []


def test_metadata_without_notes_is_handed_on_unchanged_and_not_sealed(scheduler):
    connector = scheduler()
    inner = {(0, 0): NixlHandshakePayload("c0ffee", b"agent")}
    connector.set_xfer_handshake_metadata_pp_aware(inner)
    assert connector.calls == [("set", inner)]


def test_of_two_connectors_of_one_engine_in_a_process_the_first_signs_in(scheduler):
    first, second = scheduler(), scheduler()
    # What a MultiConnector's child does with metadata that its parent unpacked.
    second.set_xfer_handshake_metadata_pp_aware({})
    assert second.calls == [("set", {})]
    with pytest.raises(Incomplete):
        first.set_xfer_handshake_metadata_pp_aware({})
    first.shutdown()
    with pytest.raises(Incomplete):
        scheduler().set_xfer_handshake_metadata_pp_aware({})


def test_a_child_whose_sibling_signed_in_without_its_metadata_ends_the_start(scheduler):
    """Under vLLM's own MultiConnector, whose children are all from here."""
    first, second = scheduler(), scheduler()
    carried = {(pp, 0): _vllm.Carrier(None, (note(pp, b""),)) for pp in range(2)}
    with pytest.raises(BadRequest, match="Put FakeConnector first"):
        second.set_xfer_handshake_metadata_pp_aware(carried)
    assert (first.calls, second.calls) == ([], [])


def test_shutting_down_twice_is_fine_and_reaches_vllms_connector(scheduler):
    connector = scheduler()
    connector.shutdown()
    connector.shutdown()
    assert connector.calls == ["shutdown", "shutdown"]


def test_only_a_connector_that_can_sleep_has_the_methods_for_it(scheduler):
    connector = scheduler()
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert connector.calls == ["unregister", "restore"]
    assert not hasattr(connectors.ExampleConnector, "unregister_kv_caches")


def test_a_carrier_survives_the_way_to_the_engine_core():
    sent = _vllm.Carrier(NixlHandshakePayload("c0ffee", b"agent"), (Note(Slot(), 0, Start("g")),))
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_metadata_that_cannot_be_encoded_is_its_workers_problem_and_no_crash_of_the_core(scheduler):
    odd = NixlHandshakePayload("c0ffee", object())
    failed = Note(Slot(1), 1, Start("01JD"), problem="Encoding objects of type object")
    payload = NixlHandshakePayload("c0ffee", b"agent")
    first = note(0, _vllm.handshake_of(payload).payload)
    connector = scheduler()
    connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): _vllm.Carrier(payload, (first,)), (1, 0): _vllm.Carrier(odd, (failed,))}
    )
    assert connector.calls == [("set", {(0, 0): payload, (1, 0): odd})]
