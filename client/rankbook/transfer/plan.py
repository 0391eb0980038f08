"""Who contacts whom, who reads what, and how many completions each side awaits.

Theory. A consumer rank faces some TP ranks of a producer stage
(`TransferTopology.handshake_target_ranks`) and needs some of those
(`source_ranks`). A plan repeats that for every stage:

- *Contact* goes to the facing ranks of **every** producer stage, whatever layers
  the consumer's stage holds. vLLM's NIXL handshake asks every stage, Mooncake
  asks every stage when the two pipelines differ, and each producer worker must
  hear of a request before its engine frees the blocks. A producer that counted
  TP ranks only would free them when the first of two consumer stages is done.
- *Read* goes to the source ranks of those stages whose published range overlaps
  the consumer's. Layers are global, so pipelines need not line up.
- A producer waits for all who contact it: vLLM's `consumer_count`, times the
  consumer's stages.
- A consumer waits, in pull, for its own reads; in push, for the writers, which
  vLLM counts as `pp_size * max(1, P_tp // D_tp)`, empty stages and copies
  included.

Which connector can carry a plan out is not asked here; `compare_peers` is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rankbook.errors import LimitExceeded
from rankbook.transfer.fit import TransferMode, check_pair, shared_heads, transfer_mode
from rankbook.transfer.ratios import head_range
from rankbook.transfer.sides import ExtraLayer, PlanSide
from rankbook.transfer.topology import TransferTopology

__all__ = [
    "MAX_PLAN_ENTRIES",
    "ConsumerPlan",
    "Plan",
    "ProducerPlan",
    "Rank",
    "Read",
    "plan_transfer",
]

MAX_PLAN_ENTRIES = 262_144
"""Most contacts a plan may list: 64 stages of 64 ranks on both sides. Such a plan
still fits into one message."""


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """A worker by stage and rank in it."""

    pp_rank: int
    """The stage."""

    tp_rank: int
    """The TP rank; the PCP rank of an engine with PCP and DCP."""


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a producer rank's KV."""

    pp_rank: int
    """The producer's stage."""

    tp_rank: int
    """The producer's TP rank."""

    start_layer: int
    """First layer, by global index."""

    end_layer: int
    """One past the last layer."""

    start_head: int
    """First KV head, by global index."""

    end_head: int
    """One past the last KV head. Both 0 for a draft layer, whose heads are not
    the model's: the connector's own metadata says what the rank holds of it."""


@dataclass(frozen=True, slots=True)
class ConsumerPlan:
    """What one consumer rank does."""

    pp_rank: int
    """The consumer's stage."""

    tp_rank: int
    """The consumer's TP rank."""

    contact: tuple[Rank, ...]
    """Producer ranks to shake hands with and to notify."""

    read: tuple[Read, ...]
    """Producer ranks to read from, and what."""

    expected_completions: int
    """Notices this rank waits for."""


