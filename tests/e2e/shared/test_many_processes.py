"""Sixty-four processes publish one engine at once, at three servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.rpc.support import Raw, seal_request

from rankbook import v1

PUBLISHER = """
import json, sys
import grpc
from tests.rpc.support import Failure, Raw, record
address, number = sys.argv[1], int(sys.argv[2])
# Two processes claim each slot: one of them is an impostor.
slot, generation = number % 32, "g1"
one = record("e", pp=slot // 8, tp=slot % 8, pp_size=4, tp_size=8, num_layers=61,
             generation=generation, boot_id=f"process-{number}", payload=b"x" * 2048)
with Raw(address) as raw:
    grpc.channel_ready_future(raw.channel).result(60)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        reply = raw.register([one])
    except Failure as failure:
        print(json.dumps({"refused": failure.reason, "holder": failure.metadata.get("holder")}))
    else:
        print(json.dumps({"epoch": reply.epoch, "digest": reply.record_digests[0].hex(),
                          "revision": reply.revision}))
"""


def test_sixty_four_processes_publish_one_engine_and_each_slot_has_one_of_them(
    servers: Callable[..., Sequence[Any]],
) -> None:
    started = servers(3)
    publishers = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, started[number % 3].grpc, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(64)
    ]
    try:
        for one in publishers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in publishers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        outcomes = [json.loads(one.communicate(timeout=60)[0]) for one in publishers]
    finally:
        for one in publishers:
            one.kill()
            one.wait()
    winners = {number % 32: number for number, outcome in enumerate(outcomes) if "epoch" in outcome}
    assert len(winners) == sum("epoch" in outcome for outcome in outcomes) == 32
    assert {outcome["epoch"] for outcome in outcomes if "epoch" in outcome} == {1}
    for number, outcome in enumerate(outcomes):
        if "refused" in outcome:
            expected = {"refused": "SLOT_HELD", "holder": f"process-{winners[number % 32]}"}
            assert outcome == expected
    last = max(outcome.get("revision", 0) for outcome in outcomes)
    raws = [Raw(server.grpc) for server in started]
    answers = [raw.topology("e", min_revision=last) for raw in raws]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].engine.state == v1.STATE_COMPLETE
    held = {
        worker.slot.pp_rank * 8 + worker.slot.tp_rank: worker.process.boot_id
        for worker in answers[0].workers
    }
    assert held == {slot: f"process-{number}" for slot, number in winners.items()}
    digests = [status.record_digest for status in answers[0].statuses]
    sealed = raws[1].call("SealEngine", seal_request(list(answers[0].workers), digests))
    states = [raw.topology("e", min_revision=sealed.revision).engine.state for raw in raws]
    assert states == [v1.STATE_READY] * 3
    for raw in raws:
        raw.channel.close()
