"""The split of layers is vLLM's, and a split that does not fit is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.errors import BadRequest, Reason, TransferError
from rankbook.transfer import partition_layers

Cases = dict[str, list[dict[str, Any]]]


def test_every_recorded_split_of_vllm_is_ours_too(vllm_cases: Cases) -> None:
    assert len(vllm_cases["pp"]) == 142
    for case in vllm_cases["pp"]:
        arguments = (case["num_layers"], case["pp_size"], case["partition"])
        if case["error"] is None:
            assert [list(one) for one in partition_layers(*arguments)] == case["expect"]
        else:
            with pytest.raises(ValueError) as caught:
                partition_layers(*arguments)
            assert isinstance(caught.value, TransferError)
            assert caught.value.reason is Reason.LAYER_SPLIT_INVALID


def test_61_layers_over_4_stages_are_not_split_by_division() -> None:
    ranges = partition_layers(61, 4)
    assert [end - start for start, end in ranges] == [15, 15, 16, 15]
    assert ranges != [(15 * stage, 15 * (stage + 1)) for stage in range(4)]


@pytest.mark.parametrize("partition", ["", "20,8,", "20;8", "30,-2", "28,0,0"])
def test_a_partition_that_is_no_split_is_refused(partition: str) -> None:
    with pytest.raises(TransferError) as caught:
        partition_layers(28, 2, partition)
    assert caught.value.reason is Reason.LAYER_SPLIT_INVALID


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_no_layers_or_no_stages_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(BadRequest):
        partition_layers(*sizes)


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_split_has_a_range_a_stage_and_each_layer_once(num_layers: int, pp_size: int) -> None:
    ranges = partition_layers(num_layers, pp_size)
    assert len(ranges) == pp_size
    assert sum(end - start for start, end in ranges) == num_layers
    assert (ranges[0][0], ranges[-1][1]) == (0, num_layers)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any))
def test_a_users_partition_is_taken_as_it_is(counts: list[int]) -> None:
    ranges = partition_layers(sum(counts), len(counts), ",".join(map(str, counts)))
    assert [end - start for start, end in ranges] == counts
