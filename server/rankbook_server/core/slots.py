"""One slot: the stored form read once, and what readers get of it."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
from dataclasses import dataclass

from rankbook import v1
from rankbook_server.core.keys import SlotKey

__all__ = ["SlotState", "WorkerView", "fold_slot", "seal_digest", "seal_piece"]


def seal_piece(slot: SlotKey, boot_id: str, digest: bytes) -> bytes:
    """What one slot adds to an engine's digest."""
    return b"%d.%d.%d|%s|%s" % (*slot, boot_id.encode(), digest)


def seal_digest(pieces: list[bytes]) -> bytes:
    """Digest of an engine from its slots' pieces, in slot order."""
    return hashlib.sha256(b"".join(pieces)).digest()


@dataclass(slots=True)
class WorkerView:
    """A live worker as readers see it."""

    slot: SlotKey
    revision: int
    record: v1.WorkerRecord
    status: v1.WorkerStatus


@dataclass(slots=True)
class SlotState:
    """A slot as it is stored, with what is looked up often."""

    stored: v1.StoredWorker
    write_revision: int
    revision: int
    epoch: int
    live: bool
    size: int
    piece: bytes
    range: tuple[int, int]
    addresses: tuple[tuple[str, int], ...]
    exposed: bool

    def status(self) -> v1.WorkerStatus:
        """What readers get of a live slot beside its record."""
        return v1.WorkerStatus(
            record_digest=self.stored.record_digest,
            revision=self.revision,
            lease_id=self.stored.lease_id,
            asleep=self.stored.asleep,
        )


@functools.lru_cache(maxsize=4096)
def _is_unreachable(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # An IPv4 address in IPv6's clothes means what the IPv4 address does.
    address = getattr(address, "ipv4_mapped", None) or address
    return bool(address.is_loopback or address.is_unspecified)


def fold_slot(stored: v1.StoredWorker, revision: int, slot: SlotKey) -> SlotState:
    """A stored slot, read once."""
    record = stored.record
    boot_id = stored.holders[-1].boot_id if stored.holders else ""
    hosts = [(a.host, a.port) for a in record.addresses]
    return SlotState(
        stored=stored,
        write_revision=revision,
        revision=stored.change_revision or revision,
        epoch=stored.epoch,
        live=stored.live,
        size=record.ByteSize() if stored.live else 0,
        piece=seal_piece(slot, boot_id, stored.record_digest),
        range=(record.layers.start_layer, record.layers.end_layer),
        addresses=tuple(pair for pair in hosts if pair[1]),
        exposed=not any(_is_unreachable(host) for host, _ in hosts),
    )
