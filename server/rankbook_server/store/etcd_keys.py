"""How a book lies in etcd: which keys there are, and what names them.

Under a prefix P:

    P/book          the head: StoredBook. Every commit puts it anew, so its
                    mod_revision is the revision of the last commit; another
                    value of it is another book
    P/book/KEY      an entry
    P/live/LEASE    StoredLiveness, on an etcd lease of that time to live
    P/server/BOOT   StoredServer, on an etcd lease: what a server tells the others

A watch of the keys from P/book to P/book0 sees every commit, also an empty one.
"""

from __future__ import annotations

import hashlib

__all__ = ["BookKeys", "lease_number"]


class BookKeys:
    """The keys of a book."""

    def __init__(self, prefix: str) -> None:
        """Names them.

        Args:
            prefix: P above.
        """
        self.head = f"{prefix}/book".encode()
        """The head."""
        self.entries = self.head + b"/"
        """What every entry starts with."""
        self.end = self.head + b"0"
        """The first key past head and entries: a zero follows a slash."""
        self.live = f"{prefix}/live/".encode()
        """What every liveness key starts with."""
        self.live_end = f"{prefix}/live0".encode()
        """The first key past these."""
        self.servers = f"{prefix}/server/".encode()
        """What every key of a server starts with."""
        self.servers_end = f"{prefix}/server0".encode()
        """The first key past these."""

    def entry(self, key: str) -> bytes:
        """The key of an entry."""
        return self.entries + key.encode()

    def name(self, key: bytes) -> str | None:
        """The entry that a key is of; None where it is of none of ours."""
        if not key.startswith(self.entries):
            return None
        try:
            return key[len(self.entries) :].decode()
        except UnicodeDecodeError:
            return None

    def lease(self, lease_id: str) -> bytes:
        """The liveness key of a lease."""
        return self.live + lease_id.encode()

    def lease_id(self, key: bytes) -> str:
        """The lease that a liveness key is of."""
        return key[len(self.live) :].decode(errors="replace")

    def server(self, server_id: str) -> bytes:
        """The key of a server."""
        return self.servers + server_id.encode()

    def server_id(self, key: bytes) -> str:
        """The server that a key is of."""
        return key[len(self.servers) :].decode(errors="replace")


def lease_number(book_id: str, lease_id: str, ttl_s: int) -> int:
    """The number of the etcd lease that a lease hangs on, the same on each server.

    etcd's numbers are 64-bit, not zero, and shared by all that use the cluster.
    """
    text = f"{book_id}\0{lease_id}\0{ttl_s}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") & ((1 << 63) - 1)
    return number or 1
