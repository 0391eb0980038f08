"""Which parts of a connector the book is put before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm
from rankbook.model import Handshake
from rankbook_vllm._vllm import mooncake, nixl
from rankbook_vllm._vllm.base import children, handshake_of, logger
from rankbook_vllm._vllm.halves import SchedulerHalf
from rankbook_vllm.config import Settings
from rankbook_vllm.peers import PeerBook

__all__ = ["extend", "handshake_for"]


def extend(
    connector: Any, settings: Settings, follow: Callable[[], PeerBook]
) -> tuple[SchedulerHalf, ...] | None:
    """Puts the book before everything in a connector, and its children, that shakes hands.

    Args:
        connector: vLLM's connector, made and not yet used.
        settings: This engine's.
        follow: Gives the process's copy of the book, where there is something to put it
            before; started by the caller.

    Returns:
        What was added to schedulers; None where there is nothing to extend, or
        this vLLM lacks what is needed, which is said: the engine then publishes
        only and shakes hands in vLLM's own way.
    """
    halves: list[SchedulerHalf] = []
    found = False
    for family in (nixl, mooncake):
        parts = children(connector)
        ours = [(family.scheduler_of(part), family.worker_of(part)) for part in parts]
        if not any(part is not None for pair in ours for part in pair):
            continue
        missing = family.missing_seams()
        if missing:
            logger.warning(
                "rankbook fallback: handshakes stay vLLM's own, this engine only publishes: "
                "vLLM %s has no %s",
                vllm.__version__,
                ", ".join(missing),
            )
            continue
        found = True
        book = follow()
        for scheduler, worker in ours:
            if worker is not None:
                family.extend_worker(worker, settings, book)
            if scheduler is not None:
                halves.append(family.extend_scheduler(scheduler, settings, book))
    return tuple(halves) if found else None


def handshake_for(connector: Any, metadata: Any) -> Handshake:
    """What a worker publishes for its peers.

    Args:
        connector: The worker's connector, its caches registered.
        metadata: What it gives its engine core; None where it gives nothing.

    Raises:
        TypeError: The metadata cannot be encoded.
    """
    listener = mooncake.listener_of(connector) if metadata is None else None
    return listener or handshake_of(metadata)
