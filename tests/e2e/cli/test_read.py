"""Looking at the book: shapes, exit codes, stdout and stderr apart."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import select
import socket
import subprocess
import time
from typing import Any

import pytest

WORKER_MEMBERS = {"engine_id", "slot", "layers", "layout", "handshake", "process", "role"}


def test_a_whole_engine_is_shown_with_every_promised_member(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    published = publish(make_grid([31, 30], 2))
    assert {"lease_id", "ttl_s", "epoch", "revision"} <= set(published)
    assert (published["ttl_s"], published["epoch"]) == (120, 1)

    shown = cli("topology", "e", "-o", "json")
    assert (shown.code, shown.err) == (0, "")
    topology = shown.json
    assert topology["namespace"] == cli.namespace
    assert (topology["engine_id"], topology["group"], topology["replica"]) == ("e", "g", "e")
    assert (topology["role"], topology["state"]) == ("PRODUCER", "COMPLETE")
    assert (topology["generation"], topology["epoch"]) == ("t1", 1)
    assert (topology["present"], topology["declared"], topology["missing"]) == (4, 4, [])
    assert topology["layout"]["num_layers"] == 61
    assert topology["stages"] == [
        {"pp_rank": 0, "start_layer": 0, "end_layer": 31},
        {"pp_rank": 1, "start_layer": 31, "end_layer": 61},
    ]
    assert 0 < topology["revision"] <= topology["book_revision"]
    assert len(topology["workers"]) == 4
    assert all(set(worker) >= WORKER_MEMBERS for worker in topology["workers"])
    payloads = {worker["handshake"]["payload"] for worker in topology["workers"]}
    assert {base64.b64decode(payload) for payload in payloads} == {b"secret"}

    sealed = cli("seal", "e", "-o", "json")
    assert sealed.code == 0
    assert sealed.json["seal"]["number"] == 1
    assert cli.state("e") == "READY"


def test_an_incomplete_engine_is_exit_5_with_the_object_and_the_error(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    publish(make_grid([31, 30], 2)[:3])
    shown = cli("topology", "e", "-o", "json")
    assert shown.code == 5
    assert shown.json["state"] == "FORMING"
    assert shown.json["missing"] == [{"pp_rank": 1, "pcp_rank": 0, "tp_rank": 1}]
    assert shown.json["error"]["reason"] == "ENGINE_INCOMPLETE"
    assert "missing pp1 tp1" in shown.err
    allowed = cli("topology", "e", "-o", "json", "--allow-incomplete")
    assert (allowed.code, allowed.err) == (0, "")
    assert "error" not in allowed.json
    picture = cli("topology", "e")
    assert picture.code == 5
    assert "missing 1 of 4: pp1 tp1\n" in picture.out
    assert picture.out.isascii()


def test_an_unknown_engine_is_exit_3(cli: Any) -> None:
    for command in ("topology", "workers", "seal", "drain", "evict"):
        shown = cli(command, "nobody", "-o", "json")
        assert (command, shown.code) == (command, 3)
        assert shown.json["error"]["reason"] == "ENGINE_NOT_FOUND"
        assert "nobody" in shown.err


@pytest.mark.parametrize("engine_id", ["", "a/b", "a b", "x" * 300])
def test_a_malformed_id_is_a_typed_error_that_names_value_and_rule(
    cli: Any, engine_id: str
) -> None:
    shown = cli("topology", engine_id, "-o", "json")
    assert shown.code == 2
    error = shown.json["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "1 to 253 characters" in error["metadata"]["rule"]


def test_contradicting_layers_are_invalid_and_exit_5(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    records = make_grid([20, 20], 1)
    records[1]["layers"] = {"start_layer": 15, "end_layer": 40}
    publish(records)
    shown = cli("topology", "e", "-o", "json")
    assert (shown.code, shown.json["state"]) == (5, "INVALID")
    assert shown.json["error"]["reason"] == "ENGINE_INVALID"
    assert [p["severity"] for p in shown.json["problems"]] == ["ERROR"]
    assert "LAYERS_OVERLAP" in cli("topology", "e").out


def test_engines_are_filtered_and_counted(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record()])
    publish([make_record(engine_id="d", group="other", role="CONSUMER")])
    listed = cli("engines", "-o", "json").json
    assert [engine["engine_id"] for engine in listed["engines"]] == ["d", "e"]
    assert isinstance(listed["book_revision"], int)
    promised = {"engine_id", "group", "replica", "dp_rank", "role", "state", "epoch", "revision"}
    assert all(promised | {"present", "declared"} <= set(one) for one in listed["engines"])
    only = cli("engines", "--role", "consumer", "-o", "json").json
    assert [engine["engine_id"] for engine in only["engines"]] == ["d"]
    lines = cli("engines", "--group", "g").out.splitlines()
    assert [line.split()[0] for line in lines] == ["ENGINE", "e"]
    none = cli("engines", "--state", "gone")
    assert (none.code, len(none.out.splitlines())) == (0, 1)
    assert "no engine" in none.err


def test_a_list_without_an_engine_says_whether_that_was_asked_for(cli: Any) -> None:
    assert cli("engines").err.startswith("no engine is in namespace ")
    asked = cli("engines", "--group", "g")
    assert asked.err.startswith("no engine is as asked for in namespace ")


def test_payloads_are_shown_only_where_they_are_asked_for(
    cli: Any, publish: Any, make_record: Any
) -> None:
    publish([make_record()])
    for words in (["workers", "e"], ["workers", "e", "-o", "wide"], ["topology", "e"]):
        assert "c2VjcmV0" not in cli(*words).out
        assert "c2VjcmV0" in cli(*words, "--payload").out
    assert cli("workers", "e", "-o", "json").json["workers"][0]["handshake"]["payload"] == (
        "c2VjcmV0"
    )
    assert "c2VjcmV0" not in cli("engines", "-o", "json").out


def test_a_plan_covers_every_layer_of_uneven_stages(cli: Any, publish: Any, make_grid: Any) -> None:
    publish(make_grid([20, 20], 1))
    shown = cli(
        "plan", "--from", "e", "--tp-size", "1", "--pp-size", "2", "--layers", "30,10", "-o", "json"
    )
    assert shown.code == 0
    first, second = shown.json["consumers"]
    spans = [(r["pp_rank"], r["start_layer"], r["end_layer"]) for r in first["read"]]
    assert spans == [(0, 0, 20), (1, 20, 30)]
    spans = [(r["pp_rank"], r["start_layer"], r["end_layer"]) for r in second["read"]]
    assert spans == [(1, 30, 40)]
    assert {"contact", "expected_completions"} <= set(first)
    assert all("consumer_count" in one for one in shown.json["producers"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tp-size", "3"], "TP_NOT_DIVISIBLE"),
        (["--tp-size", "1", "--pp-size", "2", "--layers", "30,30"], "LAYER_SPLIT_INVALID"),
    ],
)
def test_where_no_plan_exists_the_exit_is_5_with_a_reason(
    cli: Any, publish: Any, make_grid: Any, words: list[str], reason: str
) -> None:
    publish(make_grid([20, 20], 2))
    shown = cli("plan", "--from", "e", *words, "-o", "json")
    assert (shown.code, shown.json["error"]["reason"]) == (5, reason)


def test_a_plan_of_an_incomplete_engine_is_refused(cli: Any, publish: Any, make_grid: Any) -> None:
    publish(make_grid([20, 20], 2)[:1])
    shown = cli("plan", "--from", "e", "--tp-size", "1", "-o", "json")
    assert (shown.code, shown.json["error"]["reason"]) == (5, "ENGINE_INCOMPLETE")


def test_comparison_is_0_or_5_with_every_reason(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record()])
    publish([make_record(engine_id="d", role="CONSUMER")])
    publish([make_record(engine_id="x", role="CONSUMER", model={"name": "m", "head_size": 128})])
    good = cli("compare", "e", "d", "-o", "json")
    assert (good.code, good.json["compatible"], good.json["reasons"]) == (0, True, [])
    bad = cli("compare", "e", "x", "-o", "json")
    assert (bad.code, bad.json["compatible"]) == (5, False)
    assert bad.json["error"]["reason"] == "INCOMPATIBLE"
    assert all({"reason", "message", "producer", "consumer"} <= set(r) for r in bad.json["reasons"])
    assert ("64", "128") in {(r["producer"], r["consumer"]) for r in bad.json["reasons"]}


def test_an_unreachable_registry_is_exit_4_that_names_the_endpoint(cli_for: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        cli = cli_for(address)
        for words in (["engines"], ["topology", "e"], ["watch"], ["status"]):
            shown = cli(*words, "--timeout", "1s", "-o", "json")
            assert (words, shown.code) == (words, 4)
            assert shown.json["error"]["reason"] == "UNREACHABLE"
            assert address in shown.err


def test_status_is_one_object(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record()])
    shown = cli("status", "-o", "json").json
    assert shown["store"] == "memory:"
    assert shown["engines"]["COMPLETE"] == 1
    assert shown["workers"] == 1
    assert "memory: (available)" in cli("status").out


def on_terminal(cli: Any, *words: str, env: dict[str, str] | None = None) -> str:
    """What a command writes to a terminal of 100 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*cli.command, *words],
        env={
            **cli.environ,
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "COLUMNS": "100",
            "PYTHONUTF8": "1",
            **(env or {}),
        },
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                written += os.read(leader, 65536)
            except OSError:
                break
        elif process.poll() is not None:
            break
    os.close(leader)
    process.wait(10)
    return written.decode()


