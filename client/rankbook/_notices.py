"""JSON forms of what a heartbeat process tells its parent. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from rankbook import v1
from rankbook._pipe import decode_bytes, encode_bytes
from rankbook.convert import to_message, to_model
from rankbook.errors import RankbookError, Reason, error_for
from rankbook.model import Registered, Sealed

__all__ = [
    "error_from_json",
    "error_to_json",
    "registered_from_json",
    "registered_to_json",
    "sealed_from_json",
    "sealed_to_json",
]

Json = dict[str, Any]


def error_to_json(error: RankbookError | None) -> Json | None:
    """An error as JSON values."""
    if error is None:
        return None
    return {"reason": error.reason.value, "message": error.message, "metadata": error.metadata}


def error_from_json(value: Json | None) -> RankbookError | None:
    """The error of `error_to_json`."""
    if value is None:
        return None
    return error_for(Reason(value["reason"]), value["message"], value["metadata"])


def registered_to_json(value: Registered | None) -> Json | None:
    """What was registered, as JSON values."""
    if value is None:
        return None
    message = to_message(value, v1.RegisterWorkersResponse)
    return {"reply": encode_bytes(message.SerializeToString()), "sequence": value.sequence}


def registered_from_json(value: Json | None) -> Registered | None:
    """What a notice says was registered."""
    if value is None:
        return None
    message = v1.RegisterWorkersResponse.FromString(decode_bytes(value["reply"]))
    found = to_model(message, Registered)
    return dataclasses.replace(found, sequence=value["sequence"])


def sealed_from_json(value: str | None) -> Sealed | None:
    """What a notice says was sealed."""
    if value is None:
        return None
    return to_model(v1.SealEngineResponse.FromString(decode_bytes(value)), Sealed)


def sealed_to_json(value: Sealed | None) -> str | None:
    """What was sealed, as text."""
    if value is None:
        return None
    return encode_bytes(to_message(value, v1.SealEngineResponse).SerializeToString())
