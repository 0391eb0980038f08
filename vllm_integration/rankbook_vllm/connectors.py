"""vLLM's connectors, signing in: set `kv_connector_module_path` to this module.

Every in-tree connector is here under its own name, as a subclass that does what
vLLM's does and publishes beside it:

    --kv-transfer-config '{"kv_connector": "NixlPushConnector",
        "kv_connector_module_path": "rankbook_vllm.connectors",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"rankbook": {"group": "prefill-a"}}}'

The class keeps its name, because vLLM and routers look at names. Settings are
in `rankbook_vllm.config`.

With MultiConnector, load the MultiConnector from here and leave its children
alone: one connector of a process signs in, and the first that asks is it. Under
vLLM's own MultiConnector, the child that shakes hands must be from here and first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rankbook.errors import BadRequest, RankbookError
from rankbook_vllm import _vllm, config
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.publish import Publisher
from rankbook_vllm.record import Facts, Start
from rankbook_vllm.seal import Note, check_grid
from rankbook_vllm.sealing import Sealer

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as _Connector
else:
    _Connector = object

logger = _vllm.logger

_signing_in: weakref.WeakValueDictionary[tuple[str, str], RankbookMixin] = (
    weakref.WeakValueDictionary()
)
"""The connector that signs in, by role and engine: a MultiConnector's children
and their parent would otherwise all claim one slot."""

# What vLLM's objects raise when a release changed what is read from them. Only
# `required` makes an engine fail for that.
_UNREADABLE = (RankbookError, AttributeError, LookupError, TypeError, ValueError)


class RankbookMixin(_Connector):  # type: ignore[misc]
    """What is added to a connector of vLLM's. Goes before it in the bases."""

    _rankbook_base: type[Any]
    """vLLM's class."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Builds vLLM's connector and, in a worker, agrees on this start's token.

        Raises:
            BadRequest: A rankbook setting is unknown or wrong.
        """
        transfer = vllm_config.kv_transfer_config
        settings = config.load(transfer.kv_connector_extra_config.get("rankbook"), os.environ)
        self._rankbook_publisher: Publisher | None = None
        self._rankbook_sealer: Sealer | None = None
        self._rankbook_book: PeerBook | None = None
        self._rankbook_halves: tuple[_vllm.SchedulerHalf, ...] = ()
        self._rankbook_notes: tuple[Note, ...] = ()
        self._rankbook_start: Start | None = None
        self._rankbook_args = (vllm_config, kv_cache_config)
        self._rankbook_settings = settings
        self._rankbook_in_worker = _vllm.is_worker(role)
        self._rankbook_key = (str(role), str(transfer.engine_id))
        signs_in = _signing_in.setdefault(self._rankbook_key, self) is self
        with _vllm.without_bootstrap(transfer, settings):
            super().__init__(vllm_config, role, kv_cache_config)
        if not signs_in:
            return
        if settings.handshake == "book":
            extended = _vllm.extend(self, settings, self._rankbook_follow)
            if extended is not None:
                self._rankbook_halves = extended
                self._rankbook_tally = _vllm.Tally(self)
        if self._rankbook_in_worker:
            publisher = Publisher(settings, logger)
            publisher.start = _vllm.agree_on_start(lambda: publisher.begin(transfer.engine_id))
            self._rankbook_start = publisher.start
            self._rankbook_publisher = publisher
        else:
            self._rankbook_sealer = Sealer(
                settings,
                logger,
                engine_id=transfer.engine_id,
                connector=type(self).__name__,
                addresses=_vllm.side_channel(self) if settings.side_channel else (),
                clock=time.perf_counter,  # the clock that NIXL's own listener answers with
            )

    def _rankbook_follow(self) -> PeerBook:
        """This process's copy of the book, one for all who ask; not started here."""
        if self._rankbook_book is None:
            # What the scheduler needs of a peer is its sizes and state, not its payloads.
            self._rankbook_book = PeerBook(
                self._rankbook_settings, logger, without_payload=not self._rankbook_in_worker
            )
        return self._rankbook_book

    @property
    def rankbook_generation(self) -> str:
        """Token of this engine's start; empty before the workers agreed on it, and in
        the engine core before it has seen that they did."""
        return self._rankbook_start.generation if self._rankbook_start is not None else ""

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Registers with vLLM's connector, then publishes this worker.

        Raises:
            RankbookError: The worker could not sign in, and `required` is set.
        """
        super().register_kv_caches(kv_caches)
        vllm_config, kv_cache_config = self._rankbook_args
        self._rankbook_publish(
            lambda: _vllm.worker_facts(
                self,
                vllm_config,
                kv_cache_config,
                kv_caches,
                _vllm.handshake_for(self, self._rankbook_metadata()),
            )
        )
        if self._rankbook_book is not None:
            self._rankbook_book.start()

    def _rankbook_publish(self, read: Callable[[], Facts]) -> None:
        publisher = self._rankbook_publisher
        if publisher is None:
            return
        try:
            note = publisher.publish(read())
        except _UNREADABLE as error:
            rank = self._rankbook_args[0].parallel_config.rank
            note = publisher.failed(_vllm.slot(), rank, error)
        self._rankbook_notes = _vllm.gather_over_pcp(note)

    def _rankbook_metadata(self) -> Any:
        return super().get_handshake_metadata()

    def get_handshake_metadata(self) -> Any:
        """vLLM's metadata, with rankbook's notes for the engine core."""
        inner = self._rankbook_metadata()
        if not self._rankbook_notes:
            return inner
        return _vllm.carrier(inner, self._rankbook_notes)

    # ------------------------------------------------------------- engine core

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Checks that the engine is whole, hands vLLM's metadata on, and seals.

        vLLM calls this at start, and from 0.33 on after each wake-up.

        Raises:
            RankbookError: A worker is missing, claimed another's slot or holds
                other layers than its stage; the connector would drop a stage, or
                another child signed in without its metadata; or the seal failed
                and `required` is set.
        """
        notes, inner = _vllm.unpack(metadata)
        sealer = self._rankbook_sealer
        if sealer is None and notes and not inner and _vllm.takes_metadata(self._rankbook_base):
            raise BadRequest(
                f"{type(self).__name__} got no handshake metadata: another child of the "
                "MultiConnector was there first, signed in and has none. Put "
                f"{type(self).__name__} first, or load the MultiConnector from "
                "rankbook_vllm.connectors and its children from vLLM",
                metadata={
                    "field": "connectors",
                    "value": type(self).__name__,
                    "rule": "the child that shakes hands is first",
                },
            )
        whole = None
        if sealer is not None and (notes or not metadata):
            layout = _vllm.engine_layout(self._rankbook_args[0])
            whole = check_grid(notes, layout, _vllm.served(inner))
        self._rankbook_hand_on(inner)
        if sealer is None:
            return
        if whole is None:
            sealer.cannot(
                "the handshake metadata came without rankbook's notes: load the MultiConnector "
                "from rankbook_vllm.connectors, not its children"
            )
        else:
            for half in self._rankbook_halves:
                half.generation = whole.start.generation
            self._rankbook_start = whole.start
            sealer.seal(whole)
        if self._rankbook_book is not None:
            self._rankbook_book.start()

    def _rankbook_hand_on(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Gives vLLM's connector its metadata; leaves out who would refuse what it ignores."""
        children = getattr(self, "sub_connectors", None)
        for connector in children if children is not None else (self,):
            kind = type(connector)
            base = getattr(kind, "_rankbook_base", kind)
            unguarded = getattr(kind, "_rankbook_unguarded", False)
            if not unguarded and not _vllm.passes_guard(base, metadata):
                logger.info(
                    "rankbook: %s takes no handshake metadata; the engine's %d workers are "
                    "published, and vLLM's guard against pipeline stages is not asked",
                    kind.__name__,
                    len(metadata),
                )
            elif connector is self:
                super().set_xfer_handshake_metadata_pp_aware(metadata)
            else:
                connector.set_xfer_handshake_metadata_pp_aware(metadata)

    # -------------------------------------------------------------------- both

    def shutdown(self) -> None:
        """Shuts vLLM's connector down and signs out. May be called again.

        A worker signs out last: who left is taken to write nothing more. The
        engine core's seal goes first, so that nobody new comes meanwhile.
        """
        with contextlib.ExitStack() as ending:  # from the last line up, whatever one raises
            if _signing_in.get(self._rankbook_key) is self:
                ending.callback(_signing_in.pop, self._rankbook_key, None)
            if self._rankbook_publisher is not None:
                ending.callback(self._rankbook_publisher.stop)
            ending.callback(super().shutdown)
            if self._rankbook_book is not None:
                ending.callback(self._rankbook_book.close)
            if self._rankbook_sealer is not None:
                ending.callback(self._rankbook_sealer.stop)


class SleepMixin(_Connector):  # type: ignore[misc]
    """Sleep mode (vLLM 0.33): the KV cache goes and comes back, the worker stays."""

    def unregister_kv_caches(self) -> None:
        """Withdraws the payload from the book before the caches go."""
        publisher = self._rankbook_publisher
        if publisher is not None:
            publisher.withdraw()
        super().unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Publishes what the connector has after the caches came back."""
        super().restore_kv_caches()
        publisher = self._rankbook_publisher
        if publisher is not None and publisher.facts is not None:
            facts = publisher.facts
            self._rankbook_publish(
                lambda: dataclasses.replace(
                    facts, handshake=_vllm.handshake_for(self, self._rankbook_metadata())
                )
            )


_classes: dict[type[Any], type[Any]] = {}


def subclass(base: type[Any], *between: type[Any], module: str = __name__) -> type[Any]:
    """The class that signs in, made from another connector class; the same one each time.

    Args:
        base: vLLM's class, or one from outside.
        between: Mixins that go before it, after ours.
        module: Where the class is found by its name.
    """
    if base not in _classes:
        mixins = (*_vllm.stats_mixins(base), RankbookMixin, *between)
        if hasattr(base, "unregister_kv_caches"):
            mixins = (SleepMixin, *mixins)
        members = {"__module__": module, "__doc__": base.__doc__, "_rankbook_base": base}
        _classes[base] = types.new_class(
            base.__name__, (*mixins, base), exec_body=lambda namespace: namespace.update(members)
        )
    return _classes[base]


def __getattr__(name: str) -> type[Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        base = _vllm.connector_class(name)
    except ValueError:
        raise AttributeError(
            f"vLLM has no connector {name!r}: kv_connector takes the name of an in-tree "
            f"connector when kv_connector_module_path is {__name__!r}"
        ) from None
    return subclass(base)
