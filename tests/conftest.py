"""Fixtures of every room: a real rankbookd on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.contract.etcd_server import EtcdNode

START_TIMEOUT_S = 30.0


class RankbookdProcess:
    """A rankbookd that a test started. It is ended by its own handle."""

    def __init__(
        self, command: Sequence[str], ready_file: Path, log: Path, env: Mapping[str, str]
    ) -> None:
        self.ready_file = ready_file
        self.log_file = log
        self.command = list(command)
        self._env = dict(env)
        self.grpc = ""
        """HOST:PORT of its gRPC side."""
        self.http = ""
        """HOST:PORT of its HTTP side."""
        self._start()

    def _start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            if self.process.poll() is not None:
                raise AssertionError(f"rankbookd ended with {self.process.returncode}:\n{self.log}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"rankbookd was not ready in time:\n{self.log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01)
        ready = json.loads(self.ready_file.read_text())
        self.grpc, self.http = ready["grpc"], ready["http"]
        assert ready["pid"] == self.process.pid

    @property
    def log(self) -> str:
        """What it has written to standard error so far."""
        return self.log_file.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def get(self, path: str, timeout_s: float = 5.0) -> str:
        """The body of a page of its HTTP side."""
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=timeout_s) as reply:
            body: bytes = reply.read()
        return body.decode()

    def pause(self) -> None:
        """Freezes it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it run on."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 15.0) -> int:
        """Asks it to stop and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"rankbookd did not stop in time:\n{self.log}") from None

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def start_again(self, *, same_port: bool = False) -> None:
        """Starts it anew after `stop` or `kill`, over the same store.

        Args:
            same_port: Listens where it listened before.
        """
        if same_port:
            self.command[self.command.index("--listen") + 1] = self.grpc
        self._start()


RankbookdFactory = Callable[..., RankbookdProcess]


@contextlib.contextmanager
def _servers(folder: Path) -> Iterator[RankbookdFactory]:
    started: list[RankbookdProcess] = []

    def make(
        *flags: str,
        store: str = "memory:",
        listen: str = "127.0.0.1:0",
        http: str = "127.0.0.1:0",
        env: Mapping[str, str] | None = None,
    ) -> RankbookdProcess:
        number = len(started)
        ready_file = folder / f"rankbookd-{number}.ready"
        command = [
            *(sys.executable, "-m", "rankbook_server.app"),
            *("--listen", listen, "--http", http, "--store", store),
            *("--ready-file", str(ready_file), "--log-format", "json"),
            *flags,
        ]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
        server = RankbookdProcess(
            command, ready_file, folder / f"rankbookd-{number}.log", {**clean, **(env or {})}
        )
        started.append(server)
        return server

    try:
        yield make
    finally:
        for server in started:
            server.process.send_signal(signal.SIGCONT)
            server.kill()


@pytest.fixture
def rankbookd(tmp_path: Path) -> Iterator[RankbookdFactory]:
    """Makes real servers: `rankbookd(*flags, store="memory:", env={})`.

    Each listens on free ports of 127.0.0.1 and is killed when the test ends.
    """
    with _servers(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def shared_rankbookd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankbookdProcess]:
    """One server with default settings for all tests that use engines of their own."""
    with _servers(tmp_path_factory.mktemp("shared")) as make:
        yield make()


@pytest.fixture(scope="session")
def etcd_node() -> Iterator[EtcdNode]:
    """A real etcd that no test stops; each test has a prefix or engines of its own."""
    with EtcdNode() as node:
        yield node


@pytest.fixture(scope="session")
def etcd_rankbookd(
    tmp_path_factory: pytest.TempPathFactory, etcd_node: EtcdNode
) -> Iterator[RankbookdProcess]:
    """As `shared_rankbookd`, over etcd."""
    with _servers(tmp_path_factory.mktemp("etcd")) as make:
        yield make(store=etcd_node.url("shared"))
