"""What the harnesses of the embedded stores share."""

from __future__ import annotations

from pathlib import Path

from rankbook_server.core.ops import Put, Txn
from rankbook_server.store.base import Store

from .store_contract import FakeClock, IdSequence, StoreHarness

HISTORY_COMMITS = 64
"""What the stores under test keep: enough for each test of the suite but one."""


class EmbeddedHarness(StoreHarness):
    """Time is a fake clock, and history is short."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.clock = FakeClock()
        self.new_id = IdSequence()

    async def forget_history(self, store: Store) -> None:
        await store.commit([Txn((Put("filler", b""),))] * HISTORY_COMMITS)

    async def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
