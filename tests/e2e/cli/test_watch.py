"""Watching and waiting."""

from __future__ import annotations

import json
import signal
import socket
import threading
from typing import Any


def test_watch_writes_a_json_line_for_each_change_at_once(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    watching = cli.start("watch", "-o", "json")
    publish(make_grid([16, 16], 1)[:1])
    first = json.loads(watching.stdout.readline())
    assert set(first) >= {"type", "revision", "engine"}
    assert (first["type"], first["engine"]["state"]) == ("ADDED", "FORMING")
    publish(make_grid([16, 16], 1)[1:])
    second = json.loads(watching.stdout.readline())
    assert (second["type"], second["engine"]["state"]) == ("MODIFIED", "COMPLETE")
    assert second["revision"] > first["revision"]
    assert cli("evict", "e").code == 0
    third = json.loads(watching.stdout.readline())
    assert third["engine"]["state"] == "GONE"
    ended = cli.finish(watching, signal.SIGINT)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_watch_follows_one_group_in_plain_lines(cli: Any, publish: Any, make_record: Any) -> None:
    watching = cli.start("watch", "--group", "g", "--count", "2")
    publish([make_record(engine_id="other", group="h")])
    publish([make_record()])
    assert cli("seal", "e").code == 0
    ended = cli.finish(watching)
    assert ended.code == 0
    lines = [line.split()[1:] for line in ended.out.splitlines()]
    assert [line[1:4] for line in lines] == [
        ["ADDED", "e", "COMPLETE"],
        ["MODIFIED", "e", "COMPLETE"],
    ]
    assert lines[1][4:6] == ["->", "READY"]


def test_watch_goes_on_over_a_restart_of_the_registry(
    rankbookd: Any, cli_for: Any, tmp_path: Any, make_record: Any
) -> None:
    server = rankbookd(store=f"sqlite:{tmp_path / 'book.db'}")
    cli = cli_for(server.grpc)
    watching = cli.start("watch", "-o", "json")
    publish = ("register", "-f", "-", "--ttl", "60s")
    assert cli(*publish, stdin=json.dumps(make_record())).code == 0
    assert json.loads(watching.stdout.readline())["engine"]["engine_id"] == "e"
    server.kill()
    server.start_again(same_port=True)
    assert cli(*publish, stdin=json.dumps(make_record(engine_id="d"))).code == 0
    assert json.loads(watching.stdout.readline())["engine"]["engine_id"] == "d"
    assert cli.finish(watching, signal.SIGINT).code == 130


def test_a_watch_whose_reader_leaves_ends_quietly(cli: Any, publish: Any, make_record: Any) -> None:
    publish([make_record()])
    watching = cli.start("watch", "-o", "json")
    watching.stdout.readline()
    watching.stdout.close()
    cli("seal", "e")
    watching.wait(20)
    assert watching.returncode == 0
    assert watching.stderr.read() == ""


def test_wait_returns_as_soon_as_the_engine_is_ready(
    cli: Any, publish: Any, make_record: Any
) -> None:
    waiting = cli.start("wait", "e", "--for", "ready", "--timeout", "30s", "-o", "json")
    publish([make_record()])
    assert waiting.poll() is None
    cli("seal", "e")
    ended = cli.finish(waiting)
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out)["state"] == "READY"


def test_wait_for_an_unknown_engine_times_out_with_exit_1(cli: Any) -> None:
    for goal in ("ready", "gone"):
        ended = cli("wait", "nobody", "--for", goal, "--timeout", "300ms", "-o", "json")
        assert ended.code == 1
        error = ended.json["error"]
        assert (error["reason"], error["metadata"]["state"]) == ("TIMED_OUT", "not known")


def test_wait_says_what_is_missing_when_the_time_is_up(
    cli: Any, publish: Any, make_grid: Any
) -> None:
    publish(make_grid([16, 16], 1)[:1])
    ended = cli("wait", "e", "--timeout", "300ms", "-o", "json")
    assert ended.code == 1
    assert ended.json["error"]["metadata"]["missing"] == "pp1 tp0"


def test_invalid_ends_a_wait_at_once_with_exit_5(cli: Any, publish: Any, make_grid: Any) -> None:
    waiting = cli.start("wait", "e", "--for", "ready", "--timeout", "60s", "-o", "json")
    records = make_grid([16, 16], 1)
    records[1]["layers"] = {"start_layer": 10, "end_layer": 32}
    publish(records)
    ended = cli.finish(waiting)
    assert ended.code == 5
    assert json.loads(ended.out)["error"]["reason"] == "ENGINE_INVALID"


def test_wait_may_begin_before_the_registry_does(
    rankbookd: Any, cli_for: Any, make_record: Any
) -> None:
    server = rankbookd()
    server.stop()
    cli = cli_for(server.grpc)
    waiting = cli.start("wait", "e", "--for", "complete", "--timeout", "30s")
    server.start_again(same_port=True)
    assert cli("register", "-f", "-", stdin=json.dumps(make_record())).code == 0
    ended = cli.finish(waiting)
    assert ended.code == 0, ended.err
    assert "COMPLETE" in ended.out


def test_wait_for_a_registry_that_never_comes_is_exit_4(cli_for: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cli = cli_for(f"127.0.0.1:{free.getsockname()[1]}")
        ended = cli("wait", "e", "--timeout", "1s", "-o", "json")
    assert (ended.code, ended.json["error"]["reason"]) == (4, "UNREACHABLE")


def test_an_interrupted_wait_is_exit_130_without_words(cli: Any) -> None:
    waiting = cli.start("wait", "nobody", "--timeout", "60s")
    assert cli.stays(waiting, 1.5)
    ended = cli.finish(waiting, signal.SIGINT)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_two_waiters_see_one_revision(cli: Any, publish: Any, make_record: Any) -> None:
    ended: list[Any] = []
    waiters = [
        threading.Thread(
            target=lambda: ended.append(cli("wait", "e", "--for", "ready", "-o", "json"))
        )
        for _ in range(2)
    ]
    for waiter in waiters:
        waiter.start()
    publish([make_record()])
    cli("seal", "e")
    for waiter in waiters:
        waiter.join(30)
    assert [one.code for one in ended] == [0, 0]
    assert ended[0].json["revision"] == ended[1].json["revision"]
