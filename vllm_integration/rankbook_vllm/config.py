"""What an operator can set, from the connector's extra config and the environment.

`kv_connector_extra_config["rankbook"]` wins over `RANKBOOK_*`, which wins over
the default: an engine's own flag is closer to it than its host's environment.
An unknown key is an error, so that a misspelt one is not silently ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankbook.errors import BadRequest, Reason
from rankbook.limits import (
    DEFAULT_NAMESPACE,
    DEFAULT_TTL_S,
    MAX_LABELS,
    MAX_TTL_S,
    MIN_TTL_S,
    check_host,
)
from rankbook.model import Address

__all__ = ["DEFAULT_ENDPOINT", "Settings", "bare_host", "load"]

DEFAULT_ENDPOINT = "127.0.0.1:7420"
_WHERE = 'kv_connector_extra_config["rankbook"]'


@dataclass(frozen=True, slots=True)
class Settings:
    """How this engine signs in. Durations are in seconds."""

    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    """Registry addresses, HOST:PORT, tried in order. `RANKBOOK_SERVER`, commas between."""
    namespace: str = DEFAULT_NAMESPACE
    """Isolated part of the book. `RANKBOOK_NAMESPACE`."""
    group: str = ""
    """Logical name of the deployment. Empty takes the engine_id without its "_dpN"
    ending: nothing is grouped that nobody grouped. `RANKBOOK_GROUP`."""
    replica: str = ""
    """Which copy of the group. Empty takes the engine_id without its "_dpN" ending.
    `RANKBOOK_REPLICA`."""
    ttl_s: float = DEFAULT_TTL_S
    """Life of a lease that is not renewed, 2 to 300. `RANKBOOK_TTL_S`."""
    required: bool = False
    """Whether an engine that cannot sign in and seal must not start. By default it
    starts, and signs in when the registry comes. `RANKBOOK_REQUIRED`."""
    begin_timeout_s: float = 3.0
    """How long rank 0 waits for the epoch of this start; without an answer the first
    registration reserves it. `RANKBOOK_BEGIN_TIMEOUT_S`."""
    register_timeout_s: float = 30.0
    """How long a worker waits to be signed in, where `required`; else it does not
    wait. `RANKBOOK_REGISTER_TIMEOUT_S`."""
    seal_timeout_s: float = 60.0
    """How long the engine core waits for its seal, where `required`; else it does
    not wait. `RANKBOOK_SEAL_TIMEOUT_S`."""
    host: str = ""
    """Address of this node as peers reach it. Empty takes vLLM's own (`VLLM_HOST_IP`,
    else the address of the default route). `RANKBOOK_HOST`."""
    serving_address: str = ""
    """Where the engine takes requests, HOST:PORT; vLLM does not tell its engine core.
    `RANKBOOK_SERVING_ADDRESS`."""
    addresses: tuple[Address, ...] = ()
    """Further addresses of this node, each `{"scheme", "host", "port", "label"}`, put
    before the ones found. Not in the environment."""
    handshake: str = "book"
    """Where a peer's handshake metadata comes from: "book", or "vllm" for the
    connector's own way, which leaves rankbook to publish only. `RANKBOOK_HANDSHAKE`."""
    side_channel: bool = True
    """Whether the connector's own listener is kept, and peers that are not in the
    book are asked through theirs. Off, no port is opened. `RANKBOOK_SIDE_CHANNEL`."""
    peer_timeout_s: float = 30.0
    """How long a request waits for a peer that is not READY yet; less where its blocks are
    kept there meanwhile (`requests.WAITED`). `RANKBOOK_PEER_TIMEOUT_S`."""
    wrong_params: str = "correct"
    """What becomes of a request whose sizes or address differ from the sealed
    topology: "correct" takes the topology's, "refuse" fails it. Both are counted.
    `RANKBOOK_WRONG_PARAMS`."""
    prewarm: bool = False
    """Whether workers shake hands with every compatible peer as soon as it is READY,
    before a request asks. `RANKBOOK_PREWARM`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Key/value pairs for filters. `RANKBOOK_LABELS` as "zone=a,rack=7"."""
    token: str = field(default="", repr=False)
    """What to show the registry. `RANKBOOK_TOKEN`."""


def _bad(name: str, value: object, rule: str) -> BadRequest:
    return BadRequest(
        f"rankbook setting {name} is {value!r}: it takes {rule}",
        metadata={"field": name, "value": str(value), "rule": rule},
    )


def _secret(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, type(value).__name__, "text; what it is is not shown")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "text")
    return value.strip()


def _host(name: str, value: Any) -> str:
    text = _text(name, value)
    try:
        return check_host(name, text) if text else ""
    except BadRequest:
        raise _bad(name, value, "a host name or an IP literal") from None


def _host_port(name: str, value: Any) -> str:
    text = _text(name, value)
    host, _, port = text.rpartition(":")
    try:
        if text:
            check_host(name, host if host and port.isdecimal() else text)
    except BadRequest:
        raise _bad(name, value, "HOST:PORT, an IPv6 literal in brackets") from None
    return text


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = dict.fromkeys(("1", "true", "yes", "on"), True)
    known |= dict.fromkeys(("0", "false", "no", "off"), False)
    if not isinstance(value, str) or value.strip().lower() not in known:
        raise _bad(name, value, "true or false")
    return known[value.strip().lower()]


