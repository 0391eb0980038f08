from __future__ import annotations

import pytest

from rankbook.cli.words import (
    address_text,
    bytes_text,
    clean,
    grid_text,
    layers_text,
    ranges_text,
    shorten,
    slots_text,
    stages_text,
)
from rankbook.model import Address, ExtraLayer, LayerKind, Layers, Layout, Slot, Stage


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([4, 0, 1, 2, 2], "0-2,4"), ([0, 2, 4], "0,2,4")]
)
def test_runs_of_numbers_are_closed_up(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text


def test_stages_that_lack_the_same_ranks_are_named_together() -> None:
    slots = [Slot(0, 0, 1), Slot(1, 0, 1), Slot(3, 0, 0), Slot(3, 0, 1)]
    assert slots_text(slots) == "pp0-1 tp1, pp3 tp0-1"


def test_pcp_ranks_are_named_where_there_are_several() -> None:
    assert slots_text([Slot(0, 0, 2)], pcp_size=2) == "pp0 pcp0 tp2"
    assert slots_text([Slot(0, 0, 2)]) == "pp0 tp2"


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address("zmq", "10.0.0.5", 5600), "zmq://10.0.0.5:5600"),
        (Address("tcp", "2001:db8::1", 9), "tcp://[2001:db8::1]:9"),
        (Address("http", "node", 0), "http://node"),
        (Address("", "node", 1), "node:1"),
        (Address("tcp", "a\x07b", 1), "tcp://a?b:1"),
    ],
)
def test_addresses_read_as_urls(address: Address, text: str) -> None:
    assert address_text(address) == text


def test_a_grid_names_pcp_only_where_there_is_one() -> None:
    assert grid_text(Layout(4, 2, 61)) == "pp4xtp2"
    assert grid_text(Layout(4, 2, 61, 3)) == "pp4xpcp3xtp2"


def test_a_long_pipeline_is_cut() -> None:
    stages = [Stage(n, 4 * n, 4 * n + 4) for n in range(9)]
    assert stages_text(stages[:2]) == "4,4"
    assert stages_text(stages) == "4,4,4,4,4,4,4,..."


def test_extra_layers_are_named_with_their_kind() -> None:
    layers = Layers(33, 61, (), (ExtraLayer(61, LayerKind.MTP),))
    assert layers_text(layers) == "[33,61)+61(mtp)"


def test_sizes_and_long_texts_are_short() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 512 * 1024)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "512.0 KiB",
    ]
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcd..hijk"


def test_control_characters_are_replaced() -> None:
    assert clean("a\x1b[0mb\nc\u202ed") == "a?[0mb?c?d"
