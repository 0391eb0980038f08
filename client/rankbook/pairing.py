"""Two engines of the book as the transfer room sees them.

    producer, consumer = view.get("prefill-a-0"), view.get("decode-a-0")
    compare_peers(peer_side(producer), peer_side(consumer)).compatible
    plan_transfer(plan_side(producer), plan_side(consumer), "push")

Pure. What a record does not state is left empty, which breaks no rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankbook import v1
from rankbook.convert import to_message
from rankbook.errors import Incomplete
from rankbook.model import Engine, Topology, WorkerRecord
from rankbook.transfer import ExtraLayer, PeerSide, PlanSide

__all__ = ["peer_side", "peer_side_of", "plan_side", "plan_side_of"]


def peer_side(topology: Topology) -> PeerSide:
    """An engine as a comparison sees it.

    Raises:
        Incomplete: It has no worker to read from.
    """
    return peer_side_of(
        topology.engine,
        _first(topology),
        topology.engine.role.name,
        _extra(topology.workers),
        topology.engine.core.connector if topology.engine.core else "",
    )


def plan_side(topology: Topology) -> PlanSide:
    """An engine as a plan sees it.

    Raises:
        Incomplete: It has no worker to read from.
        TransferError: No plan can be made for its layout.
        BadRequest: A size is below 1.
    """
    return plan_side_of(topology.engine, _first(topology), _extra(topology.workers))


def _first(topology: Topology) -> v1.WorkerRecord:
    if not topology.workers:
        raise Incomplete(
            f"{topology.engine.engine_id} has no worker: it is {topology.engine.state.name}",
            metadata={"engine_id": topology.engine.engine_id, "missing": "all"},
        )
    # On the wire what is not stated is an empty part, in the model it is None.
    return to_message(topology.workers[0], v1.WorkerRecord)


def _extra(records: Iterable[WorkerRecord]) -> tuple[ExtraLayer, ...]:
    found = {
        (extra.index, record.slot.pp_rank): extra.kind.name
        for record in records
        for extra in record.layers.extra
    }
    return tuple(
        ExtraLayer(index, pp_rank, kind) for (index, pp_rank), kind in sorted(found.items())
    )


def _stages(engine: Engine | v1.Engine) -> tuple[tuple[int, int], ...]:
    return tuple((stage.start_layer, stage.end_layer) for stage in engine.stages)


def plan_side_of(
    engine: Engine | v1.Engine, first: v1.WorkerRecord, extra: Sequence[ExtraLayer]
) -> PlanSide:
    """`plan_side`, out of model or wire objects.

    Args:
        engine: The engine.
        first: Any of its workers: what is read is the same for all.
        extra: The extra layers of all of them.
    """
    return PlanSide(
        engine_id=engine.engine_id,
        tp_size=engine.layout.tp_size,
        stages=_stages(engine),
        num_layers=engine.layout.num_layers,
        total_num_kv_heads=first.model.total_num_kv_heads,
        is_mla=first.model.is_mla,
        block_size=first.kv.block_size,
        pcp_size=engine.layout.pcp_size or 1,
        dcp_size=engine.layout.dcp_size or 1,
        extra=tuple(extra),
    )


def peer_side_of(
    engine: Engine | v1.Engine,
    first: v1.WorkerRecord,
    role: str,
    extra: Sequence[ExtraLayer],
    connector: str,
) -> PeerSide:
    """`peer_side`, out of model or wire objects.

    Args:
        engine: The engine.
        first: Any of its workers.
        role: PRODUCER, CONSUMER or BOTH.
        extra: The extra layers of all workers.
        connector: Class name of its connector; empty where no core is alive.
    """
    factors = dict(first.compat.factors)
    return PeerSide(
        engine_id=engine.engine_id,
        role=role,
        connector=connector,
        handshake_format=first.handshake.format,
        pp_size=engine.layout.pp_size,
        tp_size=engine.layout.tp_size,
        pcp_size=engine.layout.pcp_size or 1,
        dcp_size=engine.layout.dcp_size or 1,
        num_layers=engine.layout.num_layers,
        stages=_stages(engine),
        extra=tuple(extra),
        model=first.model.name,
        dtype=first.model.dtype,
        kv_cache_dtype=first.model.kv_cache_dtype,
        total_num_kv_heads=first.model.total_num_kv_heads,
        head_size=first.model.head_size,
        is_mla=first.model.is_mla,
        block_size=first.kv.block_size,
        kv_layout=first.kv.layout,
        attention_backend=first.kv.attention_backend,
        compat_hashes=frozenset(engine.compat_hashes),
        factors=factors,
        enforce_compat=factors.get("enforce_handshake_compat", "true").lower() != "false",
        permute_kv=factors.get("enable_permute_local_kv", "false").lower() == "true",
    )
