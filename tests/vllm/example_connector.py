"""A connector of one's own that moves KV by the plan, over plain sockets. Runs on CPU.

    --kv-transfer-config '{"kv_connector": "BookConnector",
        "kv_connector_module_path": "example_connector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"rankbook": {"endpoints": "127.0.0.1:7420"}}}'

The flow is that of a pull: the prefill engine keeps a request's blocks and
returns where they are; each decode worker reads its layers and heads from
whoever has them, and tells every worker it should. Everything about who that is
comes from `rankbook_vllm.authors`; what is here is sockets and block ids.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.request import RequestStatus

from rankbook.errors import RankbookError
from rankbook_vllm.authors import Part, Peers, Share, Topology, signs_in

logger = init_logger("vllm.book_connector")

WAIT_S = 30.0
"""How long a peer is waited for, and how long blocks are kept for one."""
NEEDED = ("remote_engine_id", "remote_generation", "remote_request_id", "remote_block_ids")
"""What a request must say of its producer; without, it is computed here."""
DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class Door(KVConnectorHandshakeMetadata):
    """Where a worker's KV is read. This is all that a worker publishes."""

    host: str
    port: int


@dataclass
class Load:
    """A request whose KV is in a producer."""

    engine_id: str
    generation: str
    request_id: str
    """The producer's name for it."""
    theirs: list[int]
    """The producer's blocks."""
    ours: list[int]
    """Where they go, one by one; none if only the notices are to be sent, for which
    the scheduler does not wait."""


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers."""

    load: dict[str, Load] = field(default_factory=dict)
    keep: set[str] = field(default_factory=set)


@signs_in
class BookConnector(KVConnectorBase_V1):
    """Any PP x TP to any PP x TP that has a plan.

    For models with KV heads, caches of shape (blocks, heads, ...), and equal
    block sizes.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.peers = Peers(self)
        self.next = Step()

    def shutdown(self) -> None:
        if hasattr(self, "shelf"):
            self.shelf.close()
            self.threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ engine core

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        missing = request.num_prompt_tokens - computed
        return (missing, True) if _is_elsewhere(request) and missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        if _is_elsewhere(request):
            ours = blocks.get_unhashed_block_ids() if external else []
            self.next.load[request.request_id] = _load(request, ours)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self.next = self.next, Step()
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        params = request.kv_transfer_params or {}
        if _is_elsewhere(request):  # aborted before it was scheduled
            self.next.load[request.request_id] = _load(request, [])
        if not params.get("do_remote_decode") or request.status not in DONE or not block_ids:
            return False, None
        self.next.keep.add(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.peers.engine_id,
            "remote_generation": self.peers.generation,
            "remote_request_id": request.request_id,
            "remote_block_ids": block_ids,
        }

    # ----------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches
        self.shelf = Shelf(kv_caches, self.peers)
        self.threads = ThreadPoolExecutor(4, thread_name_prefix="book-load")
        self.loads: dict[str, Future[None]] = {}

    def get_handshake_metadata(self) -> Door | None:
        return self.shelf.door if hasattr(self, "shelf") else None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        step = self._get_connector_metadata()
        self.shelf.keep(step.keep)
        for request_id, load in step.load.items():
            future = self.threads.submit(self._load, load)
            if load.ours:
                self.loads[request_id] = future

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received = {name for name, load in self.loads.items() if load.done()}
        failed = {name for name in received if self.loads.pop(name).exception() is not None}
        return KVConnectorTransferResults(self.shelf.take_finished(), received, failed)

    def _load(self, load: Load) -> None:
        """Reads this worker's share of a request and tells all who should know."""
        try:
            producer = self.peers.topology(load.engine_id, load.generation, timeout_s=WAIT_S)
            share = self.peers.share(producer)
            try:
                for part in share.read if load.ours else ():
                    self._read(producer, part, load)
            finally:
                self._tell(producer, share, load)
        except Exception:
            logger.exception("%s of %s cannot be read", load.request_id, load.engine_id)
            raise

    def _tell(self, producer: Topology, share: Share, load: Load) -> None:
        reader = [self.peers.engine_id, self.peers.generation, *astuple(share.rank)]
        for rank in share.contact:
            try:
                door = self.peers.payload(producer, rank, Door)
                with ask(door, {"request": load.request_id, "read_by": reader}):
                    pass
            except (OSError, RankbookError) as error:
                # It keeps the blocks until their time is over; nothing is wrong here.
                logger.warning("%s cannot be told of %s: %s", rank, load.request_id, error)

    def _read(self, producer: Topology, part: Part, load: Load) -> None:
        door = self.peers.payload(producer, part.rank, Door)
        theirs = load.theirs[len(load.theirs) - len(load.ours) :]  # the first may be cached here
        heads = [part.heads.start, part.heads.stop]
        for name in part.names:
            question = {"request": load.request_id, "name": name, "blocks": theirs, "heads": heads}
            into = self.caches[name]
            shape = (len(load.ours), heads[1] - heads[0], *into.shape[2:])
            with ask(door, question) as answer:
                data = bytearray(answer.read())
            values = torch.frombuffer(data, dtype=into.dtype).view(shape)
            into[load.ours, part.into] = values

    # Nothing is done by layer: a request is kept, and read, as a whole.

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def _is_elsewhere(request: Any) -> bool:
    """Whether a request's KV is in a producer and not asked for yet."""
    params = request.kv_transfer_params or {}
    return bool(params.get("do_remote_prefill")) and all(params.get(name) for name in NEEDED)


