"""Every limit, written once, and the checks that both ends make with them.

Names end in their unit. A check raises `BadRecord`, `BadRequest` or
`LimitExceeded` with the field, the value and the rule; it never changes what it
checks. All functions are pure and thread-safe.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rankbook import v1
from rankbook.errors import BadRecord, BadRequest, LimitExceeded, Reason

__all__ = [
    "DEFAULT_NAMESPACE",
    "DEFAULT_TTL_S",
    "MAX_ADDRESSES",
    "MAX_BATCH_BYTES",
    "MAX_BATCH_RECORDS",
    "MAX_CALL_BYTES",
    "MAX_DRAIN_WAIT_S",
    "MAX_ENGINE_BYTES",
    "MAX_EXTRA_LAYERS",
    "MAX_GRID_SLOTS",
    "MAX_ID_CHARS",
    "MAX_LABELS",
    "MAX_LAYER_NAMES",
    "MAX_MESSAGE_BYTES",
    "MAX_PAGE_ENGINES",
    "MAX_PAYLOAD_BYTES",
    "MAX_PEERS",
    "MAX_RENEWALS",
    "MAX_REPLY_BYTES",
    "MAX_SMALL_CALL_BYTES",
    "MAX_TEXT_CHARS",
    "MAX_TTL_S",
    "MAX_WAIT_S",
    "MIN_TTL_S",
    "check_batch",
    "check_core",
    "check_count",
    "check_host",
    "check_id",
    "check_namespace",
    "check_record",
    "check_slot",
    "check_text",
    "grid_slots",
]

DEFAULT_NAMESPACE = "default"
MIN_TTL_S = 2.0
DEFAULT_TTL_S = 10.0
MAX_TTL_S = 300.0
MAX_WAIT_S = 300.0
"""Longest long poll, in seconds."""
MAX_DRAIN_WAIT_S = 60.0
"""Longest that one call waits for a drain, in seconds; a longer wait is several calls."""
MAX_ID_CHARS = 253
"""As a DNS name, so that a Kubernetes name is always an id."""
MAX_TEXT_CHARS = 1024
MAX_PAYLOAD_BYTES = 512 * 1024
MAX_LABELS = 64
MAX_ADDRESSES = 16
MAX_LAYER_NAMES = 4096
MAX_EXTRA_LAYERS = 256
MAX_BATCH_RECORDS = 64
MAX_BATCH_BYTES = 1024 * 1024
MAX_GRID_SLOTS = 65_536
MAX_ENGINE_BYTES = 64 * 1024 * 1024
MAX_RENEWALS = 1024
MAX_PEERS = 4096
MAX_PAGE_ENGINES = 1000
"""Most engines of one page of a list."""
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest request a server takes. The largest legal one is a seal of a grid of
65,536 slots with short boot ids (about 6 MiB)."""
MAX_CALL_BYTES: Mapping[str, int] = {
    "seal_engine": MAX_MESSAGE_BYTES,
    "report_peers": 3 * 1024 * 1024,
    "register_workers": MAX_BATCH_BYTES + 128 * 1024,
    "update_worker": MAX_BATCH_BYTES + 128 * 1024,
    "get_topology": 1024 * 1024,
    "deregister": 1024 * 1024,
    "renew_leases": 512 * 1024,
}
"""Largest request of a call, by its field in a session; `MAX_SMALL_CALL_BYTES` for
the others. Each fits the call's largest legal request, and keeps the time to
read one well below a lease's."""
MAX_SMALL_CALL_BYTES = 256 * 1024
"""Largest request of every other call: a filter with 64 labels is 82 KiB."""
MAX_REPLY_BYTES = 3 * 1024 * 1024
"""Largest part of a reply: below gRPC's default receive bound of 4 MiB, so that
clients in other languages need no option."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,253}\Z")
_HOST_NAME = re.compile(r"[^\s\x00-\x20\x7f/\\\[\]:@%?#]{1,253}\Z")
_SHOWN_CHARS = 64
_MAX_INSTANT_S = 253_402_300_799
"""The end of the year 9999, the last instant that a Timestamp may name."""
_MAX_NANOS = 999_999_999


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    length = len(value) if isinstance(value, str) else len(text)
    return f"{text[:_SHOWN_CHARS]}... ({length} characters)"


def _bad(field: str, value: object, rule: str) -> BadRecord:
    return BadRecord(
        f"{field} is {_shown(value)}: {rule}",
        metadata={"field": field, "value": _shown(value), "rule": rule},
    )


def _over(field: str, value: int, bound: int, unit: str) -> LimitExceeded:
    return LimitExceeded(
        f"{field} is {value} {unit}, over the limit of {bound} {unit}",
        metadata={"limit": field, "value": value, "bound": bound, "unit": unit},
    )


_ID_RULE = "an id has 1 to 253 characters of [A-Za-z0-9._-]"


def check_id(field: str, value: str) -> str:
    """Returns `value` when it is a well-formed id.

    Raises:
        BadRequest: It is empty, too long, or has another character.
    """
    if not _ID.match(value):
        raise BadRequest(
            f"{field} is {_shown(value)}: {_ID_RULE}",
            metadata={"field": field, "value": _shown(value), "rule": _ID_RULE},
        )
    return value


_HOST_RULE = "a host is a name or an IP literal; scheme and port have fields of their own"


def check_host(field: str, value: str) -> str:
    """Returns a host in its one form: no brackets, small letters, IPv6 as RFC 5952 writes it.

    A name is not resolved. A zone (`fe80::1%eth0`) is kept as it is.

    Raises:
        BadRecord: It is neither a name nor an IP literal.
    """
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if ":" not in bare:
        if bare is not value or not _HOST_NAME.match(bare):
            raise _bad(field, value, _HOST_RULE)
        return bare.lower()
    address, percent, zone = bare.partition("%")
    try:
        literal = ipaddress.IPv6Address(address)
    except ValueError:
        raise _bad(field, value, _HOST_RULE) from None
    if percent and not _HOST_NAME.match(zone):
        raise _bad(field, value, _HOST_RULE)
    # Python's own text of a mapped address is not the same in every version.
    mapped = literal.ipv4_mapped
    return f"{f'::ffff:{mapped}' if mapped else literal.compressed}{percent}{zone}"


def check_count(field: str, count: int, bound: int, unit: str) -> None:
    """Checks that a repeated field has at most `bound` elements, before any is looked at.

    Raises:
        LimitExceeded: It has more.
    """
    if count > bound:
        raise _over(field, count, bound, unit)


def check_text(field: str, value: str, bound: int = MAX_TEXT_CHARS) -> str:
    """Returns `value` when it has at most `bound` characters.

    Raises:
        LimitExceeded: It has more.
    """
    if len(value) > bound:
        raise _over(field, len(value), bound, "characters")
    return value


def check_namespace(value: str) -> str:
    """Returns the namespace, `default` for an empty one.

    Raises:
        BadRequest: It is no id.
    """
    return check_id("namespace", value) if value else DEFAULT_NAMESPACE


def grid_slots(layout: v1.Layout) -> int:
    """Number of slots a layout declares: pp_size x pcp_size x tp_size."""
    return layout.pp_size * (layout.pcp_size or 1) * layout.tp_size


def check_slot(slot: v1.Slot, layout: v1.Layout, field: str = "slot") -> None:
    """Checks that a slot is inside the grid.

    Raises:
        BadRecord: A rank is not below its size.
    """
    for name, size in (
        ("pp", layout.pp_size),
        ("pcp", layout.pcp_size or 1),
        ("tp", layout.tp_size),
    ):
        rank = getattr(slot, f"{name}_rank")
        if rank >= size:
            raise _bad(
                f"{field}.{name}_rank",
                rank,
                f"a rank is inside the grid, 0 to {size - 1} where {name}_size is {size}",
            )


def _check_layout(layout: v1.Layout) -> None:
    for name in ("pp_size", "tp_size", "num_layers"):
        value = getattr(layout, name)
        if not 1 <= value <= MAX_GRID_SLOTS:
            raise _bad(f"layout.{name}", value, f"1 to {MAX_GRID_SLOTS}")
    for name in ("pcp_size", "dcp_size"):
        value = getattr(layout, name)
        if value > MAX_GRID_SLOTS:
            raise _bad(f"layout.{name}", value, f"1 to {MAX_GRID_SLOTS}")
    if grid_slots(layout) > MAX_GRID_SLOTS:
        raise _over("layout (pp_size x pcp_size x tp_size)", grid_slots(layout), 65_536, "slots")


def _check_layers(layers: v1.Layers, num_layers: int) -> None:
    start, end = layers.start_layer, layers.end_layer
    if end < start:
        raise _bad(
            "layers.end_layer", end, f"end_layer is exclusive and not below start_layer ({start})"
        )
    if end > num_layers:
        raise _bad("layers.end_layer", end, f"not above layout.num_layers ({num_layers})")
    if len(layers.names) > MAX_LAYER_NAMES:
        raise _over("layers.names", len(layers.names), MAX_LAYER_NAMES, "names")
    for name in layers.names:
        check_text("layers.names", name)
    if len(layers.extra) > MAX_EXTRA_LAYERS:
        raise _over("layers.extra", len(layers.extra), MAX_EXTRA_LAYERS, "layers")
    for extra in layers.extra:
        if extra.index < num_layers:
            raise _bad(
                "layers.extra.index",
                extra.index,
                f"an extra layer is outside [0, num_layers), so at or above {num_layers}",
            )
        if extra.kind not in _LAYER_KINDS:
            raise _bad("layers.extra.kind", extra.kind, "DRAFT, MTP or OTHER")


def _check_map(field: str, entries: Iterable[tuple[str, str]], count: int) -> None:
    if count > MAX_LABELS:
        raise _over(field, count, MAX_LABELS, "entries")
    for key, value in entries:
        if not 1 <= len(key) <= MAX_ID_CHARS:
            raise _bad(f"{field} key", key, "1 to 253 characters")
        check_text(f"{field}[{_shown(key)}]", value, MAX_TEXT_CHARS)


def _check_addresses(field: str, addresses: Sequence[v1.Address]) -> None:
    if len(addresses) > MAX_ADDRESSES:
        raise _over(field, len(addresses), MAX_ADDRESSES, "addresses")
    for address in addresses:
        if address.port > 65_535:
            raise _bad(f"{field}.port", address.port, "0 to 65535")
        for name in ("scheme", "host", "label"):
            check_text(f"{field}.{name}", getattr(address, name), MAX_ID_CHARS)
        check_host(f"{field}.host", address.host)


def _check_process(field: str, process: v1.Process) -> None:
    if not _ID.match(process.boot_id):
        raise _bad(f"{field}.boot_id", process.boot_id, _ID_RULE)
    check_text(f"{field}.hostname", process.hostname, MAX_ID_CHARS)
    check_text(f"{field}.device", process.device, MAX_ID_CHARS)


_Part = Literal["layout", "slot", "layers", "process"]
_REQUIRED_PARTS: tuple[_Part, ...] = ("layout", "slot", "layers", "process")
_ROLES = frozenset((v1.ROLE_PRODUCER, v1.ROLE_CONSUMER, v1.ROLE_BOTH))
_LAYER_KINDS = frozenset((v1.LAYER_KIND_DRAFT, v1.LAYER_KIND_MTP, v1.LAYER_KIND_OTHER))


def check_record(record: v1.WorkerRecord, namespace: str, *, need_handshake: bool = True) -> None:
    """Checks one record whole.

    Args:
        record: The record.
        namespace: Namespace of the call.
        need_handshake: False for a record whose payload is being withdrawn.

    Raises:
        BadRecord: A field breaks a rule; `metadata` names field, value, rule.
        LimitExceeded: A value is over its limit.
    """
    if record.namespace and record.namespace != namespace:
        raise BadRecord(
            f"namespace of the record is {_shown(record.namespace)} and of the call "
            f"{_shown(namespace)}: a record belongs to the namespace of its call",
            reason=Reason.NAMESPACE_MISMATCH,
            metadata={"field": "namespace", "record": record.namespace, "call": namespace},
        )
    for name in ("group", "engine_id", "generation"):
        if not _ID.match(getattr(record, name)):
            raise _bad(name, getattr(record, name), _ID_RULE)
    if record.replica and not _ID.match(record.replica):
        raise _bad("replica", record.replica, _ID_RULE)
    if record.role not in _ROLES:
        raise _bad("role", record.role, "PRODUCER, CONSUMER or BOTH")
    for part in _REQUIRED_PARTS:
        if not record.HasField(part):
            raise _bad(part, None, f"{part} is required")
    _check_layout(record.layout)
    check_slot(record.slot, record.layout)
    _check_layers(record.layers, record.layout.num_layers)
    _check_process("process", record.process)
    if record.addresses:
        _check_addresses("addresses", record.addresses)
    if record.labels:
        _check_map("labels", record.labels.items(), len(record.labels))
    if record.HasField("compat"):
        check_text("compat.hash", record.compat.hash)
        _check_map("compat.factors", record.compat.factors.items(), len(record.compat.factors))
    if record.HasField("model"):
        for name in ("name", "dtype", "kv_cache_dtype"):
            check_text(f"model.{name}", getattr(record.model, name))
    if record.HasField("kv"):
        for name in ("layout", "attention_backend"):
            check_text(f"kv.{name}", getattr(record.kv, name))
    if need_handshake and not record.HasField("handshake"):
        raise _bad("handshake", None, "handshake is required")
    if record.HasField("handshake"):
        if not 1 <= len(record.handshake.format) <= MAX_ID_CHARS:
            raise _bad("handshake.format", record.handshake.format, "1 to 253 characters")
        if len(record.handshake.payload) > MAX_PAYLOAD_BYTES:
            raise _over(
                "handshake.payload", len(record.handshake.payload), MAX_PAYLOAD_BYTES, "bytes"
            )


def check_batch(records: Sequence[v1.WorkerRecord], namespace: str) -> None:
    """Checks a registration's records, each whole and all together.

    Raises:
        BadRecord: A record breaks a rule, two are of different engines or
            generations, or two fill one slot.
        LimitExceeded: Too many records or bytes.
        BadRequest: There is no record.
    """
    if not records:
        raise BadRequest(
            "records is empty: a registration has 1 to 64 records",
            metadata={"field": "records", "value": 0, "rule": "1 to 64 records"},
        )
    if len(records) > MAX_BATCH_RECORDS:
        raise _over("records", len(records), MAX_BATCH_RECORDS, "records")
    first = records[0]
    size = 0
    slots = set()
    for record in records:
        check_record(record, namespace)
        size += record.ByteSize()
        for name in ("engine_id", "generation"):
            if getattr(record, name) != getattr(first, name):
                raise _bad(
                    name,
                    getattr(record, name),
                    f"all records of one registration have one {name}, here "
                    f"{_shown(getattr(first, name))}",
                )
        slot = record.slot
        key = (slot.pp_rank, slot.pcp_rank, slot.tp_rank)
        if key in slots:
            raise _bad("slot", key, "no slot twice in one registration")
        slots.add(key)
    if size > MAX_BATCH_BYTES:
        raise _over("records", size, MAX_BATCH_BYTES, "bytes")


def check_core(core: v1.CoreRecord) -> None:
    """Checks an engine core's own record.

    Raises:
        BadRecord: A field breaks a rule.
        LimitExceeded: A value is over its limit.
    """
    _check_process("core.process", core.process)
    _check_addresses("core.addresses", core.addresses)
    check_text("core.connector", core.connector, MAX_ID_CHARS)
    if not core.HasField("clock"):
        return
    if not core.clock.HasField("registry_time"):
        raise _bad("core.clock.registry_time", None, "a pair has both readings")
    if not math.isfinite(core.clock.local_s):
        raise _bad("core.clock.local_s", core.clock.local_s, "a number of seconds")
    for name, part in (("registry_time", core.clock.registry_time), ("error", core.clock.error)):
        if not 0 <= part.seconds <= _MAX_INSTANT_S:
            raise _bad(f"core.clock.{name}", part.seconds, f"0 to {_MAX_INSTANT_S} seconds")
        if not 0 <= part.nanos <= _MAX_NANOS:
            raise _bad(f"core.clock.{name}.nanos", part.nanos, f"0 to {_MAX_NANOS}")
