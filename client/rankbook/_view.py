"""A local copy of the book (being written; the signatures are final)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rankbook.model import EngineFilter, Topology, WatchEvent

if TYPE_CHECKING:
    from rankbook._sync import Client

__all__ = ["TopologyView"]


class TopologyView:
    """A copy of the engines that a filter matches, kept by a watch in a thread.

    Look-ups take no lock, do no I/O, and answer while the registry is away.
    """

    def __init__(
        self,
        client: Client,
        filter: EngineFilter = EngineFilter(),  # noqa: B008
        *,
        without_payload: bool = False,
    ) -> None:
        """Takes note of what to watch; starts nothing. `client` stays the caller's to close."""
        raise NotImplementedError

    def start(self) -> None:
        """Begins to watch in the background; returns at once."""
        raise NotImplementedError

    def __enter__(self) -> TopologyView:
        """Starts."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        """Closes."""
        raise NotImplementedError

    def wait_synced(self, timeout_s: float) -> None:
        """Waits until the view has the whole state once.

        Raises:
            Unavailable: No registry was reached by the deadline.
            DeadlineExceeded: The deadline passed.
        """
        raise NotImplementedError

    def get(self, engine_id: str) -> Topology | None:
        """The engine as last seen, or None."""
        raise NotImplementedError

    def engines(self) -> tuple[Topology, ...]:
        """Every engine as last seen, by engine_id, all of one moment."""
        raise NotImplementedError

    @property
    def age_s(self) -> float:
        """Seconds since the registry last said anything; infinite before the first word."""
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether the view is whole and follows every change now."""
        raise NotImplementedError

    @property
    def revision(self) -> int:
        """The book's revision the view is of."""
        raise NotImplementedError

    def subscribe(self, callback: Callable[[WatchEvent], None]) -> Callable[[], None]:
        """Calls back with every change, on the view's thread; returns what ends it.

        Begins with an ADDED for each engine that is there.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the watch; look-ups go on answering from the last copy."""
        raise NotImplementedError
