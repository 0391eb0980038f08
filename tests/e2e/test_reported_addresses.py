"""Addresses, ports and identity, as reported of other systems.

The numbers in the docstrings are public reports; README.md lists them all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys

import pytest

import rankbook
from rankbook import Address, Layout, Process, Requirement, Role, Slot


@pytest.fixture
def client(shared_rankbookd):
    with rankbook.Client(shared_rankbookd.grpc) as one:
        yield one


def register(client, *records):
    key = f"{records[0].engine_id}-{records[0].process.boot_id}"
    return client.register_workers(records, sequence=1, lease_key=key, ttl_s=60)


def shown(client, engine_id):
    return client.get_topology(engine_id, require=Requirement.ANY)


def at(record, *addresses):
    return dataclasses.replace(record, addresses=addresses)


def command(server: str, *words: str):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
    return subprocess.run(
        [sys.executable, "-m", "rankbook.cli", "--server", server, *words],
        env=clean,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_one_port_of_two_workers_is_told_to_both(client, made, engine_id):
    """vllm-project/vllm-ascend#4244: a port formula left the stage out, two stages had one port.
    vllm-project/vllm#20965, #25059, ray-project/ray#57757: two engines' side channels on one port.

    Both are taken, and both say with whom they share it, also where the same
    address is spelled in two ways.
    """
    first, second = made.grid(engine_id, pp_size=2, tp_size=1)
    register(client, at(first, Address("zmq", "2001:db8::1", 5600)))
    register(client, at(second, Address("zmq", "[2001:DB8:0:0::1]", 5600)))
    other = made.record(f"{engine_id}-other", boot_id="b")
    register(client, at(other, Address("zmq", "2001:db8::0:1", 5600)))
    for name in (engine_id, other.engine_id):
        told = [p for p in shown(client, name).engine.problems if p.reason == "DUPLICATE_ADDRESS"]
        assert told
        assert "[2001:db8::1]:5600" in told[0].message


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "0.0.0.0", "::", "[::1]", "::ffff:127.0.0.1"]
)
def test_an_address_that_means_this_host_is_flagged_and_found_by_the_doctor(
    shared_rankbookd, client, made, engine_id, host
):
    """vllm-project/vllm#27083: the side channel's host was not set, so decode talked to itself.
    srt-slurm#158: the same with 0.0.0.0.
    """
    record = dataclasses.replace(made.record(engine_id, tp_size=2), process=Process("b", "node-7"))
    register(client, at(record, Address("zmq", host, 5600)))
    (problem,) = shown(client, engine_id).engine.problems
    assert problem.reason == "LOOPBACK_ADDRESS"
    assert problem.metadata["slots"] == "pp0 tp0"
    if host != "localhost":
        return
    ran = command(shared_rankbookd.grpc, "doctor", engine_id, "-o", "json")
    assert "LOOPBACK_ADDRESS" in {one["id"] for one in json.loads(ran.stdout)["findings"]}


@pytest.mark.parametrize(
    ("host", "kept", "url"),
    [
        ("2001:db8::1", "2001:db8::1", "zmq://[2001:db8::1]:9"),
        ("[2001:db8::1]", "2001:db8::1", "zmq://[2001:db8::1]:9"),
        ("2001:DB8:0:0:0:0:0:1", "2001:db8::1", "zmq://[2001:db8::1]:9"),
        ("fe80::1%eth0", "fe80::1%eth0", "zmq://[fe80::1%eth0]:9"),
        ("::ffff:10.0.0.5", "::ffff:10.0.0.5", "zmq://[::ffff:10.0.0.5]:9"),
        ("only-v6.example.org", "only-v6.example.org", "zmq://only-v6.example.org:9"),
        ("Only-V6.example.org", "only-v6.example.org", "zmq://only-v6.example.org:9"),
        ("10.0.0.5", "10.0.0.5", "zmq://10.0.0.5:9"),
    ],
)
def test_a_host_is_kept_in_one_form_and_shown_in_brackets_where_it_needs_them(
    shared_rankbookd, client, made, engine_id, host, kept, url
):
    """sgl-project/sglang#10389, #29459, ai-dynamo/dynamo#3019, vllm-project/vllm-ascend#4103: IPv6
    literals without brackets, names that have no IPv4 address.

    However it is spelled, it is kept in one form, which comes back as it went
    in, and every URL made of it is one.
    """
    register(client, at(made.record(engine_id), Address("zmq", host, 9)))
    (worker,) = shown(client, engine_id).workers
    assert [address.host for address in worker.addresses] == [kept]
    again = made.record(f"{engine_id}-again")
    register(client, at(again, *worker.addresses))
    assert shown(client, again.engine_id).workers[0].addresses == worker.addresses
    if kept.startswith("2001") and host == kept:
        wide = command(shared_rankbookd.grpc, "workers", engine_id, "-o", "wide").stdout
        assert url in wide


@pytest.mark.parametrize(
    "host",
    [
        "[2001:db8::1]:9",
        "10.0.0.5:9",
        "2001:db8::1::2",
        "tcp://10.0.0.5",
        "10.0.0.5/24",
        "node 7",
        "node-7\n",
        "[node-7]",
        "[]",
        "",
    ],
)
def test_what_is_no_host_is_refused_with_the_rule(client, made, engine_id, host):
    """The same reports: an address that nobody can dial was handed on until somebody tried."""
    with pytest.raises(rankbook.BadRecord) as caught:
        register(client, at(made.record(engine_id), Address("zmq", host, 0)))
    assert caught.value.metadata["field"] == "addresses.host"
    with pytest.raises(rankbook.NotFound):
        shown(client, engine_id)


def test_a_registry_on_ipv6_is_reached_in_brackets(rankbookd, registration, made):
    """The same reports, for the registry itself: ready file, client and command line agree."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = rankbookd(listen="[::1]:0", http="[::1]:0")
    assert server.grpc.startswith("[::1]:")
    one = registration([made.record("e")], endpoints=server.grpc)
    one.start()
    one.wait_registered(10)
    ran = command(server.grpc, "engines", "-o", "json")
    assert [engine["engine_id"] for engine in json.loads(ran.stdout)["engines"]] == ["e"]
    assert server.get("/healthz") == "ok\n"


