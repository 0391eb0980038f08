"""One rank's view of its peers agrees with vLLM and never answers by default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from rankbook.errors import BadRequest, NotFound, Reason, TransferError
from rankbook.transfer import EngineTransferInfo, TransferTopology

Cases = dict[str, list[dict[str, Any]]]


def make_topology(**sizes: Any) -> TransferTopology:
    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "block_size": 16,
        "engine_id": "local",
        "is_mla": False,
        "total_num_kv_heads": 8,
    }
    return TransferTopology(**{**given, **sizes})


def make_info(**values: Any) -> EngineTransferInfo:
    given = {
        "remote_tp_size": 2,
        "remote_block_len": 4096,
        "remote_block_size": 16,
        "remote_physical_blocks_per_logical": 1,
    }
    return EngineTransferInfo(**{**given, **values})


def test_every_recorded_answer_of_vllm_is_ours_too(vllm_cases: Cases) -> None:
    assert len(vllm_cases["tp"]) == 1055
    for case in vllm_cases["tp"]:
        local, remote, expect = case["local"], case["remote"], case["expect"]
        ours = make_topology(
            **local, is_mla=case["is_mla"], total_num_kv_heads=case["total_num_kv_heads"]
        )
        ours.register_remote_engine(
            "remote",
            make_info(
                remote_tp_size=remote["tp_size"],
                remote_block_size=remote["block_size"],
                remote_dcp_size=remote["dcp_size"],
            ),
        )
        tp, dcp = remote["tp_size"], remote["dcp_size"]
        calls: dict[str, Callable[[], object]] = {
            "tp_ratio": lambda t=ours, tp=tp: t.tp_ratio(tp),
            "block_size_ratio": lambda t=ours, b=remote["block_size"]: t.block_size_ratio(b),
            "handshake_target_ranks": lambda t=ours, tp=tp, dcp=dcp: t.handshake_target_ranks(
                tp, dcp
            ),
            "target_remote_ranks": lambda t=ours: t.target_remote_ranks("remote", remote_pp_rank=0),
            "is_kv_replicated": lambda t=ours: t.is_kv_replicated("remote", remote_pp_rank=0),
            "replicates_kv_cache": lambda t=ours: t.replicates_kv_cache("remote", 0),
            "local_replicates_kv_cache": lambda t=ours: t.local_replicates_kv_cache,
            "consumer_count": lambda t=ours, tp=tp, dcp=dcp: t.consumer_count(tp, dcp),
            "mapping": lambda t=ours, tp=tp, dcp=dcp: {
                "source_ranks": t.source_ranks(tp, dcp),
                "rank_offset_factor": t.rank_offset_factor(tp),
            },
        }
        assert set(expect) | set(case["error"]) == set(calls)
        for name, call in calls.items():
            if name in case["error"]:
                with pytest.raises(ValueError) as caught:
                    call()
                assert isinstance(caught.value, TransferError)
                named = set(re.findall(r"\d+", caught.value.message))
                size = "block_size" if name == "block_size_ratio" else "tp_size"
                assert {str(local[size]), str(remote[size])} <= named
            else:
                assert call() == expect[name], (name, case)


def test_source_ranks_and_offset_each_refuse_sizes_that_do_not_divide() -> None:
    three = make_topology(tp_size=3)
    for call in (three.source_ranks, three.rank_offset_factor, three.consumer_count):
        with pytest.raises(TransferError) as caught:
            call(2)
        assert caught.value.reason is Reason.TP_NOT_DIVISIBLE


def test_info_has_the_names_order_and_defaults_of_vllm() -> None:
    fields = dataclasses.fields(EngineTransferInfo)
    assert [one.name for one in fields] == [
        "remote_tp_size",
        "remote_block_len",
        "remote_block_size",
        "remote_physical_blocks_per_logical",
        "remote_pp_rank",
        "start_layer",
        "end_layer",
        "remote_dcp_size",
    ]
    assert [one.default for one in fields[4:]] == [0, 0, 0, 1]
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_info().remote_tp_size = 3  # type: ignore[misc]


def test_stages_of_one_engine_are_kept_apart() -> None:
    topology = make_topology()
    first = make_info(remote_pp_rank=0, start_layer=0, end_layer=31)
    second = make_info(remote_tp_size=4, remote_pp_rank=1, start_layer=31, end_layer=61)
    assert topology.register_remote_engine("remote", first) is first
    assert topology.register_remote_engine("remote", second) is second
    assert topology.get_engine_info("remote") is first
    assert topology.get_engine_info("remote", 1) is second
    assert topology.target_remote_ranks("remote") == [0, 1]
    assert topology.target_remote_ranks("remote", 1) == [0, 1, 2, 3]
    assert "stage 1" in topology.describe("remote", 1)
    assert "[31, 61)" in topology.describe("remote", 1)


def test_registering_an_equal_info_again_returns_the_first() -> None:
    topology = make_topology()
    first = topology.register_remote_engine("remote", make_info())
    assert topology.register_remote_engine("remote", make_info()) is first


def test_another_info_under_a_known_key_is_refused_and_shows_both() -> None:
    topology = make_topology()
    first = topology.register_remote_engine("remote", make_info(remote_block_size=16))
    with pytest.raises(TransferError) as caught:
        topology.register_remote_engine("remote", make_info(remote_block_size=32))
    assert caught.value.reason is Reason.ENGINE_INFO_CHANGED
    assert "remote_block_size=16" in caught.value.message
    assert "remote_block_size=32" in caught.value.message
    assert topology.get_engine_info("remote") is first


def test_unregistering_drops_every_stage_so_that_a_restart_registers_anew() -> None:
    topology = make_topology()
    for pp_rank in range(3):
        topology.register_remote_engine("remote", make_info(remote_pp_rank=pp_rank))
    topology.register_remote_engine("other", make_info())
    topology.unregister_remote_engine("remote")
    topology.unregister_remote_engine("remote")
    for pp_rank in range(3):
        with pytest.raises(NotFound):
            topology.get_engine_info("remote", pp_rank)
    assert topology.get_engine_info("other")
    topology.register_remote_engine("remote", make_info(remote_tp_size=8))
    assert topology.get_engine_info("remote").remote_tp_size == 8


def test_an_engine_is_never_its_own_remote() -> None:
    with pytest.raises(TransferError) as caught:
        make_topology(engine_id="decode-0").register_remote_engine("decode-0", make_info())
    assert caught.value.reason is Reason.LOCAL_ENGINE
    assert "decode-0" in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "get_engine_info",
        "target_remote_ranks",
        "is_kv_replicated",
        "replicates_kv_cache",
        "describe",
    ],
)
@pytest.mark.parametrize("is_mla", [False, True])
def test_an_engine_never_registered_is_not_found_by_any_call(name: str, is_mla: bool) -> None:
    topology = make_topology(is_mla=is_mla)
    topology.register_remote_engine("remote", make_info())
    for engine, pp_rank in (("nobody", 0), ("remote", 1), ("", 0)):
        with pytest.raises(NotFound) as caught:
            getattr(topology, name)(engine, pp_rank)
        assert caught.value.reason is Reason.ENGINE_NOT_FOUND


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 0},
        {"tp_size": 2, "tp_rank": 2},
        {"tp_rank": -1},
        {"block_size": 0},
        {"dcp_size": 0},
    ],
)
def test_a_rank_outside_its_grid_or_an_empty_size_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(BadRequest):
        make_topology(**sizes)


@pytest.mark.parametrize("sizes", [(0, 1), (-2, 1), (0, 2)])
def test_a_remote_size_below_one_is_refused(sizes: tuple[int, int]) -> None:
    topology = make_topology(tp_size=2, dcp_size=2, is_mla=True)
    for call in (topology.handshake_target_ranks, topology.source_ranks):
        with pytest.raises(BadRequest):
            call(*sizes)
    with pytest.raises(BadRequest):
        topology.block_size_ratio(0)


def test_unknown_heads_are_an_error_only_where_heads_decide() -> None:
    topology = make_topology(total_num_kv_heads=0)
    assert topology.handshake_target_ranks(4) == [0, 1, 2, 3]
    with pytest.raises(TransferError) as caught:
        topology.source_ranks(4)
    assert caught.value.reason is Reason.HEADS_UNKNOWN
    assert make_topology(total_num_kv_heads=0, is_mla=True).source_ranks(4) == [0]


def test_token_slices_that_do_not_line_up_are_refused() -> None:
    topology = make_topology(tp_size=3, dcp_size=3, is_mla=True)
    for call in (
        topology.handshake_target_ranks,
        topology.source_ranks,
        topology.consumer_count,
    ):
        with pytest.raises(TransferError) as caught:
            call(2, 2)
        assert caught.value.reason is Reason.DCP_NOT_DIVISIBLE
        assert "3" in caught.value.message
        assert "2" in caught.value.message
