"""A store as an endpoint: this process serves itself from it.

`Client("etcd:HOST:PORT,...")` needs no rankbookd: the server's own code runs in
a thread of this process, over the store, and the client reaches it by a socket
file that only this user can open. So the rules are the same, and so is all of
the client. The code comes with `rankbook[server]`, and is found by its entry
point, since the client imports nothing of the server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import metadata

from rankbook.errors import Reason, Unavailable

__all__ = ["GROUP", "serve"]

GROUP = "rankbook.stores"
"""Entry points: by scheme of the URL, a function from the URL to gRPC's target."""

_lock = threading.Lock()
_served: dict[tuple[int, str], str] = {}


def serve(url: str) -> str:
    """What gRPC calls the server over a store, which is started where it does not
    run yet; it runs until this process ends. Safe from any thread.

    Args:
        url: For example `etcd:10.0.0.1:2379,10.0.0.2:2379/rankbook`.

    Raises:
        BadRequest: The URL is malformed.
        Unavailable: The code for it is not installed.
    """
    # A forked child has the address and not the thread that serves it.
    key = (os.getpid(), url)
    with _lock:
        found = _served.get(key)
        if found is None:
            found = _served[key] = _server_of(url.partition(":")[0])(url)
        return found


def _server_of(scheme: str) -> Callable[[str], str]:
    for point in metadata.entry_points(group=GROUP, name=scheme):
        try:
            loaded: Callable[[str], str] = point.load()
        except ImportError as error:
            raise _missing(scheme, str(error)) from None
        return loaded
    raise _missing(scheme, f"nothing is installed for {scheme}:")


def _missing(scheme: str, why: str) -> Unavailable:
    return Unavailable(
        f"an endpoint {scheme}:... is served by this process itself, which needs "
        f"rankbook[server,{scheme}] ({why}): install it, or name a rankbookd",
        reason=Reason.UNREACHABLE,
        metadata={"scheme": scheme},
    )
