"""An engine core's scheduler object with the book before it: what NIXL and Mooncake share.

vLLM makes a scheduler object in the engine core and a worker object in each
worker. `become` turns one into a subclass of its own class, so that everything
not named here is vLLM's, this release's and the next one's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rankbook_vllm._vllm.base import logger
from rankbook_vllm.config import Settings
from rankbook_vllm.requests import Requests, Verdict

__all__ = ["BookScheduler", "Orders", "SchedulerHalf", "become"]


@dataclass
class Orders:
    """What the engine core tells its workers beside NIXL's own metadata; pickled."""

    generations: dict[str, str] = field(default_factory=dict)
    """The producer's start that each request is of, by request."""
    failed: dict[str, Any] = field(default_factory=dict)
    """Local block ids of requests that cannot get their KV."""


class SchedulerHalf:
    """What the book adds to a NIXL scheduler."""

    def __init__(self, requests: Requests, settings: Settings, generation: str = "") -> None:
        self.requests = requests
        self.settings = settings
        self.generation = generation
        """This engine's own start; set when its workers told it."""
        self.failed: dict[str, Any] = {}


class BookScheduler:
    """Goes before a NIXL scheduler class. Everything here runs on the engine core's thread."""

    rankbook: SchedulerHalf

    def on_new_request(self, request: Any) -> None:
        """Resolves the request at once where its producer is known."""
        params = request.kv_transfer_params
        if params is not None and not isinstance(params, dict):
            logger.warning(
                "rankbook: request %s has kv_transfer_params %.100r, which is no object; served "
                "without",
                request.request_id,
                params,
            )
            request.kv_transfer_params = None  # vLLM would end the engine core for it
        _look_back(self, request)
        if _takes(request):
            if self.rankbook.requests.ask(_id(request), request.kv_transfer_params) is Verdict.GO:
                super().on_new_request(request)  # type: ignore[misc]
            return
        super().on_new_request(request)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """vLLM's answer; "ask me again" while the producer is not there yet."""
        half = self.rankbook
        if _reads_back(request):
            if half.requests.recheck(_id(request)) is Verdict.FAIL:
                _compute(request)
        elif _takes(request):
            if half.requests.went_on(_id(request)):
                half.requests.recheck(_id(request))
            else:
                verdict = half.requests.ask(_id(request), request.kv_transfer_params)
                if verdict is Verdict.LATER:
                    return None, False
                if verdict is Verdict.GO:
                    super().on_new_request(request)  # type: ignore[misc]
        return super().get_num_new_matched_tokens(  # type: ignore[misc]
            request, num_computed_tokens
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        """vLLM's bookkeeping; a request that cannot be served goes to the workers to be failed."""
        half = self.rankbook
        if _takes(request) and half.requests.error(_id(request)) is not None:
            request.kv_transfer_params["do_remote_prefill"] = False
            if num_external_tokens > 0:
                half.failed[_id(request)] = blocks.get_unhashed_block_ids_all_groups()
            return None
        return super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's metadata with our orders beside it."""
        half = self.rankbook
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        failed, half.failed = half.failed, {}
        meta.rankbook = Orders(self._generations(meta), failed)
        for request_id, registration in getattr(meta, "push_registrations", {}).items():
            registration["decode_generation"] = half.generation
            registration["remote_generation"] = half.requests.generation(request_id)
        return meta

    def _generations(self, meta: Any) -> dict[str, str]:
        generations = {
            request_id: self.rankbook.requests.generation(request_id)
            for request_id in meta.reqs_to_recv
        }
        return {request_id: start for request_id, start in generations.items() if start}

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """vLLM's answer, with this start's generation for whoever reads the blocks."""
        half = self.rankbook
        params = request.kv_transfer_params
        took = _takes(request)
        went_on = half.requests.forget(_id(request))
        if took and not went_on:
            # vLLM would tell the producer that nobody comes for its blocks; the
            # request never learned which producer. Its lease frees them.
            params["do_remote_prefill"] = False
            return False, None
        delay, returned = super().request_finished(request, block_ids)  # type: ignore[misc]
        if returned is not None and half.generation:
            returned["remote_generation"] = half.generation
            if not half.settings.side_channel:
                returned["remote_host"] = returned["remote_port"] = None
        return delay, returned

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Starts vLLM's listener, unless it is not wanted."""
        if self.rankbook.settings.side_channel:
            super().set_xfer_handshake_metadata(metadata)  # type: ignore[misc]


def _look_back(scheduler: Any, request: Any) -> None:
    """Resolves a prefill that may read what its decode engine kept of the last turn. Where it
    may not, the prompt is computed: nothing is lost but time."""
    if not _reads_back(request):
        return
    requests = scheduler.rankbook.requests
    # vLLM counts on that KV whether or not this engine ever reads back.
    if (
        not getattr(scheduler, "is_bidirectional_kv_xfer_enabled", False)
        or requests.ask(_id(request), request.kv_transfer_params) is not Verdict.GO
    ):
        _compute(request)


def _reads_back(request: Any) -> bool:
    """Whether it is a prefill that names KV of its prompt at its decode engine."""
    params = request.kv_transfer_params
    return (
        isinstance(params, dict)
        and bool(params.get("do_remote_decode"))
        and not params.get("do_remote_prefill")
        and not params.get("_remote_blocks_processed")
        and bool(params.get("remote_block_ids"))
    )


def _compute(request: Any) -> None:
    for name in ("remote_block_ids", "remote_engine_id", "remote_request_id"):
        request.kv_transfer_params.pop(name, None)


def _takes(request: Any) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def _id(request: Any) -> str:
    return str(request.request_id)


_extended: dict[tuple[type, type], type] = {}


def become(part: Any, before: type) -> None:
    """Makes an object one of a subclass of its own class."""
    base = type(part)
    key = (before, base)
    if key not in _extended:
        _extended[key] = type(base.__name__, (before, base), {"__module__": __name__})
    part.__class__ = _extended[key]
