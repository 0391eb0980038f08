"""The engine core's side of a request that needs a peer's KV.

A request names its producer; where that is, and of what sizes, the sealed
topology says. Free of vLLM; used by the engine core's thread alone, which never
waits here: a request that must wait is asked about again at the next step.
"""

from __future__ import annotations

import itertools
import logging
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from rankbook.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Gone,
    NotFound,
    RankbookError,
    Reason,
)
from rankbook.model import Address, Role, State, Topology
from rankbook_vllm.config import Settings, bare_host
from rankbook_vllm.lookup import Answer, Refuse, Use, Wait

__all__ = [
    "MAX_TEXT",
    "WAITED",
    "Known",
    "Requests",
    "Verdict",
    "address_of",
    "is_text",
    "transfer_tp_size",
    "unreadable",
]

Params = MutableMapping[str, Any]

MAX_TEXT = 512
"""Characters of a name in a request. An engine_id has at most 256 (`rankbook.limits`); vLLM makes
request ids of a client's, of a few hundred."""
_MAX_SIZE = 65_535
"""Of a port, and more than any number of ranks."""
_MAX_BLOCKS = 1 << 18
"""Block ids of a request: four million tokens in blocks of 16. Each is looked at."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


class Known(Protocol):
    """The copy of the book that requests are resolved with: `PeerBook`."""

    def judge(self, engine_id: str, generation: str = "") -> Answer:
        """Whether an engine may be used."""
        ...

    def get(self, engine_id: str) -> Topology | None:
        """The engine as last seen."""
        ...

    def engines(self) -> tuple[Topology, ...]:
        """Every engine as last seen."""
        ...


WAITED = 0.4
"""The part of the time for which a producer keeps blocks that a request may wait for its peer,
and once more for the handshake; the rest is for the way from the producer to here."""


class Verdict(Enum):
    """What becomes of a request now."""

    GO = "go"
    """Its parameters are whole: vLLM may go on."""
    LATER = "later"
    """Its producer is not there yet: ask again."""
    FAIL = "fail"
    """It cannot be served from its producer; `Requests.error` says why."""


@dataclass(slots=True)
class _Pending:
    deadline_s: float
    said: bool = False


def transfer_tp_size(topology: Topology) -> int:
    """Ranks of a stage as NIXL counts them: DCP over PCP makes transfer ranks of its own."""
    layout = topology.engine.layout
    return max(layout.tp_size, layout.dcp_size)


def address_of(topology: Topology) -> Address | None:
    """Where the engine's own side channel listens; None where it has none."""
    core = topology.engine.core
    addresses = core.addresses if core else ()
    return next((a for a in addresses if a.label == "side-channel"), None)


def _text(params: Mapping[str, Any], name: str) -> str:
    """A parameter that is text; empty where it is absent."""
    value = params.get(name)
    if value is None:
        return ""
    if not is_text(value):
        raise unreadable(name, value, "the text that the producer returned")
    return str(value)


