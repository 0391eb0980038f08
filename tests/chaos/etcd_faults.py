"""What goes wrong inside etcd: compaction at any moment, a full quota, a leader that moves.

All through etcd's JSON gateway, past the proxies, and each is tried at the
members in turn. For threads: every call blocks.
"""

from __future__ import annotations

import contextlib
import json
import random
import urllib.error
from collections.abc import Sequence
from typing import Any

from tests.contract.etcd_server import EtcdNode, b64

__all__ = ["compact", "fill", "free", "move_leader"]

_JUNK = "junk/"
_JUNK_BYTES = 512 * 1024
_MOST_JUNK = 600


def _any(nodes: Sequence[EtcdNode], path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of the first member that gives one; None where etcd refuses or none does."""
    for node in nodes:
        try:
            return node.call(path, body)
        except urllib.error.HTTPError as error:
            with error:
                error.read()
        except (OSError, json.JSONDecodeError):
            continue
    return None


def compact(nodes: Sequence[EtcdNode], rng: random.Random) -> str:
    """Compacts away every revision but the newest few; returns what was done."""
    status = _any(nodes, "/v3/kv/range", {"key": b64("none")})
    if status is None:
        return "no member answers"
    revision = int(status["header"]["revision"]) - rng.choice((0, 0, 1, 5))
    done = _any(nodes, "/v3/kv/compaction", {"revision": revision, "physical": rng.random() < 0.5})
    return f"below {revision}" if done is not None else f"below {revision}: refused"


def fill(nodes: Sequence[EtcdNode]) -> str:
    """Writes until etcd takes no more for lack of space."""
    junk = b64(b"x" * _JUNK_BYTES)
    for number in range(_MOST_JUNK):
        if _any(nodes, "/v3/kv/put", {"key": b64(f"{_JUNK}{number}"), "value": junk}) is None:
            return f"refused after {number} x {_JUNK_BYTES} bytes"
    return "never full"


def free(nodes: Sequence[EtcdNode]) -> str:
    """Takes out what `fill` wrote, gives the space back and disarms the alarm."""
    gone = _any(nodes, "/v3/kv/deleterange", {"key": b64(_JUNK), "range_end": b64("junk0")})
    if gone is None:
        return "no member answers"
    revision = int(gone["header"]["revision"])
    _any(nodes, "/v3/kv/compaction", {"revision": revision, "physical": True})
    for node in nodes:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            node.call("/v3/maintenance/defragment")
    alarms = _any(nodes, "/v3/maintenance/alarm", {"action": "GET"}) or {}
    for alarm in alarms.get("alarms", []):
        _any(nodes, "/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
    left = _any(nodes, "/v3/maintenance/alarm", {"action": "GET"}) or {}
    return f"{len(alarms.get('alarms', []))} alarms, {len(left.get('alarms', []))} left"


def move_leader(nodes: Sequence[EtcdNode], rng: random.Random) -> str:
    """Makes another member the leader."""
    for node in nodes:
        try:
            leader = node.call("/v3/maintenance/status")["leader"]
            members = [m["ID"] for m in node.call("/v3/cluster/member/list")["members"]]
        except (OSError, KeyError):
            continue
        target = rng.choice([member for member in members if member != leader])
        done = _any(nodes, "/v3/maintenance/transfer-leadership", {"targetID": target})
        return f"to {int(target):x}" if done is not None else "refused"
    return "no member answers"
