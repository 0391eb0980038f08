"""Mooncake's addresses out of a sealed topology: all of them, or a reason why not."""

import dataclasses
import json
import logging

import pytest
from tests.unit.vllm_integration.facts import LAYOUT, facts

from rankbook.errors import BadRecord, BadRequest, Incompatible, Incomplete
from rankbook.model import Engine, Handshake, Layout, Role, State, Topology
from rankbook_vllm.config import Settings
from rankbook_vllm.lookup import judge
from rankbook_vllm.mooncake import FORMAT, Listener, MooncakeRequests, addresses_of, is_dead
from rankbook_vllm.record import Start, worker_record
from rankbook_vllm.requests import Verdict

ENGINE = "prefill-a-0"
START = Start("g1", 1)


def worker(pp_rank=0, tp_rank=0, *, layout=LAYOUT, handshake=None):
    port = 7000 + 10 * pp_rank + tp_rank
    told = handshake or Listener(f"tcp://10.0.0.5:{port}", "tcp").encode()
    made = facts(pp_rank, tp_rank=tp_rank, layout=layout, handshake=told)
    return worker_record(made, START, Settings(), "boot")


def producer(*workers, layout=LAYOUT, state=State.READY, generation="g1", lapsed=False):
    engine = Engine(
        namespace="default",
        engine_id=ENGINE,
        group="a",
        replica="0",
        dp_rank=0,
        role=Role.PRODUCER,
        state=state,
        generation=generation,
        epoch=1,
        revision=7,
        start_revision=5,
        layout=layout,
        present=len(workers),
        declared=layout.pp_size * layout.tp_size,
        lapsed=lapsed,
    )
    return Topology(engine, workers, ())


def test_every_worker_is_named_by_its_ranks_whatever_their_order():
    layout = Layout(pp_size=2, tp_size=2, num_layers=4)
    slots = [(1, 1), (0, 1), (1, 0), (0, 0)]
    sealed = producer(*(worker(*slot, layout=layout) for slot in slots), layout=layout)
    assert addresses_of(sealed, "tcp") == {
        0: {0: "tcp://10.0.0.5:7000", 1: "tcp://10.0.0.5:7010"},
        1: {0: "tcp://10.0.0.5:7001", 1: "tcp://10.0.0.5:7011"},
    }


def test_a_part_of_the_workers_is_never_given():
    with pytest.raises(Incomplete) as caught:
        addresses_of(producer(worker(0)), "tcp")
    assert caught.value.metadata["missing"] == "pp1 tp0"


def test_a_worker_that_took_its_payload_back_is_named():
    asleep = worker(1, handshake=Handshake(FORMAT, 1))
    with pytest.raises(Incomplete, match="pp1 tp0"):
        addresses_of(producer(worker(0), asleep), "tcp")


@pytest.mark.parametrize(
    "handshake",
    [Handshake("vllm.nixl", 14, b"payload"), Handshake("vllm.none"), Handshake(FORMAT, 2, b"{}")],
)
def test_another_connector_or_version_is_refused_with_both(handshake):
    with pytest.raises(Incompatible) as caught:
        addresses_of(producer(worker(0), worker(1, handshake=handshake)), "tcp")
    assert caught.value.metadata == {
        "producer": f"{handshake.format} {handshake.version}",
        "consumer": "vllm.mooncake 1",
    }


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff",
        b"[]",
        b"{}",
        b'{"address": "", "protocol": "tcp"}',
        b'{"address": 1}',
        b"[" * 200_000,
        b'{"address": ' * 40_000,
    ],
    ids=["no text", "a list", "nothing", "empty", "a number", "deep", "deep in the address"],
)
def test_a_payload_that_is_none_is_refused(payload):
    with pytest.raises(BadRecord, match="pp0 tp0"):
        addresses_of(producer(worker(0, handshake=Handshake(FORMAT, 1, payload)), worker(1)), "tcp")


def test_a_field_of_a_later_release_is_left_out():
    told = json.dumps({"address": "tcp://10.0.0.5:7000", "protocol": "tcp", "numa": 1}).encode()
    read = Listener.decode(worker(0, handshake=Handshake(FORMAT, 1, told)))
    assert read == Listener("tcp://10.0.0.5:7000", "tcp")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.0.0.5:1",
        "tcp://10.0.0.5:65535",
        "tcp://node-7.rack_2.example:7000",
        "tcp://[fd00::5]:7000",
        "tcp://[fe80::1%eth0]:7000",
        "tcp://[::ffff:10.0.0.5]:7000",
    ],
)
def test_an_address_is_a_host_and_a_port(address):
    assert Listener.decode(worker(handshake=Listener(address, "tcp").encode())).address == address


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/socket",
        "inproc://worker",
        "10.0.0.5:7000",
        "TCP://10.0.0.5:7000",
        "tcp://10.0.0.5",
        "tcp://10.0.0.5:",
        "tcp://:7000",
        "tcp://*:7000",
        "tcp://10.0.0.5:0",
        "tcp://10.0.0.5:65536",
        "tcp://10.0.0.5:-7000",
        "tcp://10.0.0.5:*",
        "tcp://10.0.0.5:7000 ",
        "tcp://10.0.0.5:7000\n",
        "tcp://10.0.0.5:\u0667000",
        "tcp://eth0;10.0.0.5:7000",
        "tcp://user@10.0.0.5:7000",
        "tcp://fd00::5:7000",
        "tcp://[]:7000",
        "tcp://10.0.0.5:7000/path",
    ],
)
def test_an_address_that_nobody_can_listen_on_is_refused_with_it(address):
    with pytest.raises(BadRecord, match="pp0 tp0") as caught:
        Listener.decode(worker(handshake=Listener(address, "tcp").encode()))
    assert caught.value.metadata["value"] == repr(address)


