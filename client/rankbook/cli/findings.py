"""What `doctor` looks for. Pure: what was read in, findings out, worst first."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankbook.cli.durations import duration_text
from rankbook.cli.words import address_text, slots_text
from rankbook.errors import RankbookError
from rankbook.model import Engine, Severity, Slot, State, Status, Topology

__all__ = [
    "Finding",
    "ranks_by_host",
    "registry_findings",
    "topology_findings",
    "unreachable",
]

_CLOCK_BOUND_S = 2.0
_SEAL_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that hurts or may hurt."""

    id: str
    """Stable name, UPPER_SNAKE."""
    severity: Severity
    """ERROR: does not work. WARNING: likely to hurt. INFO: good to know."""
    subject: str
    """Whom it is about: engine ids with commas, or the server."""
    evidence: str
    """What was seen."""
    why: str
    """Why it matters."""
    next_step: str
    """What to do."""

    def as_json(self) -> dict[str, Any]:
        """The finding as `doctor -o json` shows it."""
        return {
            "id": self.id,
            "severity": str(self.severity),
            "subject": self.subject,
            "evidence": self.evidence,
            "why": self.why,
            "next_step": self.next_step,
        }


# What the registry itself finds, with why it matters and what to do.
_KNOWN: Mapping[str, tuple[str, str]] = {
    "LOOPBACK_ADDRESS": (
        "A peer on another host that dials it reaches itself, or nobody.",
        "Set the host that peers should use (VLLM_HOST_IP, VLLM_NIXL_SIDE_CHANNEL_HOST) and "
        "restart the engine.",
    ),
    "PLACE_TAKEN_TWICE": (
        "Routers that pick by group and replica cannot tell the engines apart.",
        "Give each replica a name of its own, or evict the one that should not be there.",
    ),
    "SPLIT_ENGINE": (
        "Each half waits for ranks that have signed in under the other name; neither gets whole.",
        "Give all nodes of one engine the same engine_id.",
    ),
    "DUPLICATE_ADDRESS": (
        "Two workers cannot listen on one port: peers of one reach the other.",
        "Give each worker a port of its own; mind that port formulas may leave PP out.",
    ),
    "TWO_STARTS": (
        "Two starts take the engine from each other; peers see it come and go.",
        "Find the second start, stop it, or give it an engine_id of its own.",
    ),
    "CORE_LOST": (
        "Nobody serves requests or frees blocks for this engine.",
        "Look at the log of the engine core; restart the engine.",
    ),
    "SEAL_OUTDATED": (
        "The core has not said that it saw the workers' new records; no new peer may use them.",
        "A vLLM core seals again by itself; by hand: rankbook seal ENGINE.",
    ),
    "EVICTED": (
        "Peers were told that it is gone; its processes were not stopped.",
        "Stop what still runs of it, and start it anew.",
    ),
    "ASLEEP": (
        "Its KV cache is not registered: nobody can read from it.",
        "Wake the engine.",
    ),
    "LAYERS_DIFFER": (
        "Ranks of one stage must hold the same layers.",
        "Restart the engine with one layer partition on every node.",
    ),
    "LAYERS_OVERLAP": (
        "A layer would be read twice, or from the wrong stage.",
        "Restart the engine with one layer partition on every node (VLLM_PP_LAYER_PARTITION).",
    ),
    "LAYERS_HOLE": (
        "A layer would be read from nobody: wrong tokens.",
        "Restart the engine with one layer partition on every node (VLLM_PP_LAYER_PARTITION).",
    ),
}
_OWN = frozenset(("RANKS_LOST",))
"""Said better by MISSING_RANKS."""


def unreachable(endpoints: Sequence[str], error: RankbookError) -> Finding:
    """The finding that no registry answers."""
    return Finding(
        "SERVER_UNREACHABLE",
        Severity.ERROR,
        ",".join(endpoints),
        error.message,
        "Nobody on this host can sign in, look anything up, or renew a lease.",
        "Is rankbookd up, and is this its address (rankbook config show)? From a pod: is the "
        "port open in the network policy?",
    )


def registry_findings(
    status: Status, *, endpoints: Sequence[str], client_version: str, now: dt.datetime
) -> list[Finding]:
    """What is odd about the registry itself.

    Args:
        status: Its own words.
        endpoints: As it was asked.
        client_version: Version of this command.
        now: This host's clock when the words came.
    """
    found = []
    name = ",".join(endpoints)
    if not status.store_available:
        found.append(
            Finding(
                "STORE_AWAY",
                Severity.ERROR,
                name,
                f"{status.store} takes no writes now",
                "No worker can sign in, and where a write was under way nothing can be read. "
                "Nobody expires meanwhile.",
                "Look at the server's log; free the disk, or bring the store back.",
            )
        )
    if status.server_time is not None:
        skew = (now - status.server_time).total_seconds()
        if abs(skew) > _CLOCK_BOUND_S:
            found.append(
                Finding(
                    "CLOCK_SKEW",
                    Severity.WARNING,
                    name,
                    f"this host's clock is {skew:+.1f} s from the registry's",
                    "Ages and log times of the two do not line up. Leases are not touched by it.",
                    "Set both by NTP.",
                )
            )
    if _minor(status.version) is not None and _minor(client_version) is not None:
        ours, theirs = _minor(client_version), _minor(status.version)
        if ours is not None and theirs is not None and not _close(ours, theirs):
            found.append(
                Finding(
                    "VERSION_SKEW",
                    Severity.WARNING,
                    name,
                    f"server {status.version}, this command {client_version}",
                    "Only versions one minor apart are meant to work together.",
                    "Bring both to versions at most one minor apart.",
                )
            )
    return found


