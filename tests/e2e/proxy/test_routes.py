"""Whom the proxy asks: what the book says, as it says it."""

from __future__ import annotations

import subprocess
import sys
import threading

import rankbook
from rankbook import Role

TOLD_S = 2.0
"""A change of the book is at every watcher's within so long."""


def decoded_by(proxy) -> str:
    """Who decodes one more request."""
    return proxy.post({"prompt": "x"}).raise_for_status().headers["x-rankbook-decode"]


def test_prefills_and_decodes_go_round_over_ready_engines(fleet, start_proxy):
    producers = [fleet.ready(f"p{n}", Role.PRODUCER) for n in range(2)]
    consumers = [fleet.ready(f"d{n}", Role.CONSUMER) for n in range(3)]
    proxy = start_proxy()
    assert [decoded_by(proxy) for _ in range(6)] == ["d0", "d1", "d2"] * 2
    assert [one.count for one in producers] == [3, 3]
    assert [one.count for one in consumers] == [2, 2, 2]


def test_only_the_groups_that_were_named_are_asked(fleet, start_proxy):
    fleet.ready("p0", Role.PRODUCER, "prefill-a")
    fleet.ready("p1", Role.PRODUCER, "prefill-b")
    fleet.ready("d0", Role.CONSUMER, "decode-a")
    fleet.ready("d1", Role.CONSUMER, "decode-b")
    proxy = start_proxy("--prefill-group", "prefill-b", "--decode-group", "decode-a")
    replies = [proxy.post({"prompt": "x"}).headers for _ in range(3)]
    assert {(one["x-rankbook-prefill"], one["x-rankbook-decode"]) for one in replies} == {
        ("p1", "d0")
    }
    shown = proxy.engines()
    assert [one["engine_id"] for one in shown["prefill"]["engines"]] == ["p1"]
    assert [one["engine_id"] for one in shown["decode"]["engines"]] == ["d0"]


def test_an_engine_that_does_both_halves_never_sends_to_itself(fleet, start_proxy, made):
    fleet.ready("b0", Role.BOTH)
    fleet.ready("b1", Role.BOTH)
    proxy = start_proxy()
    for _ in range(3):
        shown = proxy.post({"prompt": "x"}).raise_for_status().headers
        assert {shown["x-rankbook-prefill"], shown["x-rankbook-decode"]} == {"b0", "b1"}
    fleet.lose("b1")
    made.eventually(lambda: proxy.takes("decode") == {"b0"}, TOLD_S, "b1 is gone")
    refused = proxy.post({"prompt": "x"})
    assert refused.status_code == 503
    assert "b0 does the prefill and cannot send to itself" in refused.json()["error"]["message"]


def test_a_drained_engine_gets_nothing_new_and_keeps_what_it_has(fleet, start_proxy, made):
    producer, consumer = fleet.pair()
    other = fleet.ready("d1", Role.CONSUMER)
    proxy = start_proxy()
    drained = threading.Event()

    def stream(handler, _):
        handler.begin_stream()
        handler.event("1")
        assert drained.wait(20)
        handler.event("2")
        handler.end_stream()

    consumer.answer = stream
    body = {"prompt": "x", "stream": True}
    with proxy.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines) == "data: 1"
        fleet.client.drain_engine("d0", reason="upgrade")
        made.eventually(lambda: proxy.takes("decode") == {"d1"}, TOLD_S, "the drain is seen")
        consumer.answer = consumer.as_vllm
        assert [decoded_by(proxy) for _ in range(3)] == ["d1"] * 3
        drained.set()
        assert list(lines) == ["data: 2"]
    assert consumer.count == 1
    assert other.count == 3
    fleet.client.drain_engine("d0", undo=True)
    made.eventually(lambda: "d0" in proxy.takes("decode"), TOLD_S, "it is back")
    assert {decoded_by(proxy) for _ in range(2)} == {"d0", "d1"}
    assert producer.count == 6


def test_a_restarted_engine_is_asked_where_it_serves_now_and_the_old_start_is_not(
    fleet, start_proxy, made
):
    _, old = fleet.pair()
    proxy = start_proxy()
    assert decoded_by(proxy) == "d0"
    new = fleet.engine("d0")
    fleet.sign_in("d0", Role.CONSUMER, "decode", generation="g2")
    made.eventually(lambda: not proxy.takes("decode"), TOLD_S, "the old start is replaced")
    assert proxy.post({"prompt": "x"}).status_code == 503
    fleet.seal("d0", new.port, generation="g2")
    made.eventually(lambda: proxy.takes("decode") == {"d0"}, TOLD_S, "the new start is READY")
    (shown,) = proxy.engines()["decode"]["engines"]
    assert shown["generation"] == "g2"
    assert shown["address"] == f"http://127.0.0.1:{new.port}"
    assert decoded_by(proxy) == "d0"
    assert (old.count, new.count) == (1, 1)


