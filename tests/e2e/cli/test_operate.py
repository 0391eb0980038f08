"""The doctor, made-up engines, and the demo."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def findings(shown: Any) -> dict[str, dict[str, str]]:
    return {one["id"]: one for one in shown.json["findings"]}


def test_a_healthy_book_has_nothing_found(cli: Any, publish: Any, make_grid: Any) -> None:
    publish(make_grid([16, 16], 1))
    shown = cli("doctor", "-o", "json")
    assert (shown.code, shown.json["findings"], shown.json["engines"]) == (0, [], 1)
    assert cli("doctor").out.endswith("nothing found\n")


def test_the_doctor_names_every_fault_with_evidence_and_a_next_step(
    cli: Any, publish: Any, make_grid: Any, make_record: Any
) -> None:
    halves = make_grid([16, 16], 2, group="split", process={"boot_id": "b1", "hostname": "node-1"})
    publish([{**one, "engine_id": "split-a"} for one in halves[:2]])
    others = [{**one, "engine_id": "split-b", "replica": "split-a"} for one in halves[2:]]
    publish([{**one, "process": {"boot_id": "b2", "hostname": "node-2"}} for one in others])
    loop = [{"scheme": "zmq", "host": "127.0.0.1", "port": 5600}]
    publish([make_record(engine_id="loop", group="l", addresses=loop)])
    here = [{"scheme": "zmq", "host": "10.0.0.5", "port": 5600}]
    for name in ("twin-1", "twin-2"):
        publish([make_record(engine_id=name, group="t", addresses=here)])
    odd = {"name": "m", "total_num_kv_heads": 8, "head_size": 128}
    publish([make_record(engine_id="d", group="d", role="CONSUMER", model=odd)])

    shown = cli("doctor", "-o", "json")
    found = findings(shown)
    assert {
        "MISSING_RANKS",
        "SPLIT_ENGINE",
        "PLACE_TAKEN_TWICE",
        "LOOPBACK_ADDRESS",
        "DUPLICATE_ADDRESS",
        "INCOMPATIBLE_PAIR",
    } <= set(found)
    promised = {"id", "severity", "subject", "evidence", "why", "next_step"}
    assert all(set(one) == promised and all(one.values()) for one in shown.json["findings"])
    assert found["SPLIT_ENGINE"]["subject"] == "split-a,split-b"
    assert "10.0.0.5:5600" in found["DUPLICATE_ADDRESS"]["evidence"]
    assert "node-" in found["MISSING_RANKS"]["evidence"]
    only = findings(cli("doctor", "loop", "-o", "json"))
    assert "LOOPBACK_ADDRESS" in only
    assert "SPLIT_ENGINE" not in only


def test_the_doctor_reports_an_unreachable_registry_within_five_seconds(cli_for: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cli = cli_for(f"127.0.0.1:{free.getsockname()[1]}")
        began = time.monotonic()
        shown = cli("doctor", "-o", "json", "--timeout", "60s")
        assert time.monotonic() - began < 5
    assert shown.code == 4
    assert findings(shown)["SERVER_UNREACHABLE"]["severity"] == "ERROR"
    assert shown.json["error"]["reason"] == "UNREACHABLE"


def test_a_black_hole_is_reported_too(cli_for: Any) -> None:
    with socket.socket() as listener:
        # Takes connections and never says a word.
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        cli = cli_for(f"127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        shown = cli("doctor", "-o", "json")
        assert time.monotonic() - began < 6
    assert shown.code == 4
    assert "SERVER_UNREACHABLE" in findings(shown)


def test_a_book_that_is_deleted_under_the_server_takes_nothing_and_says_so(
    rankbookd: Any, cli_for: Any, tmp_path: Path, make_record: Any
) -> None:
    book = tmp_path / "book.db"
    cli = cli_for(rankbookd(store=f"sqlite:{book}").grpc)
    publish = ("register", "-f", "-", "-o", "json")
    assert cli(*publish, stdin=json.dumps(make_record())).code == 0
    book.unlink()
    refused = cli(*publish, stdin=json.dumps(make_record(engine_id="d")))
    assert refused.code == 4
    assert refused.json["error"]["reason"] == "STORE_UNAVAILABLE"
    assert "moved or deleted" in refused.json["error"]["message"]
    # Nobody else writes to this book: what the server knows is still true.
    assert len(cli("engines", "-o", "json").json["engines"]) == 1
    status = cli("status", "-o", "json")
    assert (status.code, status.json["store_available"]) == (0, False)
    doctor = cli("doctor", "-o", "json")
    assert doctor.code == 4
    assert findings(doctor)["STORE_AWAY"]["severity"] == "ERROR"


def test_made_up_engines_are_real_ones_and_leave_nothing_behind(cli: Any) -> None:
    simulated = cli.start(
        *("simulate", "--pp", "4", "--tp", "2", "--layers", "61", "--engines", "3", "-o", "json")
    )
    sealed = [json.loads(simulated.stdout.readline()) for _ in range(3)]
    assert {(one["event"], one["epoch"]) for one in sealed} == {("sealed", 1)}
    shown = cli("topology", "sim-2", "-o", "json").json
    assert (shown["state"], shown["present"]) == ("READY", 8)
    spans = [(stage["start_layer"], stage["end_layer"]) for stage in shown["stages"]]
    assert spans == [(0, 15), (15, 30), (30, 46), (46, 61)]
    assert len({worker["process"]["boot_id"] for worker in shown["workers"]}) == 8
    assert cli("doctor", "-o", "json").json["findings"] == []
    assert cli.finish(simulated, signal.SIGINT).code == 0
    states = {one["state"] for one in cli("engines", "-o", "json").json["engines"]}
    assert states == {"GONE"}
    status = cli("status", "-o", "json").json
    assert (status["workers"], status["engines"]) == (0, {"GONE": 3})


def test_the_kill_and_restart_switches_take_a_worker_and_a_generation(cli: Any) -> None:
    simulated = cli.start(
        *("simulate", "--tp", "2", "--ttl", "2s", "--kill-after", "500ms"),
        *("--restart-after", "6s", "--duration", "9s", "-o", "json"),
    )
    first = json.loads(simulated.stdout.readline())
    assert first["event"] == "sealed"
    killed = json.loads(simulated.stdout.readline())
    assert (killed["event"], killed["tp_rank"]) == ("killed", 1)
    cli.until(lambda: cli.state("sim-0") == "DEGRADED", "DEGRADED after the lease", 6)
    again = json.loads(simulated.stdout.readline())
    assert (again["event"], again["epoch"]) == ("sealed", 2)
    assert again["generation"] != first["generation"]
    assert cli.state("sim-0") == "READY"
    assert cli.finish(simulated).code == 0
    assert cli.state("sim-0") == "GONE"


def test_the_demo_runs_in_under_thirty_seconds() -> None:
    demo = Path(__file__).parents[1] / "demo.py"
    began = time.monotonic()
    done = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 30
    assert "no answer ever held workers of two generations" in done.stdout
