"""How a connector ends, and what it leaves alone.

Stand-ins: a connector of our own in vLLM's place, around vLLM's real NIXL scheduler
object. The registry is one that nobody runs.
"""

import importlib.util
import threading
import warnings

import pytest

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm import test_connectors as parts
    from tests.vllm import test_nixl_scheduler_half as half
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
        NixlPushConnectorScheduler,
    )

    from rankbook_vllm import _vllm, connectors

NOBODY = "127.0.0.1:1"
THREAD_S = 5.0


class Connector(parts.FakeConnector):
    """Has a NIXL scheduler as vLLM's own connector does."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler = NixlPushConnectorScheduler(
            half.config(), vllm_config.kv_transfer_config.engine_id, half.CacheConfig()
        )
        self.connector_worker = None
        self.fails = False

    def shutdown(self):
        super().shutdown()
        if self.fails:
            raise RuntimeError("vLLM could not shut down")


def make(**settings):
    config = parts.vllm_config({"endpoints": NOBODY} | settings)
    return connectors.subclass(Connector)(config, KVConnectorRole.SCHEDULER, None)


class Part:
    """Notes when it is ended."""

    def __init__(self, calls, name):
        self._calls = calls
        self._name = name

    def stop(self):
        self._calls.append(self._name)

    close = stop


@pytest.fixture
def ending():
    """A connector whose parts note in which order they end."""
    connector = make()
    connector._rankbook_book.close()
    connector._rankbook_sealer.stop()
    connector._rankbook_book = Part(connector.calls, "book")
    connector._rankbook_sealer = Part(connector.calls, "seal")
    connector._rankbook_publisher = Part(connector.calls, "worker")
    return connector


def test_the_seal_goes_first_and_the_worker_signs_out_last(ending):
    ending.shutdown()
    assert ending.calls == ["seal", "book", "shutdown", "worker"]


def test_the_worker_signs_out_also_when_vllm_cannot_shut_down(ending):
    ending.fails = True
    with pytest.raises(RuntimeError, match="could not shut down"):
        ending.shutdown()
    assert ending.calls[-1] == "worker"
    ending.fails = False
    ending.shutdown()


def test_a_second_shutdown_is_fine(ending):
    ending.shutdown()
    ending.shutdown()
    assert ending.calls == ["seal", "book", "shutdown", "worker"] * 2


def test_no_thread_is_left():
    before = set(threading.enumerate())
    connector = make()
    payload = NixlHandshakePayload("c0ffee", b"agent")
    published = _vllm.handshake_of(payload).payload
    connector.set_xfer_handshake_metadata_pp_aware(
        {(pp, 0): _vllm.Carrier(payload, (parts.note(pp, published),)) for pp in range(2)}
    )
    ours = [one for one in set(threading.enumerate()) - before if "rankbook" in one.name]
    assert {"rankbook-peers", "rankbook-view"} <= {one.name for one in ours}
    connector.shutdown()
    connector.shutdown()
    for thread in ours:
        thread.join(THREAD_S)
    left = set(threading.enumerate()) - before
    assert [one.name for one in left if one.name.startswith("rankbook")] == []


def test_a_connector_that_was_never_used_leaves_no_thread():
    before = set(threading.enumerate())
    make().shutdown()
    assert set(threading.enumerate()) <= before


def test_the_book_is_put_before_vllms_scheduler():
    connector = make()
    assert type(connector.connector_scheduler) is not NixlPushConnectorScheduler
    assert connector.connector_scheduler.rankbook in connector._rankbook_halves
    connector.shutdown()


def test_vllms_own_handshakes_leave_vllms_objects_alone():
    connector = make(handshake="vllm")
    assert type(connector.connector_scheduler) is NixlPushConnectorScheduler
    assert not hasattr(connector.connector_scheduler, "rankbook")
    assert connector._rankbook_book is None
    connector.shutdown()
    assert connector.calls == ["shutdown"]


def test_the_start_that_the_workers_agreed_on_reaches_the_scheduler():
    connector = make()
    payload = NixlHandshakePayload("c0ffee", b"agent")
    published = _vllm.handshake_of(payload).payload
    assert connector.rankbook_generation == ""
    for _ in range(2):  # from vLLM 0.33 on, again after each wake-up
        connector.set_xfer_handshake_metadata_pp_aware(
            {(pp, 0): _vllm.Carrier(payload, (parts.note(pp, published),)) for pp in range(2)}
        )
        assert connector.rankbook_generation == "01JD"
        assert connector.connector_scheduler.rankbook.generation == "01JD"
    connector.shutdown()