def test_a_terminal_gets_colour_and_signs_and_a_pipe_gets_ascii(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    publish(make_grid([16, 16], 2)[:3])
    shown = on_terminal(cli, "topology", "e")
    assert "●" in shown
    assert "✗" in shown
    assert "\x1b[1;31m✗" in shown
    assert "\x1b" in on_terminal(cli, "engines")
    plain = on_terminal(cli, "topology", "e", env={"NO_COLOR": "1"})
    assert "\x1b" not in plain
    assert "✗" in plain
    piped = cli("topology", "e").out
    assert piped.isascii()
    assert re.search(r"^pp 1 .* # x$", piped, re.M)


def test_json_on_a_terminal_is_the_same_object(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record()])
    shown = json.loads(on_terminal(cli, "workers", "e", "-o", "json"))
    assert shown == cli("workers", "e", "-o", "json").json


def test_a_pipe_whose_reader_leaves_is_quiet(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record(handshake={"format": "t", "payload": "A" * 400_000})])
    process = cli.start("topology", "e", "-o", "json")
    process.stdout.read(1)
    process.stdout.close()
    process.wait(20)
    assert process.returncode == 0
    assert process.stderr.read() == ""


def test_engine_ids_complete_from_the_book(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record(), make_record(engine_id="elsewhere"), make_record(engine_id="x")][:1])
    publish([make_record(engine_id="elsewhere")])
    publish([make_record(engine_id="x")])
    asked = {
        "_RANKBOOK_COMPLETE": "bash_complete",
        "COMP_WORDS": "rankbook topology e",
        "COMP_CWORD": "2",
    }
    shown = cli(env=asked)
    assert shown.out.split() == ["plain,e", "plain,elsewhere"]


def test_the_bash_script_is_one_that_bash_takes(cli: Any) -> None:
    script = cli("completion", "bash").out
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
