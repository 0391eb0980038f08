"""The split of a model's layers over pipeline stages that vLLM makes.

Used where an engine is only imagined: a simulated one, or a consumer that a
plan is asked for before it exists. An engine in the book is taken at its
published ranges and never through here, since a user may have split it
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rankbook.errors import Reason, TransferError
from rankbook.transfer.ratios import require_size

__all__ = ["partition_layers", "ranges_of"]


def partition_layers(
    num_layers: int, pp_size: int, partition: str | None = None
) -> list[tuple[int, int]]:
    """Layer range of every stage, as vLLM's `get_pp_indices` splits them.

    Each stage gets `num_layers // pp_size`. What is left over goes one layer
    each to the stages before the last, from the back: the last stage carries
    the final norm and head, and the first is served last for its embeddings.

    Args:
        num_layers: Layers of the model, without draft or MTP layers.
        pp_size: Stages.
        partition: Text of `VLLM_PP_LAYER_PARTITION`, for example "33,28"; None
            for the default split.

    Returns:
        `(start, end)` of each stage in order: global layer indices, end
        exclusive. More stages than layers leaves some of them empty.

    Raises:
        TransferError: LAYER_SPLIT_INVALID, when `partition` is not a list of
            `pp_size` counts that sum to `num_layers`.
        BadRequest: `num_layers` or `pp_size` is below 1.

    Example:
        >>> partition_layers(61, 4)
        [(0, 15), (15, 30), (30, 46), (46, 61)]
        >>> partition_layers(61, 2, "33,28")
        [(0, 33), (33, 61)]
    """
    require_size("num_layers", num_layers)
    require_size("pp_size", pp_size)
    if partition is not None:
        try:
            counts = [int(part) for part in partition.split(",")]
        except ValueError:
            raise _invalid(
                f'partition "{partition}" is not a list of whole numbers such as "33,28"',
                num_layers,
                pp_size,
                partition,
            ) from None
        if len(counts) != pp_size:
            raise _invalid(
                f'partition "{partition}" has {len(counts)} stages and pp_size is {pp_size}; '
                "give one count a stage",
                num_layers,
                pp_size,
                partition,
            )
        return ranges_of(counts, num_layers)
    base, left_over = divmod(num_layers, pp_size)
    counts = [base] * pp_size
    for distance_from_end in range(2, left_over + 2):
        counts[-distance_from_end] += 1
    return ranges_of(counts, num_layers)


def ranges_of(counts: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """Turns layers per stage into ranges.

    Args:
        counts: Layers of each stage, first stage first. Zero is an empty stage.
        num_layers: What they must sum to.

    Raises:
        TransferError: LAYER_SPLIT_INVALID, when a count is negative or the sum
            is not `num_layers`.
    """
    text = ",".join(map(str, counts))
    if any(count < 0 for count in counts):
        raise _invalid(
            f"layers per stage {text} has a negative count; zero is the least a stage can hold",
            num_layers,
            len(counts),
            text,
        )
    if sum(counts) != num_layers:
        raise _invalid(
            f"layers per stage {text} sum to {sum(counts)} and the model has {num_layers}; "
            "make them sum to the model's layers",
            num_layers,
            len(counts),
            text,
        )
    ends = list(accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _invalid(message: str, num_layers: int, pp_size: int, partition: str) -> TransferError:
    return TransferError(
        message,
        reason=Reason.LAYER_SPLIT_INVALID,
        metadata={"num_layers": num_layers, "pp_size": pp_size, "partition": partition},
    )
