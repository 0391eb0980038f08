"""What is needed of vLLM, in one table: its NIXL package's by handshakes from the book, its
statistics' by our counts in /metrics.

Names that are part of no interface: a release may change any of them. Where one of
NIXL's is missing the engine publishes only, where one of the statistics' is the
counts are in the log only; and it says which.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ANSWERED",
    "ATTRIBUTES",
    "FUNCTIONS",
    "HOOKS",
    "METHODS",
    "NIXL",
    "V1",
    "missing_seams",
    "missing_stats_seams",
]

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
NIXL = f"{V1}.nixl"

FUNCTIONS: Mapping[str, tuple[str, ...]] = {"base_worker": ("zmq_ctx",)}
"""By module."""

METHODS: Mapping[tuple[str, str], Mapping[str, tuple[str, ...]]] = {
    ("base_worker", "NixlBaseConnectorWorker"): {
        "_nixl_handshake": ("host", "port", "remote_tp_size", "expected_engine_id"),
        "_ensure_handshake": ("engine_id", "host", "port", "tp_size"),
        "_cleanup_remote_engine": ("engine_id",),
        "_evict_stale_engines": (),
    },
    ("push_worker", "NixlPushConnectorWorker"): {
        "start_load_kv": ("metadata",),
        "_send_registration_to_p": ("req_id", "reg_data"),
        "_do_start_push_kv": ("request_id", "local_block_ids", "registration_data"),
        "_handle_push_reg_notif": ("notif",),
    },
    ("pull_worker", "NixlPullConnectorWorker"): {
        "start_load_kv": ("metadata",),
        "_read_blocks_for_req": ("req_id", "meta"),
    },
    ("base_scheduler", "NixlBaseConnectorScheduler"): {
        "on_new_request": ("request",),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "request_finished": ("request", "block_ids"),
        "set_xfer_handshake_metadata": ("metadata",),
    },
}
"""By module and class: methods with the parameters that are used by name."""

ATTRIBUTES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("base_worker", "NixlBaseConnectorWorker"): (
        "kv_transfer_config",
        "nixl_wrapper",
        "dst_xfer_side_handles",
        "_handshake_initiation_executor",
        "_handshake_futures",
        "_handshake_lock",
        "_remote_agents",
        "_recving_metadata",
        "_recving_transfers",
        "_failed_recv_reqs",
        "_reqs_to_send",
    ),
    ("push_worker", "NixlPushConnectorWorker"): (
        "_sending_transfers",
        "_pending_d_registrations",
        "_deferred_push_inbox",
        "_push_writer_wake",
    ),
}
"""By module and class: what its `__init__` sets."""

HOOKS: Mapping[str, tuple[str, ...]] = {
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": (
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ),
}
"""Where every connector is asked for statistics: methods with their parameters."""

ANSWERED: Mapping[str, tuple[str, ...]] = {
    "KVConnectorStats": ("reset", "aggregate", "reduce", "is_empty"),
    "KVConnectorPromMetrics": ("observe",),
}
"""By class of vLLM's statistics: the methods that ours answer for the connector's own."""

_NEWER = ("to_dict",)
"""A method that some releases have besides, and ours too."""


def missing_seams() -> tuple[str, ...]:
    """What the vLLM at hand lacks; empty where all is there."""
    try:
        modules = {
            name: importlib.import_module(f"{NIXL}.{name}")
            for name in {*FUNCTIONS, *(module for module, _ in METHODS)}
        }
    except ImportError as error:
        return (str(error),)
    lacking = [
        f"{module}.{name}"
        for module, names in FUNCTIONS.items()
        for name in names
        if not hasattr(modules[module], name)
    ]
    for (module, owner), methods in METHODS.items():
        cls = getattr(modules[module], owner, None)
        for name, parameters in methods.items():
            method = getattr(cls, name, None)
            if method is None:
                lacking.append(f"{owner}.{name}")
                continue
            known = inspect.signature(method).parameters
            lacking += [f"{owner}.{name}({one})" for one in parameters if one not in known]
    for (module, owner), names in ATTRIBUTES.items():
        cls = getattr(modules[module], owner, None)
        code = getattr(getattr(cls, "__init__", None), "__code__", None)
        lacking += [f"{owner}.{one}" for one in names if code and one not in code.co_names]
    return tuple(lacking)


def missing_stats_seams() -> tuple[str, ...]:
    """What the vLLM at hand lacks, or has besides, of statistics as ours know them; empty
    where they fit. A method that is not known would be answered for nobody's connector."""
    try:
        base: Any = importlib.import_module(f"{V1}.base")
        metrics: Any = importlib.import_module(f"{V1}.metrics")
    except ImportError as error:
        return (str(error),)
    found = []
    for name, parameters in HOOKS.items():
        hook = getattr(base.KVConnectorBase_V1, name, None)
        if hook is None:
            found.append(f"has no KVConnectorBase_V1.{name}")
            continue
        known = [one for one in inspect.signature(hook).parameters if one != "self"]
        if known != list(parameters):
            found.append(f"has KVConnectorBase_V1.{name}({', '.join(known)})")
    for owner, methods in ANSWERED.items():
        cls = getattr(metrics, owner, None)
        there = {name for name in dir(cls) if name[0] != "_" and callable(getattr(cls, name))}
        found += [f"has no {owner}.{name}" for name in methods if name not in there]
        found += [f"has {owner}.{name} too" for name in sorted(there - {*methods, *_NEWER})]
    return tuple(found)
