"""One worker's facts, as a vLLM of four layers over two stages has them."""

import dataclasses

from rankbook.model import Compat, Handshake, KvCache, Layout, Model, Slot
from rankbook_vllm.record import Facts

LAYOUT = Layout(pp_size=2, tp_size=1, num_layers=4)


def facts(pp_rank=0, *, tp_rank=0, layout=LAYOUT, stage=None, **changes):
    """The facts of a worker; `stage` is its range, an even split by default."""
    start, end = stage or (pp_rank * 2, pp_rank * 2 + 2)
    made = Facts(
        engine_id="prefill-a-0",
        dp_rank=0,
        kv_role="kv_producer",
        layout=layout,
        slot=Slot(pp_rank, 0, tp_rank),
        stage_layers=(start, end),
        layer_names=tuple(f"model.layers.{index}.self_attn.attn" for index in range(start, end)),
        model=Model("tiny", "float32", "auto", 4, 32),
        kv=KvCache(block_size=32, block_len_bytes=32768, num_blocks=256, layout="LBHNC"),
        compat=Compat("c0ffee", {"connector": "NixlPushConnector"}),
        handshake=Handshake("vllm.nixl", 14, b"payload of pp%d tp%d" % (pp_rank, tp_rank)),
        node_host="10.0.0.5",
        hostname="node-7",
        pid=4711,
        worker_rank=pp_rank * layout.tp_size + tp_rank,
    )
    return dataclasses.replace(made, **changes)