def test_a_consumer_chooses_among_several_addresses_by_label(client, made, engine_id):
    """sgl-project/sglang#7237: the wrong network card was chosen for everybody.

    A worker advertises all it has; order and labels come back as they were.
    """
    addresses = (
        Address("tcp", "192.168.0.5", 5600, "management"),
        Address("tcp", "10.0.0.5", 5600, "rdma"),
        Address("tcp", "10.0.1.5", 5600, "rdma"),
    )
    register(client, at(made.record(engine_id), *addresses))
    (worker,) = shown(client, engine_id).workers
    assert worker.addresses == addresses
    chosen = next(address for address in worker.addresses if address.label == "rdma")
    assert chosen.host == "10.0.0.5"


def test_a_worker_publishes_the_port_it_got(
    shared_rankbookd, client, registration, made, engine_id
):
    """vllm-project/vllm#20965, #25059: ports that were fixed beforehand were taken already.

    A port is 0 while it is not known, which nobody shares; what was bound is
    told by an update. The registry itself does so in its ready file.
    """
    assert not shared_rankbookd.grpc.endswith(":0")
    records = [at(one, Address("zmq", "10.0.0.5", 0)) for one in made.grid(engine_id, pp_size=1)]
    one = registration(records, endpoints=shared_rankbookd.grpc)
    one.start()
    one.wait_registered(10)
    assert shown(client, engine_id).engine.problems == ()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        one.update(at(records[0], Address("zmq", "10.0.0.5", port)))
        one.wait_registered(5)
    ports = [worker.addresses[0].port for worker in shown(client, engine_id).workers]
    assert ports == [port, 0]


def test_one_engine_under_two_names_is_named_on_both(shared_rankbookd, client, made, engine_id):
    """vllm-project/vllm#39907, #42928: each node of one engine made an engine_id of its own.

    Sixteen ranks, half of them under either name: neither becomes whole, and
    both say that two engine ids claim one group.
    """
    layout = Layout(pp_size=2, tp_size=8, num_layers=8)
    names = (f"{engine_id}-a", f"{engine_id}-b")
    for pp, name in enumerate(names):
        records = [
            dataclasses.replace(
                made.record(name, pp, tp, pp_size=2, tp_size=8), group=engine_id, layout=layout
            )
            for tp in range(8)
        ]
        register(client, *records)
    for name, other in (names, names[::-1]):
        engine = shown(client, name).engine
        assert (engine.present, engine.declared) == (8, 16)
        (problem,) = [p for p in engine.problems if p.reason == "SPLIT_ENGINE"]
        assert problem.message.startswith("two engine ids claim one group")
        assert problem.metadata["engines"] == other
        with pytest.raises(rankbook.Incomplete):
            client.get_topology(name, require=Requirement.COMPLETE)
    ran = command(shared_rankbookd.grpc, "doctor", names[0], "-o", "json")
    found = {one["id"]: one for one in json.loads(ran.stdout)["findings"]}
    assert found["SPLIT_ENGINE"]["subject"] == ",".join(names)


MINTED = """
import os, rankbook
from rankbook import Registration
ours = [rankbook.new_id(), Registration(endpoints="127.0.0.1:1").boot_id]
child = os.fork()
print(",".join([rankbook.new_id(), Registration(endpoints="127.0.0.1:1").boot_id]), flush=True)
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
print(",".join(ours), flush=True)
import sys; sys.stdin.readline()
"""


def test_ids_that_are_made_here_are_unique_also_in_a_forked_child(program):
    """sgl-project/sglang#40125, ray-project/ray#63741: a room number came twice, once made of
    the text "None", and two requests met in it."""
    one = program(MINTED)
    made = [text for _ in range(3) for text in one.line().split(",")]
    assert len(set(made)) == 6


def test_an_id_that_is_in_use_is_refused_to_another(client, made, engine_id):
    """The same reports: what is taken stays with whom it belongs to.

    A slot, a number with other content, and a live start's identity are each
    refused to whoever comes second, and the first one stands.
    """
    mine = made.record(engine_id, boot_id="b1")
    register(client, mine)
    with pytest.raises(rankbook.Conflict) as caught:
        register(client, made.record(engine_id, boot_id="b2"))
    assert caught.value.metadata["holder"] == "b1"
    with pytest.raises(rankbook.Refused):
        register(client, dataclasses.replace(mine, handshake=rankbook.Handshake("test", 2, b"x")))
    other = made.record(engine_id, 0, 1, tp_size=2, boot_id="b3")
    with pytest.raises(rankbook.Conflict):
        register(client, dataclasses.replace(other, role=Role.CONSUMER))
    (worker,) = shown(client, engine_id).workers
    assert (worker.process.boot_id, worker.handshake.version) == ("b1", 1)
    assert worker.slot == Slot()
