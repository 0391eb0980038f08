"""Real processes for these tests and the demo: a registry and a vLLM engine.

They are observed from outside, so waiting for them is polling with a deadline.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
START_S = 240.0
"""Longest start of an engine. 30 s on two idle cores; more beside other work."""


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


class Engine:
    """A vLLM API server with its engine core and workers."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        connector: str = "NixlPushConnector",
        engine_id: str = "",
        pp_size: int = 2,
        settings: dict | None = None,
        extra: dict | None = None,
        launch: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server"),
        arguments: tuple[str, ...] = (),
        env: dict | None = None,
    ) -> None:
        """Starts it and returns at once.

        Args:
            model: Folder of the model.
            folder: Where the log goes.
            connector: Class name; loaded from rankbook_vllm.connectors.
            engine_id: vLLM's engine_id; empty lets vLLM make one.
            pp_size: Pipeline stages.
            settings: The connector's "rankbook" settings.
            extra: More of its extra config.
            launch: What Python runs.
            arguments: More arguments of vLLM's server.
            env: More environment.
        """
        self.port = free_port()
        self.side_port = free_port()
        self.engine_id = engine_id
        self.log = folder / f"{engine_id or 'engine'}-{self.port}.log"
        self._shm = set(os.listdir("/dev/shm"))
        transfer = {
            "kv_connector": connector,
            "kv_connector_module_path": "rankbook_vllm.connectors",
            "kv_role": "kv_producer",
            "kv_buffer_device": "cpu",
            **({"engine_id": engine_id} if engine_id else {}),
            "kv_connector_extra_config": {**(extra or {}), "rankbook": settings or {}},
        }
        command = [sys.executable, *launch]
        command += ["--model", str(model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32"]
        command += ["--max-num-seqs", "8", "--gpu-memory-utilization", "0.2", "--seed", "0"]
        command += ["--num-gpu-blocks-override", "256", "--no-enable-prefix-caching"]
        # Not --enforce-eager: without a warm-up the second stage has no buffers on CPU.
        command += ["-cc", '{"mode": 2, "backend": "eager"}']
        command += ["--pipeline-parallel-size", str(pp_size)]
        command += ["--kv-transfer-config", json.dumps(transfer), *arguments]
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
            **(env or {}),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: list[int] = []

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

    def complete(self, prompt: str, max_tokens: int = 4) -> dict:
        """One completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

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
        """Ends what is left of it, and what it left in shared memory."""
        for pid in dict.fromkeys([*self._family, *family(self.process.pid)]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for name in set(os.listdir("/dev/shm")) - self._shm:
            if name.startswith(("vllm_dist_", "psm_", "sem.", "torch_")):
                Path("/dev/shm", name).unlink(missing_ok=True)
