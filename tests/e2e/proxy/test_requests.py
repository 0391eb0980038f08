"""What the proxy for trying things out asks engines for."""

from __future__ import annotations

import json
import threading

import pytest

from rankbook import Role

MINIMAL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_generation": "g1",
    "remote_block_ids": [[3, 4]],
    "remote_request_id": "cmpl-7-0",
}
NOBODY_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_a_completion_is_a_prefill_of_one_token_and_a_decode_of_the_least_the_shim_needs(
    fleet, start_proxy
):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    body = {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 16,
        "min_tokens": 4,
        "temperature": 0,
        "logit_bias": {"7": 1.5},
        "kv_transfer_params": {"remote_host": "a client's own idea"},
    }
    reply = proxy.post(body, headers={"X-Request-Id": "abc", "Authorization": "Bearer k"})
    assert (reply.status_code, reply.json()["choices"][0]["text"]) == (200, "d0")
    prefill, decode = producer.get(), consumer.get()
    assert prefill.body == {
        **body,
        "max_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": NOBODY_YET,
    }
    assert decode.body == {**body, "kv_transfer_params": MINIMAL}
    for asked in (prefill, decode):
        assert asked.path == "/v1/completions"
        assert asked.headers["x-request-id"] == "abc"
        assert asked.headers["authorization"] == "Bearer k"
    assert reply.headers["x-request-id"] == "abc"
    named = [reply.headers[f"x-rankbook-{name}"] for name in ("prefill", "decode", "kv")]
    assert named == ["p0", "d0", "remote"]


def test_a_chat_keeps_its_own_limits_for_the_decode(fleet, start_proxy):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    consumer.answer = lambda handler, _: handler.reply(
        b"data: [DONE]\n\n", 200, "text/event-stream"
    )
    assert proxy.post(body, "/v1/chat/completions").text == "data: [DONE]\n\n"
    prefill, decode = producer.get(), consumer.get()
    assert prefill.body == {
        "model": "m",
        "messages": body["messages"],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": NOBODY_YET,
    }
    assert decode.body == {**body, "kv_transfer_params": MINIMAL}
    assert {prefill.path, decode.path} == {"/v1/chat/completions"}


def test_both_engines_get_one_request_id_where_the_client_sent_none(fleet, start_proxy):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    given = [proxy.post({"prompt": "x"}).headers["x-request-id"] for _ in range(2)]
    assert [producer.get().headers["x-request-id"] for _ in range(2)] == given
    assert [consumer.get().headers["x-request-id"] for _ in range(2)] == given
    assert given[0] != given[1]


def test_all_params_passes_on_what_the_producer_returned(fleet, start_proxy):
    producer, consumer = fleet.pair()
    start_proxy("--all-params").post({"prompt": "x"})
    assert consumer.get().kv == producer.returned


@pytest.mark.parametrize("returned", [None, {"remote_block_ids": [[]], "remote_engine_id": "p0"}])
def test_a_producer_that_kept_no_blocks_leaves_the_prefill_to_the_consumer(
    fleet, start_proxy, returned
):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    producer.answer = lambda handler, _: handler.reply(
        {"choices": [{"finish_reason": "stop"}], "kv_transfer_params": returned}
    )
    reply = proxy.post({"prompt": "x", "kv_transfer_params": {"remote_host": "a client's own"}})
    assert (reply.status_code, reply.headers["x-rankbook-kv"]) == (200, "local")
    assert consumer.get().body == {"prompt": "x"}
    assert "p0 kept no KV" in proxy.log


def test_for_mooncake_the_proxy_names_the_transfer(fleet, start_proxy):
    producer = fleet.ready("p0", Role.PRODUCER, connector="MooncakeConnector")
    consumer = fleet.ready("d0", Role.CONSUMER, connector="MooncakeConnector")
    producer.answer = lambda handler, _: handler.reply(
        {"choices": [{"finish_reason": "length"}], "kv_transfer_params": None}
    )
    start_proxy().post({"prompt": "x"})
    prefill, decode = producer.get(), consumer.get()
    name = prefill.kv["transfer_id"]
    assert name
    assert prefill.kv == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": name,
    }
    assert decode.kv == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": name,
        "remote_engine_id": "p0",
        "remote_generation": "g1",
    }


def test_mooncake_keeps_no_blocks_of_a_prefill_that_stopped_by_itself(fleet, start_proxy):
    producer = fleet.ready("p0", Role.PRODUCER, connector="MooncakeConnector")
    consumer = fleet.ready("d0", Role.CONSUMER, connector="MooncakeConnector")
    producer.answer = lambda handler, _: handler.reply({"choices": [{"finish_reason": "stop"}]})
    assert start_proxy().post({"prompt": "x"}).headers["x-rankbook-kv"] == "local"
    assert consumer.get().kv is None


def test_a_streams_events_reach_the_client_as_they_come(fleet, start_proxy):
    _, consumer = fleet.pair()
    proxy = start_proxy()
    first_is_read = threading.Event()

    def slowly(handler, _):
        handler.begin_stream()
        handler.event(json.dumps({"n": 1}))
        assert first_is_read.wait(20)
        handler.event(json.dumps({"n": 2}))
        handler.event("[DONE]")
        handler.end_stream()

    consumer.answer = slowly
    body = {"prompt": "x", "stream": True}
    with proxy.http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines) == 'data: {"n": 1}'
        first_is_read.set()
        assert list(lines) == ['data: {"n": 2}', "data: [DONE]"]


SEVERAL = {
    "prompt": [{"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}],
    "n": [{"prompt": "a", "n": 2}],
    "best_of": [{"prompt": "a", "best_of": 2}],
    "use_beam_search": [{"prompt": "a", "use_beam_search": True}],
}


def test_a_request_for_several_sequences_is_refused_before_any_engine(fleet, start_proxy):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    for field, requests in SEVERAL.items():
        for body in requests:
            reply = proxy.post(body)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert (error["reason"], error["field"]) == ("SEVERAL_SEQUENCES", field)
    assert producer.count + consumer.count == 0


def test_one_prompt_in_a_list_is_one_sequence(fleet, start_proxy):
    _, consumer = fleet.pair()
    proxy = start_proxy()
    for prompt in (["a"], [[1, 2, 3]], [1, 2, 3], []):
        assert proxy.post({"prompt": prompt}).status_code == 200
        assert consumer.get().body["prompt"] == prompt


def test_a_body_that_is_no_json_object_is_refused_in_words(fleet, start_proxy):
    producer, _ = fleet.pair()
    proxy = start_proxy()
    for raw in (b"", b"{", b"[1]", b"\xff\xfe{}", b"[" * 200_000, b"1" * 5000):
        reply = proxy.http.post("/v1/completions", content=raw)
        assert (reply.status_code, reply.json()["error"]["reason"]) == (400, "BAD_BODY")
    assert producer.count == 0


def test_nothing_of_a_request_or_an_answer_is_logged(fleet, start_proxy):
    producer, consumer = fleet.pair()
    proxy = start_proxy()
    body = {"prompt": "SECRET-PROMPT", "user": "SECRET-USER"}
    proxy.post(body, headers={"Authorization": "Bearer SECRET-KEY"})
    consumer.answer = lambda handler, _: handler.reply({"error": "SECRET-ANSWER"}, 500)
    proxy.post(body)
    producer.answer = lambda handler, _: handler.reply({"error": "SECRET-ANSWER"}, 500)
    proxy.post(body)
    proxy.http.post("/v1/completions", content=b'{"prompt": "SECRET')
    assert proxy.stop() == 0
    assert "prefill p0, decode d0" in proxy.log
    assert "SECRET" not in proxy.log
