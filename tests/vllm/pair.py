"""A prefill engine and a decode engine that find each other through the book.

    with Pair(start_engine, registry.address, partition="3,1") as pair:
        answer = pair.ask(prompt, 16)
        assert answer.tokens == truth(prompt)

Both are real vLLM engines on CPU; KV moves over NIXL on the loopback interface.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from tests.vllm.engine import BLOCK_TOKENS, Engine
from tests.vllm.tiny_model import HEAD_SIZE, KV_HEADS, LAYERS

import rankbook

Side = Literal["producer", "consumer"]
Params = dict[str, Any]

SIDE_CHANNEL = True
"""Setting "side_channel" of every pair that does not say otherwise."""
BLOCK_BYTES = 2 * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * 4
"""One block of one layer: K and V of float32."""

_POLL_S = 0.05


def blocks_of(prompt: Sequence[int]) -> int:
    """How many blocks hold a prompt."""
    return math.ceil(len(prompt) / BLOCK_TOKENS)


def bytes_of(prompt: Sequence[int]) -> int:
    """How much KV a prompt has, over all layers."""
    return blocks_of(prompt) * LAYERS * BLOCK_BYTES


@dataclass(frozen=True)
class Answer:
    """What became of one request."""

    request_id: str
    """X-Request-Id, the same at both engines."""
    tokens: list[int]
    """What the decode engine made."""
    finish_reason: str
    """Why it ended; "length" if nothing went wrong."""
    first_token: int
    """What the prefill engine made."""
    params: Params
    """kv_transfer_params that the prefill engine returned."""
    prefill_s: float
    """From sending to the prefill engine until its answer."""
    decode_s: float
    """From sending to the decode engine until its answer."""


@dataclass(frozen=True)
class Moved:
    """What a pair has moved so far, by its own counters."""

    tokens: int
    """Prompt tokens that the decode engine did not compute."""
    computed: int
    """Prompt tokens that the decode engine did compute."""
    bytes: int
    """Bytes that NIXL wrote or read, at whichever engine did it."""

    def __sub__(self, earlier: Moved) -> Moved:
        return Moved(
            self.tokens - earlier.tokens,
            self.computed - earlier.computed,
            self.bytes - earlier.bytes,
        )


class Pair:
    """A producer and a consumer with one connector, and the least proxy before them.

    Nothing is started before `start` or `with`. Requests may be made from many
    threads; the rest is for one.
    """

    def __init__(
        self,
        start_engine: Callable[..., Engine],
        registry: str,
        *,
        connector: str = "NixlPushConnector",
        pp_size: int = 2,
        partition: str = "",
        settings: Mapping[str, Any] | None = None,
        producer: Mapping[str, Any] | None = None,
        consumer: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> None:
        """Says what is to be started.

        Args:
            start_engine: The fixture, or `Engine` with its model and folder bound.
            registry: Address of the registry that both sign in at.
            connector: Class of both, from rankbook_vllm.connectors.
            pp_size: Stages of the producer; the consumer has one.
            partition: Layers of each stage, "3,1"; empty lets vLLM divide.
            settings: "rankbook" settings of both, over those of every pair.
            producer: Options of `Engine` for the producer only; its "settings",
                "env" and "extra" are added to those of the pair.
            consumer: The same for the consumer.
            name: Ending of both engine_ids and groups: "prefill-NAME" and
                "decode-NAME". Empty makes one that no other pair has.
        """
        self.name = name or uuid.uuid4().hex[:8]
        both = {"endpoints": registry, "ttl_s": 60, "side_channel": SIDE_CHANNEL}
        both.update(settings or {})
        self.settings = both
        """What both have set."""
        self._start_engine = start_engine
        self._engines: dict[Side, Engine] = {}
        self._options: dict[Side, dict[str, Any]] = {
            "producer": _merged(
                {
                    "connector": connector,
                    "engine_id": f"prefill-{self.name}",
                    "role": "kv_producer",
                    "pp_size": pp_size,
                    "settings": {"group": f"prefill-{self.name}", **both},
                    "env": {"VLLM_PP_LAYER_PARTITION": partition} if partition else {},
                },
                producer or {},
            ),
            "consumer": _merged(
                {
                    "connector": connector,
                    "engine_id": f"decode-{self.name}",
                    "role": "kv_consumer",
                    "pp_size": 1,
                    "settings": {"group": f"decode-{self.name}", **both},
                },
                consumer or {},
            ),
        }

    @property
    def producer(self) -> Engine:
        """The prefill engine as it was started last."""
        return self._engines["producer"]

    @property
    def consumer(self) -> Engine:
        """The decode engine as it was started last."""
        return self._engines["consumer"]

    def launch(self, side: Side, **changes: Any) -> Engine:
        """Starts one side and returns at once; the one before must have ended.

        A side that is launched again is the same engine anew: same engine_id,
        same settings, other ports.

        Args:
            side: Which one.
            changes: Options of `Engine`, added as in the constructor.
        """
        engine = self._start_engine(**_merged(self._options[side], changes))
        self._engines[side] = engine
        return engine

    def start(self) -> Self:
        """Starts both at once and waits until both serve.

        Raises:
            RuntimeError: One does not; with the end of its log.
        """
        self.launch("producer")
        self.launch("consumer")
        self.producer.wait_serving()
        self.consumer.wait_serving()
        return self

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until both are READY in the book: they serve a moment before.

        Raises:
            rankbook.RankbookError: One is not, and why.
        """
        with rankbook.Client(self.settings["endpoints"]) as client:
            for engine in self._engines.values():
                client.get_topology(engine.engine_id, wait_s=timeout_s)

    def stop(self) -> None:
        """Kills both, the decode engine first."""
        for side in ("consumer", "producer"):
            if side in self._engines:
                self._engines[side].kill()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- requests

    def prefill(
        self,
        prompt: Sequence[int],
        request_id: str,
        *,
        params: Params | None = None,
        timeout_s: float = 45.0,
    ) -> dict[str, Any]:
        """The first half of a request; vLLM's answer, "kv_transfer_params" in it.

        Args:
            prompt: Ids of the tokens.
            request_id: X-Request-Id; the second half needs the same.
            params: kv_transfer_params. None asks for KV that is kept for a peer.
            timeout_s: How long to wait, in seconds.

        Raises:
            Refused: The engine answered with an error.
            NoAnswer: It did not answer.
        """
        keep = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        return self.producer.complete(
            list(prompt),
            1,
            request_id=request_id,
            timeout_s=timeout_s,
            min_tokens=1,
            return_token_ids=True,
            kv_transfer_params=keep if params is None else params,
        )

    def decode(
        self,
        prompt: Sequence[int],
        n: int,
        request_id: str,
        params: Params,
        *,
        timeout_s: float = 45.0,
    ) -> dict[str, Any]:
        """The second half; vLLM's answer. Arguments and errors as for `prefill`."""
        return self.consumer.complete(
            list(prompt),
            n,
            request_id=request_id,
            timeout_s=timeout_s,
            return_token_ids=True,
            kv_transfer_params=params,
        )

    def ask(
        self,
        prompt: Sequence[int],
        n: int = 16,
        *,
        prefill_prompt: Sequence[int] | None = None,
        change_params: Callable[[Params], Params] | None = None,
        timeout_s: float = 45.0,
    ) -> Answer:
        """One request through both, as the least proxy does it.

        Args:
            prompt: Ids of the tokens.
            n: How many tokens to make.
            prefill_prompt: What the producer gets in its place.
            change_params: What the consumer gets in place of what the producer
                returned.
            timeout_s: How long to wait for each half, in seconds.

        Raises:
            Refused: One of them answered with an error.
            NoAnswer: One of them did not answer.
        """
        request_id = str(uuid.uuid4())
        sent = time.monotonic()
        first = self.prefill(
            prompt if prefill_prompt is None else prefill_prompt, request_id, timeout_s=timeout_s
        )
        between = time.monotonic()
        params = first["kv_transfer_params"]
        changed = params if change_params is None else change_params(dict(params))
        again = time.monotonic()
        (choice,) = self.decode(prompt, n, request_id, changed, timeout_s=timeout_s)["choices"]
        done = time.monotonic()
        return Answer(
            request_id=request_id,
            tokens=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            first_token=first["choices"][0]["token_ids"][0],
            params=params,
            prefill_s=between - sent,
            decode_s=done - again,
        )

    # ---------------------------------------------------------------- counters

    def moved(self) -> Moved:
        """What was moved so far. Push writes at the producer, pull reads at the consumer."""
        producer, consumer = self.producer.metrics(), self.consumer.metrics()
        source = "vllm:prompt_tokens_by_source_total"
        moved = "vllm:nixl_bytes_transferred_sum"
        return Moved(
            tokens=int(consumer.total(source, source="external_kv_transfer")),
            computed=int(consumer.total(source, source="local_compute")),
            bytes=int(producer.total(moved) + consumer.total(moved)),
        )

    def wait_moved(self, since: Moved, at_least: int, timeout_s: float = 10.0) -> Moved:
        """What was moved since, once it is so many bytes, or after `timeout_s`.

        An engine counts a transfer in the step after its end, so the answer to a
        request may be there before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            moved = self.moved() - since
            if moved.bytes >= at_least or time.monotonic() > deadline:
                return moved
            time.sleep(_POLL_S)

    def failures(self) -> dict[str, float]:
        """What NIXL counted as failed, by engine and counter; only what is not 0."""
        return {
            f"{engine} {name}": count
            for engine in (self.producer, self.consumer)
            for name, count in engine.metrics().counters("vllm:nixl_num_").items()
            if count
        }

    def wait_blocks_free(self, timeout_s: float = 10.0) -> dict[Side, float]:
        """The part of each side's blocks that is in use, once none is or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            used: dict[Side, float] = {
                side: engine.metrics().total("vllm:kv_cache_usage_perc")
                for side, engine in self._engines.items()
            }
            if not any(used.values()) or time.monotonic() > deadline:
                return used
            time.sleep(_POLL_S)


def _merged(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Options with changes; mappings are added to, the rest is replaced."""
    merged = {**options, **changes}
    for key in options.keys() & changes.keys():
        if isinstance(options[key], Mapping):
            merged[key] = {**options[key], **changes[key]}
    return merged
