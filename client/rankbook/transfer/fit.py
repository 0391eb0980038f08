"""Whether two engines' sizes fit, before anything is planned.

The rules here hold for every connector. What one connector cannot do belongs to
`compare_peers`.
"""

from __future__ import annotations

import enum

from rankbook.errors import BadRequest, Reason, TransferError
from rankbook.transfer.ratios import block_size_ratio, check_dcp, kv_heads, tp_ratio
from rankbook.transfer.sides import PlanSide

__all__ = ["TransferMode", "check_pair", "shared_heads", "transfer_mode"]


class TransferMode(enum.StrEnum):
    """Who starts a transfer."""

    PULL = "pull"
    """The consumer reads."""

    PUSH = "push"
    """The producer writes."""


def transfer_mode(mode: TransferMode | str) -> TransferMode:
    """Reads a mode by its name.

    Raises:
        BadRequest: It is neither "pull" nor "push".
    """
    try:
        return TransferMode(mode)
    except ValueError:
        raise BadRequest(
            f'mode is "{mode}"; it must be "pull" or "push"',
            metadata={"field": "mode", "value": mode},
        ) from None


def check_pair(producer: PlanSide, consumer: PlanSide, mode: TransferMode) -> None:
    """Refuses a pair between which no plan exists.

    Raises:
        TransferError: LOCAL_ENGINE, LAYERS_NOT_COVERED, TP_NOT_DIVISIBLE,
            DCP_NOT_DIVISIBLE, BLOCK_SIZE_NOT_DIVISIBLE or TRANSFER_UNSUPPORTED.
    """
    if producer.engine_id and producer.engine_id == consumer.engine_id:
        raise TransferError(
            f'engine "{producer.engine_id}" is on both sides; name two engines',
            reason=Reason.LOCAL_ENGINE,
            metadata={"engine_id": producer.engine_id},
        )
    if producer.num_layers != consumer.num_layers:
        raise TransferError(
            f"producer has {producer.num_layers} layers and consumer {consumer.num_layers}; "
            "serve the same model on both",
            reason=Reason.LAYERS_NOT_COVERED,
            metadata={
                "producer_num_layers": producer.num_layers,
                "consumer_num_layers": consumer.num_layers,
            },
        )
    names = {"local_name": "consumer", "remote_name": "producer"}
    tp_ratio(consumer.transfer_tp_size, producer.transfer_tp_size, **names)
    check_dcp(consumer.dcp_size, producer.dcp_size, **names)
    if producer.block_size and consumer.block_size:
        if mode is TransferMode.PULL:
            block_size_ratio(consumer.block_size, producer.block_size, **names)
        else:
            block_size_ratio(
                producer.block_size,
                consumer.block_size,
                local_name="producer",
                remote_name="consumer",
            )
    sharded = producer.dcp_size > 1 or consumer.dcp_size > 1
    unsupported = ""
    if mode is TransferMode.PUSH and sharded:
        unsupported = (
            "a push between engines with dcp_size above 1 has no count of writers; use pull, or "
            "dcp_size 1 on both"
        )
    elif consumer.pcp_size > 1:
        unsupported = "a consumer takes KV only with pcp_size 1; start it with that"
    elif producer.pcp_size > 1 and producer.dcp_size == 1 and consumer.dcp_size > 1:
        unsupported = (
            "a producer whose pcp ranks hold copies cannot feed a consumer that shards tokens; "
            "use dcp_size 1 on the consumer"
        )
    if unsupported:
        raise TransferError(
            f"producer pcp_size {producer.pcp_size} dcp_size {producer.dcp_size}, consumer "
            f"pcp_size {consumer.pcp_size} dcp_size {consumer.dcp_size}, mode {mode.value}: "
            f"{unsupported}",
            reason=Reason.TRANSFER_UNSUPPORTED,
            metadata={
                "producer_pcp_size": producer.pcp_size,
                "producer_dcp_size": producer.dcp_size,
                "consumer_pcp_size": consumer.pcp_size,
                "consumer_dcp_size": consumer.dcp_size,
                "mode": mode.value,
            },
        )


def shared_heads(producer: PlanSide, consumer: PlanSide) -> int:
    """KV heads of the model that both serve; one side's word is enough.

    Raises:
        TransferError: TRANSFER_UNSUPPORTED, when the two contradict each other;
            HEADS_UNKNOWN, when neither states a count.
    """
    same_kind = producer.is_mla == consumer.is_mla
    counts = {side.total_num_kv_heads for side in (producer, consumer)} - {0}
    if not same_kind or (len(counts) > 1 and not producer.is_mla):
        raise TransferError(
            f"producer has {producer.total_num_kv_heads} KV heads (MLA: {producer.is_mla}) and "
            f"consumer {consumer.total_num_kv_heads} (MLA: {consumer.is_mla}); serve the same "
            "model on both",
            reason=Reason.TRANSFER_UNSUPPORTED,
            metadata={
                "producer_total_num_kv_heads": producer.total_num_kv_heads,
                "producer_is_mla": producer.is_mla,
                "consumer_total_num_kv_heads": consumer.total_num_kv_heads,
                "consumer_is_mla": consumer.is_mla,
            },
        )
    return kv_heads(max(counts, default=0), is_mla=producer.is_mla)
