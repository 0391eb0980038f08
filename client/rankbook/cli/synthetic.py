"""Made-up engines for `simulate` and the demo: whole, uneven, and never routable. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rankbook import limits
from rankbook.model import (
    Address,
    Compat,
    Handshake,
    KvCache,
    Layers,
    Layout,
    Model,
    Process,
    Role,
    Slot,
    WorkerRecord,
)
from rankbook.transfer import partition_layers

__all__ = ["Shape", "make_records"]

_RANKS_PER_HOST = 8
_BLOCK_TOKENS = 16
_HEADS = 8
_HEAD_SIZE = 128
_FIRST_PORT = 5600
_PORT_BLOCKS = 4096
"""A host of the benchmark range and one of these: enough places for a large fleet."""
_HOSTNAME_CHARS = limits.MAX_ID_CHARS - len("-node-65535")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a made-up engine looks like."""

    pp_size: int = 1
    tp_size: int = 1
    num_layers: int = 32
    layers: Sequence[int] = ()
    """Layers of each stage; empty takes vLLM's split."""
    role: Role = Role.PRODUCER
    group: str = "sim"
    payload_bytes: int = 1024
    """Size of each worker's made-up handshake payload."""


def make_records(
    shape: Shape, *, engine_id: str, generation: str, boot_ids: Sequence[str]
) -> list[WorkerRecord]:
    """One record a slot, in slot order.

    Args:
        shape: Sizes and role.
        engine_id: Name of the engine.
        generation: Token of the start.
        boot_ids: One a slot: every worker is a process of its own.

    Raises:
        TransferError: The layers do not split as asked.
    """
    partition = ",".join(map(str, shape.layers)) if shape.layers else None
    ranges = partition_layers(shape.num_layers, shape.pp_size, partition)
    layout = Layout(shape.pp_size, shape.tp_size, shape.num_layers)
    heads = max(1, _HEADS // shape.tp_size)
    factors = {"connector": "SimulatedConnector", "transfer_mode": "pull"}
    place = int.from_bytes(_digest(engine_id)[:8], "big")
    first_host, first_port = place >> 32, _FIRST_PORT + place % _PORT_BLOCKS * _RANKS_PER_HOST
    records = []
    for rank, boot_id in enumerate(boot_ids):
        slot = Slot(pp_rank=rank // shape.tp_size, tp_rank=rank % shape.tp_size)
        start, end = ranges[slot.pp_rank]
        host = rank // _RANKS_PER_HOST
        records.append(
            WorkerRecord(
                group=shape.group,
                engine_id=engine_id,
                generation=generation,
                role=shape.role,
                layout=layout,
                slot=slot,
                layers=Layers(
                    start,
                    end,
                    tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(start, end)),
                ),
                model=Model(
                    f"simulated-{shape.num_layers}-layers", "bfloat16", "auto", _HEADS, _HEAD_SIZE
                ),
                kv=KvCache(
                    block_size=_BLOCK_TOKENS,
                    block_len_bytes=2 * 2 * _BLOCK_TOKENS * heads * _HEAD_SIZE,
                    num_blocks=4096,
                    layout="LBHNC",
                    attention_backend="SIMULATED",
                ),
                compat=Compat(_digest(*sorted(factors.items())).hex(), factors),
                addresses=(
                    Address(
                        "zmq",
                        _host(first_host + host),
                        first_port + rank % _RANKS_PER_HOST,
                        "side-channel",
                    ),
                ),
                handshake=Handshake(
                    "rankbook.simulated", 1, _payload(generation, rank, shape.payload_bytes)
                ),
                process=Process(
                    boot_id=boot_id,
                    hostname=f"{engine_id[:_HOSTNAME_CHARS]}-node-{host}",
                    device=f"SIM-{rank}",
                ),
                labels={"simulated": "true"},
            )
        )
    return records


def _host(number: int) -> str:
    """An address of 198.18.0.0/15: set aside for benchmarks, so nobody answers there."""
    number %= 2 * 256 * 256
    return f"198.{18 + number // 65_536}.{number // 256 % 256}.{number % 256}"


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _payload(generation: str, rank: int, size: int) -> bytes:
    seed = _digest(generation, rank)
    return (seed * (size // len(seed) + 1))[:size]
