"""A connector class from outside vLLM, decorated: still itself, and in the book."""

import importlib.util
import pickle
import warnings
from dataclasses import dataclass

import pytest
from tests.unit.vllm_integration.books import HandBook, consumer, engine

import rankbook
from rankbook.model import Handshake, State

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorRole,
    )

    from rankbook_vllm import _vllm
    from rankbook_vllm.authors import Peers, signs_in


@dataclass
class Door(KVConnectorHandshakeMetadata):
    host: str
    port: int


@dataclass
class Gate(KVConnectorHandshakeMetadata):
    host: str
    port: int


@signs_in
class Giver(KVConnectorBase_V1):
    """Gives metadata and takes none."""

    def get_handshake_metadata(self):
        return Door("10.0.0.5", 7000)


@signs_in
class Taker(KVConnectorBase_V1):
    """Takes what is under a rank, and so knows no stages."""

    def set_xfer_handshake_metadata(self, metadata):
        self.taken = metadata


class Plain(KVConnectorBase_V1):
    """Not decorated."""


def made(cls):
    """A scheduler-side connector that never finds a registry."""
    cls.__abstractmethods__ = frozenset()
    transfer = KVTransferConfig(
        kv_connector=cls.__name__,
        kv_role="kv_producer",
        engine_id=f"engine-{cls.__name__}",
        kv_connector_extra_config={"rankbook": {"endpoints": "127.0.0.1:1"}},
    )
    config = type("Config", (), {"kv_transfer_config": transfer})()
    return cls(config, KVConnectorRole.SCHEDULER, None)


@pytest.fixture
def giver():
    connector = made(Giver)
    yield connector
    connector.shutdown()


def test_vllms_factory_finds_it_in_its_own_module_and_it_pickles_by_reference():
    config = KVTransferConfig(
        kv_connector="Giver", kv_connector_module_path=__name__, kv_role="kv_producer"
    )
    assert KVConnectorFactory.get_connector_class(config) is Giver
    assert (Giver.__name__, Giver.__module__) == ("Giver", __name__)
    assert pickle.loads(pickle.dumps(Giver)) is Giver


def test_a_giver_is_not_asked_about_the_metadata_of_later_stages():
    connector = made(Giver)
    # Without rankbook's notes, so that nothing is sealed; vLLM's own guard would raise.
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): Door("10.0.0.5", 7000)})
    connector.shutdown()


def test_a_taker_that_knows_no_stages_is_refused_those_and_gets_the_rest():
    connector = made(Taker)
    door = Door("10.0.0.5", 7000)
    with pytest.raises(rankbook.BadRequest, match="of 2 it would keep the first"):
        connector.set_xfer_handshake_metadata_pp_aware({(1, 0): door})
    connector.set_xfer_handshake_metadata_pp_aware({(0, 1): door})
    assert connector.taken == {1: door}
    connector.shutdown()


def test_a_class_is_decorated_once():
    with pytest.raises(TypeError, match="a base of Again signs in already"):
        signs_in(type("Again", (Giver,), {}))


def test_the_connectors_shutdown_ends_its_peers(giver):
    peers = Peers(giver)
    giver.shutdown()
    with pytest.raises(Exception, match="shutting down"):
        peers.topology("prefill-a-0", timeout_s=1)


def test_a_connector_has_one_copy_of_the_book_whoever_looks_into_it(giver):
    assert Peers(giver).book is Peers(giver, mode="push").book is giver._rankbook_follow()


def test_plans_are_kept_while_both_starts_live_and_no_longer(giver):
    peers = Peers(giver, mode="push")
    peers.book = HandBook(consumer(), *(engine(f"prefill-{number}") for number in range(4)))
    first, second, third, fourth = (peers.book.get(f"prefill-{number}") for number in range(4))
    own = peers.book.get("decode-a-0")
    kept = peers.plan(first, own)
    for producer in (second, third, fourth):
        peers.plan(producer, own)
    assert peers.plan(first, own) is kept
    peers.book.put(engine("prefill-1", state=State.GONE))
    peers.book.put(engine("prefill-2", generation="g2", epoch=2))
    peers.book.forget("prefill-3")
    again = peers.book.get("prefill-2")
    peers.plan(again, own)
    assert peers.plan(first, own) is kept
    assert {starts[:2] for starts in peers._plans} == {("prefill-0", "g1"), ("prefill-2", "g2")}


def test_peers_are_of_a_connector_that_signs_in():
    with pytest.raises(TypeError, match="Plain does not sign in: decorate it @signs_in"):
        Peers(made(Plain))


def test_a_payload_is_read_as_the_class_that_it_was_and_no_other():
    handshake = _vllm.handshake_of(Door("10.0.0.5", 7000))
    assert _vllm.metadata_of(handshake, Door) == Door("10.0.0.5", 7000)
    with pytest.raises(ValueError, match=r"vllm\.Door"):
        _vllm.metadata_of(handshake, Gate)
    with pytest.raises(ValueError, match="port"):
        _vllm.metadata_of(
            Handshake(handshake.format, 0, handshake.payload.replace(b"port", b"door")), Door
        )
    with pytest.raises(ValueError, match="format"):
        _vllm.metadata_of(None, Door)
