"""Which parts of a connector the book is put before."""

from __future__ import annotations

from typing import Any

import vllm
from rankbook_vllm._vllm import nixl
from rankbook_vllm._vllm.base import children, logger
from rankbook_vllm.config import Settings
from rankbook_vllm.peers import PeerBook

__all__ = ["extend"]


def extend(
    connector: Any, settings: Settings, book: PeerBook
) -> tuple[nixl.SchedulerHalf, ...] | None:
    """Puts the book before everything in a connector, and its children, that shakes hands.

    Args:
        connector: vLLM's connector, made and not yet used.
        settings: This engine's.
        book: The process's copy of the book; started by the caller.

    Returns:
        What was added to schedulers; None where there is nothing to extend, or
        this vLLM lacks what is needed, which is said: the engine then publishes
        only and shakes hands in vLLM's own way.
    """
    schedulers = [found for part in children(connector) if (found := nixl.scheduler_of(part))]
    workers = [found for part in children(connector) if (found := nixl.worker_of(part))]
    if not schedulers and not workers:
        return None
    missing = nixl.missing_seams()
    if missing:
        logger.warning(
            "rankbook fallback: handshakes stay vLLM's own, this engine only publishes: "
            "vLLM %s has no %s",
            vllm.__version__,
            ", ".join(missing),
        )
        return None
    for worker in workers:
        nixl.extend_worker(worker, settings, book)
    return tuple(nixl.extend_scheduler(found, settings, book) for found in schedulers)
