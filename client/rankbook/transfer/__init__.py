"""Who reads what from whom: pure arithmetic over published topologies.

Nothing here waits, sends, or imports torch. The answers are those of vLLM
0.32's `TransferTopology`, carried over pipeline stages.

    topology = TransferTopology(
        tp_rank=0, tp_size=2, block_size=16, engine_id="decode-a-0",
        is_mla=False, total_num_kv_heads=8,
    )
    topology.handshake_target_ranks(4)  # [0, 1]

    producer = PlanSide(
        engine_id="prefill-a-0", tp_size=4, stages=((0, 31), (31, 61)),
        num_layers=61, total_num_kv_heads=8,
    )
    plan = plan_transfer(producer, PlanSide.for_layout(producer, tp_size=2))
    plan.consumers[0].read

    compare_peers(PeerSide(...), PeerSide(...)).compatible
"""

from rankbook.transfer.compare import compare_peers
from rankbook.transfer.fit import TransferMode
from rankbook.transfer.layers import partition_layers
from rankbook.transfer.peers import Comparison, FactorDifference, Incompatibility, PeerSide
from rankbook.transfer.plan import (
    ConsumerPlan,
    Plan,
    ProducerPlan,
    Rank,
    Read,
    plan_transfer,
)
from rankbook.transfer.sides import ExtraLayer, PlanSide, absent_extra_layers
from rankbook.transfer.topology import EngineTransferInfo, TransferTopology

__all__ = [
    "Comparison",
    "ConsumerPlan",
    "EngineTransferInfo",
    "ExtraLayer",
    "FactorDifference",
    "Incompatibility",
    "PeerSide",
    "Plan",
    "PlanSide",
    "ProducerPlan",
    "Rank",
    "Read",
    "TransferMode",
    "TransferTopology",
    "absent_extra_layers",
    "compare_peers",
    "partition_layers",
    "plan_transfer",
]
