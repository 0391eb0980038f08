"""The proxy as a process of its own, a real registry, and engines that stand in for vLLM's."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

import rankbook
from rankbook.model import Address, CoreRecord, Process, Requirement, Role

PATIENCE_S = 20.0


class Asked:
    """One request that an engine got."""

    def __init__(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        self.path = path
        self.headers = headers
        self.body = body

    @property
    def kv(self) -> dict[str, Any] | None:
        """Its `kv_transfer_params`."""
        return self.body.get("kv_transfer_params")


class Handler(BaseHTTPRequestHandler):
    """What a fake engine does with a connection."""

    protocol_version = "HTTP/1.1"
    engine: FakeEngine

    def do_POST(self) -> None:
        """Notes the request, then answers as the test says."""
        raw = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.path, headers, json.loads(raw))
        self.engine.asked.put(asked)
        self.close_connection = True
        self.engine.answer(self, asked)

    def reply(self, body: object, status: int = 200, kind: str = "application/json") -> None:
        """Answers at once."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        """Begins to answer with server-sent events."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def event(self, text: str) -> None:
        """Sends one event of a stream."""
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_stream(self) -> None:
        """Ends a stream as HTTP has it."""
        self.wfile.write(b"0\r\n\r\n")

    def wait_closed(self) -> bool:
        """Waits until the caller hangs up; False if it does not."""
        self.connection.settimeout(PATIENCE_S)
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A caller that hung up is what some tests are about."""


class FakeEngine:
    """Stands in for the HTTP side of a vLLM engine: it computes nothing.

    A prefill is answered with all that vLLM 0.32's NixlPushConnector returns,
    a decode with the engine's name as the text.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.asked: queue.Queue[Asked] = queue.Queue()
        self.answer: Callable[[Handler, Asked], None] = self.as_vllm
        handler = type("BoundHandler", (Handler,), {"engine": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def returned(self) -> dict[str, Any]:
        """The `kv_transfer_params` of its prefills."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[3, 4]],
            "remote_engine_id": self.engine_id,
            "remote_generation": "g1",
            "remote_request_id": "cmpl-7-0",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 2,
            "dcp_size": 1,
            "remote_num_tokens": 33,
            "transfer_mode": "push",
        }

    def as_vllm(self, handler: Handler, asked: Asked) -> None:
        """Answers as described above."""
        choice = {"index": 0, "text": self.engine_id, "finish_reason": "length"}
        reply: dict[str, Any] = {"choices": [choice], "kv_transfer_params": None}
        if (asked.kv or {}).get("do_remote_decode"):
            reply["kv_transfer_params"] = self.returned
        handler.reply(reply)

    def get(self) -> Asked:
        """The next request that it gets."""
        return self.asked.get(timeout=PATIENCE_S)

    @property
    def count(self) -> int:
        """Requests that it got and nobody took."""
        return self.asked.qsize()

    def close(self) -> None:
        """Takes no more connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)


class Fleet:
    """Publishes engines, sealed as engine cores seal them, in a namespace of its own."""

    def __init__(self, server: str, made: Any) -> None:
        self.server = server
        self.namespace = f"proxy-{uuid.uuid4().hex[:12]}"
        self.client = rankbook.Client(server, namespace=self.namespace)
        self._made = made
        self._started: list[FakeEngine] = []
        self._leases: dict[str, str] = {}

    def engine(self, engine_id: str) -> FakeEngine:
        """An engine that takes requests and is not in the book."""
        self._started.append(FakeEngine(engine_id))
        return self._started[-1]

    def sign_in(
        self,
        engine_id: str,
        role: Role,
        group: str,
        *,
        generation: str = "g1",
    ) -> None:
        """Its worker signs in: COMPLETE."""
        record = dataclasses.replace(
            self._made.record(engine_id, generation=generation),
            role=role,
            group=group,
        )
        registered = self.client.register_workers(
            [record], sequence=1, lease_key=f"{engine_id}-{generation}", ttl_s=300
        )
        self._leases[engine_id] = registered.lease.lease_id

    def seal(
        self,
        engine_id: str,
        port: int | None,
        *,
        generation: str = "g1",
        connector: str = "NixlPushConnector",
        side_channel: int = 5600,
        sequence: int = 1,
    ) -> None:
        """Its core seals it: READY. Without `port` it does not say where it serves."""
        topology = self.client.get_topology(engine_id, require=Requirement.COMPLETE)
        assert topology.engine.generation == generation
        addresses = [Address("zmq", "127.0.0.1", side_channel, "side-channel")]
        if port is not None:
            addresses.append(Address("http", "127.0.0.1", port, "serving"))
        core = CoreRecord(
            process=Process(f"{engine_id}-{generation}-core"),
            connector=connector,
            addresses=tuple(addresses),
        )
        slots = self._made.seal_slots(topology)
        self.client.seal_engine(engine_id, generation, slots, core, sequence=sequence)

    def ready(
        self,
        engine_id: str,
        role: Role,
        group: str = "",
        *,
        generation: str = "g1",
        connector: str = "NixlPushConnector",
    ) -> FakeEngine:
        """An engine that takes requests and says so in the book."""
        engine = self.engine(engine_id)
        group = group or ("decode" if role is Role.CONSUMER else "prefill")
        self.sign_in(engine_id, role, group, generation=generation)
        self.seal(engine_id, engine.port, generation=generation, connector=connector)
        return engine

    def pair(self) -> tuple[FakeEngine, FakeEngine]:
        """A READY producer p0 and a READY consumer d0."""
        return self.ready("p0", Role.PRODUCER), self.ready("d0", Role.CONSUMER)

    def lose(self, engine_id: str) -> None:
        """Its process is dead, as its heartbeat process tells."""
        self.client.revoke_lease(self._leases[engine_id])

    def close(self) -> None:
        """Ends its engines."""
        for engine in self._started:
            engine.close()
        self.client.close()


class ProxyProcess:
    """`python -m rankbook_vllm.proxy`, ended by its own handle."""

    def __init__(self, folder: Path, server: str, namespace: str, flags: tuple[str, ...]) -> None:
        self.ready_file = folder / "proxy.ready"
        self._log_file = folder / "proxy.log"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rankbook_vllm.proxy", "--listen", "127.0.0.1:0"),
                    *("--namespace", namespace, "--ready-file", str(self.ready_file), *flags),
                ],
                env={**clean, "RANKBOOK_SERVER": server, "HTTP_PROXY": "http://127.0.0.1:9"},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01)
        ready = json.loads(self.ready_file.read_text())
        assert ready["pid"] == self.process.pid
        self.address: str = ready["http"]
        self.http = httpx.Client(
            base_url=f"http://{self.address}", timeout=PATIENCE_S, trust_env=False
        )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log_file.read_text(errors="replace")

    def post(self, body: object, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        """Sends a request."""
        return self.http.post(path, json=body, **options)

    def engines(self) -> Any:
        """What it would route to."""
        return self.http.get("/engines").json()

    def takes(self, half: str) -> set[str]:
        """engine_ids that get requests."""
        shown = self.engines()[half]["engines"]
        return {one["engine_id"] for one in shown if one["takes_requests"]}

    def stop(self) -> int:
        """Asks it to stop and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Ends it."""
        self.http.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def fleet(shared_rankbookd: Any, made: Any) -> Iterator[Fleet]:
    """Engines in a namespace of the test's own."""
    one = Fleet(shared_rankbookd.grpc, made)
    yield one
    one.close()


@pytest.fixture
def start_proxy(fleet: Fleet, made: Any, tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    """Starts the proxy: `start_proxy(*flags)` returns once it knows the fleet's READY engines."""
    started: list[ProxyProcess] = []

    def start(*flags: str, server: str = "", synced: bool = True) -> ProxyProcess:
        one = ProxyProcess(tmp_path, server or fleet.server, fleet.namespace, flags)
        started.append(one)
        if synced:
            made.eventually(
                lambda: one.http.get("/health").status_code == 200, 10, "the book is read"
            )
        return one

    yield start
    for one in started:
        one.close()
