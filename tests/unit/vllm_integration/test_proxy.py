"""Whom the proxy for trying things out asks, and what it hands over: decided without I/O."""

import dataclasses
import re
from pathlib import Path

import pytest

from rankbook.model import Address, CoreRecord, Engine, Layout, Process, Role, State, Topology
from rankbook_vllm.config import load
from rankbook_vllm.proxy.bodies import handover
from rankbook_vllm.proxy.command import DEFAULT_LISTEN, cli
from rankbook_vllm.proxy.routing import Rota, Side, Target, serving_url, standing
from rankbook_vllm.sealing import serving_addresses

PAGE = (Path(__file__).parents[3] / "vllm_integration/README.md").read_text()


def engine(name="p0", *, serving="10.0.0.5:8000", state=State.READY, role=Role.PRODUCER, group="a"):
    return Engine(
        namespace="default",
        engine_id=name,
        group=group,
        replica=name,
        dp_rank=0,
        role=role,
        state=state,
        generation="g1",
        epoch=1,
        revision=7,
        start_revision=5,
        layout=Layout(1, 1, 4),
        present=1,
        declared=1,
        core=CoreRecord(
            process=Process("core"),
            connector="NixlConnector",
            addresses=(
                Address("zmq", "10.0.0.5", 5600, "side-channel"),
                *serving_addresses(serving),
            ),
        ),
    )


def topologies(*engines):
    return [Topology(one, (), ()) for one in engines]


def target(name, connector="NixlConnector"):
    return Target(name, "g1", connector, f"http://{name}")


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("node-7.example:80", "http://node-7.example:80"),
        ("[2001:db8::5]:8000", "http://[2001:db8::5]:8000"),
        ("", ""),
        ("node-7", ""),  # without a port nobody can connect
    ],
)
def test_a_serving_address_as_the_setting_gives_it_becomes_a_url(setting, url):
    assert serving_url(engine(serving=setting)) == url


def test_an_address_of_another_scheme_is_not_where_requests_go():
    core = CoreRecord(process=Process("core"), addresses=(Address("grpc", "h", 1, "serving"),))
    assert serving_url(dataclasses.replace(engine(), core=core)) == ""
    assert serving_url(dataclasses.replace(engine(), core=None)) == ""


@pytest.mark.parametrize("state", [one for one in State if one is not State.READY])
def test_only_ready_engines_take_requests(state):
    side = Side("producer", Role.PRODUCER)
    book = topologies(engine("p0", state=state), engine("p1"))
    assert [one.engine_id for one in side.targets(book)] == ["p1"]
    assert f"is {state}" in standing(engine(state=state))


def test_a_side_is_a_role_or_both_of_a_group_or_any():
    book = topologies(
        engine("p0", group="a"),
        engine("p1", group="b"),
        engine("d0", role=Role.CONSUMER),
        engine("b0", role=Role.BOTH),
    )

    def names(side):
        return [one.engine_id for one in side.targets(book)]

    assert names(Side("producer", Role.PRODUCER)) == ["b0", "p0", "p1"]
    assert names(Side("producer", Role.PRODUCER, "b")) == ["p1"]
    assert names(Side("consumer", Role.CONSUMER)) == ["b0", "d0"]


def test_who_comes_and_goes_shifts_nobodys_turn():
    rota = Rota()
    a, b, c, d = (target(name) for name in "abcd")
    assert rota.next([a, b, c]) == a
    assert rota.next([a, c]) == c
    assert rota.next([a, b, c, d]) == d
    assert rota.next([a, b, c, d]) == a
    assert rota.next([a, b, c, d], without=["b"]) == c
    assert rota.next([a], without=["a"]) is None
    assert rota.next([]) is None


def test_the_refusal_counts_states_by_group_and_names_who_is_silent():
    side = Side("consumer", Role.CONSUMER)
    book = topologies(
        engine("d0", role=Role.CONSUMER, state=State.FORMING),
        engine("d1", role=Role.CONSUMER, state=State.FORMING),
        engine("d2", role=Role.CONSUMER, serving="", group="b"),
        engine("p0"),
    )
    refusal = side.nobody(book)
    assert (refusal.status, refusal.reason) == (503, "NO_CONSUMER")
    assert refusal.details["states"] == {"a": {"FORMING": 2}, "b": {"READY": 1}}
    assert "a has 2 FORMING; b has 1 READY; 1 READY without serving_address" in refusal.message


@pytest.mark.parametrize(
    ("blocks", "kept"),
    [([[0]], True), ([0], True), ([[], [5]], True), ([[], []], False), ([], False), (None, False)],
)
def test_kv_is_handed_over_where_a_block_is_named(blocks, kept):
    reply = {"kv_transfer_params": {"remote_block_ids": blocks}}
    assert (handover(reply, target("p0"), "t", all_params=False) is not None) is kept


def test_what_a_mooncake_producer_says_of_itself_goes_before_the_book():
    reply = {
        "choices": [{"finish_reason": "length"}],
        "kv_transfer_params": {
            "transfer_id": "t",
            "remote_engine_id": "p0_dp1",
            "remote_generation": "g9",
        },
    }
    assert handover(reply, target("p0", "MooncakeConnector"), "t", all_params=False) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_engine_id": "p0_dp1",
        "remote_generation": "g9",
    }


def test_what_the_readme_shows_of_it_is_what_it_takes():
    (section,) = re.findall(r"^## Trying it out\n(.*?)^## ", PAGE, re.S | re.M)
    assert "NOT for production" in section
    flags = set(re.findall(r"--[a-z-]+", section)) - {"--port"}
    assert {"--server", "--prefill-group", "--decode-group", "--timeout", "--all-params"} == flags
    assert flags <= {name for option in cli.params for name in option.opts}
    assert set(re.findall(r"http://([\d.:]+)/", section)) == {DEFAULT_LISTEN}
    (setting,) = re.findall(r"(RANKBOOK_\w+)=(\S+)", section)
    assert load({}, dict([setting])).serving_address == setting[1]
    assert "NOT for production" in cli.help
