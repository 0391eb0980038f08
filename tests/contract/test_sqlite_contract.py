"""`sqlite:` keeps what every store promises, at either level of durability."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankbook_server.store.base import Store
from rankbook_server.store.sqlite import SqliteStore

from .embedded import HISTORY_COMMITS, EmbeddedHarness
from .store_contract import StoreContract, StoreHarness


class SqliteHarness(EmbeddedHarness):
    sync_full = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._count = 0
        self._paths: dict[int, Path] = {}

    def _on(self, path: Path) -> Store:
        store = SqliteStore(
            path,
            self.clock,
            self.new_id,
            sync_full=self.sync_full,
            max_history_commits=HISTORY_COMMITS,
        )
        self._paths[id(store)] = path
        return store

    def new(self) -> Store:
        self._count += 1
        return self._on(self.folder / f"book-{self._count}.db")

    async def restart(self, store: Store) -> Store:
        await store.close()
        again = self._on(self._paths[id(store)])
        await again.open()
        return again

    @contextlib.contextmanager
    def broken(self, store: Store) -> Iterator[None]:
        """No file of this process may be written: the system itself says no."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FullSyncHarness(SqliteHarness):
    sync_full = True


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return SqliteHarness(tmp_path)


class TestFullySyncedSqliteStore(StoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        return FullSyncHarness(tmp_path)
