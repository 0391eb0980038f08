"""Lines of engines, workers, plans and events, against lines written by hand."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
from collections.abc import Callable

import pytest

from rankbook.cli.engines import engines_table, make_filter
from rankbook.cli.output import Output, Table
from rankbook.cli.plan import consumers_table, producers_table
from rankbook.cli.topology import state_error, topology_json, workers_table
from rankbook.cli.watch import event_json, event_line, is_reached
from rankbook.errors import Refused
from rankbook.model import (
    Address,
    EngineFilter,
    EventType,
    Role,
    Slot,
    State,
    Successor,
    Topology,
    WatchEvent,
)

Make = Callable[..., Topology]


def plain(table: Table) -> str:
    data = io.StringIO()
    Output(
        data,
        io.StringIO(),
        form="table",
        terminal=False,
        stderr_terminal=False,
        unicode=False,
        color=False,
        width=80,
    ).table(table)
    return data.getvalue()


def test_engines_stand_one_a_line(make_topology: Make, now: dt.datetime) -> None:
    whole = make_topology([15, 15, 16, 15], 2).engine
    half = make_topology([32], 2, State.FORMING, engine_id="d", gone=[Slot(0, 0, 1)]).engine
    expected = """\
ENGINE       GROUP      ROLE      STATE    EPOCH  GRID     RANKS  LAYERS  STAGES       AGE
prefill-a-0  prefill-a  PRODUCER  READY        3  pp4xtp2    8/8      61  15,15,16,15   3m
d            prefill-a  PRODUCER  FORMING      3  pp1xtp2    1/2      32  32            3m
"""
    assert expected == plain(engines_table([whole, half], now))


def test_workers_stand_in_slot_order_with_sizes_not_payloads(make_topology: Make) -> None:
    topology = make_topology(
        [31, 30],
        1,
        State.DEGRADED,
        asleep=[Slot(1, 0, 0)],
        addresses=[Address("zmq", "10.0.0.5", 5600)],
    )
    expected = """\
PP  TP  LAYERS   HOST     PID  ADDRESS              HANDSHAKE      PAYLOAD
 0   0  [0,31)   node-0  4711  zmq://10.0.0.5:5600  vllm.nixl v14      6 B
 1   0  [31,61)  node-0  4711  zmq://10.0.0.5:5600  vllm.nixl v14   asleep
"""
    assert expected == plain(workers_table(topology))
    assert "c2VjcmV0" not in plain(workers_table(topology, wide=True))
    assert "c2VjcmV0" in plain(workers_table(topology, payload=True))


def test_a_topology_in_json_has_every_promised_member(make_topology: Make) -> None:
    shown = topology_json(make_topology([31, 30], 1, State.FORMING, gone=[Slot(1, 0, 0)]))
    promised = {
        "namespace": "default",
        "engine_id": "prefill-a-0",
        "group": "prefill-a",
        "replica": "prefill-a-0",
        "role": "PRODUCER",
        "state": "FORMING",
        "generation": "01JD0",
        "epoch": 3,
        "revision": 17,
        "book_revision": 20,
        "layout": {"pp_size": 2, "tp_size": 1, "pcp_size": 1, "dcp_size": 1, "num_layers": 61},
        "present": 1,
        "declared": 2,
        "missing": [{"pp_rank": 1, "pcp_rank": 0, "tp_rank": 0}],
        "stages": [{"pp_rank": 0, "start_layer": 0, "end_layer": 31}],
        "problems": [],
    }
    assert {name: shown[name] for name in promised} == promised
    (worker,) = shown["workers"]
    assert worker["handshake"] == {"format": "vllm.nixl", "version": 14, "payload": "c2VjcmV0"}
    assert worker["slot"] == {"pp_rank": 0, "pcp_rank": 0, "tp_rank": 0}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.READY, None),
        (State.DRAINING, None),
        (State.COMPLETE, None),
        (State.FORMING, "ENGINE_INCOMPLETE"),
        (State.DEGRADED, "ENGINE_INCOMPLETE"),
        (State.INVALID, "ENGINE_INVALID"),
        (State.GONE, "ENGINE_GONE"),
    ],
)
def test_only_complete_or_better_is_usable(
    make_topology: Make, state: State, reason: str | None
) -> None:
    error = state_error(make_topology([32], 1, state))
    if reason is None:
        assert error is None
    else:
        assert error is not None
        assert (str(error.reason), error.exit_code) == (reason, 5)


def test_a_dead_engines_error_carries_its_successor(make_topology: Make) -> None:
    error = state_error(make_topology([32], 1, State.GONE, successor=Successor("e2", 4, "t2")))
    assert error is not None
    assert error.metadata["successor_engine_id"] == "e2"
    assert error.metadata["successor_epoch"] == "4"


def test_a_plan_reads_a_line_a_read() -> None:
    plan = {
        "consumers": [
            {
                "pp_rank": 0,
                "tp_rank": 0,
                "contact": [{"pp_rank": 0, "tp_rank": 0}, {"pp_rank": 1, "tp_rank": 0}],
                "read": [
                    {
                        "pp_rank": 0,
                        "tp_rank": 0,
                        "start_layer": 0,
                        "end_layer": 20,
                        "start_head": 0,
                        "end_head": 4,
                    },
                    {
                        "pp_rank": 1,
                        "tp_rank": 0,
                        "start_layer": 20,
                        "end_layer": 30,
                        "start_head": 0,
                        "end_head": 4,
                    },
                ],
                "expected_completions": 2,
            }
        ],
        "producers": [{"pp_rank": 0, "tp_rank": 0, "consumer_count": 1}],
    }
    expected = """\
