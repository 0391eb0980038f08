"""What a client of the proxy hears when an engine, or the client itself, fails."""

from __future__ import annotations

import contextlib
import json
import queue
import socket

import httpx
import pytest

from rankbook import Role
from rankbook_vllm.proxy.app import MAX_BODY


def hanging(engine):
    """Has an engine say nothing; returns a queue that hears when its caller hangs up."""
    hung_up: queue.Queue[bool] = queue.Queue()
    engine.answer = lambda handler, _: hung_up.put(handler.wait_closed())
    return hung_up


@contextlib.contextmanager
def leaving_client(proxy, stream):
    """A connection on which a request was sent, to be closed by the test."""
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = proxy.address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def test_a_prefill_that_reaches_nobody_is_tried_on_another_producer(fleet, start_proxy):
    first, _ = fleet.pair()
    second = fleet.ready("p1", Role.PRODUCER)
    proxy = start_proxy()
    first.close()
    for _ in range(3):
        reply = proxy.post({"prompt": "x"})
        assert (reply.status_code, reply.headers["x-rankbook-prefill"]) == (200, "p1")
    assert second.count == 3


def test_two_producers_that_are_not_reached_end_the_request(fleet, start_proxy):
    fleet.pair()[0].close()
    fleet.ready("p1", Role.PRODUCER).close()
    third = fleet.ready("p2", Role.PRODUCER)
    reply = start_proxy().post({"prompt": "x"})
    assert reply.status_code == 502
    error = reply.json()["error"]
    assert (error["reason"], error["engine_id"]) == ("ENGINE_UNREACHABLE", "p1")
    assert third.count == 0


def test_the_only_producer_that_is_not_reached_is_named(fleet, start_proxy):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    producer.close()
    reply = proxy.post({"prompt": "x"})
    assert reply.status_code == 502
    assert f"p0 at http://127.0.0.1:{producer.port}" in reply.json()["error"]["message"]
    assert consumer.count == 0


def test_a_consumer_that_is_not_reached_is_named(fleet, start_proxy):
    _, consumer = fleet.pair()
    proxy = start_proxy()
    consumer.close()
    reply = proxy.post({"prompt": "x"})
    assert reply.status_code == 502
    error = reply.json()["error"]
    assert (error["reason"], error["engine_id"]) == ("ENGINE_UNREACHABLE", "d0")


@pytest.mark.parametrize("which", ["p0", "d0"])
def test_an_engines_error_is_passed_on_as_it_is(fleet, start_proxy, which):
    engines = dict(zip(("p0", "d0"), fleet.pair(), strict=True))
    proxy = start_proxy()
    engines[which].answer = lambda handler, _: handler.reply(b"no such model", 404, "text/x-odd")
    reply = proxy.post({"prompt": "x", "stream": True})
    assert (reply.status_code, reply.content) == (404, b"no such model")
    assert reply.headers["content-type"].startswith("text/x-odd")
    assert engines["d0"].count == (which == "d0")


@pytest.mark.parametrize("which", ["p0", "d0"])
def test_an_engine_that_says_nothing_costs_the_timeout_and_is_let_go(fleet, start_proxy, which):
    engines = dict(zip(("p0", "d0"), fleet.pair(), strict=True))
    proxy = start_proxy("--timeout", "0.5")
    hung_up = hanging(engines[which])
    reply = proxy.post({"prompt": "x"})
    assert reply.status_code == 504
    error = reply.json()["error"]
    assert (error["reason"], error["engine_id"]) == ("ENGINE_SILENT", which)
    assert hung_up.get(timeout=10) is True


@pytest.mark.parametrize("reply", [b"not json", b"[]"])
def test_a_prefill_that_is_no_json_object_is_an_error_of_the_engine(fleet, start_proxy, reply):
    producer, consumer = fleet.pair()
    producer.answer = lambda handler, _: handler.reply(reply)
    answered = start_proxy().post({"prompt": "x"})
    assert (answered.status_code, answered.json()["error"]["reason"]) == (502, "BAD_REPLY")
    assert consumer.count == 0


