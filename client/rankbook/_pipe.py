"""What a registration and its heartbeat process say to each other, and how.

One JSON object a line, in both directions. Towards the heartbeat process: a
"start" with everything it needs, then commands. Back: notices. The writing
side of the heartbeat process never blocks: a parent whose interpreter is
blocked for minutes reads nothing, so a notice that was not yet written is
replaced by the next one of its kind.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["LineReader", "NoticeWriter", "decode_bytes", "encode_bytes", "encode_line"]


def encode_bytes(value: bytes) -> str:
    """Bytes as text that JSON carries."""
    return base64.b64encode(value).decode("ascii")


def decode_bytes(text: str) -> bytes:
    """The bytes of `encode_bytes`."""
    return base64.b64decode(text)


def encode_line(value: dict[str, Any]) -> bytes:
    """One object as a line."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class LineReader:
    """Cuts what comes in pieces into objects."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Takes a piece; every object that is whole now."""
        start = len(self._rest)
        self._rest += data
        while (end := self._rest.find(b"\n", start)) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            start = 0
            yield json.loads(line)


class NoticeWriter:
    """Writes notices to a pipe without ever waiting; keeps one of each kind at most."""

    def __init__(self, fd: int) -> None:
        """Makes the pipe non-blocking."""
        self._fd = fd
        os.set_blocking(fd, False)
        self._rest = b""
        self._newest: dict[str, dict[str, Any]] = {}
        self.broken = False

    def post(self, kind: str, value: dict[str, Any]) -> None:
        """Takes a notice in place of an unwritten one of its kind, and writes what goes."""
        self._newest.pop(kind, None)
        self._newest[kind] = {"kind": kind, **value}
        self.flush()

    @property
    def pending(self) -> bool:
        """Whether something waits for the pipe to be writable."""
        return bool(self._rest or self._newest) and not self.broken

    def flush(self) -> None:
        """Writes what the pipe takes now."""
        while self.pending:
            if not self._rest:
                kind = next(iter(self._newest))
                self._rest = encode_line(self._newest.pop(kind))
            try:
                written = os.write(self._fd, self._rest)
            except BlockingIOError:
                return
            except OSError:
                # Nobody listens any more; whether the parent lives is not the pipe's to say.
                self.broken = True
                return
            self._rest = self._rest[written:]