CONSUMER  READS FROM  LAYERS   HEADS  CONTACTS   WAITS FOR
pp0 tp0   pp0 tp0     [0,20)   [0,4)  pp0-1 tp0          2
pp0 tp0   pp1 tp0     [20,30)  [0,4)  pp0-1 tp0          2
"""
    assert expected == plain(consumers_table(plan))
    assert plain(producers_table(plan)) == "PRODUCERS  WAIT FOR\npp0 tp0           1\n"


def test_a_read_of_a_draft_layer_shows_no_heads() -> None:
    rank = {"pp_rank": 0, "tp_rank": 0}
    read = {**rank, "start_layer": 61, "end_layer": 62, "start_head": 0, "end_head": 0}
    consumer = {**rank, "contact": [rank], "read": [read], "expected_completions": 1}
    line = plain(consumers_table({"consumers": [consumer]})).splitlines()[1]
    assert line.split() == ["pp0", "tp0", "pp0", "tp0", "[61,62)", "-", "pp0", "tp0", "1"]


def test_an_event_says_what_changed_and_what_it_was(make_topology: Make, now: dt.datetime) -> None:
    before = make_topology([31, 30], 2).engine
    lost = make_topology([31, 30], 2, State.DEGRADED, gone=[Slot(1, 0, 1)])
    event = WatchEvent(EventType.MODIFIED, 18, lost, removed=(Slot(1, 0, 1),))
    assert event_line(event, before, now).plain == (
        "03:04:05      18  MODIFIED  prefill-a-0  READY -> DEGRADED  3/4  lost pp1 tp1"
    )
    restarted = dataclasses.replace(lost.engine, epoch=4, state=State.READY, present=4)
    event = WatchEvent(EventType.MODIFIED, 19, dataclasses.replace(lost, engine=restarted))
    assert event_line(event, lost.engine, now).plain == (
        "03:04:05      19  MODIFIED  prefill-a-0  DEGRADED -> READY  4/4  new start, epoch 4"
    )


def test_an_event_in_json_has_no_payload_unless_asked_for(make_topology: Make) -> None:
    event = WatchEvent(EventType.ADDED, 17, make_topology([32], 1), changed=(Slot(),))
    shown = event_json(event)
    assert (shown["type"], shown["revision"]) == ("ADDED", 17)
    assert shown["engine"]["state"] == "READY"
    assert "c2VjcmV0" not in repr(shown)
    assert "c2VjcmV0" in repr(event_json(event, payload=True))


@pytest.mark.parametrize(
    ("goal", "state", "reached"),
    [
        ("ready", State.READY, True),
        ("ready", State.COMPLETE, False),
        ("ready", State.DRAINING, False),
        ("complete", State.COMPLETE, True),
        ("complete", State.READY, True),
        ("complete", State.DRAINING, True),
        ("complete", State.FORMING, False),
        ("gone", State.GONE, True),
        ("gone", State.INVALID, False),
    ],
)
def test_what_is_waited_for(make_topology: Make, goal: str, state: State, reached: bool) -> None:
    assert is_reached(goal, make_topology([32], 1, state).engine) is reached


def test_an_unknown_engine_is_not_yet_whatever_is_waited_for() -> None:
    assert not any(is_reached(goal, None) for goal in ("ready", "complete", "gone"))


def test_an_invalid_engine_ends_a_wait_with_the_reason(make_topology: Make) -> None:
    with pytest.raises(Refused) as caught:
        is_reached("ready", make_topology([32], 1, State.INVALID).engine)
    assert (str(caught.value.reason), caught.value.exit_code) == ("ENGINE_INVALID", 5)


def test_filters_come_from_flags() -> None:
    made = make_filter("g", "producer", ["ready"], "m", ["zone=a", "x="], "h")
    assert made == EngineFilter(
        group="g",
        role=Role.PRODUCER,
        model="m",
        labels={"zone": "a", "x": ""},
        states=(State.READY,),
        compat_hash="h",
    )
