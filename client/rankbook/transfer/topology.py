"""Where one worker stands towards the engines it exchanges KV with.

A torch-free counterpart of vLLM 0.32's `EngineTransferInfo` and
`TransferTopology`: same names, same defaults, same answers. Three things are
stricter, because vLLM's way hides a fault:

- another info under a known key is an error that shows both (vLLM keeps the
  first in silence, so a failed handshake leaves stale sizes behind);
- an engine that was never registered is `NotFound`, not a bare `KeyError`;
- sizes that do not fit are a `TransferError`, which is also a `ValueError`,
  where vLLM asserts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankbook.errors import NotFound, Reason, TransferError
from rankbook.transfer.ratios import (
    block_size_ratio,
    check_dcp,
    kv_heads,
    require_rank,
    require_size,
    tp_ratio,
)

__all__ = ["EngineTransferInfo", "TransferTopology"]


@dataclass(frozen=True, slots=True)
class EngineTransferInfo:
    """One pipeline stage of a remote engine, as seen at its handshake."""

    remote_tp_size: int
    """TP ranks of a stage."""

    remote_block_len: int
    """Length of one block of one layer on one rank, in bytes."""

    remote_block_size: int
    """Tokens in a block."""

    remote_physical_blocks_per_logical: int
    """Physical blocks behind one logical block."""

    remote_pp_rank: int = 0
    """The stage."""

    start_layer: int = 0
    """Global index of the stage's first layer."""

    end_layer: int = 0
    """One past the global index of the stage's last layer."""

    remote_dcp_size: int = 1
    """Decode-context-parallel ranks."""


