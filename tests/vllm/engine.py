"""Real processes for these tests and the demo: a registry and a vLLM engine.

They are observed from outside, so waiting for them is polling with a deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 240.0
"""Longest start of an engine. 30 s on two idle cores; more beside other work."""
BLOCK_TOKENS = 32
"""Tokens of one KV block in every engine of these tests."""


class Refused(Exception):
    """An engine answered a request with an error."""

    def __init__(self, engine: str, status: int, body: str) -> None:
        super().__init__(f"{engine} answered {status}: {body}")
        self.engine = engine
        """Name of the engine."""
        self.status = status
        """HTTP status."""
        self.body = body
        """What it said."""


class NoAnswer(Exception):
    """An engine gave no answer: too late, or the connection broke."""

    def __init__(self, engine: str, waited_s: float, reason: str) -> None:
        super().__init__(f"{engine} gave no answer in {waited_s:.1f} s: {reason}")
        self.engine = engine
        """Name of the engine."""
        self.waited_s = waited_s
        """How long it was waited for, in seconds."""


_PORTS = iter(random.sample(range(10_000, 32_000), 22_000))
"""Each is given out once: vLLM's server shares a port (SO_REUSEPORT) with whoever else
got it, and half of the requests then reach the wrong engine. All are below those that
Linux gives to outgoing connections."""


def free_port() -> int:
    """A port of the loopback interface that nothing listens on, and that nobody else gets."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is left")


def make_model(folder: Path) -> Path:
    """Makes the tiny model in `folder`."""
    subprocess.run(
        [sys.executable, str(HERE / "tiny_model.py"), str(folder)],
        check=True,
        env=dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"),
        capture_output=True,
    )
    return folder


class Registry:
    """A `rankbookd` on the loopback interface, with its book in memory."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Starts it and waits until it serves."""
        ready = folder / f"ready-{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "rankbook_server.app", "--store", "memory:"]
        command += ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
        command += ["--ready-file", str(ready)]
        log = folder / "rankbookd.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        self.address: str = json.loads(ready.read_text())["grpc"]

    def freeze(self) -> None:
        """Stops it in its tracks: what is sent to it is taken and not answered."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Ends it as a crash does."""
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(30)


