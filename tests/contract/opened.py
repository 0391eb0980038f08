"""Open stores on etcd, for tests of what only such a store does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from itertools import count
from typing import Any

from rankbook.errors import Unavailable
from rankbook_server.core.ops import Commit
from rankbook_server.store import SharedStore, open_store
from rankbook_server.store.etcd import EtcdStore

from .store_contract import IdSequence

_IDS = IdSequence()
_PREFIXES = count(1)


def fresh_prefix() -> str:
    """A prefix that no other test uses."""
    return f"test-{next(_PREFIXES)}"


def build(url: str) -> EtcdStore:
    """The store of a URL, not open."""
    store = open_store(url, time.monotonic, _IDS)
    assert isinstance(store, EtcdStore)
    shared: SharedStore = store
    assert shared is store
    return store


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[EtcdStore]:
    """An open store; closed at the end."""
    store = build(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def run(body: Coroutine[Any, Any, None], timeout_s: float = 60.0) -> None:
    """Runs a test's body on a loop of its own."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await body

    asyncio.run(bounded())


async def until_served(call: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
    """Makes a call again while the store is away."""
    ends = time.monotonic() + timeout_s
    while True:
        try:
            return await call()
        except Unavailable:
            if time.monotonic() > ends:
                raise
            await asyncio.sleep(0.05)


async def take_until(watch: AsyncIterator[Commit], revision: int) -> list[Commit]:
    """Commits of a watch, up to the one of a revision."""
    seen: list[Commit] = []
    async for commit in watch:
        seen.append(commit)
        if commit.revision >= revision:
            break
    return seen