@dataclass(frozen=True, slots=True)
class ProducerPlan:
    """What one producer rank waits for."""

    pp_rank: int
    """The producer's stage."""

    tp_rank: int
    """The producer's TP rank."""

    consumer_count: int
    """Consumer ranks that contact this producer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole plan, ranks by stage and then by TP rank."""

    consumers: tuple[ConsumerPlan, ...]
    """One entry a consumer rank."""

    producers: tuple[ProducerPlan, ...]
    """One entry a producer rank."""

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON shows it: plain dicts, lists and numbers."""
        return {
            "consumers": [
                {
                    "pp_rank": one.pp_rank,
                    "tp_rank": one.tp_rank,
                    "contact": [{"pp_rank": r.pp_rank, "tp_rank": r.tp_rank} for r in one.contact],
                    "read": [
                        {name: getattr(read, name) for name in _READ_FIELDS} for read in one.read
                    ],
                    "expected_completions": one.expected_completions,
                }
                for one in self.consumers
            ],
            "producers": [
                {
                    "pp_rank": one.pp_rank,
                    "tp_rank": one.tp_rank,
                    "consumer_count": one.consumer_count,
                }
                for one in self.producers
            ],
        }


_READ_FIELDS = ("pp_rank", "tp_rank", "start_layer", "end_layer", "start_head", "end_head")


def plan_transfer(
    producer: PlanSide, consumer: PlanSide, mode: TransferMode | str = TransferMode.PULL
) -> Plan:
    """Plans a transfer of a whole model's KV from one engine to another.

    Args:
        producer: The engine that computed the KV.
        consumer: The engine that needs it.
        mode: Who starts the transfer. Contact and read do not depend on it; what
            the consumer waits for does.

    Returns:
        The plan. Contact and read of a consumer rank are by stage, then rank.

    Raises:
        TransferError: No plan exists: TP_NOT_DIVISIBLE, DCP_NOT_DIVISIBLE,
            BLOCK_SIZE_NOT_DIVISIBLE, LAYERS_NOT_COVERED, HEADS_UNKNOWN,
            LOCAL_ENGINE or TRANSFER_UNSUPPORTED.
        LimitExceeded: The plan would list more than `MAX_PLAN_ENTRIES` contacts.
        BadRequest: `mode` is neither "pull" nor "push".
    """
    mode = transfer_mode(mode)
    check_pair(producer, consumer, mode)
    heads = shared_heads(producer, consumer)
    sizes = (producer.transfer_tp_size, producer.dcp_size)
    first = _view(consumer, 0, heads)
    _check_extent(producer, consumer, len(first.handshake_target_ranks(*sizes)))
    views = [_view(consumer, tp_rank, heads) for tp_rank in range(consumer.transfer_tp_size)]
    targets = [view.handshake_target_ranks(*sizes) for view in views]
    slices = [
        _slices(producer, consumer, tp_rank, view.source_ranks(*sizes), heads)
        for tp_rank, view in enumerate(views)
    ]
    contacts = [
        tuple(Rank(pp_rank, rank) for pp_rank in range(producer.pp_size) for rank in ranks)
        for ranks in targets
    ]
    pushes = producer.pp_size * max(1, producer.transfer_tp_size // consumer.transfer_tp_size)
    held = {layer.index: layer for layer in sorted(producer.extra, key=lambda one: -one.pp_rank)}
    consumers = []
    for pp_rank, layers in enumerate(consumer.stages):
        extra = [held[e.index] for e in consumer.extra if e.pp_rank == pp_rank and e.index in held]
        for tp_rank, parts in enumerate(slices):
            reads = (*_main_reads(producer, layers, parts), *_extra_reads(extra, parts))
            own = len({(read.pp_rank, read.tp_rank) for read in reads})
            consumers.append(
                ConsumerPlan(
                    pp_rank=pp_rank,
                    tp_rank=tp_rank,
                    contact=contacts[tp_rank],
                    read=tuple(sorted(reads, key=_read_order)),
                    expected_completions=own if mode is TransferMode.PULL else pushes,
                )
            )
    counts = [0] * producer.transfer_tp_size
    for ranks in targets:
        for rank in ranks:
            counts[rank] += consumer.pp_size
    producers = [
        ProducerPlan(pp_rank, tp_rank, count)
        for pp_rank in range(producer.pp_size)
        for tp_rank, count in enumerate(counts)
    ]
    return Plan(tuple(consumers), tuple(producers))


def _view(consumer: PlanSide, tp_rank: int, heads: int) -> TransferTopology:
    return TransferTopology(
        tp_rank=tp_rank,
        tp_size=consumer.transfer_tp_size,
        block_size=consumer.block_size or 1,
        engine_id=consumer.engine_id,
        is_mla=consumer.is_mla,
        total_num_kv_heads=heads,
        dcp_size=consumer.dcp_size,
    )


def _slices(
    producer: PlanSide, consumer: PlanSide, tp_rank: int, ranks: list[int], heads: int
) -> list[tuple[int, int, int]]:
    """Which heads to take from each source rank: `(tp_rank, start, end)`.

    Token slices are of all heads. Otherwise each source gives the heads from its
    first one up to the first of the next source, so that none is read twice.
    """
    start, end = head_range(tp_rank, consumer.transfer_tp_size, heads)
    if producer.dcp_size > 1:
        return [(rank, start, end) for rank in ranks]
    firsts = [head_range(rank, producer.transfer_tp_size, heads)[0] for rank in ranks[1:]]
    return list(zip(ranks, [start, *firsts], [*firsts, end], strict=True))


def _main_reads(
    producer: PlanSide, layers: tuple[int, int], slices: list[tuple[int, int, int]]
) -> Iterator[Read]:
    for pp_rank, (start, end) in enumerate(producer.stages):
        low, high = max(start, layers[0]), min(end, layers[1])
        if low < high:
            for rank, start_head, end_head in slices:
                yield Read(pp_rank, rank, low, high, start_head, end_head)


def _extra_reads(extra: list[ExtraLayer], slices: list[tuple[int, int, int]]) -> Iterator[Read]:
    # An MTP layer is built like the model's own; a draft model may have other
    # heads, and a range computed from the target's would be in bounds and wrong.
    for layer in extra:
        for rank, start_head, end_head in slices:
            span = (start_head, end_head) if layer.kind == "MTP" else (0, 0)
            yield Read(layer.pp_rank, rank, layer.index, layer.index + 1, *span)


def _read_order(read: Read) -> tuple[int, int, int]:
    return read.pp_rank, read.tp_rank, read.start_layer


def _check_extent(producer: PlanSide, consumer: PlanSide, targets_per_stage: int) -> None:
    # Every consumer rank has as many targets in a stage as any other.
    stage = consumer.transfer_tp_size * targets_per_stage
    # Reads of the model's layers are fewer than contacts; extra layers come on top.
    entries = stage * max(consumer.pp_size * producer.pp_size, len(consumer.extra))
    if entries > MAX_PLAN_ENTRIES:
        raise LimitExceeded(
            f"the plan would list {entries} contacts or reads and the limit is "
            f"{MAX_PLAN_ENTRIES}; ask for a smaller consumer layout",
            metadata={"limit": "plan_entries", "value": entries, "bound": MAX_PLAN_ENTRIES},
        )
