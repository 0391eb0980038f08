"""Publishing from a file, holding, sealing, draining, evicting."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def file(tmp_path: Path, make_record: Any) -> Any:
    """Writes records to a file and gives its name."""

    def write(*records: Any) -> str:
        path = tmp_path / "records.json"
        path.write_text(json.dumps(list(records) or [make_record()]))
        return str(path)

    return write


def held(cli: Any, *words: str) -> tuple[Any, Any]:
    """Starts `register --hold` and gives it with the object it printed."""
    process = cli.start("register", *words, "--hold", "-o", "json")
    return process, json.loads(process.stdout.readline())


def test_without_hold_the_lease_is_left_to_run_out(cli: Any, file: Any) -> None:
    shown = cli("register", "-f", file(), "--ttl", "2s", "-o", "json")
    assert (shown.code, shown.json["ttl_s"]) == (0, 2)
    assert cli.state("e") == "COMPLETE"
    gone = cli("wait", "e", "--for", "gone", "--timeout", "10s", "-o", "json")
    assert (gone.code, gone.json["state"]) == (0, "GONE")
    shown = cli("topology", "e", "-o", "json")
    assert (shown.code, shown.json["error"]["reason"]) == (5, "ENGINE_GONE")


def test_a_repeated_registration_of_one_file_is_no_conflict(
    cli: Any, file: Any, make_record: Any
) -> None:
    name = file(make_record(process={"boot_id": "b1"}))
    first = cli("register", "-f", name, "-o", "json").json
    second = cli("register", "-f", name, "-o", "json").json
    assert (first["epoch"], second["epoch"]) == (1, 1)
    assert first["lease_id"] != second["lease_id"]
    conflict = cli("register", "-f", file(make_record(process={"boot_id": "b2"})), "-o", "json")
    assert (conflict.code, conflict.json["error"]["reason"]) == (5, "SLOT_HELD")


def test_several_engines_of_one_file_are_several_registrations(
    cli: Any, file: Any, make_record: Any
) -> None:
    shown = cli("register", "-f", file(make_record(), make_record(engine_id="d")), "-o", "json")
    assert [one["engine_id"] for one in shown.json["registrations"]] == ["e", "d"]
    assert (cli.state("e"), cli.state("d")) == ("COMPLETE", "COMPLETE")


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"colour": "red"}, 5, "UNKNOWN_FIELD"),
        ({"slot": {"pp_rank": 0, "tp_rank": 1}}, 5, "INVALID_RECORD"),
        ({"engine_id": ""}, 5, "INVALID_RECORD"),
        ({"layers": {"start_layer": 9, "end_layer": 3}}, 5, "INVALID_RECORD"),
        ({"namespace": "elsewhere"}, 5, "NAMESPACE_MISMATCH"),
        ({"handshake": {"format": "f", "payload": "A" * 700_000}}, 5, "LIMIT_EXCEEDED"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_record_is_refused_and_nothing_is_written(
    cli: Any, file: Any, make_record: Any, changes: dict[str, Any], code: int, reason: str
) -> None:
    good = make_record(engine_id="good")
    shown = cli("register", "-f", file(good, make_record(**changes)), "-o", "json")
    assert (shown.code, shown.json["error"]["reason"]) == (code, reason)
    assert shown.err.startswith("rankbook: ")
    assert cli("engines", "-o", "json").json["engines"] == []


def test_a_negative_ttl_is_a_typed_error(cli: Any, file: Any) -> None:
    for words in ([], ["--hold"]):
        shown = cli("register", "-f", file(), "--ttl=-1", *words, "-o", "json")
        assert shown.code == 2
        assert shown.json["error"]["metadata"]["field"] == "ttl"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_held_lease_is_given_up_cleanly_at_a_signal(cli: Any, file: Any, number: int) -> None:
    process, printed = held(cli, "-f", file(), "--ttl", "60s")
    assert {"lease_id", "ttl_s", "epoch", "revision"} <= set(printed)
    assert cli.state("e") == "COMPLETE"
    ended = cli.finish(process, number)
    assert ended.code == 0
    # Given up, not left to its minute of life.
    assert cli.state("e") == "GONE"


def test_a_held_record_outlives_its_ttl(cli: Any, file: Any) -> None:
    process, _ = held(cli, "-f", file(), "--ttl", "2s")
    timed_out = cli("wait", "e", "--for", "gone", "--timeout", "5s")
    assert timed_out.code == 1
    assert cli.state("e") == "COMPLETE"
    assert cli.finish(process, signal.SIGTERM).code == 0


def test_a_newer_start_ends_a_hold_with_exit_5(cli: Any, file: Any, make_record: Any) -> None:
    process, _ = held(cli, "-f", file(make_record(generation="t1")), "--ttl", "3s")
    newer = cli("register", "-f", file(make_record(generation="t2")), "-o", "json")
    assert newer.json["epoch"] == 2
    ended = cli.finish(process)
    assert ended.code == 5
    assert json.loads(ended.out)["error"]["reason"] in {"GENERATION_FENCED", "EPOCH_FENCED"}
    assert cli("topology", "e", "-o", "json").json["generation"] == "t2"


def test_killing_a_holder_takes_its_record_out_long_before_the_ttl(cli: Any, file: Any) -> None:
    process, _ = held(cli, "-f", file(), "--ttl", "60s")
    process.kill()
    gone = cli("wait", "e", "--for", "gone", "--timeout", "5s")
    assert gone.code == 0, gone.err


def test_a_stall_of_the_server_never_ends_a_hold(
    rankbookd: Any, cli_for: Any, file: Any, tmp_path: Path
) -> None:
    server = rankbookd(store=f"sqlite:{tmp_path / 'book.db'}")
    cli = cli_for(server.grpc)
    process, printed = held(cli, "-f", file(), "--ttl", "2s")
    server.pause()
    assert cli.stays(process, 5)
    server.resume()
    assert cli("wait", "e", "--for", "complete", "--timeout", "10s").code == 0
    server.kill()
    server.start_again(same_port=True)
    assert cli("wait", "e", "--for", "complete", "--timeout", "10s").code == 0
    assert cli("topology", "e", "-o", "json").json["epoch"] == printed["epoch"]
    assert process.poll() is None
    assert cli.finish(process, signal.SIGTERM).code == 0


def test_a_hold_may_begin_before_the_registry_does(rankbookd: Any, cli_for: Any, file: Any) -> None:
    server = rankbookd()
    address = server.grpc
    server.stop()
    cli = cli_for(address)
    process = cli.start("register", "-f", file(), "--hold", "-o", "json")
    assert "not published yet" in process.stderr.readline()
    server.start_again(same_port=True)
    assert json.loads(process.stdout.readline())["epoch"] == 1
    assert cli.finish(process, signal.SIGTERM).code == 0


def test_seal_drain_undo_and_evict_do_as_named(cli: Any, publish: Any, make_grid: Any) -> None:
    publish(make_grid([16, 16], 1)[:1])
    early = cli("seal", "e", "-o", "json")
    assert early.code == 5
    assert early.json["error"]["reason"] in {"ENGINE_INCOMPLETE", "SEAL_MISMATCH"}
    publish(make_grid([16, 16], 1)[1:])
    assert cli("seal", "e").out.startswith("e sealed #1: 2 of 2 ranks")
    assert cli.state("e") == "READY"

    drained = cli("drain", "e", "--reason", "node work", "--wait", "5s", "-o", "json")
    assert (drained.code, drained.json["state"], drained.json["outcome"]) == (
        0,
        "DRAINING",
        "IDLE",
    )
    shown = cli("topology", "e")
    assert shown.code == 0
    assert "(node work)" in shown.out
    assert cli("drain", "e", "--undo", "-o", "json").json["state"] == "READY"

    evicted = cli("evict", "e", "--reason", "gone bad", "-o", "json")
    assert (evicted.code, evicted.json["removed"]) == (0, 2)
    assert cli.state("e") == "GONE"
    again = cli("evict", "e", "-o", "json")
    assert (again.code, again.json["removed"]) == (0, 0)
    late = cli("register", "-f", "-", "-o", "json", stdin=json.dumps(make_grid([16, 16], 1)))
    assert (late.code, late.json["error"]["reason"]) == (5, "EVICTED")
