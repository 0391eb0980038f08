"""For the author of a connector outside vLLM: sign in, find one's peers, read by the plan.

    @signs_in
    class MyConnector(KVConnectorBase_V1):
        def register_kv_caches(self, kv_caches):
            self.caches, self.door = kv_caches, serve(kv_caches)
            self.peers = Peers(self)

        def get_handshake_metadata(self):
            return self.door  # a dataclass: published for this worker

        def load(self, params, blocks):  # on a thread of its own
            producer = self.peers.topology(
                params["remote_engine_id"], params["remote_generation"], timeout_s=30
            )
            for part in self.peers.share(producer).read:
                door = self.peers.payload(producer, part.rank, Door)
                ...

The README has the whole of it. Errors are those of `rankbook.errors`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rankbook.errors import BadRecord, Incompatible, Incomplete, Reason, TransferError
from rankbook.model import Topology, WorkerRecord
from rankbook.pairing import peer_side, plan_side
from rankbook.transfer import Plan, PlanSide, Rank, Read, TransferMode, compare_peers, plan_transfer
from rankbook.transfer.ratios import head_range, kv_heads
from rankbook_vllm import _vllm, config, connectors
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.record import layer_index
from rankbook_vllm.seal import listed

__all__ = ["Part", "Peers", "Plan", "Rank", "Share", "Topology", "signs_in"]

C = TypeVar("C", bound=type)
T = TypeVar("T")


class _TakenFromTheBook:
    """Goes before a connector whose scheduler takes no handshake metadata itself.

    vLLM's guard against metadata of later stages is for those who would lose it.
    """

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Leaves them where they are: in the book."""


def signs_in(connector: C) -> C:
    """Makes a connector class publish its workers and seal its engine. A decorator.

    What the class's `get_handshake_metadata` returns after `register_kv_caches`
    is the worker's payload: a dataclass of plain values, at most 512 KiB, or
    None. The class's own scheduler gets it as vLLM hands it over, if it
    overrides one of `set_xfer_handshake_metadata[_pp_aware]`.

    Settings are in `kv_connector_extra_config["rankbook"]`, see
    `rankbook_vllm.config`. The class keeps its name and module, so
    `kv_connector` and `kv_connector_module_path` name it as before.
    """
    between = () if _vllm.takes_metadata(connector) else (_TakenFromTheBook,)
    return cast(C, connectors.subclass(connector, *between, module=connector.__module__))


@dataclass(frozen=True, slots=True)
class Part:
    """KV of one worker of a peer that this worker reads, in both workers' terms."""

    rank: Rank
    """The peer's worker."""
    layers: range
    """Global indices of the layers."""
    names: tuple[str, ...]
    """Names of these layers' caches, the same on both sides."""
    heads: slice
    """KV heads in that worker's caches. All of them for a model with latent attention."""
    into: slice
    """Where they belong in this worker's caches."""


@dataclass(frozen=True, slots=True)
class Share:
    """What this worker does in every transfer from one peer."""

    rank: Rank
    """This worker."""
    contact: tuple[Rank, ...]
    """The peer's workers to notify when everything is read, also those of which
    nothing is read: each keeps a request's blocks until all who should have told it."""
    read: tuple[Part, ...]
    """What to read, by rank and layer."""
    expected_completions: int
    """Completions to wait for: own reads in pull, writers in push."""


