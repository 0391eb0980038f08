"""Runs the README's connector: two engines of one worker each, in this process.

    python readme_probe.py MODEL REGISTRY

`my_connector`, the README's code, is on the path; its transport is below. Prints
one JSON line: what was read, what was told, and what a wrong start gets.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ.update(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo")

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs

import rankbook

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.engine import BLOCK_TOKENS, free_port
from tests.vllm.tiny_model import HEAD_SIZE, KV_HEADS, LAYERS

served: list[dict[str, torch.Tensor]] = []
told: list[str] = []
transport = types.ModuleType("my_transport")


def serve(caches):
    served.append(caches)
    return "127.0.0.1", len(served) - 1


transport.serve = serve
transport.fetch = lambda door, name, blocks, heads: served[door.port][name][blocks, heads]
transport.tell = lambda door, params: told.append(f"{door.port} {params['remote_block_ids']}")
sys.modules["my_transport"] = transport


def config(model: str, registry: str, engine_id: str, role: str):
    """vLLM's own configuration of an engine with the README's connector."""
    return EngineArgs(
        model=model,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=256,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MyConnector",
            kv_connector_module_path="my_connector",
            kv_role=role,
            engine_id=engine_id,
            kv_connector_extra_config={"rankbook": {"endpoints": registry}},
        ),
    ).create_engine_config()


def caches() -> dict[str, torch.Tensor]:
    """A worker's caches of eight blocks, with numbers that no other has."""
    shape = (8, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    return {f"model.layers.{layer}.self_attn.attn": torch.rand(shape) for layer in range(LAYERS)}


def run(model: str, registry: str) -> dict:
    """Both engines sign in, and the consumer loads two blocks."""
    from my_connector import MyConnector

    MyConnector.__abstractmethods__ = frozenset()  # what the README leaves out is not called
    sides = []
    for engine_id, role in (("prefill-r", "kv_producer"), ("decode-r", "kv_consumer")):
        made = config(model, registry, engine_id, role)
        with set_current_vllm_config(made):
            if not sides:
                parallel_state.init_distributed_environment(
                    world_size=1,
                    rank=0,
                    distributed_init_method=f"tcp://127.0.0.1:{free_port()}",
                    local_rank=0,
                    backend="gloo",
                )
                parallel_state.initialize_model_parallel(1, 1)
            worker = MyConnector(made, KVConnectorRole.WORKER, None)
            core = MyConnector(made, KVConnectorRole.SCHEDULER, None)
        worker.register_kv_caches(caches())
        core.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        sides.append((worker, core))
    (producer, core), (consumer, _) = sides
    _, params = core.request_finished(None, [5, 2])
    consumer.load(params, [1, 6])
    moved = {
        name: torch.equal(consumer.caches[name][[1, 6]], producer.caches[name][[5, 2]])
        and not torch.equal(consumer.caches[name][0], producer.caches[name][0])
        for name in producer.caches
    }
    try:
        consumer.load(params | {"remote_generation": "a-start-before"}, [1, 6])
    except rankbook.Gone as error:
        gone = str(error)
    for side in sides:
        for connector in side:
            connector.shutdown()
    return {"params": params, "moved": moved, "told": told, "gone": gone}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[1], sys.argv[2])) + "\n")
