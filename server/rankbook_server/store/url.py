"""Which store a URL means."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote

import platformdirs

from rankbook.errors import BadRequest
from rankbook_server.store.base import Store
from rankbook_server.store.memory import MemoryStore
from rankbook_server.store.sqlite import SqliteStore

__all__ = ["default_path", "open_store"]

_KNOWN = (
    "memory:, sqlite: (a book in the user's state folder), sqlite:PATH[?sync=full] or "
    "etcd:HOST:PORT,...[/PREFIX][?user=NAME&password_file=FILE&ca=FILE&cert=FILE&key=FILE&tls=on]"
)


def default_path() -> Path:
    """Returns where the book of `sqlite:` lies: the user's state folder."""
    return platformdirs.user_state_path("rankbook") / "book.db"


def open_store(
    url: str,
    clock: Callable[[], float],
    new_id: Callable[[], str] | None = None,
    unix: Callable[[], float] = time.time,
) -> Store:
    """Builds the store of a URL; `Store.open` opens it.

    Args:
        url: `memory:`, `sqlite:`, `sqlite:PATH[?sync=full]` or
            `etcd:HOST:PORT,...[/PREFIX][?OPTIONS]`. PATH, and the files that
            options name, may be relative to the working folder, start with `~`,
            and hold percent-encoded characters (`%3F` for a question mark).
        clock: Seconds on a clock that never goes back; for liveness.
        new_id: Makes the id of a new book; by default 32 random hex digits.
        unix: Seconds since 1970; for when a book was created.

    Raises:
        BadRequest: The URL means no store; the message names those there are.
    """
    new_id = new_id or _random_id
    scheme, colon, rest = url.partition(":")
    if not colon:
        raise _bad(url, f"it has no scheme; did you mean sqlite:{url}?")
    if scheme == "memory":
        if rest:
            raise _bad(url, "memory: takes nothing after the colon")
        return MemoryStore(clock, new_id)
    if scheme == "sqlite":
        path, sync_full = _parse_sqlite(url, rest)
        return SqliteStore(path, clock, new_id, sync_full=sync_full)
    if scheme == "etcd":
        return _open_etcd(rest, clock, new_id, unix)
    raise _bad(f"{scheme}:...", "no store has this scheme")


def _open_etcd(
    rest: str, clock: Callable[[], float], new_id: Callable[[], str], unix: Callable[[], float]
) -> Store:
    # gRPC and etcd's messages are for those who use them.
    from rankbook_server.store.etcd import EtcdStore
    from rankbook_server.store.etcd_url import parse_etcd

    try:
        address = parse_etcd(rest, os.environ)
    except ValueError as error:
        # The rest may hold a password.
        raise _bad("etcd:...", str(error)) from None
    return EtcdStore(address, clock, new_id, unix)


def _parse_sqlite(url: str, rest: str) -> tuple[Path, bool]:
    encoded, _, query = rest.partition("?")
    if encoded.startswith("//"):
        host, slash, tail = encoded[2:].partition("/")
        if host or not slash:
            raise _bad(url, "a book lies on this machine: write sqlite:PATH, without a host")
        encoded = "/" + tail
    if encoded == ":memory:":
        raise _bad(url, "for a book that is kept in memory and lost write memory:")
    sync_full = False
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "sync":
            raise _bad(url, f"there is no option {name!r}, only sync")
        if value not in ("normal", "full"):
            raise _bad(url, f"sync is normal or full, not {value!r}")
        sync_full = value == "full"
    path = unquote(encoded, errors="surrogateescape")
    if "\0" in path:
        raise _bad(url, "a path holds no zero byte")
    if not path:
        return default_path(), sync_full
    return Path(os.path.abspath(os.path.expanduser(path))), sync_full


def _bad(url: str, why: str) -> BadRequest:
    return BadRequest(
        f"the store {url!r} cannot be used: {why}. Stores are {_KNOWN}",
        metadata={"field": "store", "value": url, "rule": _KNOWN},
    )


def _random_id() -> str:
    return secrets.token_hex(16)
