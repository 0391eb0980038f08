"""Namespaces of a run's own, where the machine gives them.

In its own network namespace a run meets nobody else's ports, and in its own
process namespace nothing of it outlives its first process, however that ends.
Where there are none everything works as well; processes are then ended by
their handles alone.
"""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import subprocess

__all__ = ["namespaces", "raise_loopback"]

_UNSHARE = (
    "unshare",
    *("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def namespaces() -> tuple[str, ...]:
    """The command that runs another one in namespaces of its own; empty where there are none."""
    if shutil.which("unshare") is None:
        return ()
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False, timeout=30)
    return _UNSHARE if tried.returncode == 0 else ()


def raise_loopback() -> None:
    """Brings up the loopback device, which is down in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xh", asked)
        if not flags & _UP:
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