def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(fleet, start_proxy):
    _, consumer = fleet.pair()

    def breaks(handler, _):
        handler.begin_stream()
        handler.event("1")
        handler.connection.shutdown(socket.SHUT_RDWR)

    consumer.answer = breaks
    reply = start_proxy().post({"prompt": "x", "stream": True})
    first, last = [line for line in reply.text.splitlines() if line]
    assert first == "data: 1"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["reason"], error["engine_id"]) == ("ENGINE_BROKE_OFF", "d0")


def test_an_answer_that_breaks_off_is_an_error_of_the_engine(fleet, start_proxy):
    _, consumer = fleet.pair()

    def breaks(handler, _):
        handler.send_response(200)
        handler.send_header("content-length", "100")
        handler.end_headers()
        handler.wfile.write(b"half")

    consumer.answer = breaks
    reply = start_proxy().post({"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["reason"]) == (502, "ENGINE_BROKE_OFF")


@pytest.mark.parametrize("which", ["p0", "d0"])
def test_a_client_that_leaves_ends_what_its_engine_does(fleet, start_proxy, which):
    engines = dict(zip(("p0", "d0"), fleet.pair(), strict=True))
    proxy = start_proxy()
    hung_up = hanging(engines[which])
    for stream in (False, True):
        with leaving_client(proxy, stream) as client:
            engines[which].get()
            client.close()
            assert hung_up.get(timeout=10) is True
    assert engines["d0"].count == 0  # not even asked after a prefill that nobody waits for


def test_who_leaves_in_the_middle_of_a_stream_ends_it_client_or_proxy(fleet, start_proxy):
    _, consumer = fleet.pair()
    proxy = start_proxy()
    hung_up: queue.Queue[bool] = queue.Queue()

    def endless(handler, _):
        handler.begin_stream()
        handler.event("1")
        hung_up.put(handler.wait_closed())

    consumer.answer = endless
    body = {"prompt": "x", "stream": True}
    with proxy.http.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines()) == "data: 1"
    assert hung_up.get(timeout=10) is True
    with proxy.http.stream("POST", "/v1/completions", json=body) as reply:
        assert next(reply.iter_lines()) == "data: 1"
        assert proxy.stop() == 0
        assert hung_up.get(timeout=10) is True
    assert "Traceback" not in proxy.log, proxy.log


def test_a_body_over_the_bound_is_refused_by_its_announced_length(fleet, start_proxy):
    producer, _ = fleet.pair()
    proxy = start_proxy()
    host, port = proxy.address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY + 1}\r\n\r\n"
        connection.sendall(head.encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()
    assert b"BODY_TOO_LARGE" in answer
    assert producer.count == 0


def test_a_body_over_the_bound_is_refused_while_it_comes(fleet, start_proxy):
    producer, _ = fleet.pair()
    proxy = start_proxy()
    megabyte = b" " * 1024 * 1024
    parts = (megabyte for _ in range(MAX_BODY // len(megabyte) + 1))
    # It may hang up while the rest is still being written.
    with contextlib.suppress(httpx.NetworkError):
        reply = proxy.http.post("/v1/completions", content=parts)
        assert (reply.status_code, reply.json()["error"]["limit"]) == (413, MAX_BODY)
    assert producer.count == 0


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(fleet, start_proxy):
    proxy = start_proxy("--timeout", "0.5")
    host, port = proxy.address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_request_id_that_cannot_go_into_a_header_and_a_log_is_refused(fleet, start_proxy):
    producer, _ = fleet.pair()
    proxy = start_proxy()
    for given in ("x" * 129, "a\tb"):
        reply = proxy.post({"prompt": "x"}, headers={"X-Request-Id": given})
        assert (reply.status_code, reply.json()["error"]["reason"]) == (400, "BAD_REQUEST_ID")
    assert producer.count == 0