class Peers:
    """The peers of a connector's engine, out of this process's copy of the book.

    Safe to use from many threads. Only `topology` waits; the copy is kept by a
    watch and goes on answering while the registry is away.
    """

    def __init__(self, connector: Any, *, mode: TransferMode | str = TransferMode.PULL) -> None:
        """Begins to follow the book in the background; returns at once.

        Args:
            connector: The connector, of a class that `signs_in`; either role.
            mode: Who starts a transfer: the consumer ("pull") or the producer
                ("push").

        Raises:
            TypeError: The connector's class does not sign in.
            BadRequest: A rankbook setting is unknown or wrong.
        """
        if not isinstance(connector, connectors.RankbookMixin):
            raise TypeError(f"{type(connector).__name__} does not sign in: decorate it @signs_in")
        transfer = connector._vllm_config.kv_transfer_config
        settings = config.load(transfer.kv_connector_extra_config.get("rankbook"), os.environ)
        self._connector = connector
        self._mode = mode
        self._timeout_s = settings.peer_timeout_s
        self._plans: dict[tuple[str, str, str, str], Plan] = {}
        self.engine_id: str = transfer.engine_id
        """This engine."""
        self.book = PeerBook(settings, _vllm.logger)
        """The copy itself, for looking without waiting and for callbacks."""
        self.book.start()

    def close(self) -> None:
        """Ends the copy's upkeep within two seconds. May be called again."""
        self.book.close()

    @property
    def generation(self) -> str:
        """This engine's start; what it hands a peer is good for this start only.

        Empty before the workers agreed on it, which is after the constructor of
        the connector; in the engine core, before it was given their metadata.
        """
        return self._connector.rankbook_generation

    def own(self) -> Topology:
        """This engine, sealed; waits for its seal at most `peer_timeout_s`.

        Raises:
            RankbookError: It is not sealed.
        """
        return self.topology(self.engine_id, self.generation, timeout_s=self._timeout_s)

    def topology(self, engine_id: str, generation: str = "", *, timeout_s: float) -> Topology:
        """A peer, whole and sealed; waits for it at most `timeout_s` seconds.

        Args:
            engine_id: The peer: `remote_engine_id` of a request.
            generation: The start that the request's block ids are of,
                `remote_generation`; empty where any will do.
            timeout_s: How long a peer that is not there yet is waited for.

        Raises:
            Gone: It, or that start of it, is dead: the blocks are lost.
            Incomplete: A worker is missing; `missing` in the metadata.
            DeadlineExceeded: It was not READY in time; the message says why not.
            RankbookError: Another reason why it cannot be used.
        """
        return self.book.wait(engine_id, generation, timeout_s=timeout_s)

    def payload(self, topology: Topology, rank: Rank, kind: type[T]) -> T:
        """What a peer's worker returned from its `get_handshake_metadata`.

        Args:
            topology: The peer.
            rank: Its worker.
            kind: The dataclass; its name must be that of the peer's.

        Raises:
            Incomplete: The worker is not there.
            BadRecord: It published something else.
        """
        record = _worker(topology, rank)
        try:
            return _vllm.metadata_of(record.handshake, kind)
        except ValueError as error:
            raise BadRecord(
                f"{topology.engine.engine_id} pp{rank.pp_rank} tp{rank.tp_rank} published no "
                f"{kind.__name__}: {error}",
                metadata={"field": "handshake", "value": kind.__name__},
            ) from None

    # ------------------------------------------------------------------ the plan

    def plan(self, producer: Topology, consumer: Topology) -> Plan:
        """The whole plan of a transfer, as `rankbook plan` shows it.

        Raises:
            Incompatible: The two may not pair; every broken rule is named.
            TransferError: No plan exists between these layouts.
        """
        key = (
            *(producer.engine.engine_id, producer.engine.generation),
            *(consumer.engine.engine_id, consumer.engine.generation),
        )
        plan = self._plans.get(key)
        if plan is None:
            _check_pair(producer, consumer)
            plan = plan_transfer(plan_side(producer), plan_side(consumer), self._mode)
            self._plans = {k: v for k, v in self._plans.items() if not _replaces(key, k)}
            self._plans[key] = plan
        return plan

    def share(self, producer: Topology) -> Share:
        """What this worker does to get KV from a producer. In a worker only.

        Raises:
            Incompatible: The two may not pair, or the producer lacks a cache that
                this worker has.
            TransferError: No plan exists between the two layouts; or HEADS_UNKNOWN
                for a draft model's layers over other TP sizes: use `plan`.
            RankbookError: This engine itself is not sealed.
        """
        own = self.own()
        here = self._rank(own)
        if here is None:
            slot = _vllm.slot()
            return Share(Rank(slot.pp_rank, slot.tp_rank), (), (), 0)
        plan = self.plan(producer, own)
        mine = next(one for one in plan.consumers if (one.pp_rank, one.tp_rank) == _pair(here))
        sides = plan_side(producer), plan_side(own)
        parts = tuple(_part(producer, read, sides, here) for read in mine.read)
        _check_names(producer, _worker(own, here), parts)
        return Share(here, mine.contact, parts, mine.expected_completions)

    def readers(self, consumer: Topology) -> int:
        """How many workers of a consumer notify this worker about each request, before
        it may free the request's blocks. In a worker only.

        Raises:
            Incompatible, TransferError: As `plan`.
            RankbookError: This engine itself is not sealed.
        """
        own = self.own()
        here = self._rank(own)
        if here is None:
            return 0
        plan = self.plan(own, consumer)
        return next(
            one.consumer_count
            for one in plan.producers
            if (one.pp_rank, one.tp_rank) == _pair(here)
        )

    def _rank(self, own: Topology) -> Rank | None:
        """This worker as plans count it; None for a rank that only holds copies."""
        slot, layout = _vllm.slot(), own.engine.layout
        if layout.pcp_size > 1 and layout.dcp_size > 1:
            return Rank(slot.pp_rank, slot.pcp_rank)
        return Rank(slot.pp_rank, slot.tp_rank) if slot.pcp_rank == 0 else None


