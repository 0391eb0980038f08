"""What a comparison looks at, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankbook.transfer.sides import ExtraLayer

__all__ = ["Comparison", "FactorDifference", "Incompatibility", "Pair", "PeerSide"]

NIXL_PULL = "NIXL pull"
NIXL_PUSH = "NIXL push"
MOONCAKE = "Mooncake"

_FAMILIES = {
    "NixlConnector": NIXL_PULL,
    "NixlPullConnector": NIXL_PULL,
    "NixlPushConnector": NIXL_PUSH,
    "MooncakeConnector": MOONCAKE,
}
_NIXL_BY_MODE = {"pull": NIXL_PULL, "push": NIXL_PUSH}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSide:
    """One engine as a comparison sees it. Empty and zero mean not stated."""

    engine_id: str = ""
    """Name of the engine."""

    role: str = ""
    """PRODUCER, CONSUMER or BOTH."""

    connector: str = ""
    """Class name of the connector. Empty takes the factor `connector`."""

    transfer_mode: str = ""
    """"pull" or "push". Empty takes the factor `transfer_mode`, else what the
    connector's class does."""

    handshake_format: str = ""
    """What the handshake payload is, for example "vllm.nixl"; tells the family
    of a connector whose class is not stated."""

    pp_size: int = 1
    """Pipeline stages."""

    tp_size: int = 1
    """TP ranks of a stage."""

    pcp_size: int = 1
    """Prefill-context-parallel ranks."""

    dcp_size: int = 1
    """Decode-context-parallel ranks."""

    num_layers: int = 0
    """Layers of the model, without extra layers."""

    stages: tuple[tuple[int, int], ...] = ()
    """`(start, end)` of each stage: global layers, end exclusive."""

    extra: tuple[ExtraLayer, ...] = ()
    """Draft, MTP and other layers outside the range."""

    model: str = ""
    """The model's name or path as the engine was given it."""

    dtype: str = ""
    """Type of the weights."""

    kv_cache_dtype: str = ""
    """Type of the KV cache; "auto" is that of the weights."""

    total_num_kv_heads: int = 0
    """KV heads of a layer over all ranks."""

    head_size: int = 0
    """Values in one head."""

    is_mla: bool = False
    """Whether the model uses multi-head latent attention."""

    block_size: int = 0
    """Tokens in a block."""

    kv_layout: str = ""
    """Order of the cache's dimensions, for example "LBHNC"."""

    attention_backend: str = ""
    """Attention backend, for example "FLASH_ATTN"."""

    compat_hashes: frozenset[str] = frozenset()
    """The connector's compatibility hash of every worker, each once."""

    factors: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The values behind the hash."""

    enforce_compat: bool = True
    """False where the connector is told to pair in spite of another hash
    (vLLM's `enforce_handshake_compat`)."""

    permute_kv: bool = False
    """Whether a consumer turns LBHNC into LBNHC as it receives (vLLM's
    `enable_permute_local_kv`)."""

    @property
    def connector_class(self) -> str:
        """Class name of the connector, as stated or by factor."""
        return self.connector or self.factors.get("connector", "")

    @property
    def mode(self) -> str:
        """Who starts a transfer: "pull", "push", or empty where nothing tells."""
        stated = (self.transfer_mode or self.factors.get("transfer_mode", "")).lower()
        if stated:
            return stated
        by_class = {NIXL_PULL: "pull", NIXL_PUSH: "push"}
        return by_class.get(_FAMILIES.get(self.connector_class, ""), "")

    @property
    def family(self) -> str:
        """Whose rules apply: NIXL pull, NIXL push, Mooncake, or none known."""
        if self.connector_class in _FAMILIES:
            return _FAMILIES[self.connector_class]
        # A MultiConnector, or a class from outside, that publishes what a known one does.
        if self.handshake_format.startswith("vllm.nixl"):
            return _NIXL_BY_MODE.get(self.mode, "")
        if self.handshake_format.startswith("vllm.mooncake"):
            return MOONCAKE
        return ""

    @property
    def transfer_tp_size(self) -> int:
        """Ranks of a stage that hold KV of their own (see `PlanSide`)."""
        return self.pcp_size if self.pcp_size > 1 and self.dcp_size > 1 else self.tp_size

    @property
    def kv_dtype(self) -> str:
        """Type of the KV cache with "auto" resolved; empty where not known."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One broken rule."""

    reason: str
    """Stable name of the rule, UPPER_SNAKE."""

    message: str
    """What is wrong and what to change."""

    producer: str
    """The producer's value."""

    consumer: str
    """The consumer's value."""


@dataclass(frozen=True, slots=True)
class FactorDifference:
    """One compatibility factor in which two engines differ."""

    name: str
    """Name of the factor."""

    producer: str
    """The producer's value; empty where it states none."""

    consumer: str
    """The consumer's value; empty where it states none."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two engines may pair."""

    compatible: bool
    """True when no rule is broken."""

    reasons: tuple[Incompatibility, ...]
    """Every rule that is broken."""

    factors: tuple[FactorDifference, ...]
    """Compatibility factors in which the two differ."""

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON shows it: plain dicts, lists and texts."""
        return {
            "compatible": self.compatible,
            "reasons": [
                {
                    "reason": one.reason,
                    "message": one.message,
                    "producer": one.producer,
                    "consumer": one.consumer,
                }
                for one in self.reasons
            ],
            "factors": [
                {"name": one.name, "producer": one.producer, "consumer": one.consumer}
                for one in self.factors
            ],
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines under comparison; what every rule is given."""

    producer: PeerSide
    """The engine that would give KV away."""

    consumer: PeerSide
    """The engine that would take it."""

    factors: tuple[FactorDifference, ...]
    """Compatibility factors in which the two differ."""

    @property
    def families(self) -> frozenset[str]:
        """Whose rules apply. Both sides', where their connectors differ."""
        return frozenset({self.producer.family, self.consumer.family} - {""})

    @property
    def is_push(self) -> bool:
        """Whether the producer starts the transfer; pull where nothing tells."""
        return (self.producer.mode or self.consumer.mode) == "push"

    @property
    def is_mla(self) -> bool:
        """Whether the model is MLA, by either side's word."""
        return self.producer.is_mla or self.consumer.is_mla

    @property
    def kv_heads(self) -> int:
        """KV heads of the model, by either side's word; 0 where not stated."""
        return self.producer.total_num_kv_heads or self.consumer.total_num_kv_heads
