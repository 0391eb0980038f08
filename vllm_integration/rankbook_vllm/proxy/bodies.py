"""What the two halves of a request say. No I/O.

One sequence's KV goes from one engine to another, so a request that makes
several is refused: vLLM names the blocks of the first only, and the others
would be decoded on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rankbook_vllm.proxy.refusal import Refusal
from rankbook_vllm.proxy.routing import Target

__all__ = ["decode_body", "handover", "prefill_body", "read", "wants_transfer_id"]

_MINIMAL = (
    *("remote_engine_id", "remote_generation"),
    *("remote_block_ids", "remote_request_id"),
    "transfer_id",
)
_NOWHERE = {
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def read(raw: bytes) -> dict[str, Any]:
    """The client's request.

    Raises:
        Refusal: It is no JSON object, or asks for more than one sequence.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise Refusal(400, "BAD_BODY", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise Refusal(400, "BAD_BODY", "the body is JSON, but no object")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise _several(name, "1")
    if body.get("use_beam_search"):
        raise _several("use_beam_search", "false")
    for name in ("prompt", "prompt_embeds"):
        value = body.get(name)
        if isinstance(value, list) and len(value) > 1 and not isinstance(value[0], int):
            raise _several(name, "one prompt")
    return body


def _several(field: str, rule: str) -> Refusal:
    return Refusal(
        400,
        "SEVERAL_SEQUENCES",
        f"this proxy hands over the KV of one sequence a request: {field} takes {rule}; "
        "send a request for each",
        {"field": field},
    )


def wants_transfer_id(producer: Target) -> bool:
    """Whether the proxy, and not the producer, names the transfer."""
    return producer.connector == "MooncakeConnector"


def prefill_body(
    body: Mapping[str, Any], producer: Target, transfer_id: str, *, chat: bool
) -> dict[str, Any]:
    """The producer's half: the same request, to end after one token."""
    told = dict(body, max_tokens=1, stream=False)
    if chat and "max_completion_tokens" in told:
        told["max_completion_tokens"] = 1
    if told.get("min_tokens"):
        told["min_tokens"] = 1  # vLLM refuses more than max_tokens
    told.pop("stream_options", None)  # and these without a stream
    if wants_transfer_id(producer):
        rest: Mapping[str, Any] = {"transfer_id": transfer_id}
    else:
        rest = _NOWHERE
    told["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **rest}
    return told


def handover(
    reply: Mapping[str, Any], producer: Target, transfer_id: str, *, all_params: bool
) -> dict[str, Any] | None:
    """The consumer's `kv_transfer_params`; None where the producer kept nothing for it.

    Args:
        reply: What the producer answered.
        producer: Who that was.
        transfer_id: What this transfer was called, where the proxy names it.
        all_params: Passes on everything the producer returned, for engines that
            do not look each other up.
    """
    returned = reply.get("kv_transfer_params")
    if not isinstance(returned, Mapping):
        returned = {}
    if not returned and wants_transfer_id(producer) and _ended_by_length(reply):
        returned = {
            "transfer_id": transfer_id,
            "remote_engine_id": producer.engine_id,
            "remote_generation": producer.generation,
        }
    if not returned.get("transfer_id") and not _has_blocks(returned.get("remote_block_ids")):
        return None
    if not all_params:
        returned = {name: returned[name] for name in _MINIMAL if name in returned}
    return {"do_remote_prefill": True, "do_remote_decode": False, **returned}


def _ended_by_length(reply: Mapping[str, Any]) -> bool:
    """Whether Mooncake's producer kept the blocks, where it does not say so itself."""
    choices = reply.get("choices")
    return isinstance(choices, list) and all(
        isinstance(one, Mapping) and one.get("finish_reason") == "length" for one in choices
    )


def _has_blocks(ids: object) -> bool:
    """Whether any block is named: ids, or lists of ids by group of layers."""
    return isinstance(ids, list) and any(one != [] for one in ids)


def decode_body(body: Mapping[str, Any], params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The consumer's half. Without `params` it does the prefill itself."""
    told = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if params is not None:
        told["kv_transfer_params"] = dict(params)
    return told
