"""Size rules between two engines, each in one place.

Tensor parallelism splits KV heads, decode context parallelism splits tokens,
and blocks are the unit of a copy. For each there is one rule that says whether
two sizes fit, and every other module asks here.

The rules are vLLM 0.32's: `TransferTopology` for TP and blocks, and
`_validate_remote_agent_handshake` of its NIXL worker for DCP. vLLM asserts;
here the broken rule is a `TransferError` with both values.
"""

from __future__ import annotations

from rankbook.errors import BadRequest, Reason, TransferError

__all__ = [
    "block_size_ratio",
    "check_dcp",
    "head_range",
    "kv_heads",
    "require_rank",
    "require_size",
    "tp_ratio",
]


def require_size(name: str, value: int) -> None:
    """Refuses a size below 1.

    Args:
        name: What the size is called, for the message.
        value: The size.

    Raises:
        BadRequest: `value` is not a positive number.
    """
    if value < 1:
        raise BadRequest(
            f"{name} is {value}; it must be 1 or more",
            metadata={"field": name, "value": value},
        )


def require_rank(name: str, rank: int, size: int) -> None:
    """Refuses a rank outside `[0, size)`.

    Raises:
        BadRequest: The rank is outside its grid.
    """
    if not 0 <= rank < size:
        raise BadRequest(
            f"{name} is {rank}; it must be from 0 to {size - 1}, since the size is {size}",
            metadata={"field": name, "value": rank, "size": size},
        )


def tp_ratio(
    local: int, remote: int, *, local_name: str = "local", remote_name: str = "remote"
) -> int:
    """How many TP ranks of the larger side face one of the smaller.

    Args:
        local: TP ranks of the side that asks.
        remote: TP ranks of its peer.
        local_name: What to call the asking side in an error.
        remote_name: What to call the peer in an error.

    Returns:
        `local // remote`, at least 1, when the local side is the larger or both
        are equal; else `-(remote // local)`, at most -2.

    Raises:
        TransferError: TP_NOT_DIVISIBLE, when neither size divides the other.
        BadRequest: A size is below 1.
    """
    require_size(f"{local_name} tp_size", local)
    require_size(f"{remote_name} tp_size", remote)
    large, small = max(local, remote), min(local, remote)
    if large % small:
        raise TransferError(
            f"{local_name} tp_size {local} and {remote_name} tp_size {remote} do not fit: "
            f"the larger must be a multiple of the smaller, and {large} is not a multiple of "
            f"{small}; start one of the two with another --tensor-parallel-size",
            reason=Reason.TP_NOT_DIVISIBLE,
            metadata={f"{local_name}_tp_size": local, f"{remote_name}_tp_size": remote},
        )
    return local // remote if local >= remote else -(remote // local)


def block_size_ratio(
    local: int, remote: int, *, local_name: str = "local", remote_name: str = "remote"
) -> int:
    """How many of the peer's blocks fill one block of the side that asks.

    The asking side is the one that starts the copy: the consumer in pull, the
    producer in push. It copies at its peer's granularity, so its blocks must be
    made of whole blocks of the peer.

    Args:
        local: Tokens in a block of the side that asks.
        remote: Tokens in a block of its peer.
        local_name: What to call the asking side in an error.
        remote_name: What to call the peer in an error.

    Raises:
        TransferError: BLOCK_SIZE_NOT_DIVISIBLE, when `local % remote` is not 0.
        BadRequest: A size is below 1.
    """
    require_size(f"{local_name} block_size", local)
    require_size(f"{remote_name} block_size", remote)
    if local % remote:
        raise TransferError(
            f"{local_name} block_size {local} is not a multiple of {remote_name} block_size "
            f"{remote} (tokens): the side that starts the copy needs blocks made of whole blocks "
            f"of its peer; start the two with equal --block-size, or the {local_name} side with "
            f"a multiple of {remote}",
            reason=Reason.BLOCK_SIZE_NOT_DIVISIBLE,
            metadata={f"{local_name}_block_size": local, f"{remote_name}_block_size": remote},
        )
    return local // remote


def check_dcp(
    local: int, remote: int, *, local_name: str = "local", remote_name: str = "remote"
) -> None:
    """Refuses two DCP sizes of which neither divides the other.

    Raises:
        TransferError: DCP_NOT_DIVISIBLE.
        BadRequest: A size is below 1.
    """
    require_size(f"{local_name} dcp_size", local)
    require_size(f"{remote_name} dcp_size", remote)
    if local % remote and remote % local:
        raise TransferError(
            f"{local_name} dcp_size {local} and {remote_name} dcp_size {remote} do not fit: "
            "one must divide the other, else their token slices do not line up; start one of "
            "the two with another --decode-context-parallel-size",
            reason=Reason.DCP_NOT_DIVISIBLE,
            metadata={f"{local_name}_dcp_size": local, f"{remote_name}_dcp_size": remote},
        )


def kv_heads(total_num_kv_heads: int, *, is_mla: bool) -> int:
    """KV heads over all ranks, as vLLM counts them: 1 for an MLA model.

    Args:
        total_num_kv_heads: What the record states; 0 where it states nothing.
        is_mla: Whether the model uses multi-head latent attention.

    Raises:
        TransferError: HEADS_UNKNOWN, when the count is needed and not stated.
    """
    if is_mla:
        return 1
    if total_num_kv_heads < 1:
        raise TransferError(
            f"total_num_kv_heads is {total_num_kv_heads}, so which rank holds which heads is "
            "not known; publish model.total_num_kv_heads (or model.is_mla) in the worker records",
            reason=Reason.HEADS_UNKNOWN,
            metadata={"total_num_kv_heads": total_num_kv_heads},
        )
    return total_num_kv_heads


def head_range(tp_rank: int, tp_size: int, total_num_kv_heads: int) -> tuple[int, int]:
    """Global KV heads that one TP rank holds.

    With more ranks than heads several ranks hold the same one: of 2 heads over
    4 ranks, ranks 0 and 1 hold head 0. Where neither number divides the other,
    which no model loads with, a rank is taken to hold every head it has a share
    of; vLLM's source ranks are kept there too, and may hold less than is asked.

    Args:
        tp_rank: The rank.
        tp_size: Ranks of a stage.
        total_num_kv_heads: Heads of a layer over all ranks, 1 for MLA.

    Returns:
        First head, and one past the last. Never empty.
    """
    start = tp_rank * total_num_kv_heads // tp_size
    return start, -(-(tp_rank + 1) * total_num_kv_heads // tp_size)
