"""A namespace of its own for every test of this room, on one shared server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from .support import Raw


@pytest.fixture
def raw(shared_rankbookd: Any, request: pytest.FixtureRequest) -> Iterator[Raw]:
    """Calls to the shared server, in a namespace of this test's own."""
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    with Raw(shared_rankbookd.grpc, f"test-{digest}") as calls:
        yield calls