def _stat(pid: int) -> tuple[int, str]:
    """Parent and state of a process; (0, "") when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, ""
    state, parent = text.rpartition(")")[2].split()[:2]
    return int(parent), state


def family(pid: int) -> list[int]:
    """A process and all its living descendants."""
    parents = {int(name): _stat(int(name)) for name in os.listdir("/proc") if name.isdecimal()}
    found = [pid]
    for known in found:
        found.extend(
            child
            for child, (parent, state) in parents.items()
            if parent == known and state not in ("", "Z") and child not in found
        )
    return found


def _mapped() -> set[str]:
    """Names in /dev/shm that some living process has mapped."""
    names = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, found, name = line.partition("/dev/shm/")
                if found:
                    names.add(name.removesuffix(" (deleted)"))
    return names


class Metrics:
    """What an engine's /metrics said at one time."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels.

        Raises:
            KeyError: There is no sample of this name.
        """
        named = [sample for sample in self._samples if sample.name == name]
        if not named:
            raise KeyError(name)
        return sum(
            sample.value
            for sample in named
            if all(sample.labels.get(label) == value for label, value in labels.items())
        )

    def counters(self, prefix: str) -> dict[str, float]:
        """The counters whose names begin so, each summed over its labels.

        Raises:
            KeyError: There is none.
        """
        names = {
            sample.name
            for sample in self._samples
            if sample.name.startswith(prefix) and sample.name.endswith("_total")
        }
        if not names:
            raise KeyError(prefix)
        return {name: self.total(name) for name in sorted(names)}


class Engine:
    """A vLLM API server with its engine core and workers.

    Its processes stay in the session of whoever started it: where each has one
    of its own, the kernel shares the cores between sessions, and a pair on two
    cores starves its driver for half a minute at a time.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        connector: str = "NixlPushConnector",
        module: str = "rankbook_vllm.connectors",
        role: str = "kv_producer",
        engine_id: str = "",
        pp_size: int = 2,
        port: int = 0,
        settings: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        launch: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server"),
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        fork: bool = True,
    ) -> None:
        """Starts it and returns at once.

        Args:
            model: Folder of the model.
            folder: Where the log goes.
            connector: Class name. Empty makes a plain engine that moves no KV.
            module: Where the class is.
            role: vLLM's kv_role.
            engine_id: vLLM's engine_id; empty lets vLLM make one.
            pp_size: Pipeline stages.
            port: Where it takes requests; 0 takes a free one.
            settings: The connector's "rankbook" settings.
            extra: More of its extra config.
            launch: What Python runs.
            arguments: More arguments of vLLM's server.
            env: More environment.
            fork: Whether its processes are forked from one that has imported vLLM, which
                makes a start a third shorter; else vLLM spawns them, as it does on CPU.
        """
        self.port = port or free_port()
        self.side_port = free_port()
        self.engine_id = engine_id
        self.log = folder / f"{engine_id or 'engine'}-{self.port}.log"
        self._shm = set(os.listdir("/dev/shm"))
        command = [sys.executable, *launch]
        command += ["--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "1024"]
        command += ["--block-size", str(BLOCK_TOKENS)]
        command += ["--max-num-seqs", "8", "--gpu-memory-utilization", "0.2", "--seed", "0"]
        command += ["--num-gpu-blocks-override", "256", "--no-enable-prefix-caching"]
        # Not --enforce-eager: without a warm-up the second stage has no buffers on CPU.
        command += ["-cc", '{"mode": 2, "backend": "eager"}']
        command += ["--disable-uvicorn-access-log"]
        command += ["--pipeline-parallel-size", str(pp_size)]
        if connector:
            transfer = {
                "kv_connector": connector,
                "kv_connector_module_path": module,
                "kv_role": role,
                "kv_buffer_device": "cpu",
                **({"engine_id": engine_id} if engine_id else {}),
                "kv_connector_extra_config": {**(extra or {}), "rankbook": {**(settings or {})}},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        command += arguments
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE / "quiet"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            **({"FORK_READY": "1"} if fork else {}),
            **(env or {}),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._family: list[int] = []
        self._killed = False

    def __str__(self) -> str:
        return self.engine_id or f"the engine at port {self.port}"

    def wait_serving(self) -> None:
        """Waits until it answers; raises with the end of its log if it does not."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM exited {self.process.returncode}:\n{self.tail()}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5),
            ):
                return
            time.sleep(0.2)
        raise RuntimeError(f"vLLM not up after {START_S:g} s:\n{self.tail()}")

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 4,
        *,
        request_id: str = "",
        timeout_s: float = 60.0,
        **more: Any,
    ) -> dict[str, Any]:
        """One greedy completion, without its tokens' text deciding where it ends.

        Args:
            prompt: Text, or the ids of its tokens.
            max_tokens: How many tokens to make.
            request_id: X-Request-Id, which vLLM makes part of its own id.
            timeout_s: How long to wait for the answer, in seconds.
            more: More fields of the request's body.

        Raises:
            Refused: It answered with an error.
            NoAnswer: It did not answer in time, or the connection broke.
        """
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body | {"temperature": 0} | more).encode(),
            {"Content-Type": "application/json"}
            | ({"X-Request-Id": request_id} if request_id else {}),
        )
        sent = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise Refused(str(self), error.code, text) from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(self), time.monotonic() - sent, str(error)) from error

    def metrics(self) -> Metrics:
        """What its /metrics says now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            return Metrics(page.read().decode())

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def freeze(self) -> None:
        """Stops every process of it, the heartbeat processes too, as a lost node does."""
        self._family = family(self.process.pid)
        for pid in self._family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def terminate(self) -> None:
        """Asks it to end; returns at once."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends what is left of it, and what it left in shared memory. May be called again."""
        if self._killed:
            return
        self._killed = True
        ours = list(dict.fromkeys([*self._family, *family(self.process.pid)]))
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        deadline = time.monotonic() + 10
        while any(_stat(pid)[1] not in ("", "Z") for pid in ours) and time.monotonic() < deadline:
            time.sleep(0.02)
        # What is new and still mapped is another engine's, started after this one.
        for name in set(os.listdir("/dev/shm")) - self._shm - _mapped():
            if name.startswith(("vllm_dist_", "psm_", "sem.", "torch_")):
                Path("/dev/shm", name).unlink(missing_ok=True)
