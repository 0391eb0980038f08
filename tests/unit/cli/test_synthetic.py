from __future__ import annotations

import ipaddress

import pytest

from rankbook import convert, limits, v1
from rankbook.cli.synthetic import Shape, make_records
from rankbook.errors import TransferError
from rankbook.model import WorkerRecord


def made(shape: Shape, engine_id: str = "sim-0", generation: str = "t1") -> list[WorkerRecord]:
    boot_ids = [f"b{n}" for n in range(shape.pp_size * shape.tp_size)]
    return make_records(shape, engine_id=engine_id, generation=generation, boot_ids=boot_ids)


def test_made_up_records_are_ones_the_registry_takes() -> None:
    records = made(Shape(pp_size=4, tp_size=2, num_layers=61))
    limits.check_batch([convert.to_message(one, v1.WorkerRecord) for one in records], "default")
    assert len(records) == 8
    spans = sorted({(one.layers.start_layer, one.layers.end_layer) for one in records})
    assert spans == [(0, 15), (15, 30), (30, 46), (46, 61)]


def test_another_partition_is_taken_or_refused() -> None:
    records = made(Shape(pp_size=2, num_layers=61, layers=(33, 28)))
    assert records[1].layers.start_layer == 33
    with pytest.raises(TransferError):
        made(Shape(pp_size=2, num_layers=61, layers=(33, 33)))


def test_no_two_workers_share_an_address_and_none_can_be_dialled() -> None:
    records = made(Shape(pp_size=4, tp_size=8), "sim-0") + made(Shape(tp_size=8), "sim-1")
    places = {(one.addresses[0].host, one.addresses[0].port) for one in records}
    assert len(places) == len(records)
    benchmarks = ipaddress.ip_network("198.18.0.0/15")
    assert all(ipaddress.ip_address(host) in benchmarks for host, _ in places)


def test_no_two_engines_of_a_large_fleet_share_an_address() -> None:
    fleet = [made(Shape(group="fleet"), f"fleet-{number}")[0] for number in range(1000)]
    assert len({(one.addresses[0].host, one.addresses[0].port) for one in fleet}) == 1000


def test_an_engine_of_the_longest_name_is_one_the_registry_takes() -> None:
    records = made(Shape(group="g" * 251, tp_size=16), f"{'g' * 251}-0")
    limits.check_batch([convert.to_message(one, v1.WorkerRecord) for one in records], "default")


def test_payloads_have_the_size_asked_for_and_differ_by_start() -> None:
    first, second = made(Shape(payload_bytes=100)), made(Shape(payload_bytes=100), generation="t2")
    assert first[0].handshake is not None
    assert second[0].handshake is not None
    assert len(first[0].handshake.payload) == 100
    assert first[0].handshake.payload != second[0].handshake.payload
