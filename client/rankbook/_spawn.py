"""Starting the heartbeat process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["close_pipes", "spawn"]


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
        env=environment,
        start_new_session=True,
    )


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Closes this side of the pipes."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
