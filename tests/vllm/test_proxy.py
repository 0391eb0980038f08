"""The proxy for trying things out before a real pair: the tokens are a single engine's."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import httpx
import pytest
from tests.vllm.engine import free_port
from tests.vllm.pair import Moved, bytes_of
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ASKED = PROMPTS[:4]
CHAT = ["--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"]
"""The tiny model has no template of its own."""


@pytest.fixture(scope="module")
def pair(truth, make_pair):
    ports = [free_port() for _ in range(2)]
    producer, consumer = (
        {"port": port, "settings": {"serving_address": f"127.0.0.1:{port}"}, "arguments": CHAT}
        for port in ports
    )
    with make_pair(
        connector="NixlConnector", pp_size=1, producer=producer, consumer=consumer
    ) as made:
        yield made


@pytest.fixture(scope="module")
def proxy(pair, registry, tmp_path_factory, logs):
    """A client of the proxy, which knows both engines."""
    ready = tmp_path_factory.mktemp("proxy") / "ready.json"
    command = [sys.executable, "-m", "rankbook_vllm.proxy", "--listen", "127.0.0.1:0"]
    command += ["--server", registry.address, "--ready-file", str(ready)]
    command += ["--prefill-group", f"prefill-{pair.name}", "--decode-group", f"decode-{pair.name}"]
    with (logs / "proxy.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        url = f"http://{json.loads(ready.read_text())['http']}"
        with httpx.Client(base_url=url, timeout=45, trust_env=False) as client:
            while not all(
                [one["takes_requests"] for one in client.get("/engines").json()[half]["engines"]]
                == [True]
                for half in ("prefill", "decode")
            ):
                assert time.monotonic() < deadline, client.get("/engines").text
                time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(20)


def body(prompt, **more):
    asked = {"model": "tiny", "prompt": list(prompt), "max_tokens": ANSWER_TOKENS}
    return {**asked, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}


def test_a_completion_through_the_proxy_is_made_from_kv_that_was_moved(pair, proxy, truth):
    for asked in ASKED:
        before = pair.moved()
        reply = proxy.post("/v1/completions", json=body(asked)).raise_for_status()
        assert reply.headers["x-rankbook-kv"] == "remote"
        assert reply.json()["choices"][0]["token_ids"] == truth(asked)
        moved = pair.wait_moved(before, bytes_of(asked))
        assert moved == Moved(tokens=len(asked), computed=0, bytes=bytes_of(asked))


def test_a_stream_through_the_proxy_has_the_same_tokens(pair, proxy, truth):
    for asked in ASKED:
        tokens = []
        with proxy.stream("POST", "/v1/completions", json=body(asked, stream=True)) as reply:
            events = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        assert events.pop() == "[DONE]"
        for event in events:
            tokens += json.loads(event)["choices"][0]["token_ids"]
        assert tokens == truth(asked)


def test_a_chat_goes_through_both_engines(pair, proxy):
    before = pair.moved()
    messages = [{"role": "user", "content": "hello there"}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 5, "ignore_eos": True}
    reply = proxy.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-rankbook-kv"] == "remote"
    usage = reply.json()["usage"]
    assert usage["completion_tokens"] == 5
    assert pair.wait_moved(before, 1).tokens == usage["prompt_tokens"]
