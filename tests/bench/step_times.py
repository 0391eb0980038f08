"""Connectors that note how long an engine's step loop is in them; for bench_step_loop.

Set `kv_connector_module_path` to this module. With RANKBOOK_PLAIN set the
connectors are vLLM's own, else rankbook's. Each process appends a line to a file
of its own in RANKBOOK_STEP_TIMES for each call that took longer than all before
it since the last mark: the method, then wall and CPU time of the thread in
microseconds.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

STEP_LOOP = (
    # the engine core's
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    # a worker's
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_transfer_results",
)

_FOLDER = Path(os.environ["RANKBOOK_STEP_TIMES"])


def _timed(name: str, method: Any) -> Any:
    longest: dict[str, float] = {}  # by mark: the newest file that the driver made

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            mark = max((path.stem for path in _FOLDER.glob("*.mark")), default="none")
            if wall > longest.get(mark, 0.0):
                longest[mark] = wall
                with (_FOLDER / f"{mark}.{os.getpid()}.times").open("a") as out:
                    out.write(f"{name} {wall * 1e6:.0f} {cpu * 1e6:.0f}\n")

    return call


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from rankbook_vllm import _vllm, connectors

    base = _vllm.connector_class(name)
    if not os.environ.get("RANKBOOK_PLAIN"):
        base = connectors.subclass(base)
    timed = {
        method: _timed(method, getattr(base, method))
        for method in STEP_LOOP
        if hasattr(base, method)
    }
    return type(name, (base,), timed)
