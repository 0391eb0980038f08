"""The processes of a run, each with a handle that ends it, and its own wall clock."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.contract.etcd_server import EtcdNode

__all__ = ["EtcdMember", "Node", "PythonNode"]

ROOT = Path(__file__).parents[2]
_SHIM = Path(__file__).parent / "clock_shim"


class Node:
    """A process that can be killed, frozen and started again."""

    def __init__(self, name: str) -> None:
        """Starts nothing."""
        self.name = name
        self.is_frozen = False

    def start(self) -> None:
        """Starts it; it must not run."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends it with SIGKILL, also while it is frozen; no effect if it does not run."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Stops it: its connections stay, nothing is answered."""
        raise NotImplementedError

    def thaw(self) -> None:
        """Lets it run on."""
        raise NotImplementedError


class PythonNode(Node):
    """A Python process of ours, whose wall clock can jump."""

    def __init__(self, name: str, folder: Path, arguments: Callable[[int], Sequence[str]]) -> None:
        """Starts nothing.

        Args:
            name: The node.
            folder: For its log and its clock.
            arguments: What Python is to run, by the number of starts before.
        """
        super().__init__(name)
        self._arguments = arguments
        self.log_file = folder / f"{name}.log"
        self._clock_file = folder / f"{name}.clock"
        self._process: subprocess.Popen[bytes] | None = None
        self.lives = 0
        self.jump(0.0)

    def jump(self, offset_s: float) -> None:
        """Sets how many seconds its wall clock is ahead of the machine's, now or once it runs."""
        mode = "r+b" if self._clock_file.exists() else "wb"
        with self._clock_file.open(mode) as file:
            file.write(struct.pack("=d", offset_s))

    def start(self) -> None:
        """Starts it."""
        assert not self.is_alive, f"{self.name} runs already"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANKBOOK_", "ETCD_"))}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._arguments(self.lives)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**clean, "PYTHONPATH": str(_SHIM), "CHAOS_CLOCK": str(self._clock_file)},
                start_new_session=True,
            )
        self.lives += 1
        self.is_frozen = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How it ended by itself; None while it runs, and after `kill`."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self.is_frozen = False

    def freeze(self) -> None:
        """Stops it."""
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """Lets it run on."""
        self._signal(signal.SIGCONT)
        self.is_frozen = False

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended by itself; False when time is up."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class EtcdMember(Node):
    """A member of the etcd cluster."""

    def __init__(self, name: str, node: EtcdNode) -> None:
        """Starts nothing."""
        super().__init__(name)
        self.node = node
        self._runs = False

    def start(self) -> None:
        """Starts it, and does not wait until it serves."""
        self.node.start(wait=False)
        self._runs = True
        self.is_frozen = False

    @property
    def is_alive(self) -> bool:
        """Whether it was started and not killed."""
        return self._runs

    def kill(self) -> None:
        """Ends it."""
        self.node.kill()
        self._runs = False
        self.is_frozen = False

    def freeze(self) -> None:
        """Stops it."""
        self.node.pause()
        self.is_frozen = True

    def thaw(self) -> None:
        """Lets it run on."""
        self.node.resume()
        self.is_frozen = False
