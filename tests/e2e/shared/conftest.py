"""Several rankbookd over one real etcd."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdCluster, EtcdNode

_numbers = itertools.count(1)


@pytest.fixture
def own_node() -> Iterator[EtcdNode]:
    """A node of the test's own, to be stopped and started."""
    with EtcdNode() as node:
        yield node


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Three nodes of the test's own."""
    with EtcdCluster(3) as nodes:
        yield nodes


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def servers(rankbookd: Any, etcd_node: EtcdNode, prefix: str) -> Callable[..., Sequence[Any]]:
    """Starts servers over one book: `servers(3)`, `servers(3, store="etcd:...")`."""

    def start(count: int, *flags: str, store: str = "") -> Sequence[Any]:
        return [rankbookd(*flags, store=store or etcd_node.url(prefix)) for _ in range(count)]

    return start
