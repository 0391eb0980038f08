"""`memory:` keeps what every store promises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankbook_server.store.base import Store
from rankbook_server.store.memory import MemoryStore

from .embedded import HISTORY_COMMITS, EmbeddedHarness
from .store_contract import StoreContract, StoreHarness


class MemoryHarness(EmbeddedHarness):
    def new(self) -> Store:
        return MemoryStore(self.clock, self.new_id, max_history_commits=HISTORY_COMMITS)

    async def restart(self, store: Store) -> Store:
        await store.close()
        await store.open()
        return store

    @contextlib.contextmanager
    def broken(self, store: Store) -> Iterator[None]:
        assert isinstance(store, MemoryStore)
        store.outage = "the memory of this test is out of order"
        try:
            yield
        finally:
            store.outage = ""


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return MemoryHarness(tmp_path)
