"""Starting the heartbeat process, and writing to it without waiting for ever."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

from rankbook import _clock

__all__ = ["close_pipes", "send", "spawn"]


def spawn() -> subprocess.Popen[bytes]:
    """Starts a heartbeat process of this one, with pipes to and from it.

    Raises:
        OSError: No process can be started.
    """
    if not sys.executable:
        raise FileNotFoundError("this interpreter does not know its own executable")
    environment = dict(os.environ)
    # So that the child finds this very package, wherever it was imported from.
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.setdefault("GRPC_VERBOSITY", "NONE")
    # -P: what lies in the working directory is not what is to be imported.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rankbook._heartbeat", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )


def send(process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> bool:
    """Writes a line to the process, waiting at most `limit_s` seconds for it to read.

    Returns:
        False where it did not read in time, and holds a part of the line: end it.
        True also for a process that is gone, which its reader notices.
    """
    assert process.stdin is not None
    until = _clock.mono_s() + limit_s
    rest = memoryview(line)
    try:
        fd = process.stdin.fileno()
        os.set_blocking(fd, False)
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                left_s = until - _clock.mono_s()
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    return False
    except (OSError, ValueError):
        return True
    return True


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Closes this side of the pipes."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
