"""The heartbeat process: `python -m rankbook._heartbeat PARENT_PID`.

Keeps a registration alive while its parent's interpreter is busy, and takes it
out as soon as the parent is gone. The main thread only watches: the parent (by
a pidfd, since a pipe says nothing while a forked child holds its other end),
the pipe with commands, signals, and the pipe with notices. The loop that talks
to the registry has a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any

from rankbook._pipe import LineReader, NoticeWriter
from rankbook.errors import Cancelled

__all__ = ["TERMINATED", "main"]

_STDIN, _STDOUT = 0, 1
_PARENT_POLL_MS = 200
"""Where there is no pidfd."""
TERMINATED = 143
"""Exit code after SIGTERM: told to end, so nobody is to start another."""
_END_S = 0.7
"""For the goodbye: an orphan is gone within a second of its parent."""


def _watch_parent(pid: int) -> int | None:
    """A descriptor that is readable once the parent is gone; None where there is none such."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


class _Watcher:
    """The main thread's loop."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._pidfd = _watch_parent(parent)
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._reader = LineReader()
        self._writer = NoticeWriter(_STDOUT)
        self._writer_lock = threading.Lock()
        self._keeping: Any = None
        self._terminated = False

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        for fd in (_STDIN, self._wake_r, self._pidfd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while not self._over():
            with self._writer_lock:
                if self._writer.pending:
                    poll.register(_STDOUT, select.POLLOUT)
                else:
                    with contextlib.suppress(KeyError):
                        poll.unregister(_STDOUT)
            ready = {
                fd for fd, _ in poll.poll(None if self._pidfd is not None else _PARENT_POLL_MS)
            }
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            if _STDOUT in ready:
                with self._writer_lock:
                    self._writer.flush()
            if self._terminated or self._orphaned(ready):
                break
            if _STDIN in ready and not self._read_commands():
                break
        if self._keeping is not None:
            error = Cancelled("the heartbeat process was told to end by SIGTERM")
            self._keeping.end(_END_S, error if self._terminated else None)
        return TERMINATED if self._terminated else 0

    def _on_term(self, *_: object) -> None:
        self._terminated = True

    def _orphaned(self, ready: set[int]) -> bool:
        return self._pidfd in ready or os.getppid() != self._parent

    def _over(self) -> bool:
        """Whether it ended by itself and the parent has been told."""
        if self._keeping is None or not self._keeping.finished.is_set():
            return False
        with self._writer_lock:
            return not self._writer.pending

    def _read_commands(self) -> bool:
        """Takes what the parent wrote; False at a stop, or at the end of the pipe."""
        data = os.read(_STDIN, 1 << 20)
        if not data:
            return False
        for command in self._reader.feed(data):
            if command["op"] == "start":
                self._start(command)
            elif command["op"] == "stop":
                return False
            elif self._keeping is not None:
                self._keeping.submit(command)
        return True

    def _start(self, command: dict[str, Any]) -> None:
        # Here and not above: the parent is watched while gRPC is being loaded.
        from rankbook._keeping import Keeping

        self._keeping = Keeping(command, self._notify)
        threading.Thread(target=self._keep, name="rankbook-heartbeat", daemon=True).start()

    def _keep(self) -> None:
        try:
            self._keeping.run()
        finally:
            self._wake()

    def _notify(self, kind: str, value: dict[str, Any]) -> None:
        with self._writer_lock:
            self._writer.post(kind, value)
            pending = self._writer.pending
        if pending:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b"\0")


def main() -> None:
    """Runs until the parent is gone, says stop, or the registration ended."""
    parent = int(sys.argv[1])
    code = _Watcher(parent).run() if os.getppid() == parent else 0
    # Not by way of interpreter shutdown: threads in gRPC may take their time there.
    os._exit(code)


if __name__ == "__main__":
    main()
