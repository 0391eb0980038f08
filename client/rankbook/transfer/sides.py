"""One engine as a plan sees it: its sizes and who holds which layers.

`PlanSide` is built from a sealed topology, or by `PlanSide.for_layout` for a
consumer that is not in the book. The layer ranges are those the workers
published. Nothing is derived from `num_layers / pp_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankbook.errors import LimitExceeded, Reason, TransferError
from rankbook.limits import MAX_GRID_SLOTS
from rankbook.transfer.layers import partition_layers, ranges_of
from rankbook.transfer.ratios import require_rank, require_size

__all__ = ["ExtraLayer", "PlanSide", "absent_extra_layers"]


@dataclass(frozen=True, slots=True)
class ExtraLayer:
    """A layer outside `[0, num_layers)`, such as a draft or MTP layer."""

    index: int
    """Global index: `num_layers` or above."""

    pp_rank: int
    """The stage that holds it."""

    kind: str = "OTHER"
    """DRAFT, MTP or OTHER, as in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSide:
    """What a plan needs to know of one engine.

    Raises:
        BadRequest: A size is below 1, or an extra layer names no stage.
        TransferError: LAYERS_NOT_COVERED, when the stages overlap, leave a hole,
            or go beyond `num_layers`; TRANSFER_UNSUPPORTED or DCP_NOT_DIVISIBLE,
            for a context-parallel layout that vLLM's connectors do not know.
    """

    engine_id: str
    """Name of the engine; empty for a consumer that is not in the book."""

    tp_size: int
    """TP ranks of a stage."""

    stages: tuple[tuple[int, int], ...]
    """`(start, end)` of each stage, by stage: global layers, end exclusive. An
    empty stage has `start == end`."""

    num_layers: int
    """Layers of the model, without extra layers."""

    total_num_kv_heads: int = 0
    """KV heads of a layer over all ranks; 0 where not stated."""

    is_mla: bool = False
    """Whether every TP rank holds the same KV, as with latent attention."""

    block_size: int = 0
    """Tokens in a block; 0 where not stated, and then not compared."""

    pcp_size: int = 1
    """Prefill-context-parallel ranks."""

    dcp_size: int = 1
    """Decode-context-parallel ranks."""

    extra: tuple[ExtraLayer, ...] = ()
    """Layers outside the range, with the stage that holds each."""

    def __post_init__(self) -> None:
        require_size("tp_size", self.tp_size)
        require_size("num_layers", self.num_layers)
        require_size("pcp_size", self.pcp_size)
        require_size("dcp_size", self.dcp_size)
        require_size("pp_size", len(self.stages))
        for layer in self.extra:
            require_rank("pp_rank of an extra layer", layer.pp_rank, len(self.stages))
        self._check_cover()
        self._check_context_parallel()

    @classmethod
    def for_layout(
        cls,
        producer: PlanSide,
        *,
        tp_size: int,
        pp_size: int = 0,
        layers: Sequence[int] = (),
        dcp_size: int = 1,
    ) -> PlanSide:
        """A consumer that is not in the book: the producer's model, own sizes.

        It is taken to hold every extra layer that the producer offers, on its
        last stage, where vLLM puts them.

        Args:
            producer: The engine it is to read from.
            tp_size: TP ranks of a stage.
            pp_size: Stages. 0 takes as many as `layers` has, else 1.
            layers: Layers of each stage, first stage first. Empty takes the
                split that vLLM makes.
            dcp_size: Decode-context-parallel ranks. 0 means 1.

        Raises:
            TransferError: LAYER_SPLIT_INVALID, when `layers` does not have
                `pp_size` counts or does not sum to the producer's layers.
            BadRequest: A size is negative, or `tp_size` is below 1.
            LimitExceeded: The sizes make more slots than an engine may have.
        """
        _check_slots(tp_size, pp_size or len(layers) or 1)
        if layers and pp_size not in (0, len(layers)):
            raise TransferError(
                f"{len(layers)} layer counts are given for {pp_size} stages; give one count a "
                "stage, or leave the number of stages away",
                reason=Reason.LAYER_SPLIT_INVALID,
                metadata={"layers": ",".join(map(str, layers)), "pp_size": pp_size},
            )
        if layers:
            stages = ranges_of(layers, producer.num_layers)
        else:
            stages = partition_layers(producer.num_layers, pp_size or 1)
        last = len(stages) - 1
        return cls(
            engine_id="",
            tp_size=tp_size,
            stages=tuple(stages),
            num_layers=producer.num_layers,
            total_num_kv_heads=producer.total_num_kv_heads,
            is_mla=producer.is_mla,
            dcp_size=dcp_size or 1,
            extra=tuple(ExtraLayer(one.index, last, one.kind) for one in producer.extra),
        )

    @property
    def pp_size(self) -> int:
        """Stages."""
        return len(self.stages)

    @property
    def transfer_tp_size(self) -> int:
        """Ranks of a stage that hold KV of their own.

        The TP ranks, except under PCP with DCP, where the PCP ranks shard the
        tokens; vLLM then numbers the ranks by PCP. PCP without DCP only makes
        copies, and rank 0 alone takes part.
        """
        return self.pcp_size if self.pcp_size > 1 and self.dcp_size > 1 else self.tp_size

    def _check_cover(self) -> None:
        at = 0
        for start, end in sorted(one for one in self.stages if one[0] != one[1]):
            if start != at or end < start:
                break
            at = end
        else:
            if at == self.num_layers:
                return
        text = " ".join(f"[{start}, {end})" for start, end in self.stages)
        raise TransferError(
            f'stages {text} of engine "{self.engine_id}" do not cover layers '
            f"[0, {self.num_layers}) exactly once; its workers must publish ranges that neither "
            "overlap nor leave a hole",
            reason=Reason.LAYERS_NOT_COVERED,
            metadata={
                "engine_id": self.engine_id,
                "stages": text,
                "num_layers": self.num_layers,
            },
        )

    def _check_context_parallel(self) -> None:
        # vLLM: NixlConnector's constructor for PCP, its config check for DCP.
        metadata = {
            "engine_id": self.engine_id,
            "tp_size": self.tp_size,
            "pcp_size": self.pcp_size,
            "dcp_size": self.dcp_size,
        }
        if self.pcp_size > 1 and self.dcp_size > 1 and self.tp_size != 1:
            raise TransferError(
                f"pcp_size {self.pcp_size} with dcp_size {self.dcp_size} needs tp_size 1 and has "
                f"{self.tp_size}: only then is it known which rank holds which tokens",
                reason=Reason.TRANSFER_UNSUPPORTED,
                metadata=metadata,
            )
        if self.dcp_size not in (1, self.transfer_tp_size):
            raise TransferError(
                f"dcp_size is {self.dcp_size}; it must be 1 or {self.transfer_tp_size}, the "
                "number of ranks in a stage, so that KV is either copied or sharded and never "
                "both; start the engine with one of these",
                reason=Reason.DCP_NOT_DIVISIBLE,
                metadata=metadata,
            )
        if self.dcp_size > 1 and not self.is_mla:
            raise TransferError(
                f"dcp_size is {self.dcp_size} and the model is not MLA: token slices of split "
                "heads have no transfer; use dcp_size 1",
                reason=Reason.TRANSFER_UNSUPPORTED,
                metadata=metadata,
            )


def absent_extra_layers(producer: PlanSide, consumer: PlanSide) -> tuple[ExtraLayer, ...]:
    """Extra layers that the consumer holds and the producer does not offer.

    A plan between the two is complete for the main layers, and the consumer
    must fill these itself.
    """
    offered = {layer.index for layer in producer.extra}
    return tuple(layer for layer in consumer.extra if layer.index not in offered)


def _check_slots(tp_size: int, pp_size: int) -> None:
    # Before anything is made of the sizes: they come from whoever asks.
    slots = tp_size * pp_size
    if slots > MAX_GRID_SLOTS:
        raise LimitExceeded(
            f"a consumer of tp_size {tp_size} and pp_size {pp_size} has {slots} slots, over the "
            f"limit of {MAX_GRID_SLOTS} slots",
            metadata={
                "limit": "grid_slots",
                "value": slots,
                "bound": MAX_GRID_SLOTS,
                "unit": "slots",
            },
        )
