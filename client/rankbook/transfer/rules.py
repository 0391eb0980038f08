"""Every rule that two engines must keep to pair, one function a rule.

A rule yields what breaks it and nothing else. Rules that hold for every
connector come first; those of one connector ask `Pair.families`. The source of
each is named: the file is in vLLM 0.32's NIXL folder unless another is given.

The order is that of the verdict, and the reasons are stable names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rankbook.errors import TransferError
from rankbook.transfer.peers import MOONCAKE, NIXL_PULL, NIXL_PUSH, Incompatibility, Pair, PeerSide
from rankbook.transfer.ratios import block_size_ratio, check_dcp, tp_ratio

__all__ = ["RULES"]

_Rule = Callable[[Pair], Iterator[Incompatibility]]

_BLOCK_CONTIGUOUS = frozenset({"LBHNC", "BLHNC"})
_LAYOUTS = frozenset({"LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"})
_SAME_CONNECTOR = {"NixlPullConnector": "NixlConnector"}
_WRAPPER = "MultiConnector"


def _two_engines(pair: Pair) -> Iterator[Incompatibility]:
    """An engine cannot be its own peer (`TransferTopology`)."""
    one, other = pair.producer.engine_id, pair.consumer.engine_id
    if one and one == other:
        yield Incompatibility(
            "LOCAL_ENGINE", f'engine "{one}" is on both sides; name two engines', one, other
        )


def _roles(pair: Pair) -> Iterator[Incompatibility]:
    """One gives and one takes."""
    roles = (pair.producer.role, pair.consumer.role)
    if roles[0] == "CONSUMER":
        yield Incompatibility(
            "ROLE_NOT_PRODUCER",
            f'"{pair.producer.engine_id}" is a consumer and gives no KV away; swap the two, or '
            "start it with kv_role kv_producer",
            *roles,
        )
    if roles[1] == "PRODUCER":
        yield Incompatibility(
            "ROLE_NOT_CONSUMER",
            f'"{pair.consumer.engine_id}" is a producer and takes no KV; swap the two, or start '
            "it with kv_role kv_consumer",
            *roles,
        )


def _connectors(pair: Pair) -> Iterator[Incompatibility]:
    """Connectors speak only to their own kind.

    A MultiConnector speaks as its child does that shakes hands, and vLLM's hash has
    no class name in it (metadata.py `compute_nixl_compatibility_hash`).
    """
    names = (pair.producer.connector_class, pair.consumer.connector_class)
    kinds = {_SAME_CONNECTOR.get(name, name) for name in names}
    if _WRAPPER in names and pair.producer.family == pair.consumer.family != "":
        return
    if all(names) and len(kinds) > 1:
        yield Incompatibility(
            "CONNECTOR_MISMATCH",
            f"producer uses {names[0]} and consumer {names[1]}; give both the same kv_connector",
            *names,
        )


def _modes(pair: Pair) -> Iterator[Incompatibility]:
    """Push and pull never shake hands (metadata.py: factor `transfer_mode`)."""
    modes = (pair.producer.mode, pair.consumer.mode)
    if all(modes) and modes[0] != modes[1]:
        yield Incompatibility(
            "TRANSFER_MODE_MISMATCH",
            f"producer is set to {modes[0]} and consumer to {modes[1]}; nobody, or both, would "
            "start the transfer; set both to one",
            *modes,
        )


def _hashes(pair: Pair) -> Iterator[Incompatibility]:
    """One hash over all workers of both (base_worker.py `_nixl_handshake`).

    The consumer checks in pull, both sides in push. A hash that varies inside an
    engine fails too: each consumer rank compares its own with every stage's.
    """
    sides = (pair.producer, pair.consumer)
    checks = any(one.enforce_compat for one in sides) if pair.is_push else sides[1].enforce_compat
    hashes = [one.compat_hashes - {""} for one in sides]
    if not checks or not all(hashes) or len(hashes[0] | hashes[1]) == 1:
        return
    named = "; ".join(
        f'{one.name} is "{one.producer}" at the producer and "{one.consumer}" at the consumer'
        for one in pair.factors
        if one.name != "extra_layers"
    )
    cause = f"they differ in: {named}" if named else "the factors they state do not differ"
    yield Incompatibility(
        "COMPAT_HASH_MISMATCH",
        f"the connectors' compatibility hashes differ; {cause}; start both with the same vLLM "
        "version, model and KV cache settings",
        *(",".join(sorted(one)) for one in hashes),
    )


def _model(pair: Pair) -> Iterator[Incompatibility]:
    """The facts of the model that decide what a block means (metadata.py)."""
    p, c = pair.producer, pair.consumer
    if p.enforce_compat and c.enforce_compat:
        yield from _differ(
            "MODEL_DIFFERS",
            "model",
            p.model,
            c.model,
            "serve one model, by the same name or path on both",
        )
    yield from _differ(
        "LAYERS_DIFFER", "num_layers", p.num_layers, c.num_layers, "serve the same model on both"
    )
    split = c if p.is_mla else p
    stated = split.total_num_kv_heads or split.head_size or split.model
    if p.is_mla != c.is_mla and stated:
        yield Incompatibility(
            "MLA_DIFFERS",
            f"one side uses latent attention and the other does not (producer: {p.is_mla}, "
            f"consumer: {c.is_mla}); serve the same model on both",
            str(p.is_mla).lower(),
            str(c.is_mla).lower(),
        )
    elif not pair.is_mla:
        yield from _differ(
            "KV_HEADS_DIFFER",
            "total_num_kv_heads",
            p.total_num_kv_heads,
            c.total_num_kv_heads,
            "serve the same model on both",
        )
    yield from _differ(
        "HEAD_SIZE_DIFFERS", "head_size", p.head_size, c.head_size, "serve the same model on both"
    )
    yield from _differ(
        "DTYPE_DIFFERS", "dtype", p.dtype, c.dtype, "start both with the same --dtype"
    )
    yield from _differ(
        "KV_CACHE_DTYPE_DIFFERS",
        "kv_cache_dtype",
        p.kv_dtype,
        c.kv_dtype,
        "start both with the same --kv-cache-dtype",
    )


def _sizes(pair: Pair) -> Iterator[Incompatibility]:
    """TP, DCP and block sizes must divide (`TransferTopology`)."""
    p, c = pair.producer, pair.consumer
    names = {"local_name": "consumer", "remote_name": "producer"}
    try:
        tp_ratio(c.transfer_tp_size, p.transfer_tp_size, **names)
    except TransferError as error:
        yield _broken(error, p.transfer_tp_size, c.transfer_tp_size)
    try:
        check_dcp(c.dcp_size, p.dcp_size, **names)
    except TransferError as error:
        yield _broken(error, p.dcp_size, c.dcp_size)
    if p.block_size and c.block_size:
        try:
            if pair.is_push:
                block_size_ratio(
                    p.block_size, c.block_size, local_name="producer", remote_name="consumer"
                )
            else:
                block_size_ratio(c.block_size, p.block_size, **names)
        except TransferError as error:
            yield _broken(error, p.block_size, c.block_size)


def _context_parallel(pair: Pair) -> Iterator[Incompatibility]:
    """DCP is all or nothing and MLA only; PCP is for producers.

    vLLM's config/vllm.py for DCP, connector.py and `_validate_remote_parallel_config`
    for PCP.
    """
    p, c = pair.producer, pair.consumer
    values = (f"pcp {p.pcp_size}, dcp {p.dcp_size}", f"pcp {c.pcp_size}, dcp {c.dcp_size}")
    for who, side in (("producer", p), ("consumer", c)):
        if side.pcp_size > 1 and side.dcp_size > 1 and side.tp_size != 1:
            yield Incompatibility(
                "PCP_DCP_UNSUPPORTED",
                f"{who} has pcp_size {side.pcp_size} and dcp_size {side.dcp_size} with tp_size "
                f"{side.tp_size}; together they need tp_size 1",
                *values,
            )
        if side.dcp_size not in (1, side.transfer_tp_size):
            yield Incompatibility(
                "DCP_PARTIAL",
                f"{who} has dcp_size {side.dcp_size}; it must be 1 or {side.transfer_tp_size}, "
                "the number of ranks in a stage",
                *values,
            )
        if side.dcp_size > 1 and not side.is_mla:
            yield Incompatibility(
                "DCP_NEEDS_MLA",
                f"{who} has dcp_size {side.dcp_size} and its model is not MLA; use dcp_size 1",
                *values,
            )
    if c.pcp_size > 1:
        yield Incompatibility(
            "PCP_CONSUMER_UNSUPPORTED",
            f"consumer has pcp_size {c.pcp_size}; only producers may have more than 1",
            *values,
        )
    if p.pcp_size > 1 and p.dcp_size == 1 and c.dcp_size > 1:
        yield Incompatibility(
            "PCP_DCP_MIXED",
            f"producer's {p.pcp_size} pcp ranks hold copies and the consumer shards tokens over "
            f"dcp_size {c.dcp_size}; use dcp_size 1 on the consumer",
            *values,
        )


def _layouts(pair: Pair) -> Iterator[Incompatibility]:
    """The same order of dimensions, and whole heads where TP differs (base_worker.py)."""
    p, c = pair.producer, pair.consumer
    if pair.is_mla or not (p.kv_layout and c.kv_layout):
        return
    layouts = (p.kv_layout, c.kv_layout)
    permutes = c.permute_kv and not pair.is_push and layouts == ("LBHNC", "LBNHC")
    if layouts[0] != layouts[1] and not permutes:
        yield Incompatibility(
            "KV_LAYOUT_DIFFERS",
            f"producer lays KV out as {layouts[0]} and consumer as {layouts[1]}; use one layout "
            "(pull can also receive LBHNC into LBNHC with enable_permute_local_kv)",
            *layouts,
        )
    starter = p if pair.is_push else c
    target = c if pair.is_push else p
    copies = bool(pair.kv_heads) and target.tp_size > pair.kv_heads
    if (
        p.tp_size != c.tp_size
        and not copies
        and not c.permute_kv
        and starter.kv_layout in _LAYOUTS - _BLOCK_CONTIGUOUS
    ):
        yield Incompatibility(
            "KV_LAYOUT_NOT_CONTIGUOUS",
            f"tp_size {p.tp_size} and {c.tp_size} differ, so heads are split, and layout "
            f"{starter.kv_layout} does not keep them together in a block; use LBHNC or BLHNC, or "
            "equal tp_size",
            *layouts,
        )


def _nixl_pipelines(pair: Pair) -> Iterator[Incompatibility]:
    """Who may have stages (base_worker.py: handshake of pull, constructor of both)."""
    p, c = pair.producer, pair.consumer
    if NIXL_PULL in pair.families and p.pp_size > 1:
        yield Incompatibility(
            "PULL_PP_PRODUCER_UNSUPPORTED",
            f"producer has {p.pp_size} pipeline stages, and NIXL in pull mode reads the first "
            "stage only; use NixlPushConnector on both sides, or pp_size 1 on the producer",
            str(p.pp_size),
            str(c.pp_size),
        )
    if pair.families & {NIXL_PULL, NIXL_PUSH} and c.pp_size > 1:
        yield Incompatibility(
            "PP_CONSUMER_UNSUPPORTED",
            f"consumer has {c.pp_size} pipeline stages, and a NIXL consumer counts completions "
            "for one; use pp_size 1 on the consumer",
            str(p.pp_size),
            str(c.pp_size),
        )


def _nixl_push(pair: Pair) -> Iterator[Incompatibility]:
    """Push knows no DCP (connector.py)."""
    p, c = pair.producer, pair.consumer
    if NIXL_PUSH in pair.families and (p.dcp_size > 1 or c.dcp_size > 1):
        yield Incompatibility(
            "PUSH_DCP_UNSUPPORTED",
            "NixlPushConnector works with dcp_size 1 only; use dcp_size 1 on both, or pull",
            str(p.dcp_size),
            str(c.dcp_size),
        )


def _nixl_unequal_tp(pair: Pair) -> Iterator[Incompatibility]:
    """The side that starts the copy must not be narrower than copied heads.

    base_worker.py `_validate_remote_agent_handshake`: a bare assert for copies,
    another for block sizes. "Local" there is the consumer in pull and the
    producer in push.
    """
    if not pair.families & {NIXL_PULL, NIXL_PUSH} or pair.is_mla:
        return
    p, c = pair.producer, pair.consumer
    who = ("producer", "consumer") if pair.is_push else ("consumer", "producer")
    starter, target = (p, c) if pair.is_push else (c, p)
    if target.tp_size <= starter.tp_size:
        return
    if pair.kv_heads and target.tp_size > pair.kv_heads:
        yield Incompatibility(
            "REPLICATED_HEADS_UNSUPPORTED",
            f"{who[1]} has tp_size {target.tp_size} for {pair.kv_heads} KV heads, so its ranks "
            f"hold copies, and {who[0]} has only {starter.tp_size}; NIXL needs tp_size of the "
            f"{who[1]} at most {max(pair.kv_heads, starter.tp_size)} here, or equal tp_size",
            str(p.tp_size),
            str(c.tp_size),
        )
    elif p.block_size and c.block_size and p.block_size != c.block_size:
        yield Incompatibility(
            "BLOCK_SIZE_DIFFERS_WITH_TP",
            f"{who[1]} tp_size {target.tp_size} is above {who[0]} tp_size {starter.tp_size}, and "
            f"block sizes differ ({p.block_size} and {c.block_size} tokens); make one of the two "
            "equal on both sides",
            str(p.block_size),
            str(c.block_size),
        )


def _mooncake_stages(pair: Pair) -> Iterator[Incompatibility]:
    """With as many stages on both sides Mooncake pairs them by rank.

    mooncake_connector.py asks every stage only where the counts differ.
    """
    p, c = pair.producer, pair.consumer
    if MOONCAKE in pair.families and len(p.stages) == len(c.stages) > 1 and p.stages != c.stages:
        yield Incompatibility(
            "STAGE_SPLIT_DIFFERS",
            "both sides have as many stages, Mooncake then pairs stage with stage, and their "
            "layers differ; give both the same VLLM_PP_LAYER_PARTITION",
            _stage_text(p),
            _stage_text(c),
        )


RULES: tuple[_Rule, ...] = (
    _two_engines,
    _roles,
    _connectors,
    _modes,
    _hashes,
    _model,
    _sizes,
    _context_parallel,
    _layouts,
    _nixl_pipelines,
    _nixl_push,
    _nixl_unequal_tp,
    _mooncake_stages,
)
"""Every rule, in the order of the verdict."""


def _differ(
    reason: str, name: str, producer: str | int, consumer: str | int, remedy: str
) -> Iterator[Incompatibility]:
    if producer and consumer and producer != consumer:
        yield Incompatibility(
            reason,
            f"{name} is {producer} at the producer and {consumer} at the consumer; {remedy}",
            str(producer),
            str(consumer),
        )


def _broken(error: TransferError, producer: int, consumer: int) -> Incompatibility:
    return Incompatibility(error.reason.value, error.message, str(producer), str(consumer))


def _stage_text(side: PeerSide) -> str:
    return " ".join(f"[{start}, {end})" for start, end in side.stages)
