"""`etcd:` keeps what every store promises, on every version of etcd there is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from rankbook_server.store import Store, open_store

from .etcd_server import EtcdNode
from .store_contract import IdSequence, StoreContract, StoreHarness

_PREFIXES = count(1)
_IDS = IdSequence()


class EtcdHarness(StoreHarness):
    """Time is real. Each store has a prefix of its own on one node."""

    def __init__(self, folder: Path, node: EtcdNode) -> None:
        super().__init__(folder)
        self.node = node
        self.urls: dict[int, str] = {}

    def new(self) -> Store:
        return self._open(self.node.url(f"contract/{next(_PREFIXES)}"))

    def _open(self, url: str) -> Store:
        store = open_store(url, time.monotonic, _IDS)
        self.urls[id(store)] = url
        return store

    async def restart(self, store: Store) -> Store:
        await store.close()
        again = self._open(self.urls[id(store)])
        await again.open()
        return again

    @contextlib.contextmanager
    def broken(self, store: Store) -> Iterator[None]:
        # What etcd does itself when its quota is used up.
        alarm = {"memberID": 0, "alarm": "NOSPACE"}
        self.node.call("/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
        try:
            yield
        finally:
            self.node.call("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    async def forget_history(self, store: Store) -> None:
        revision = self.node.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self.node.call("/v3/kv/compaction", {"revision": revision, "physical": True})

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TestEtcdStore(StoreContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, each_etcd: EtcdNode) -> StoreHarness:
        return EtcdHarness(tmp_path, each_etcd)
