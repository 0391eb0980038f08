"""Histories made by hand, for the tests of the checker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .checker.history import History, read_history
from .checker.verdict import violations
from .journal import Line

__all__ = ["Scene", "good_scene"]

Slot = tuple[int, int]
CONVERGE_S = 10.0


class Scene:
    """Lines of a run, one after the other. Times are seconds from its beginning."""

    def __init__(self) -> None:
        """Without any line."""
        self.lines: list[Line] = []
        self._numbers = 0

    def _line(self, kind: str, at: float, **facts: Any) -> Line:
        line = {"t": at, "kind": kind, "from": "by hand", **facts}
        self.lines.append(line)
        return line

    def call(
        self,
        name: str,
        at: float,
        facts: dict[str, Any],
        reply: dict[str, Any] | None,
        *,
        took: float = 0.01,
        refused: str = "",
    ) -> None:
        """A call and its outcome; without a reply and a reason it has none."""
        self._numbers += 1
        self._line("call", at, id=self._numbers, call=name, **facts)
        if refused:
            self._line("failed", at + took, id=self._numbers, reason=refused)
        elif reply is not None:
            self._line("done", at + took, id=self._numbers, **reply)

    def register(
        self,
        boot: str,
        seq: int,
        at: float,
        *,
        rev: int = 0,
        slots: Sequence[Slot] = ((0, 0),),
        gen: str = "g1",
        epoch: int = 1,
        content: int = 0,
        ttl: float = 2.0,
        lease: str = "",
        key: str = "",
        took: float = 0.01,
        refused: str = "",
        lost: bool = False,
    ) -> None:
        """A registration in engine-0."""
        facts = {
            "engine": "engine-0",
            "gen": gen,
            "boot": boot,
            "slots": [list(slot) for slot in slots],
            "seq": seq,
            "content": content or seq,
            "epoch": 0,
            "key": key or boot,
        }
        reply = {"rev": rev, "epoch": epoch, "lease": lease or f"lease-{boot}", "ttl": ttl}
        self.call("register", at, facts, None if lost else reply, took=took, refused=refused)

    def renew(self, lease: str, at: float, state: str = "ALIVE", ttl: float = 2.0) -> None:
        """A renewal that was answered."""
        self.call("renew", at, {"leases": [lease]}, {"states": [state], "ttls": [ttl]})

    def deregister(self, boot: str, seq: int, at: float, gen: str = "g1") -> None:
        """A process signs out of engine-0."""
        facts = {"engine": "engine-0", "gen": gen, "boot": boot, "seq": seq}
        self.call("deregister", at, facts, {"removed": 1})

    def content(
        self,
        rev: int,
        rows: Sequence[tuple[Slot, str, int]],
        *,
        gen: str = "g1",
        epoch: int = 1,
        state: str = "",
        **facts: Any,
    ) -> Line:
        """What engine-0 is: slot, holder and content of each worker, of two there are."""
        return {
            "engine": "engine-0",
            "rev": rev,
            "state": state or ("READY" if len(rows) == 2 else "DEGRADED" if rows else "GONE"),
            "gen": gen,
            "epoch": epoch,
            "declared": 2,
            "present": len(rows),
            "seal": 1,
            "seal_is_of_this": True,
            "core": "core",
            "drain": False,
            "bare": False,
            "workers": [[*slot, boot, gen, number, False, True] for slot, boot, number in rows],
            **facts,
        }

    def show(self, at: float, content: Line, digest: str = "") -> str:
        """Somebody is shown a content for the first time; returns its name."""
        digest = digest or f"d{content['rev']}"
        self._line("content", at, digest=digest, **content)
        return digest

    def reader(self, name: str, way: str = "raw", **facts: Any) -> None:
        """There is a reader."""
        defaults = {"group": "", "ready_only": False, "bare": False}
        self._line("reader", 0.0, reader=name, way=way, **{**defaults, **facts})

    def message(
        self, reader: str, at: float, rev: int, *events: Sequence[Any], synced: bool = True
    ) -> None:
        """A reader gets a message; each event is engine, kind, revision, digest."""
        self._line(
            "message",
            at,
            reader=reader,
            rev=rev,
            book="b",
            synced=synced,
            reset=False,
            events=[list(event) for event in events],
        )

    def note(self, kind: str, at: float, **facts: Any) -> None:
        """Any other line."""
        self._line(kind, at, **facts)

    def history(self) -> History:
        """The lines put together."""
        return read_history(self.lines)

    def broken(self) -> set[str]:
        """Names of the rules that are broken."""
        return {found.rule for found in violations(self.history(), converge_s=CONVERGE_S)}


def good_scene() -> Scene:
    """A short run in which two workers sign in, one changes, and everybody is content.

    Until 3 s it lives; the faults end at 1 s. Both leases are renewed at 2 s.
    """
    scene = Scene()
    scene.register("a", 1, 0.0, rev=1, slots=[(0, 0)])
    scene.register("b", 1, 0.1, rev=2, slots=[(0, 1)])
    first = scene.content(2, [((0, 0), "a", 1), ((0, 1), "b", 1)])
    second = scene.content(3, [((0, 0), "a", 2), ((0, 1), "b", 1)])
    scene.reader("w0.0")
    scene.message("w0.0", 0.3, 2, ("engine-0", "added", 2, scene.show(0.2, first)))
    scene.register("a", 2, 0.5, rev=3, slots=[(0, 0)])
    scene.message("w0.0", 0.6, 3, ("engine-0", "modified", 3, scene.show(0.55, second)))
    scene.note("faults end", 1.0)
    scene.renew("lease-a", 2.0)
    scene.renew("lease-b", 2.0)
    for server in ("server-0", "server-1"):
        scene.note("truth", 3.0, server=server, digest="d3", **second)
    scene.note("end", 2.9, reader="w0.0", rev=3, synced=True, engines={"engine-0": [3, "d3"]})
    for pub, boot, slot, number in ((0, "a", (0, 0), 2), (1, "b", (0, 1), 1)):
        scene.note(
            "final",
            2.9,
            pub=pub,
            holds=True,
            engine="engine-0",
            gen="g1",
            boot=boot,
            slots=[list(slot)],
            content=number,
        )
    return scene
