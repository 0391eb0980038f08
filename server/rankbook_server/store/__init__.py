"""Where a book is kept: one protocol, and the stores that keep it.

`url` builds a store from its URL, `base` says what a store promises.
"""

from rankbook_server.store.base import (
    Compacted,
    Liveness,
    Presence,
    SharedStore,
    Snapshot,
    Store,
)
from rankbook_server.store.memory import MemoryStore
from rankbook_server.store.sqlite import SqliteStore
from rankbook_server.store.url import default_path, open_store

__all__ = [
    "Compacted",
    "Liveness",
    "MemoryStore",
    "Presence",
    "SharedStore",
    "Snapshot",
    "SqliteStore",
    "Store",
    "default_path",
    "open_store",
]