def _choice(*known: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in known:
            raise _bad(name, value, " or ".join(known))
        return value.strip().lower()

    return read


def _between(low: float, high: float) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        rule = f"{low:g} to {high:g} seconds"
        if isinstance(value, bool):
            raise _bad(name, value, rule)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise _bad(name, value, rule) from None
        if not low <= number <= high:
            raise _bad(name, value, rule)
        return number

    return read


def _endpoints(name: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise _bad(name, value, "HOST:PORT, or a list of them")
    found = tuple(part.strip() for part in parts if part.strip())
    if not found:
        raise _bad(name, value, "HOST:PORT, or a list of them")
    return found


def _labels(name: str, value: Any) -> Mapping[str, str]:
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(mark and key.strip() for key, mark, _ in pairs):
            raise _bad(name, value, 'text as "zone=a,rack=7"')
        value = {key.strip(): text.strip() for key, _, text in pairs}
    if not isinstance(value, Mapping) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        raise _bad(name, value, "text values by text keys")
    if len(value) > MAX_LABELS:
        raise _bad(name, len(value), f"at most {MAX_LABELS} labels")
    return dict(value)


def bare_host(host: str) -> str:
    """A host in the form that the book keeps; what is no host stays as it is.

    Two spellings of one host would be a difference between core and book.
    """
    try:
        return check_host("host", host)
    except BadRequest:
        return host


def _addresses(name: str, value: Any) -> tuple[Address, ...]:
    rule = 'a list of {"scheme", "host", "port", "label"}'
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _bad(name, value, rule)
    found = []
    for item in value:
        if not isinstance(item, Mapping) or not {"scheme", "host"} <= set(item):
            raise _bad(name, item, rule)
        try:
            address = Address(**item)
        except TypeError:
            raise _bad(name, item, rule) from None
        found.append(dataclasses.replace(address, host=_host(f"{name}.host", address.host)))
    return tuple(found)


_READERS: dict[str, tuple[Callable[[str, Any], Any], str]] = {
    "endpoints": (_endpoints, "RANKBOOK_SERVER"),
    "namespace": (_text, "RANKBOOK_NAMESPACE"),
    "group": (_text, "RANKBOOK_GROUP"),
    "replica": (_text, "RANKBOOK_REPLICA"),
    "ttl_s": (_between(MIN_TTL_S, MAX_TTL_S), "RANKBOOK_TTL_S"),
    "required": (_flag, "RANKBOOK_REQUIRED"),
    "begin_timeout_s": (_between(0.1, 60), "RANKBOOK_BEGIN_TIMEOUT_S"),
    "register_timeout_s": (_between(0.1, 3600), "RANKBOOK_REGISTER_TIMEOUT_S"),
    "seal_timeout_s": (_between(0.1, 3600), "RANKBOOK_SEAL_TIMEOUT_S"),
    "host": (_host, "RANKBOOK_HOST"),
    "serving_address": (_host_port, "RANKBOOK_SERVING_ADDRESS"),
    "addresses": (_addresses, ""),
    "handshake": (_choice("book", "vllm"), "RANKBOOK_HANDSHAKE"),
    "side_channel": (_flag, "RANKBOOK_SIDE_CHANNEL"),
    "peer_timeout_s": (_between(0.1, 3600), "RANKBOOK_PEER_TIMEOUT_S"),
    "wrong_params": (_choice("correct", "refuse"), "RANKBOOK_WRONG_PARAMS"),
    "prewarm": (_flag, "RANKBOOK_PREWARM"),
    "labels": (_labels, "RANKBOOK_LABELS"),
    "token": (_secret, "RANKBOOK_TOKEN"),
}


def load(extra: object, env: Mapping[str, str]) -> Settings:
    """The settings of one engine.

    Args:
        extra: Value of `kv_connector_extra_config["rankbook"]`; None where absent.
        env: The environment. An empty variable counts as unset.

    Raises:
        BadRequest: A key is unknown (UNKNOWN_FIELD), or a value is not what its
            key takes; the error names both.
    """
    if extra is None:
        extra = {}
    if not isinstance(extra, Mapping):
        raise BadRequest(
            # Not its value, in which a token may be.
            f"{_WHERE} is a {type(extra).__name__}: it takes an object of settings",
            metadata={"field": _WHERE, "value": type(extra).__name__},
        )
    for key in extra:
        if key not in _READERS:
            raise BadRequest(
                f"{key!r} is no setting in {_WHERE}; known are {', '.join(sorted(_READERS))}",
                reason=Reason.UNKNOWN_FIELD,
                metadata={"field": str(key), "known": ", ".join(sorted(_READERS))},
            )
    values: dict[str, Any] = {}
    for name, (read, variable) in _READERS.items():
        if name in extra:
            values[name] = read(name, extra[name])
        elif variable and env.get(variable):
            values[name] = read(variable, env[variable])
    return dataclasses.replace(Settings(), **values)
