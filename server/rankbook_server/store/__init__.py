"""Where a book is kept: one protocol, and the stores that keep it.

`url` builds a store from its URL, `base` says what a store promises.
"""

from .base import Compacted, Liveness, Snapshot, Store
from .memory import MemoryStore
from .sqlite import SqliteStore
from .url import default_path, open_store

__all__ = [
    "Compacted",
    "Liveness",
    "MemoryStore",
    "Snapshot",
    "SqliteStore",
    "Store",
    "default_path",
    "open_store",
]
