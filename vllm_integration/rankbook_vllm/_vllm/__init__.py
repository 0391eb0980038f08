"""The one room that knows vLLM's insides.

Everything that rankbook asks of vLLM goes through here, so that a new vLLM
release changes one folder: `base` has what every connector needs, `nixl` what
NIXL's handshake needs, `mooncake` what Mooncake's look-up needs, `stats` what
/metrics needs. What cannot be done without is checked at import (`ImportError`
says what is missing); what can is looked up when it is needed, and a `fallback`
line in the log says what was done instead.

Read against vLLM 0.32; vLLM calls this interface experimental.
"""

from rankbook_vllm._vllm.base import (
    Carrier,
    KVConnectorRole,
    agree_on_start,
    carrier,
    connector_class,
    dp_rank,
    engine_layout,
    gather_over_pcp,
    handshake_of,
    is_worker,
    logger,
    metadata_of,
    passes_guard,
    served,
    side_channel,
    slot,
    takes_metadata,
    unpack,
    worker_facts,
)
from rankbook_vllm._vllm.extend import extend, handshake_for
from rankbook_vllm._vllm.halves import SchedulerHalf
from rankbook_vllm._vllm.mooncake import without_bootstrap
from rankbook_vllm._vllm.stats import Tally, stats_mixins

__all__ = [
    "Carrier",
    "KVConnectorRole",
    "SchedulerHalf",
    "Tally",
    "agree_on_start",
    "carrier",
    "connector_class",
    "dp_rank",
    "engine_layout",
    "extend",
    "gather_over_pcp",
    "handshake_for",
    "handshake_of",
    "is_worker",
    "logger",
    "metadata_of",
    "passes_guard",
    "served",
    "side_channel",
    "slot",
    "stats_mixins",
    "takes_metadata",
    "unpack",
    "without_bootstrap",
    "worker_facts",
]
