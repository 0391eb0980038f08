"""What a server makes of values that another version, or somebody else, wrote."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdNode, b64
from tests.e2e.shared.test_store_away import NOT_SERVING, SERVING, eventually, health
from tests.rpc.support import Failure, Raw, record

from rankbook import v1


def value_of(node: EtcdNode, key: str) -> bytes:
    (found,) = node.call("/v3/kv/range", {"key": b64(key)})["kvs"]
    return base64.b64decode(found["value"])


def put(node: EtcdNode, key: str, value: bytes) -> None:
    node.call("/v3/kv/put", {"key": b64(key), "value": b64(value)})


def test_everything_that_is_stored_has_a_version(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    (server,) = servers(1, "--tombstone-ttl", "0.2", store=own_node.url("p"))
    with Raw(server.grpc) as raw:
        gone = raw.register([record("gone", tp_size=1)])
        raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=gone.lease.lease_id))
        raw.ready([record("e", tp_size=1)])

        def kinds() -> set[str]:
            everything = {"key": b64("p/"), "range_end": b64("p0"), "keys_only": True}
            kvs = own_node.call("/v3/kv/range", everything)["kvs"]
            return {base64.b64decode(kv["key"]).decode() for kv in kvs}

        eventually(lambda: "p/book/default/n" in kinds(), 15, "a namespace's facts")
        messages = {
            "n": v1.StoredNamespace,
            "e": v1.StoredEngine,
            "w": v1.StoredWorker,
            "l": v1.StoredLease,
        }
        seen = set()
        for key in kinds():
            value = value_of(own_node, key)
            if key.startswith("p/live/"):
                assert v1.StoredLiveness.FromString(value).version == 1
                seen.add("live")
            elif key.startswith("p/server/"):
                assert v1.StoredServer.FromString(value).version == 1
                seen.add("server")
            elif key == "p/book":
                assert v1.StoredBook.FromString(value).version == 1
                seen.add("book")
            else:
                kind = key.split("/")[3]
                assert messages[kind].FromString(value).version == 1, key
                seen.add(kind)
        assert seen == {"live", "server", "book", "n", "e", "w", "l"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("p/book/default/e/e", v1.StoredEngine(version=2).SerializeToString(), "version 2"),
        ("p/book/default/w/e/0.0.0", v1.StoredWorker(version=9).SerializeToString(), "version 9"),
        ("p/book/default/l/x", b"\xff\xff", "damaged"),
        ("p/book/default/z/x", b"", "none that this rankbookd knows"),
    ],
)
def test_what_a_server_cannot_read_it_refuses_by_name_and_it_goes_on_once_that_is_gone(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode, key: str, value: bytes, words: str
) -> None:
    (server,) = servers(1, store=own_node.url("p"))
    with Raw(server.grpc) as raw:
        raw.ready([record("e", tp_size=1)])
        before = raw.topology("e")
        try:
            kept = value_of(own_node, key)
        except (KeyError, ValueError):
            kept = b""
        put(own_node, key, value)
        eventually(lambda: health(server.grpc) == NOT_SERVING, 10, "it says so")
        with pytest.raises(Failure) as refused:
            raw.register([record("other", tp_size=1)])
        assert refused.value.reason == "STORE_UNAVAILABLE"
        assert words in refused.value.message
        assert key.removeprefix("p/book/") in refused.value.message
        server.stop()
        if kept:
            put(own_node, key, kept)
        else:
            own_node.call("/v3/kv/deleterange", {"key": b64(key)})
        server.start_again(same_port=True)
        assert health(server.grpc) == SERVING
        found = raw.topology("e")
        assert found.engine.state == before.engine.state
        assert raw.register([record("other", tp_size=1)]).epoch == 1