@dataclass(slots=True, eq=False)
class TransferTopology:
    """One local rank's view: its own sizes, and what it knows of its peers.

    Peers are kept by `(engine_id, pp_rank)`. A caller that knows nothing of
    pipeline stages leaves `remote_pp_rank` at 0 and sees no difference.

    The methods that take sizes are pure arithmetic and need no registration.
    Registering may happen on one thread while others ask.

    Raises:
        BadRequest: A size is below 1, or `tp_rank` is outside `tp_size`.
    """

    tp_rank: int
    """This rank."""

    tp_size: int
    """TP ranks of the local engine."""

    block_size: int
    """Tokens in a local block."""

    engine_id: str
    """Name of the local engine."""

    is_mla: bool
    """Whether every TP rank holds the same KV, as with latent attention."""

    total_num_kv_heads: int
    """KV heads of a layer over all ranks; 1 for MLA, 0 where not known."""

    dcp_size: int = 1
    """Decode-context-parallel ranks of the local engine."""

    _engines: dict[tuple[str, int], EngineTransferInfo] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        require_size("tp_size", self.tp_size)
        require_size("block_size", self.block_size)
        require_size("dcp_size", self.dcp_size)
        require_rank("tp_rank", self.tp_rank, self.tp_size)

    # What is known of peers.

    def register_remote_engine(
        self, remote_engine_id: str, info: EngineTransferInfo
    ) -> EngineTransferInfo:
        """Remembers one stage of a remote engine.

        Args:
            remote_engine_id: Name of the engine.
            info: The stage; its `remote_pp_rank` is part of the key.

        Returns:
            The info that is kept. Registering an equal one again returns the
            first and changes nothing.

        Raises:
            TransferError: LOCAL_ENGINE, for this engine's own name;
                ENGINE_INFO_CHANGED, when the key holds another info.
        """
        if remote_engine_id == self.engine_id:
            raise TransferError(
                f'engine "{remote_engine_id}" is the local engine and cannot be its own remote; '
                "check whose engine_id the peer's address answers with (a loopback address "
                "leads back here)",
                reason=Reason.LOCAL_ENGINE,
                metadata={"engine_id": remote_engine_id},
            )
        kept = self._engines.setdefault((remote_engine_id, info.remote_pp_rank), info)
        if kept != info:
            raise TransferError(
                f'engine "{remote_engine_id}" stage {info.remote_pp_rank} is registered as '
                f"{kept} and now claims to be {info}; if it restarted, call "
                "unregister_remote_engine first",
                reason=Reason.ENGINE_INFO_CHANGED,
                metadata={
                    "engine_id": remote_engine_id,
                    "pp_rank": info.remote_pp_rank,
                    "registered": kept,
                    "claimed": info,
                },
            )
        return kept

    def unregister_remote_engine(self, remote_engine_id: str) -> None:
        """Forgets every stage of an engine, so that a restart can register anew.

        An engine that is not registered is no error.
        """
        for key in [key for key in list(self._engines) if key[0] == remote_engine_id]:
            self._engines.pop(key, None)

    def get_engine_info(self, remote_engine_id: str, remote_pp_rank: int = 0) -> EngineTransferInfo:
        """Returns what was registered for one stage.

        Raises:
            NotFound: That stage of that engine is not registered.
        """
        info = self._engines.get((remote_engine_id, remote_pp_rank))
        if info is None:
            stages = sorted(pp for engine, pp in list(self._engines) if engine == remote_engine_id)
            known = f"only stages {stages} are" if stages else "none of its stages is"
            raise NotFound(
                f'engine "{remote_engine_id}" stage {remote_pp_rank} is not registered here; '
                f"{known}; register_remote_engine comes first",
                metadata={
                    "engine_id": remote_engine_id,
                    "pp_rank": remote_pp_rank,
                    "registered_pp_ranks": ",".join(map(str, stages)),
                },
            )
        return info

    # Arithmetic on sizes.

    @property
    def dcp_rank(self) -> int:
        """Which token slice this rank holds: `tp_rank % dcp_size`."""
        return self.tp_rank % self.dcp_size

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Positive where the local side has more ranks or as many, else negative.

        Raises:
            TransferError: TP_NOT_DIVISIBLE.
        """
        return tp_ratio(self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """How many remote blocks fill one local block.

        Raises:
            TransferError: BLOCK_SIZE_NOT_DIVISIBLE.
        """
        return block_size_ratio(self.block_size, remote_block_size)

    def handshake_target_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """TP ranks of a remote stage to shake hands with, and to notify.

        Raises:
            TransferError: TP_NOT_DIVISIBLE, or DCP_NOT_DIVISIBLE when the remote
                side shards tokens.
        """
        if remote_dcp_size > 1:
            return self._token_slice_ranks(remote_tp_size, remote_dcp_size)
        return self._facing_ranks(remote_tp_size)

    def source_ranks(self, remote_tp_size: int, remote_dcp_size: int = 1) -> list[int]:
        """TP ranks of a remote stage to read KV from.

        Fewer than `handshake_target_ranks` where the remote side holds copies:
        one rank is enough for MLA, and one a head where ranks outnumber heads.
        They are spread, so that not every reader takes the first copy.

        Raises:
            TransferError: TP_NOT_DIVISIBLE, DCP_NOT_DIVISIBLE, or HEADS_UNKNOWN.
        """
        if self.is_mla and remote_dcp_size > 1:
            return self._token_slice_ranks(remote_tp_size, remote_dcp_size)
        facing = self._facing_ranks(remote_tp_size)
        if len(facing) == 1:
            return facing
        heads = kv_heads(self.total_num_kv_heads, is_mla=self.is_mla)
        first_holder: dict[int, int] = {}
        for rank in facing:
            first_holder.setdefault(rank * heads // remote_tp_size, rank)
        return list(first_holder.values())

    def rank_offset_factor(self, remote_tp_size: int) -> int:
        """First head to read inside the source rank, in units of local heads.

        0 where the local rank takes all that the source holds.

        Raises:
            TransferError: TP_NOT_DIVISIBLE, or HEADS_UNKNOWN.
        """
        ratio = self.tp_ratio(remote_tp_size)
        if self.is_mla or ratio <= 1:
            return 0
        heads = kv_heads(self.total_num_kv_heads, is_mla=self.is_mla)
        if self.tp_size > heads:
            source_start = (self.tp_rank // ratio) * heads // remote_tp_size
            return self.tp_rank * heads // self.tp_size - source_start
        return self.tp_rank % ratio

    def consumer_count(self, remote_tp_size: int, remote_dcp_size: int = 1) -> int:
        """Local ranks of one stage that contact any one remote rank.

        So many notices a remote rank waits for from one stage of ours.

        Raises:
            TransferError: TP_NOT_DIVISIBLE, or DCP_NOT_DIVISIBLE when the remote
                side shards tokens.
        """
        if remote_dcp_size > 1:
            check_dcp(self.dcp_size, remote_dcp_size)
            if self.dcp_size == 1:
                return self.tp_size
            return max(1, self.dcp_size // remote_dcp_size)
        return max(1, self.tp_ratio(remote_tp_size))

    @property
    def local_replicates_kv_cache(self) -> bool:
        """Whether several local ranks hold the same KV.

        Raises:
            TransferError: HEADS_UNKNOWN.
        """
        return self.is_mla or self.tp_size > kv_heads(self.total_num_kv_heads, is_mla=False)

    # The same, of an engine that is registered.

    def target_remote_ranks(self, remote_engine_id: str, remote_pp_rank: int = 0) -> list[int]:
        """TP ranks of a registered stage that face this rank, DCP left aside.

        Raises:
            NotFound: The stage is not registered.
            TransferError: TP_NOT_DIVISIBLE.
        """
        return self._facing_ranks(
            self.get_engine_info(remote_engine_id, remote_pp_rank).remote_tp_size
        )

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether the remote stage has more TP ranks than there are KV heads.

        Raises:
            NotFound: The stage is not registered.
            TransferError: HEADS_UNKNOWN.
        """
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return info.remote_tp_size > kv_heads(self.total_num_kv_heads, is_mla=self.is_mla)

    def replicates_kv_cache(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether several ranks of the remote stage hold the same KV.

        Always so for MLA, but only of a stage that is registered.

        Raises:
            NotFound: The stage is not registered.
            TransferError: HEADS_UNKNOWN.
        """
        replicated = self.is_kv_replicated(remote_engine_id, remote_pp_rank)
        return self.is_mla or replicated

    def describe(self, remote_engine_id: str, remote_pp_rank: int = 0) -> str:
        """One line for a log: both sides' sizes and this rank.

        Raises:
            NotFound: The stage is not registered.
            TransferError: TP_NOT_DIVISIBLE.
        """
        info = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return (
            f"{self.engine_id} rank {self.tp_rank} <-> {remote_engine_id} stage {remote_pp_rank}: "
            f"tp {self.tp_size}:{info.remote_tp_size} (ratio {self.tp_ratio(info.remote_tp_size)}) "
            f"dcp {self.dcp_size}:{info.remote_dcp_size} "
            f"kv_heads {1 if self.is_mla else self.total_num_kv_heads} "
            f"block_size {self.block_size}:{info.remote_block_size} "
            f"remote_block_len {info.remote_block_len} "
            f"remote_layers [{info.start_layer}, {info.end_layer})"
        )

    def _facing_ranks(self, remote_tp_size: int) -> list[int]:
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))

    def _token_slice_ranks(self, remote_tp_size: int, remote_dcp_size: int) -> list[int]:
        # Rank r holds the tokens that are r modulo its DCP size. The coarser
        # side's slice is made of the finer side's slices, so ranks match modulo
        # the smaller size.
        require_size("remote tp_size", remote_tp_size)
        check_dcp(self.dcp_size, remote_dcp_size)
        if self.dcp_size > remote_dcp_size:
            return [self.dcp_rank % remote_dcp_size]
        return [r for r in range(remote_tp_size) if r % self.dcp_size == self.dcp_rank]
