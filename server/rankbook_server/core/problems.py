"""What is wrong or odd about an engine, in words and in values.

A problem of severity ERROR makes the engine INVALID; a WARNING is for people.
Every value of a message is also in its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankbook import v1
from rankbook.limits import DEFAULT_TTL_S
from rankbook_server.core.keys import SlotKey, slot_text

__all__ = [
    "asleep",
    "core_lost",
    "evicted",
    "layer_problems",
    "loopback",
    "problem",
    "ranks_lost",
    "seal_outdated",
    "two_starts",
]

_SHOWN = 16
_INFO = v1.SEVERITY_INFO
_WARNING = v1.SEVERITY_WARNING
_ERROR = v1.SEVERITY_ERROR


def problem(
    reason: str, severity: v1.Severity.ValueType, message: str, **metadata: object
) -> v1.Problem:
    """A problem with its values as text."""
    return v1.Problem(
        reason=reason,
        severity=severity,
        message=message,
        metadata={name: str(value) for name, value in metadata.items()},
    )


def layer_problems(
    ranges: Mapping[int, Mapping[tuple[int, int], int]], num_layers: int, *, full: bool
) -> list[v1.Problem]:
    """Where the layers of an engine's stages contradict each other (rule 4).

    Args:
        ranges: By stage, the ranges its live workers hold and how many hold each.
        num_layers: Layers of the whole model, as declared.
        full: Every slot is filled, so that a layer nobody holds is a hole.
    """
    found = []
    spans: list[tuple[int, int, int]] = []
    for pp in sorted(ranges):
        held = sorted(ranges[pp])
        if len(held) > 1:
            found.append(
                problem(
                    "LAYERS_DIFFER",
                    _ERROR,
                    f"workers of stage {pp} hold different layers, {_spans(held)}: all "
                    "workers of a stage hold the same range; restart the ones that differ",
                    stage=pp,
                    ranges=_spans(held),
                )
            )
        spans.extend((start, end, pp) for start, end in held if end > start)
    spans.sort()
    reached, owner = 0, -1
    holes = []
    for start, end, pp in spans:
        if start < reached and pp != owner:
            found.append(
                problem(
                    "LAYERS_OVERLAP",
                    _ERROR,
                    f"stage {owner} reaches layer {reached} and stage {pp} starts at {start}: "
                    "stages do not overlap; give all ranks one layer partition",
                    stage=pp,
                    other_stage=owner,
                    start_layer=start,
                    end_layer=reached,
                )
            )
        if start > reached:
            holes.append((reached, start))
        if end > reached:
            reached, owner = end, pp
    if reached < num_layers:
        holes.append((reached, num_layers))
    if holes and full:
        found.append(
            problem(
                "LAYERS_HOLE",
                _ERROR,
                f"no stage holds the layers {_spans(holes)} of {num_layers}, and every rank is "
                "here: give all ranks one layer partition",
                layers=_spans(holes),
                num_layers=num_layers,
            )
        )
    return found


def two_starts(engine_id: str, head: v1.StoredEngine) -> list[v1.Problem]:
    """Live starts were retired more than once within a lease's time (rule 2)."""
    times = [t.seconds + t.nanos / 1e9 for t in head.retired_alive]
    if len(times) < 2 or times[-1] - times[-2] > DEFAULT_TTL_S:
        return []
    return [
        problem(
            "TWO_STARTS",
            _WARNING,
            f"two starts share one engine_id, {engine_id}: generations replaced live ones more "
            "than once within a lease's time; give each its own engine_id",
            engine_id=engine_id,
            generation=head.generation,
        )
    ]


def ranks_lost(lost: Sequence[SlotKey], present: int, declared: int) -> v1.Problem:
    """Ranks are gone since the engine was COMPLETE."""
    slots = _slots(lost)
    return problem(
        "RANKS_LOST",
        _WARNING,
        f"{declared - present} of {declared} ranks are gone since the engine was complete: {slots}",
        missing=slots,
        count=declared - present,
        declared=declared,
    )


def asleep(slots: Sequence[SlotKey]) -> v1.Problem:
    """Workers withdrew their payload."""
    text = _slots(slots)
    return problem("ASLEEP", _WARNING, f"payload withdrawn by {text}: wake the engine", slots=text)


def core_lost(boot_id: str) -> v1.Problem:
    """The core that sealed is gone."""
    return problem(
        "CORE_LOST",
        _WARNING,
        f"the engine core {boot_id} that sealed is gone",
        boot_id=boot_id,
    )


def evicted(eviction: v1.StoredEviction) -> v1.Problem:
    """An operator took the engine out."""
    by = f" by {eviction.requested_by}" if eviction.requested_by else ""
    why = f": {eviction.reason}" if eviction.reason else ""
    return problem(
        "EVICTED",
        _INFO,
        f"evicted{by}{why}; its processes may still run, and cannot sign in again",
        requested_by=eviction.requested_by,
        why=eviction.reason,
    )


def seal_outdated(number: int) -> v1.Problem:
    """What is present is not what was sealed."""
    return problem(
        "SEAL_OUTDATED",
        _WARNING,
        f"records changed since seal {number}: the core must seal again",
        seal=number,
    )


def loopback(slots: Sequence[SlotKey]) -> v1.Problem:
    """Workers advertise what other hosts cannot reach."""
    text = _slots(slots)
    return problem(
        "LOOPBACK_ADDRESS",
        _WARNING,
        f"{text} advertise a loopback or wildcard address, which other hosts cannot reach: set "
        "the host that peers should use (VLLM_HOST_IP)",
        slots=text,
    )


def _spans(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in ranges)


def _slots(slots: Sequence[SlotKey]) -> str:
    text = ", ".join(slot_text(slot) for slot in slots[:_SHOWN])
    return text if len(slots) <= _SHOWN else f"{text} and {len(slots) - _SHOWN} more"