def test_a_dead_engine_is_asked_no_more(fleet, start_proxy, made):
    fleet.pair()
    other = fleet.ready("p1", Role.PRODUCER)
    proxy = start_proxy()
    fleet.lose("p0")
    made.eventually(lambda: proxy.takes("prefill") == {"p1"}, TOLD_S, "its death is told")
    for _ in range(3):
        assert proxy.post({"prompt": "x"}).headers["x-rankbook-prefill"] == "p1"
    assert other.count == 3


def test_an_engine_that_does_not_say_where_it_serves_is_skipped_and_said_once(
    fleet, start_proxy, made
):
    fleet.pair()
    fleet.sign_in("p1", Role.PRODUCER, "prefill")
    fleet.seal("p1", None)
    proxy = start_proxy()
    revision = proxy.engines()["view"]["revision"]
    fleet.seal("p1", None, side_channel=5601, sequence=2)
    made.eventually(
        lambda: proxy.engines()["view"]["revision"] > revision, TOLD_S, "the new seal is seen"
    )
    for _ in range(4):
        assert proxy.post({"prompt": "x"}).headers["x-rankbook-prefill"] == "p0"
    lines = [line for line in proxy.log.splitlines() if "p1" in line]
    assert len(lines) == 1
    assert "serving_address" in lines[0]
    (shown,) = [x for x in proxy.engines()["prefill"]["engines"] if x["engine_id"] == "p1"]
    assert (shown["state"], shown["address"], shown["takes_requests"]) == ("READY", None, False)


def test_without_a_producer_the_answer_says_what_states_there_are(fleet, start_proxy):
    fleet.ready("d0", Role.CONSUMER)
    fleet.sign_in("p0", Role.PRODUCER, "prefill")
    fleet.ready("p1", Role.PRODUCER)
    fleet.client.drain_engine("p1")
    reply = start_proxy("--prefill-group", "prefill").post({"prompt": "x"})
    assert reply.status_code == 503
    error = reply.json()["error"]
    assert (error["reason"], error["group"]) == ("NO_PRODUCER", "prefill")
    assert error["states"] == {"prefill": {"COMPLETE": 1, "DRAINING": 1}}
    for word in ("'prefill'", "1 COMPLETE", "1 DRAINING"):
        assert word in error["message"]


def test_without_a_consumer_no_prefill_is_made(fleet, start_proxy):
    producer = fleet.ready("p0", Role.PRODUCER)
    reply = start_proxy().post({"prompt": "x"})
    assert reply.status_code == 503
    error = reply.json()["error"]
    assert (error["reason"], error["states"]) == ("NO_CONSUMER", {})
    assert producer.count == 0


def test_a_proxy_that_starts_first_is_not_healthy_until_it_has_read_the_book(
    fleet, start_proxy, rankbookd, made, tmp_path
):
    server = rankbookd()
    server.kill()
    proxy = start_proxy(server=server.grpc, synced=False)
    assert proxy.http.get("/health").status_code == 503
    reply = proxy.post({"prompt": "x"})
    assert (reply.status_code, reply.json()["error"]["reason"]) == (503, "NOT_SYNCED")
    server.start_again(same_port=True)
    made.eventually(lambda: proxy.http.get("/health").status_code == 200, 10, "the book is read")
    assert proxy.post({"prompt": "x"}).json()["error"]["reason"] == "NO_PRODUCER"


def test_requests_go_on_while_the_registry_is_away_and_the_age_of_the_view_is_shown(
    start_proxy, rankbookd, made, fleet
):
    server = rankbookd()
    fleet.client.close()
    fleet.client = rankbook.Client(server.grpc, namespace=fleet.namespace)
    fleet.pair()
    proxy = start_proxy(server=server.grpc)
    assert proxy.engines()["view"]["connected"] is True
    server.kill()
    made.eventually(lambda: not proxy.engines()["view"]["connected"], 10, "it is noticed")
    assert decoded_by(proxy) == "d0"
    view = proxy.engines()["view"]
    assert view["synced"] is True
    assert view["age_s"] > 0
    assert view["error"]


def test_it_says_everywhere_that_it_is_not_for_production(fleet, start_proxy):
    proxy = start_proxy()
    assert f"NOT for production: http://{proxy.address}" in proxy.log
    shown = subprocess.run(
        [sys.executable, "-m", "rankbook_vllm.proxy", "--help"], capture_output=True, text=True
    )
    assert "NOT for production" in shown.stdout


def test_a_stop_is_clean_and_takes_the_ready_file_along(fleet, start_proxy):
    proxy = start_proxy()
    assert proxy.ready_file.exists()
    assert proxy.stop() == 0
    assert not proxy.ready_file.exists()
    assert "Traceback" not in proxy.log


def test_a_port_that_is_taken_is_one_line_that_says_why(fleet, start_proxy):
    proxy = start_proxy()
    command = [sys.executable, "-m", "rankbook_vllm.proxy", "--listen", proxy.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stderr == f"Error: cannot listen on {proxy.address}: Address already in use\n"
