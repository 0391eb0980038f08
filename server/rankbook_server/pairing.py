"""Plans and comparisons over engines of the book: the transfer room's functions,
given what the records say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankbook import v1
from rankbook.convert import from_json
from rankbook.errors import TransferError
from rankbook.pairing import peer_side_of, plan_side_of
from rankbook.transfer import (
    ExtraLayer,
    PeerSide,
    PlanSide,
    TransferMode,
    compare_peers,
    plan_transfer,
)

__all__ = ["compare", "plan", "prepare_plan"]

_MODES = {v1.TRANSFER_MODE_PULL: TransferMode.PULL, v1.TRANSFER_MODE_PUSH: TransferMode.PUSH}


def _extra(records: Sequence[v1.WorkerRecord]) -> tuple[ExtraLayer, ...]:
    found = {
        (extra.index, record.slot.pp_rank): extra.kind
        for record in records
        for extra in record.layers.extra
    }
    return tuple(
        ExtraLayer(index, pp_rank, v1.LayerKind.Name(kind).removeprefix("LAYER_KIND_"))
        for (index, pp_rank), kind in sorted(found.items())
    )


def _plan_side(engine: v1.Engine, records: Sequence[v1.WorkerRecord]) -> PlanSide:
    return plan_side_of(engine, records[0], _extra(records))


def _stated_mode(record: v1.WorkerRecord) -> TransferMode:
    stated = record.compat.factors.get("transfer_mode", "").lower()
    return TransferMode.PUSH if stated == TransferMode.PUSH else TransferMode.PULL


def plan(
    producer: v1.Engine,
    producer_records: Sequence[v1.WorkerRecord],
    consumer: v1.Engine | v1.ConsumerLayout,
    consumer_records: Sequence[v1.WorkerRecord],
    mode: v1.TransferMode.ValueType,
) -> v1.PlanTransferResponse:
    """Plans a transfer.

    Args:
        producer: An engine with every slot filled.
        producer_records: Its workers in slot order.
        consumer: Such an engine, or sizes only.
        consumer_records: Its workers in slot order; empty for sizes.
        mode: Who starts it; unspecified takes what the producer states, else pull.

    Raises:
        TransferError: No plan exists between the two.
        BadRequest: A size is below 1.
        LimitExceeded: The plan would be too large to answer.
    """
    return prepare_plan(producer, producer_records, consumer, consumer_records, mode)()


def prepare_plan(
    producer: v1.Engine,
    producer_records: Sequence[v1.WorkerRecord],
    consumer: v1.Engine | v1.ConsumerLayout,
    consumer_records: Sequence[v1.WorkerRecord],
    mode: v1.TransferMode.ValueType,
) -> Callable[[], v1.PlanTransferResponse]:
    """Reads all that `plan` needs of the book; what it returns makes the plan, in any thread.

    Raises:
        TransferError: One of the sides can have no plan.
        BadRequest: A size is below 1.
        LimitExceeded: The sizes make more slots than an engine may have.
    """
    chosen = _MODES.get(mode) or _stated_mode(producer_records[0])
    side = _plan_side(producer, producer_records)
    producer_revision = producer.revision
    if isinstance(consumer, v1.ConsumerLayout):
        other = PlanSide.for_layout(
            side,
            tp_size=consumer.tp_size,
            pp_size=consumer.pp_size,
            layers=tuple(consumer.layers),
            dcp_size=consumer.dcp_size,
        )
        consumer_revision = 0
    else:
        other = _plan_side(consumer, consumer_records)
        consumer_revision = consumer.revision

    def make() -> v1.PlanTransferResponse:
        found = plan_transfer(side, other, chosen)
        push = chosen is TransferMode.PUSH
        return v1.PlanTransferResponse(
            plan=from_json(found.as_dict(), v1.Plan),
            mode=v1.TRANSFER_MODE_PUSH if push else v1.TRANSFER_MODE_PULL,
            producer_revision=producer_revision,
            consumer_revision=consumer_revision,
        )

    return make


def _peer_side(engine: v1.Engine, records: Sequence[v1.WorkerRecord]) -> PeerSide:
    role = v1.Role.Name(engine.role).removeprefix("ROLE_")
    return peer_side_of(engine, records[0], role, _extra(records), engine.core.connector)


def compare(
    producer: v1.Engine,
    producer_records: Sequence[v1.WorkerRecord],
    consumer: v1.Engine,
    consumer_records: Sequence[v1.WorkerRecord],
) -> v1.ComparePeersResponse:
    """Compares two engines with every slot filled as producer and consumer."""
    try:
        verdict = compare_peers(
            _peer_side(producer, producer_records), _peer_side(consumer, consumer_records)
        ).as_dict()
    except TransferError as error:
        # A side that no plan can be made for is a broken rule, not a failed comparison.
        verdict = {
            "compatible": False,
            "reasons": [
                {
                    "reason": error.reason.value,
                    "message": error.message,
                    "producer": producer.engine_id,
                    "consumer": consumer.engine_id,
                }
            ],
            "factors": [],
        }
    return v1.ComparePeersResponse(comparison=from_json(verdict, v1.Comparison))