def _load(request: Any, ours: list[int]) -> Load:
    params = request.kv_transfer_params
    params["do_remote_prefill"] = False  # once
    return Load(*(params[name] for name in NEEDED), ours)


class Shelf:
    """The requests that a worker keeps for its readers, and the socket they are read at."""

    def __init__(self, caches: dict[str, torch.Tensor], peers: Peers) -> None:
        self._caches = caches
        self._peers = peers
        self._changed = threading.Condition()
        self._until: dict[str, float] = {}
        self._read_by: dict[str, set[tuple[Any, ...]]] = {}
        self._readers: dict[str, int] = {}
        shelf = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(shelf.answer(json.loads(self.rfile.readline())))

        self._server = socketserver.ThreadingTCPServer((get_ip(), 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.door = Door(*self._server.server_address[:2])

    def close(self) -> None:
        """Ends the socket."""
        self._server.shutdown()
        self._server.server_close()

    def keep(self, request_ids: set[str]) -> None:
        """Keeps the blocks of these requests from now on."""
        with self._changed:
            until = time.monotonic() + WAIT_S
            self._until.update((request_id, until) for request_id in request_ids)
            self._changed.notify_all()

    def take_finished(self) -> set[str]:
        """The requests that every reader has read, or that nobody came for."""
        with self._changed:
            now = time.monotonic()
            finished = {
                name
                for name, until in self._until.items()
                if len(self._read_by.get(name, ())) == self._readers.get(name) or now > until
            }
            for name in finished:
                if now > self._until.pop(name):
                    logger.warning("nobody has read %s, its blocks are free again", name)
                self._read_by.pop(name, None)
                self._readers.pop(name, None)
        return finished

    def answer(self, question: dict[str, Any]) -> bytes:
        """Answers a reader: with "ok" and the bytes it asks for."""
        name = question["request"]
        readers = 0
        if "read_by" in question:
            engine_id, generation, *_ = question["read_by"]
            reader = self._peers.topology(engine_id, generation, timeout_s=WAIT_S)
            readers = self._peers.readers(reader)
        with self._changed:
            # The reader may have heard of the request before this worker's next step.
            if not self._changed.wait_for(lambda: name in self._until, timeout=5.0):
                return f"{name} is not kept here\n".encode()
            if readers:
                self._readers[name] = readers
                self._read_by.setdefault(name, set()).add(tuple(question["read_by"]))
                return b"ok\n"
            cache = self._caches[question["name"]]
            first, end = question["heads"]
            values = cache[question["blocks"], first:end].contiguous()
            return b"ok\n" + values.view(torch.uint8).numpy().tobytes()


@contextmanager
def ask(door: Door, question: dict[str, Any]) -> Iterator[Any]:
    """Asks a worker and gives what follows its "ok".

    Raises:
        OSError: It did not answer, or said no.
    """
    with socket.create_connection((door.host, door.port), timeout=WAIT_S) as link:
        link.sendall(json.dumps(question).encode() + b"\n")
        with link.makefile("rb") as answer:
            if (word := answer.readline()) != b"ok\n":
                raise OSError(f"{door.host}:{door.port} said {word.decode()!r} to {question}")
            yield answer
