"""For the author of a connector outside vLLM: sign in, find one's peers, read by the plan.

    @signs_in
    class MyConnector(KVConnectorBase_V1):
        def __init__(self, vllm_config, role, kv_cache_config):
            super().__init__(vllm_config, role, kv_cache_config)
            self.peers = Peers(self)

        def register_kv_caches(self, kv_caches):
            self.caches, self.door = kv_caches, serve(kv_caches)

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

from typing import Any, TypeVar, cast

from rankbook.errors import BadRecord
from rankbook.model import State, Topology
from rankbook.pairing import plan_side
from rankbook.transfer import Plan, Rank, TransferMode, plan_transfer
from rankbook_vllm import _vllm, connectors
from rankbook_vllm.handshake import check_peers
from rankbook_vllm.parts import Part, Share, readers_of, share_of, worker_of
from rankbook_vllm.peers import PeerBook

__all__ = ["Part", "Peers", "Plan", "Rank", "Share", "Topology", "signs_in"]

C = TypeVar("C", bound=type)
T = TypeVar("T")
_Starts = tuple[str, str, str, str]
"""Two engines and the start of each."""


class _SignsIn:
    """Goes before a connector from outside, after what every connector gets."""


class _TakenFromTheBook(_SignsIn):
    """For a connector whose scheduler takes no handshake metadata itself.

    vLLM's guard against metadata of later stages is for those who would lose it.
    """

    _rankbook_unguarded = True

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
    `kv_connector` and `kv_connector_module_path` name it as before. Decorate the
    class that vLLM loads, and none that it derives from.

    Raises:
        TypeError: A base of the class signs in already.
    """
    if issubclass(connector, connectors.RankbookMixin):
        raise TypeError(
            f"a base of {connector.__name__} signs in already: decorate only the class that vLLM "
            "loads"
        )
    between = _SignsIn if _vllm.takes_metadata(connector) else _TakenFromTheBook
    return cast(C, connectors.subclass(connector, between, module=connector.__module__))


class Peers:
    """The peers of a connector's engine, out of this process's copy of the book.

    Safe to use from many threads. Only `topology` and what needs `own` wait; the
    copy is kept by a watch, goes on answering while the registry is away, and ends
    with the connector's `shutdown`.
    """

    def __init__(self, connector: Any, *, mode: TransferMode | str = TransferMode.PULL) -> None:
        """Begins to follow the book in the background; returns at once.

        Args:
            connector: The connector, of a class that `signs_in`; either role.
            mode: Who starts a transfer: the consumer ("pull") or the producer
                ("push").

        Raises:
            TypeError: The connector's class does not sign in.
        """
        if not issubclass(type(connector), _SignsIn):
            raise TypeError(f"{type(connector).__name__} does not sign in: decorate it @signs_in")
        self._connector: Any = connector
        self._mode = mode
        self._timeout_s: float = connector._rankbook_settings.peer_timeout_s
        self._plans: dict[_Starts, Plan] = {}
        self.engine_id: str = connector._rankbook_args[0].kv_transfer_config.engine_id
        """This engine."""
        self.book: PeerBook = connector._rankbook_follow()
        """The copy itself, for looking without waiting and for callbacks. All of the
        connector that looks into the book shares it."""
        self.book.start()

    @property
    def generation(self) -> str:
        """This engine's start; what it hands a peer is good for this start only.

        Empty before the workers agreed on it, which is after the constructor of
        the connector; in the engine core, before it was given their metadata.
        """
        token: str = self._connector.rankbook_generation
        return token

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
        """What a peer's worker returned from its `get_handshake_metadata`. In a worker
        only: the engine core's copy of the book has no payloads.

        Args:
            topology: The peer.
            rank: Its worker.
            kind: The dataclass; its name must be that of the peer's.

        Raises:
            Incomplete: The worker is not there.
            BadRecord: It published something else.
        """
        record = worker_of(topology, rank)
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
            check_peers(producer, consumer)
            plan = plan_transfer(plan_side(producer), plan_side(consumer), self._mode)
            kept = {k: v for k, v in self._plans.items() if self._is_alive(k)}
            self._plans = kept | {key: plan}
        return plan

    def _is_alive(self, starts: _Starts) -> bool:
        """Whether the book has both starts, and neither is gone."""
        for engine_id, generation in (starts[:2], starts[2:]):
            known = self.book.get(engine_id)
            if known is None or known.engine.state is State.GONE:
                return False
            if known.engine.generation != generation:
                return False
        return True

    def share(self, producer: Topology) -> Share:
        """What this worker does to get KV from a producer. In a worker only.

        Raises:
            Incompatible: The two may not pair, or the producer lacks a cache that
                this worker has.
            TransferError: No plan exists between the two layouts; or HEADS_UNKNOWN,
                for a draft model's layers over other TP sizes.
            RankbookError: This engine itself is not sealed.
        """
        own = self.own()
        return share_of(self.plan(producer, own), producer, own, _vllm.slot())

    def readers(self, consumer: Topology) -> int:
        """How many workers of a consumer notify this worker about each request, before
        it may free the request's blocks. In a worker only.

        Raises:
            Incompatible, TransferError: As `plan`.
            RankbookError: This engine itself is not sealed.
        """
        own = self.own()
        return readers_of(self.plan(own, consumer), own, _vllm.slot())