def test_a_long_address_or_protocol_is_told_in_short():
    long = "x" * 10_000
    for told in (Listener(long, "tcp"), Listener("tcp://10.0.0.5:7000", long)):
        with pytest.raises((BadRecord, Incompatible)) as caught:
            addresses_of(producer(worker(0, handshake=told.encode()), worker(1)), "tcp")
        assert len(repr(caught.value) + repr(caught.value.metadata)) < 1000


def test_another_protocol_is_refused_with_both():
    with pytest.raises(Incompatible, match="mooncake_protocol") as caught:
        addresses_of(producer(worker(0), worker(1)), "rdma")
    assert caught.value.metadata == {"producer": "tcp", "consumer": "rdma"}


def test_context_parallel_ranks_are_refused_because_mooncake_cannot_tell_them_apart():
    layout = dataclasses.replace(LAYOUT, pcp_size=2)
    with pytest.raises(Incompatible, match="pcp_size 2"):
        addresses_of(producer(worker(0), worker(1), layout=layout), "tcp")


@pytest.mark.parametrize(
    ("now", "dead"),
    [
        (producer(worker(0), worker(1)), False),
        (producer(worker(0), state=State.DEGRADED), False),
        (producer(state=State.GONE), True),
        # Its process may be frozen, thaw, and write into blocks that were given away.
        (producer(state=State.GONE, lapsed=True), False),
        (producer(worker(0), generation="g2", state=State.FORMING), False),
        (producer(generation="g2", state=State.GONE), False),
        (None, False),
    ],
)
def test_a_start_is_dead_when_nothing_of_it_can_write_any_more(now, dead):
    assert is_dead("g1", now) is dead


class Known:
    """A copy of the book with at most one engine."""

    def __init__(self, topology=None):
        self.topology = topology

    def get(self, engine_id):
        return self.topology if engine_id == ENGINE else None

    def engines(self):
        return (self.topology,) if self.topology else ()

    def judge(self, engine_id, generation=""):
        return judge(self.get(engine_id), engine_id, generation=generation, current=True)


def requests(topology=None, **settings):
    known = Known(topology)
    log = logging.getLogger("test")
    return MooncakeRequests(known, Settings(**settings), log, lambda: 100.0, needs_block_ids=False)


def asking(**more):
    return {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": ENGINE, **more}


def test_a_request_needs_a_transfer_and_an_engine_and_gets_the_rest():
    asked, params = requests(producer(worker(0), worker(1))), asking()
    assert asked.ask("r1", params) is Verdict.GO
    # vLLM goes on only where the key is there; no address of a server is needed.
    assert params["remote_bootstrap_addr"] == ""
    assert asked.generation("r1") == "g1"


@pytest.mark.parametrize("transfer_id", [None, "", 7, [1], {}, True, "x" * 513, "\ud800"])
def test_a_request_that_names_no_transfer_fails_and_says_so(transfer_id):
    asked = requests(producer(worker(0), worker(1)))
    assert asked.ask("r1", asking(transfer_id=transfer_id)) is Verdict.FAIL
    assert isinstance(asked.error("r1"), BadRequest)
    assert asked.error("r1").metadata["field"] == "transfer_id"


def test_the_longest_transfer_and_server_are_taken():
    asked = requests()
    params = asking(transfer_id="x" * 512, remote_bootstrap_addr="http://10.0.0.5/".ljust(512, "x"))
    assert asked.ask("r1", params) is Verdict.GO


@pytest.mark.parametrize("topology", [None, producer(worker(0), worker(1))], ids=["not", "in"])
@pytest.mark.parametrize("server", [5, 0, ["http://10.0.0.5:8998"], {}, True, "x" * 513])
def test_a_bootstrap_server_that_is_no_address_fails_the_request_and_says_so(topology, server):
    asked = requests(topology)
    assert asked.ask("r1", asking(remote_bootstrap_addr=server)) is Verdict.FAIL
    assert isinstance(asked.error("r1"), BadRequest)
    assert asked.error("r1").metadata["field"] == "remote_bootstrap_addr"


def test_what_a_request_said_is_told_in_short():
    asked = requests()
    for field in ("transfer_id", "remote_bootstrap_addr"):
        asked.ask(field, asking(**{field: ["x" * 10_000]}))
        told = asked.error(field)
        assert len(str(told) + repr(told.metadata)) < 1000


@pytest.mark.parametrize("server", ["http://10.0.0.5:8998", None])
def test_no_server_is_left_to_ask_for_an_engine_that_the_book_knows(server):
    asked, params = requests(producer(worker(0), worker(1))), asking(remote_bootstrap_addr=server)
    assert asked.ask("r1", params) is Verdict.GO
    assert params["remote_bootstrap_addr"] == ""


def test_a_request_of_an_older_start_fails_at_once():
    asked = requests(producer(worker(0), worker(1), generation="g2"))
    assert asked.ask("r1", asking(remote_generation="g1")) is Verdict.FAIL
    assert asked.error("r1").metadata["successor_generation"] == "g2"


def test_an_engine_that_is_not_in_the_book_is_asked_for_at_the_bootstrap_server_it_names():
    params = asking(remote_bootstrap_addr="http://10.0.0.5:8998")
    assert requests().ask("r1", params) is Verdict.GO
    assert params["remote_bootstrap_addr"] == "http://10.0.0.5:8998"
    assert requests(side_channel=False).ask("r1", dict(params)) is Verdict.LATER
    assert requests().ask("r1", asking()) is Verdict.LATER


def test_an_engine_that_returned_its_start_is_waited_for_in_the_book():
    params = asking(remote_bootstrap_addr="http://10.0.0.5:8998", remote_generation="g1")
    assert requests().ask("r1", params) is Verdict.LATER