def _pair(rank: Rank) -> tuple[int, int]:
    return rank.pp_rank, rank.tp_rank


def _replaces(new: tuple[str, str, str, str], old: tuple[str, str, str, str]) -> bool:
    """Whether a plan is of the same two engines, of starts before."""
    return new[::2] == old[::2]


def _worker(topology: Topology, rank: Rank) -> WorkerRecord:
    layout = topology.engine.layout
    by_pcp = layout.pcp_size > 1 and layout.dcp_size > 1
    tp_rank, pcp_rank = (0, rank.tp_rank) if by_pcp else (rank.tp_rank, 0)
    record = topology.worker(rank.pp_rank, tp_rank, pcp_rank)
    if record is None:
        raise Incomplete(
            f"{topology.engine.engine_id} has no worker pp{rank.pp_rank} tp{rank.tp_rank}",
            metadata={
                "engine_id": topology.engine.engine_id,
                "missing": f"pp{rank.pp_rank} tp{rank.tp_rank}",
            },
        )
    return record


def _check_pair(producer: Topology, consumer: Topology) -> None:
    verdict = compare_peers(peer_side(producer), peer_side(consumer))
    if not verdict.compatible:
        names = producer.engine.engine_id, consumer.engine.engine_id
        told = "; ".join(f"{broken.reason}: {broken.message}" for broken in verdict.reasons)
        raise Incompatible(
            f"{names[0]} cannot give KV to {names[1]}: {told}",
            metadata={
                "producer": names[0],
                "consumer": names[1],
                "reasons": ", ".join(broken.reason for broken in verdict.reasons),
            },
        )


def _index(name: str, num_layers: int) -> int | None:
    index = layer_index(name)
    if index is not None and name.startswith("draft_model."):
        return index + num_layers  # a draft model of its own counts its layers from zero
    return index


def _names(record: WorkerRecord, layers: range) -> tuple[str, ...]:
    num_layers = record.layout.num_layers
    return tuple(name for name in record.layers.names if _index(name, num_layers) in layers)


def _part(producer: Topology, read: Read, sides: tuple[PlanSide, PlanSide], here: Rank) -> Part:
    rank = Rank(read.pp_rank, read.tp_rank)
    layers = range(read.start_layer, read.end_layer)
    names = _names(_worker(producer, rank), layers)
    theirs, ours = sides
    if read.start_head == read.end_head:
        if theirs.transfer_tp_size != ours.transfer_tp_size:
            raise TransferError(
                f"layers {list(layers)} are a draft model's, whose heads over "
                f"{theirs.transfer_tp_size} and {ours.transfer_tp_size} ranks are not in the book",
                reason=Reason.HEADS_UNKNOWN,
                metadata={
                    "producer_tp_size": theirs.transfer_tp_size,
                    "consumer_tp_size": ours.transfer_tp_size,
                },
            )
        return Part(rank, layers, names, slice(None), slice(None))
    if theirs.is_mla:
        return Part(rank, layers, names, slice(None), slice(None))
    heads = kv_heads(theirs.total_num_kv_heads, is_mla=False)
    there, _ = head_range(rank.tp_rank, theirs.transfer_tp_size, heads)
    first, _ = head_range(here.tp_rank, ours.transfer_tp_size, heads)
    return Part(
        rank,
        layers,
        names,
        slice(read.start_head - there, read.end_head - there),
        slice(read.start_head - first, read.end_head - first),
    )


def _check_names(producer: Topology, own: WorkerRecord, parts: tuple[Part, ...]) -> None:
    """Refuses a producer without a cache that this worker needs for the model's layers."""
    needed = set(_names(own, range(own.layers.start_layer, own.layers.end_layer)))
    missing = sorted(needed.difference(*(part.names for part in parts)))
    if missing:
        raise Incompatible(
            f"{producer.engine.engine_id} has no KV cache named {listed(missing)}: serve the same "
            "model on both",
            metadata={"producer": producer.engine.engine_id, "missing": listed(missing)},
        )
