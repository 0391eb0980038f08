"""A namespace of its own for every test of this room, on one shared server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from .support import Raw


@pytest.fixture(scope="session", params=["memory", "etcd"])
def address(request: pytest.FixtureRequest) -> str:
    """A server for all tests, over either kind of store."""
    name = "shared_rankbookd" if request.param == "memory" else "etcd_rankbookd"
    served: str = request.getfixturevalue(name).grpc
    return served


@pytest.fixture
def raw(address: str, request: pytest.FixtureRequest) -> Iterator[Raw]:
    """Calls to the shared server, in a namespace of this test's own."""
    with Raw(address, _namespace(request)) as calls:
        yield calls


@pytest.fixture
def embedded_raw(shared_rankbookd: Any, request: pytest.FixtureRequest) -> Iterator[Raw]:
    """As `raw`, over an embedded store only: for claims on how fast writes are."""
    with Raw(shared_rankbookd.grpc, _namespace(request)) as calls:
        yield calls


def _namespace(request: pytest.FixtureRequest) -> str:
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    return f"test-{digest}"