def is_text(value: object) -> bool:
    """Whether a parameter is text of at most `MAX_TEXT` characters that can be sent: half of a
    surrogate pair, which JSON can say, ends whoever encodes it."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(name: str, value: object, takes: str) -> BadRequest:
    """The error of a parameter that is no text, without the whole of it."""
    return BadRequest(
        f"kv_transfer_params {name} is {_short(value)}: it takes {takes}, at most {MAX_TEXT} "
        "characters",
        metadata={
            "field": name,
            "value": _short(value),
            "rule": f"text of at most {MAX_TEXT} characters",
        },
    )


def _short(value: object) -> str:
    """What a request said, as far as a line of the log takes it."""
    return _SHORT.repr(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_SIZE


def _same(given: object, sealed: object) -> bool:
    """Whether a parameter says what the topology does; a host has several spellings."""
    return given == sealed or (isinstance(given, str) and bare_host(given) == sealed)


def _are_block_ids(value: object) -> bool:
    """Whether it is a list of block ids, or of such lists, with at least one entry."""
    if not isinstance(value, list | tuple) or not value:
        return False
    ids = tuple(itertools.islice(_flat(value), _MAX_BLOCKS + 1))
    return len(ids) <= _MAX_BLOCKS and all(isinstance(block, int) for block in ids)


def _flat(block_ids: Sequence[Any]) -> Iterator[Any]:
    """The ids of a request, which come as one list or as one for each cache group."""
    for part in block_ids:
        yield from part if isinstance(part, list | tuple) else (part,)


def _check_blocks(block_ids: Sequence[Any], topology: Topology) -> None:
    """Whether the producer has these blocks.

    vLLM counts a block's place from the start of its layer without looking: one too
    far is another layer's KV, or ends the worker.

    Raises:
        BadRequest: It has not.
    """
    held = min(
        (
            kv.num_blocks // (kv.physical_blocks_per_logical or 1)
            for kv in (worker.kv for worker in topology.workers)
            if kv is not None and kv.num_blocks
        ),
        default=None,
    )
    if held is None:  # not published
        return
    beyond = next((block for block in _flat(block_ids) if not 0 <= block < held), None)
    if beyond is not None:
        engine_id = topology.engine.engine_id
        raise BadRequest(
            f"kv_transfer_params remote_block_ids has block {beyond}, {engine_id} has 0 to "
            f"{held - 1}; send what the producer returned",
            metadata={
                "field": "remote_block_ids",
                "value": beyond,
                "rule": f"0 to {held - 1}",
                "engine_id": engine_id,
            },
        )


def _unforeseen(error: Exception) -> RankbookError:
    return BadRequest(
        f"kv_transfer_params or the producer's record cannot be read ({type(error).__name__}); "
        "the log has the trace",
        metadata={"field": "kv_transfer_params", "value": type(error).__name__, "rule": "readable"},
    )


class Requests:
    """The requests of one engine that need a peer's KV."""

    def __init__(
        self,
        book: Known,
        settings: Settings,
        log: logging.Logger,
        clock: Callable[[], float],
        *,
        needs_block_ids: bool,
        kept_s: float = math.inf,
    ) -> None:
        """Takes note.

        Args:
            book: The local copy of the book.
            settings: How long to wait, and what a wrong parameter means.
            log: Where to say what happens.
            clock: Seconds that never go back, for deadlines.
            needs_block_ids: Whether this engine reads the blocks itself (pull) and
                so must be told which.
            kept_s: How long a producer keeps the blocks of a request that nobody has
                come for.
        """
        self._kept_s = kept_s
        self._book = book
        self._settings = settings
        self._log = log
        self._clock = clock
        self._needs_block_ids = needs_block_ids
        self._pending: dict[str, _Pending] = {}
        self._failed: dict[str, RankbookError] = {}
        self._gone_on: dict[str, tuple[str, str]] = {}
        self.counts: Counter[str] = Counter()
        """What happened how often: resolved, waited, refused, corrected, foreign."""

    def ask(self, request_id: str, params: Params) -> Verdict:
        """Resolves a request's parameters in place, or says why not (yet). Never waits."""
        if request_id in self._failed:
            return Verdict.FAIL
        if request_id in self._gone_on:
            return Verdict.GO
        try:
            if request_id not in self._pending:
                self._check(params)
            answer = self._answer(params)
            if isinstance(answer, Refuse):
                return self._fail(request_id, answer.why)
            if isinstance(answer, Wait):
                if self._is_foreign(params):
                    self.counts["foreign"] += 1
                    return self._go(request_id, params, "")
                return self._wait(request_id, params, answer)
            self._fill(request_id, params, answer.topology)
        except RankbookError as error:
            return self._fail(request_id, error)
        except Exception as error:  # noqa: BLE001 - it would end the engine core
            self._log.exception("rankbook: request %s could not be resolved", request_id)
            return self._fail(request_id, _unforeseen(error))
        self.counts["resolved"] += 1
        return self._go(request_id, params, answer.topology.engine.generation)

    def recheck(self, request_id: str) -> Verdict:
        """Asks the book again about a request that went on, before its KV is asked for: its
        producer may be dead by now, or another start, which has no such blocks."""
        if request_id in self._gone_on and request_id not in self._failed:
            engine_id, generation = self._gone_on[request_id]
            answer = self._book.judge(engine_id, generation) if generation else None
            if isinstance(answer, Refuse) and isinstance(answer.why, Gone):
                return self._fail(request_id, answer.why)
        return Verdict.FAIL if request_id in self._failed else Verdict.GO

    def error(self, request_id: str) -> RankbookError | None:
        """Why the request failed; None where it did not."""
        return self._failed.get(request_id)

    def generation(self, request_id: str) -> str:
        """The producer's start that the request is bound to; empty where unknown."""
        return self._gone_on.get(request_id, ("", ""))[1]

    def went_on(self, request_id: str) -> bool:
        """Whether vLLM has been given the request."""
        return request_id in self._gone_on

    def forget(self, request_id: str) -> bool:
        """The request is over; returns whether it ever went on to vLLM."""
        self._pending.pop(request_id, None)
        self._failed.pop(request_id, None)
        return self._gone_on.pop(request_id, None) is not None

    # -------------------------------------------------------------- deciding

    def _check(self, params: Params) -> None:
        """Looks at a request's parameters, once."""
        engine_id, group = _text(params, "remote_engine_id"), _text(params, "group")
        _text(params, "remote_generation")
        _text(params, "remote_request_id")
        if not engine_id and not group:
            raise BadRequest(
                "kv_transfer_params has no remote_engine_id: send what the producer returned",
                metadata={"field": "remote_engine_id", "value": "", "rule": "text"},
            )
        # vLLM asserts on an empty list, and what is no number ends a worker.
        blocks = params.get("remote_block_ids")
        if self._needs_block_ids and not _are_block_ids(blocks):
            raise BadRequest(
                f"kv_transfer_params remote_block_ids is {_short(blocks)}: this engine reads them "
                f"from {engine_id or group}; send what the producer returned",
                metadata={
                    "field": "remote_block_ids",
                    "value": _short(blocks),
                    "rule": f"up to {_MAX_BLOCKS} block ids",
                },
            )

    def _answer(self, params: Params) -> Answer:
        engine_id: str = params.get("remote_engine_id") or ""
        generation: str = params.get("remote_generation") or ""
        if not engine_id:
            found = self._of_group(params, params["group"])
            if isinstance(found, Wait):
                return found
            params["remote_engine_id"] = engine_id = found.topology.engine.engine_id
        return self._book.judge(engine_id, generation)

    def _of_group(self, params: Params, group: str) -> Use | Wait:
        if params.get("remote_block_ids"):
            raise BadRequest(
                f"kv_transfer_params names group {group!r} and block ids: blocks are of one "
                "engine, name it as remote_engine_id",
                metadata={"field": "group", "value": group, "rule": "no block ids"},
            )
        ready = [
            topology
            for topology in self._book.engines()
            if topology.engine.group == group
            and topology.engine.state is State.READY
            and topology.engine.role is not Role.CONSUMER
        ]
        if not ready:
            return Wait(
                NotFound(
                    f"group {group!r} has no READY producer",
                    reason=Reason.GROUP_NOT_FOUND,
                    metadata={"group": group},
                )
            )
        if len(ready) > 1:
            names = ", ".join(topology.engine.engine_id for topology in ready)
            raise Conflict(
                f"group {group!r} has {len(ready)} READY producers ({names}): name one as "
                "remote_engine_id",
                reason=Reason.IDENTITY_CONFLICT,
                metadata={"group": group, "engines": names},
            )
        return Use(ready[0])

    def _is_foreign(self, params: Mapping[str, Any]) -> bool:
        """Whether the peer is one without rankbook, to be asked in vLLM's own way. One
        that names its start has it."""
        sizes = [params.get(name, 1) for name in ("tp_size", "dcp_size", "pp_size")]
        return (
            self._settings.side_channel
            and not params.get("remote_generation")
            and all(params.get(name) for name in ("remote_engine_id", "remote_request_id"))
            and bool(_text(params, "remote_host"))
            # vLLM counts with them where nothing catches what goes wrong.
            and all(_is_size(one) for one in (params.get("remote_port"), *sizes))
            and "tp_size" in params
            and self._book.get(params["remote_engine_id"]) is None
        )

    def _fill(self, request_id: str, params: Params, topology: Topology) -> None:
        if self._needs_block_ids:
            _check_blocks(params["remote_block_ids"], topology)
        layout = topology.engine.layout
        sealed: dict[str, Any] = {
            "tp_size": transfer_tp_size(topology),
            "dcp_size": layout.dcp_size,
            "pp_size": layout.pp_size,
        }
        listens = address_of(topology)
        if listens is not None:
            sealed |= {"remote_host": listens.host, "remote_port": listens.port}
        wrong = {
            name: (params[name], value)
            for name, value in sealed.items()
            if params.get(name) is not None and not _same(params[name], value)
        }
        if wrong:
            self._wrong(request_id, params, wrong)
        # Nobody dials it, and NIXL takes two engines of one address for one that started
        # anew: "localhost", where vLLM is not told otherwise.
        sealed |= {"remote_host": topology.engine.engine_id, "remote_port": 0}
        params.update(sealed)
        if self._needs_block_ids and not isinstance(params["remote_block_ids"][0], list | tuple):
            params["remote_block_ids"] = [params["remote_block_ids"]]  # vLLM's are by group
        params["remote_generation"] = topology.engine.generation
        for name, value in (("remote_request_id", request_id), ("remote_block_ids", ())):
            if params.get(name) is None:
                params[name] = value

    def _wrong(self, request_id: str, params: Params, wrong: Mapping[str, tuple[Any, Any]]) -> None:
        engine_id = params["remote_engine_id"]
        listed = ", ".join(
            f"{name} {_short(given)} instead of {value!r}" for name, (given, value) in wrong.items()
        )
        if self._settings.wrong_params == "refuse":
            raise Conflict(
                f"kv_transfer_params say of {engine_id}: {listed}; leave them out, the sealed "
                "topology has them, or set wrong_params to correct",
                reason=Reason.LAYOUT_CONFLICT,
                metadata={"engine_id": engine_id}
                | {name: f"{_short(given)} != {value}" for name, (given, value) in wrong.items()},
            )
        self.counts["corrected"] += 1
        self._log.warning(
            "rankbook: request %s said of %s: %s; corrected (%d so far)",
            request_id,
            engine_id,
            listed,
            self.counts["corrected"],
        )

    # ------------------------------------------------------------- remembering

    def _go(self, request_id: str, params: Params, generation: str) -> Verdict:
        self._pending.pop(request_id, None)
        self._gone_on[request_id] = (params["remote_engine_id"], generation)
        return Verdict.GO

    def _wait(self, request_id: str, params: Params, answer: Wait) -> Verdict:
        now = self._clock()
        timeout_s = self._settings.peer_timeout_s
        if self._needs_block_ids or params.get("remote_generation"):
            # Its blocks are there already, and are freed if nobody comes. As much again
            # is for the handshake.
            timeout_s = min(timeout_s, self._kept_s * WAITED)
        pending = self._pending.setdefault(request_id, _Pending(now + timeout_s))
        if now >= pending.deadline_s:
            error = DeadlineExceeded(
                f"waited {timeout_s:g} s: {answer.why.message}",
                metadata=answer.why.metadata | {"timeout_s": timeout_s, "why": answer.why.reason},
            )
            return self._fail(request_id, error)
        if not pending.said:
            pending.said = True
            self.counts["waited"] += 1
            self._log.info("rankbook: request %s waits: %s", request_id, answer.why.message)
        return Verdict.LATER

    def _fail(self, request_id: str, error: RankbookError) -> Verdict:
        self._pending.pop(request_id, None)
        self._failed[request_id] = error
        self.counts["refused"] += 1
        self._log.error(
            "rankbook: request %s cannot get its KV (%s): %s", request_id, error.reason, error
        )
        return Verdict.FAIL
