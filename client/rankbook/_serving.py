"""A store as an endpoint: this process serves itself from it.

`Client("etcd:HOST:PORT,...")` needs no rankbookd: the server's own code runs in
a small process beside this one, over the store, and the client reaches it by a
socket file that only this user can open. So the rules are the same, and so is all
of the client. The code comes with `rankbook[server]`, and is found by its entry
point, since the client imports nothing of the server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import metadata
from typing import Protocol

from rankbook.errors import Reason, Unavailable

__all__ = ["GROUP", "serve"]

GROUP = "rankbook.stores"
"""Entry points: by scheme of the URL, a function from the URL to what is `Served`."""


class Served(Protocol):
    """A server of this process."""

    target: str
    """What gRPC calls it."""

    def is_running(self) -> bool:
        """Whether it has not ended."""


_lock = threading.Lock()
_served: dict[tuple[int, str], Served] = {}


def serve(url: str) -> str:
    """What gRPC calls the server over a store, which is started where it does not
    run; it ends with this process. Takes up to a second then. Safe from any thread.

    Args:
        url: For example `etcd:10.0.0.1:2379,10.0.0.2:2379/rankbook`.

    Raises:
        BadRequest: The URL is malformed.
        Unavailable: The code for it is not installed, or does not start.
    """
    # A forked child has its own: the one of its parent ends with that.
    key = (os.getpid(), url)
    with _lock:
        found = _served.get(key)
        if found is None or not found.is_running():
            found = _served[key] = _server_of(url.partition(":")[0])(url)
        return found.target


def _server_of(scheme: str) -> Callable[[str], Served]:
    for point in metadata.entry_points(group=GROUP, name=scheme):
        try:
            loaded: Callable[[str], Served] = point.load()
        except ImportError as error:
            raise _missing(scheme, str(error)) from None
        return loaded
    raise _missing(scheme, f"nothing is installed for {scheme}:")


def _missing(scheme: str, why: str) -> Unavailable:
    return Unavailable(
        f"an endpoint {scheme}:... is served by this process itself, which needs "
        f"rankbook[server] ({why}): install it, or name a rankbookd",
        reason=Reason.UNREACHABLE,
        metadata={"scheme": scheme},
    )
