"""The command line as a process of its own, against a real rankbookd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

_PATIENCE_S = 30.0

# A run in the background (nohup, &) ignores ctrl-C, and what it starts would, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Ran:
    """What a command came to."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """Its one JSON object."""
        return json.loads(self.out)


class Cli:
    """Runs `rankbook` with one server and a namespace of its own."""

    def __init__(self, server: str, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
        self.environ = {**clean, "RANKBOOK_SERVER": server, "RANKBOOK_NAMESPACE": namespace}
        self.command = [sys.executable, "-m", "rankbook.cli"]
        self._running: list[subprocess.Popen[str]] = []

    def __call__(
        self, *words: str, stdin: str | None = None, env: Mapping[str, str] | None = None
    ) -> Ran:
        """Runs a command to its end."""
        done = subprocess.run(
            [*self.command, *words],
            env={**self.environ, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Starts a command that goes on; it is ended with the test."""
        process = subprocess.Popen(
            [*self.command, *words],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], number: int | None = None) -> Ran:
        """Waits for a started command, after sending it a signal if one is given."""
        if number is not None:
            process.send_signal(number)
        out, err = process.communicate(timeout=_PATIENCE_S)
        return Ran(process.returncode, out, err)

    def stays(self, process: subprocess.Popen[str], seconds: float) -> bool:
        """Whether a started command is still there after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is None

    def until(self, wanted: Callable[[], bool], words: str, timeout_s: float = 20.0) -> None:
        """Waits until another process has brought something about."""
        deadline = time.monotonic() + timeout_s
        while not wanted():
            if time.monotonic() > deadline:
                raise AssertionError(f"never came: {words}")

    def state(self, engine_id: str) -> str:
        """The state of an engine, or "UNKNOWN"."""
        shown = self("topology", engine_id, "-o", "json", "--allow-incomplete")
        return str(shown.json.get("state", "UNKNOWN"))

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            with contextlib.suppress(ValueError):
                process.communicate()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def record(**changes: Any) -> dict[str, Any]:
    """A record as a file holds it: one rank of one."""
    return {
        "group": "g",
        "engine_id": "e",
        "generation": "t1",
        "role": "PRODUCER",
        "layout": {"pp_size": 1, "tp_size": 1, "num_layers": 32},
        "slot": {"pp_rank": 0, "tp_rank": 0},
        "layers": {"start_layer": 0, "end_layer": 32},
        "model": {"name": "m", "total_num_kv_heads": 8, "head_size": 64},
        "kv": {"block_size": 16, "block_len_bytes": 65536, "num_blocks": 64},
        "handshake": {"format": "test", "version": 1, "payload": "c2VjcmV0"},
        **changes,
    }


def grid(split: list[int], tp_size: int, **changes: Any) -> list[dict[str, Any]]:
    """Records of a whole engine: stages of `split` layers by `tp_size` ranks."""
    layout = {"pp_size": len(split), "tp_size": tp_size, "num_layers": sum(split)}
    return [
        record(
            **{
                "layout": layout,
                "slot": {"pp_rank": stage, "tp_rank": tp_rank},
                "layers": {
                    "start_layer": sum(split[:stage]),
                    "end_layer": sum(split[: stage + 1]),
                },
                **changes,
            }
        )
        for stage in range(len(split))
        for tp_rank in range(tp_size)
    ]


@pytest.fixture
def cli(shared_rankbookd: Any) -> Iterator[Cli]:
    """The command line against the shared server, in a namespace of the test's own."""
    made = Cli(shared_rankbookd.grpc, f"ns-{uuid.uuid4().hex[:12]}")
    yield made
    made.close()


@pytest.fixture
def cli_for() -> Iterator[Callable[[str], Cli]]:
    """Command lines against servers that the test starts itself."""
    made: list[Cli] = []

    def make(server: str) -> Cli:
        made.append(Cli(server, "default"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def make_record() -> Callable[..., dict[str, Any]]:
    """Makes a record; keywords replace its members."""
    return record


@pytest.fixture
def make_grid() -> Callable[..., list[dict[str, Any]]]:
    """Makes the records of a whole engine: `make_grid([31, 30], 2)`."""
    return grid


@pytest.fixture
def publish(cli: Cli) -> Callable[..., Any]:
    """Publishes records for two minutes and gives what `register` printed."""

    def publish_(records: Any) -> Any:
        words = ("register", "-f", "-", "--ttl", "120s", "-o", "json")
        ran = cli(*words, stdin=json.dumps(records))
        assert ran.code == 0, ran.err
        return ran.json

    return publish_
