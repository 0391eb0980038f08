"""The HTTP side under connections that never ask for anything."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from rankbook_server.http.web import MAX_CONNECTIONS


def test_connections_that_never_finish_a_request_keep_no_probe_out(rankbookd: Any) -> None:
    server = rankbookd()
    host, port = server.http.split(":")
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(MAX_CONNECTIONS + 150):
            one = stack.enter_context(socket.create_connection((host, int(port)), 5))
            # A connection too many may be gone before this is sent.
            with contextlib.suppress(OSError):
                one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
            held.append(one)
        for path in ("/healthz", "/livez"):
            assert server.get(path) == "ok\n"
        assert len(os.listdir(f"/proc/{server.pid}/fd")) < MAX_CONNECTIONS + 50
        # The oldest lost their places.
        held[0].settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert held[0].recv(1) == b""