def _minor(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def _close(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    return ours[0] == theirs[0] and abs(ours[1] - theirs[1]) <= 1


def topology_findings(
    topologies: Sequence[Topology],
    broken_pairs: Iterable[tuple[str, str, Sequence[str]]],
    *,
    now: dt.datetime,
) -> list[Finding]:
    """What is wrong or odd about the engines, worst first.

    Args:
        topologies: The engines that are not GONE, with their workers.
        broken_pairs: Producer, consumer, and every reason why the two may not
            pair, for the pairs that may not.
        now: The moment that ages are counted to.
    """
    found: list[Finding] = []
    for topology in topologies:
        found += _missing_ranks(topology)
        found += _not_sealed(topology.engine, now)
        found += _unroutable(topology)
    found += _said_by_registry([topology.engine for topology in topologies])
    found += [
        Finding(
            "INCOMPATIBLE_PAIR",
            Severity.WARNING,
            f"{producer},{consumer}",
            "; ".join(reasons),
            "A router that pairs the two gets failed handshakes or wrong tokens.",
            f"Keep them apart, or make them agree: rankbook compare {producer} {consumer}",
        )
        for producer, consumer, reasons in broken_pairs
    ]
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.UNSPECIFIED]
    return sorted(found, key=lambda finding: order.index(finding.severity))


def ranks_by_host(topology: Topology) -> dict[str, list[Slot]]:
    """The slots that each host fills, hosts in order of their first slot."""
    hosts: dict[str, list[Slot]] = {}
    for worker in topology.workers:
        hosts.setdefault(worker.process.hostname or "(no hostname)", []).append(worker.slot)
    return hosts


def _missing_ranks(topology: Topology) -> Iterator[Finding]:
    engine = topology.engine
    if not engine.missing:
        return
    pcp = engine.layout.pcp_size
    hosts = ranks_by_host(topology)
    here = "; ".join(f"{host} has {slots_text(slots, pcp)}" for host, slots in hosts.items())
    total = engine.declared - engine.present
    yield Finding(
        "MISSING_RANKS",
        Severity.ERROR if engine.state is State.DEGRADED else Severity.WARNING,
        engine.engine_id,
        f"{engine.state}, {total} of {engine.declared} missing: {slots_text(engine.missing, pcp)}. "
        f"By host: {here or 'nobody'}",
        "An engine takes peers only when every declared rank is here.",
        "Look at the node that should run the missing ranks: is it up, can it reach the registry "
        "(rankbook doctor there), and was it given this engine_id?",
    )


def _not_sealed(engine: Engine, now: dt.datetime) -> Iterator[Finding]:
    if engine.state is not State.COMPLETE or engine.change_time is None or engine.seal is not None:
        return
    age = (now - engine.change_time).total_seconds()
    if age > _SEAL_PATIENCE_S:
        yield Finding(
            "NOT_SEALED",
            Severity.WARNING,
            engine.engine_id,
            f"every rank is here since {duration_text(age)}, and no engine core has sealed it",
            "It is not READY, so no new peer may use it.",
            f"Look at the log of the engine core; by hand: rankbook seal {engine.engine_id}",
        )


def _unroutable(topology: Topology) -> Iterator[Finding]:
    """Addresses that no other host can use, beside what the registry flags itself."""
    odd: dict[str, list[Slot]] = {}
    for worker in topology.workers:
        for address in worker.addresses:
            try:
                ip = ipaddress.ip_address(address.host.split("%")[0])
            except ValueError:
                continue
            if ip.is_link_local or ip.is_multicast or (ip.is_unspecified and worker.addresses[1:]):
                odd.setdefault(address_text(address), []).append(worker.slot)
    pcp = topology.engine.layout.pcp_size
    if odd:
        yield Finding(
            "UNROUTABLE_ADDRESS",
            Severity.WARNING,
            topology.engine.engine_id,
            "; ".join(f"{slots_text(slots, pcp)} advertise {text}" for text, slots in odd.items()),
            "Other hosts cannot dial a wildcard, link-local or multicast address.",
            "Set the host that peers should use (VLLM_HOST_IP) and restart the engine.",
        )
    core = topology.engine.core
    for address in core.addresses if core is not None else ():
        host = address.host.strip("[]").lower()
        try:
            ip = ipaddress.ip_address(host)
            local = ip.is_loopback or ip.is_unspecified
        except ValueError:
            local = host == "localhost"
        if local:
            yield Finding(
                "LOOPBACK_ADDRESS",
                Severity.WARNING,
                topology.engine.engine_id,
                f"the engine core advertises {address_text(address)}",
                *_KNOWN["LOOPBACK_ADDRESS"],
            )


def _said_by_registry(engines: Sequence[Engine]) -> Iterator[Finding]:
    seen = set()
    for engine in engines:
        for problem in engine.problems:
            if problem.reason in _OWN:
                continue
            others = problem.metadata.get("engines") or problem.metadata.get("other_engine", "")
            about = tuple(sorted({engine.engine_id, *filter(None, others.split(","))}))
            place = (problem.metadata.get("host"), problem.metadata.get("port"))
            if others and (problem.reason, about, place) in seen:
                continue  # two engines that are in each other's way each say so
            seen.add((problem.reason, about, place))
            why, next_step = _KNOWN.get(
                problem.reason,
                ("The registry flags it.", f"rankbook topology {engine.engine_id}"),
            )
            yield Finding(
                problem.reason,
                problem.severity,
                ",".join(about) if others else engine.engine_id,
                problem.message,
                why,
                next_step,
            )
