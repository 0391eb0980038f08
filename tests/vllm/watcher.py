"""What a peer sees of one engine, and when."""

import threading
import time
from collections.abc import Callable

import rankbook
from rankbook import State, WatchEvent


class Watcher:
    """Watches one engine in a thread, as a router or a decode engine does."""

    def __init__(self, address: str, engine_id: str) -> None:
        """Starts watching."""
        self._client = rankbook.Client(address)
        self._changed = threading.Condition()
        self.seen: list[tuple[float, WatchEvent]] = []
        """Reading of `time.monotonic()` and event, in order."""
        self._thread = threading.Thread(target=self._run, args=(engine_id,), daemon=True)
        self._thread.start()

    def _run(self, engine_id: str) -> None:
        try:
            for event in self._client.watch(rankbook.EngineFilter(engine_id=engine_id)):
                with self._changed:
                    self.seen.append((time.monotonic(), event))
                    self._changed.notify_all()
        except rankbook.RankbookError:
            return  # closed

    @property
    def states(self) -> list[State]:
        """The states it went through."""
        return [event.topology.engine.state for _, event in self.seen]

    def wait_for(
        self, matches: Callable[[State], bool], timeout_s: float, since: float = 0.0
    ) -> tuple[float, rankbook.Topology]:
        """The first event after `since` whose state matches: when, and the engine.

        Raises:
            TimeoutError: There was none within `timeout_s`.
        """

        def found() -> tuple[float, rankbook.Topology] | None:
            for at, event in self.seen:
                if at >= since and matches(event.topology.engine.state):
                    return at, event.topology
            return None

        with self._changed:
            self._changed.wait_for(lambda: found() is not None, timeout_s)
        got = found()
        if got is None:
            raise TimeoutError(f"not within {timeout_s:g} s; seen: {self.states}")
        return got

    def close(self) -> None:
        """Ends the watch."""
        self._client.close()
        self._thread.join(10)
