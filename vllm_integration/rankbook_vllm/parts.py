"""A plan in the terms of two workers: which caches, and which heads of them.

A plan counts layers and KV heads over a whole model. A worker has caches by
name, and in each the heads of its own rank; this is the way from one to the
other. Pure, and free of vLLM and torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankbook.errors import Incompatible, Incomplete, Reason, TransferError
from rankbook.model import Slot, Topology, WorkerRecord
from rankbook.pairing import plan_side
from rankbook.transfer import Plan, PlanSide, Rank, Read
from rankbook.transfer.ratios import head_range
from rankbook_vllm.record import layer_index_in
from rankbook_vllm.seal import listed

__all__ = ["Part", "Share", "rank_of", "readers_of", "share_of", "worker_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """KV of one worker of a peer that this worker reads, in both workers' terms."""

    rank: Rank
    """The peer's worker."""
    layers: range
    """Global indices of the layers."""
    names: tuple[str, ...]
    """Names of these layers' caches, the same on both sides."""
    heads: slice
    """KV heads in that worker's caches; `slice(None)` where both have all there are,
    as with latent attention."""
    into: slice
    """Where they belong in this worker's caches."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this worker does in every transfer from one peer."""

    rank: Rank
    """This worker."""
    contact: tuple[Rank, ...]
    """The peer's workers to notify when everything is read, also those of which
    nothing is read: each keeps a request's blocks until all who should have told it."""
    read: tuple[Part, ...]
    """What to read, by rank and layer."""
    expected_completions: int
    """Completions to wait for: own reads in pull, writers in push."""


def _shards_tokens(topology: Topology) -> bool:
    """Whether the ranks of a stage are counted by PCP, as plans and NIXL do then."""
    layout = topology.engine.layout
    return layout.pcp_size > 1 and layout.dcp_size > 1


def rank_of(own: Topology, slot: Slot) -> Rank | None:
    """A worker as plans count it; None for a PCP rank that only holds copies."""
    if _shards_tokens(own):
        return Rank(slot.pp_rank, slot.pcp_rank)
    return Rank(slot.pp_rank, slot.tp_rank) if slot.pcp_rank == 0 else None


def worker_of(topology: Topology, rank: Rank) -> WorkerRecord:
    """The worker that a plan's rank means.

    Raises:
        Incomplete: It is not there.
    """
    by_pcp = _shards_tokens(topology)
    tp_rank, pcp_rank = (0, rank.tp_rank) if by_pcp else (rank.tp_rank, 0)
    record = topology.worker(rank.pp_rank, tp_rank, pcp_rank)
    if record is None:
        engine_id, missing = topology.engine.engine_id, f"pp{rank.pp_rank} tp{rank.tp_rank}"
        raise Incomplete(
            f"{engine_id} has no worker {missing}",
            metadata={"engine_id": engine_id, "missing": missing},
        )
    return record


def readers_of(plan: Plan, own: Topology, slot: Slot) -> int:
    """How many of a consumer's workers notify a producer's worker about each request."""
    here = rank_of(own, slot)
    counts = {Rank(one.pp_rank, one.tp_rank): one.consumer_count for one in plan.producers}
    return counts[here] if here is not None else 0


def share_of(plan: Plan, producer: Topology, own: Topology, slot: Slot) -> Share:
    """What one consumer worker does.

    Args:
        plan: The plan between the two engines.
        producer: The engine that gives.
        own: The engine that takes.
        slot: The worker.

    Raises:
        Incompatible: The producer lacks a cache that this worker has.
        TransferError: HEADS_UNKNOWN, for a draft model's layers over other TP sizes.
    """
    here = rank_of(own, slot)
    if here is None:
        return Share(Rank(slot.pp_rank, slot.tp_rank), (), (), 0)
    mine = next(one for one in plan.consumers if Rank(one.pp_rank, one.tp_rank) == here)
    sides = plan_side(producer), plan_side(own)
    parts = tuple(_part(producer, read, *sides, here) for read in mine.read)
    _check_names(producer, worker_of(own, here), parts)
    return Share(here, mine.contact, parts, mine.expected_completions)


def _part(producer: Topology, read: Read, theirs: PlanSide, ours: PlanSide, here: Rank) -> Part:
    rank = Rank(read.pp_rank, read.tp_rank)
    layers = range(read.start_layer, read.end_layer)
    names = _names(worker_of(producer, rank), layers)
    sizes = theirs.transfer_tp_size, ours.transfer_tp_size
    draft = read.start_head == read.end_head
    if draft and sizes[0] != sizes[1]:
        raise TransferError(
            f"layer {read.start_layer} is a draft model's, and how its heads lie over {sizes[0]} "
            f"and {sizes[1]} ranks is not in the book; give both the same --tensor-parallel-size",
            reason=Reason.HEADS_UNKNOWN,
            metadata={"producer_tp_size": sizes[0], "consumer_tp_size": sizes[1]},
        )
    if draft or theirs.is_mla:
        return Part(rank, layers, names, slice(None), slice(None))
    heads = theirs.total_num_kv_heads
    there, _ = head_range(rank.tp_rank, sizes[0], heads)
    first, _ = head_range(here.tp_rank, sizes[1], heads)
    return Part(
        rank,
        layers,
        names,
        slice(read.start_head - there, read.end_head - there),
        slice(read.start_head - first, read.end_head - first),
    )


def _names(record: WorkerRecord, layers: range) -> tuple[str, ...]:
    num_layers = record.layout.num_layers
    return tuple(name for name in record.layers.names if layer_index_in(name, num_layers) in layers)


def _check_names(producer: Topology, own: WorkerRecord, parts: tuple[Part, ...]) -> None:
    """Every cache of the model's own layers must come from somewhere."""
    needed = _names(own, range(own.layers.start_layer, own.layers.end_layer))
    given = {name for part in parts for name in part.names}
    missing = [name for name in needed if name not in given]
    if missing:
        raise Incompatible(
            f"{producer.engine.engine_id} has no KV cache named {listed(missing)}: serve the same "
            "model on both",
            metadata={"producer": producer.engine.engine_id, "missing": listed(missing)},
        )
