"""A connector whose peers need no handshake is in the book too."""

import pytest

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_connector_without_metadata_is_published_and_sealed(start_engine, registry, tmp_path):
    engine = start_engine(
        engine_id="prefill-e-0",
        connector="ExampleConnector",
        pp_size=1,
        settings={"endpoints": registry.address},
        extra={"shared_storage_path": str(tmp_path)},
    )
    engine.wait_serving()
    with rankbook.Client(registry.address) as client:
        topology = client.get_topology("prefill-e-0", wait_s=30)
    assert topology.engine.state is State.READY
    worker = topology.worker(0, 0)
    assert (worker.layers.start_layer, worker.layers.end_layer) == (0, 4)
    assert (worker.handshake.format, worker.handshake.payload) == ("vllm.none", b"")
    assert worker.kv.num_blocks == 256
