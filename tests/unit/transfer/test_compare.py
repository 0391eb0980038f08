"""A comparison lists every broken rule, with both values, and no other."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook.transfer import (
    Comparison,
    ExtraLayer,
    FactorDifference,
    PeerSide,
    TransferTopology,
    compare_peers,
)
from rankbook.transfer.rules import RULES

PRODUCER = PeerSide(
    engine_id="prefill-a-0",
    role="PRODUCER",
    connector="NixlPushConnector",
    transfer_mode="push",
    pp_size=2,
    tp_size=4,
    num_layers=61,
    stages=((0, 31), (31, 61)),
    model="org/model",
    dtype="bfloat16",
    kv_cache_dtype="auto",
    total_num_kv_heads=8,
    head_size=128,
    block_size=16,
    kv_layout="LBHNC",
    attention_backend="FLASH_ATTN",
    compat_hashes=frozenset({"sha256:1"}),
    factors={"vllm_version": "0.32.0", "transfer_mode": "push"},
)
CONSUMER = dataclasses.replace(
    PRODUCER,
    engine_id="decode-a-0",
    role="CONSUMER",
    pp_size=1,
    tp_size=2,
    stages=((0, 61),),
)
PULL = {"connector": "NixlConnector", "transfer_mode": "pull", "factors": {}}
MOONCAKE = {"connector": "MooncakeConnector", "transfer_mode": "", "factors": {}}
ONE_STAGE = {"pp_size": 1, "stages": ((0, 61),)}
MLA = {"is_mla": True, "total_num_kv_heads": 1}


def compare(
    producer: dict[str, Any] | None = None,
    consumer: dict[str, Any] | None = None,
    **both: Any,
) -> Comparison:
    return compare_peers(
        dataclasses.replace(PRODUCER, **(both | (producer or {}))),
        dataclasses.replace(CONSUMER, **(both | (consumer or {}))),
    )


def reasons(verdict: Comparison) -> list[str]:
    return [one.reason for one in verdict.reasons]


def test_two_engines_that_keep_every_rule_are_compatible() -> None:
    assert compare() == Comparison(True, (), ())
    assert compare(producer={"role": "BOTH"}, consumer={"role": "BOTH"}).compatible
    assert compare(**PULL, producer=ONE_STAGE, consumer={"tp_size": 4}).compatible


def test_what_neither_side_states_breaks_no_rule() -> None:
    assert compare_peers(PeerSide(), PeerSide()) == Comparison(True, (), ())
    assert compare_peers(PRODUCER, PeerSide()).compatible
    mla = dataclasses.replace(PRODUCER, **MLA)
    assert compare_peers(mla, PeerSide()).compatible


@pytest.mark.parametrize(
    ("both", "producer", "consumer", "reason", "values"),
    [
        ({"engine_id": "one"}, {}, {}, "LOCAL_ENGINE", ("one", "one")),
        ({}, {"role": "CONSUMER"}, {}, "ROLE_NOT_PRODUCER", ("CONSUMER", "CONSUMER")),
        ({}, {}, {"role": "PRODUCER"}, "ROLE_NOT_CONSUMER", ("PRODUCER", "PRODUCER")),
        (
            {"factors": {}, "transfer_mode": ""},
            {},
            {"connector": "LMCacheConnectorV1"},
            "CONNECTOR_MISMATCH",
            ("NixlPushConnector", "LMCacheConnectorV1"),
        ),
        (
            {"connector": ""},
            {},
            {"transfer_mode": "pull"},
            "TRANSFER_MODE_MISMATCH",
            ("push", "pull"),
        ),
        (
            {},
            {},
            {"compat_hashes": frozenset({"sha256:2"})},
            "COMPAT_HASH_MISMATCH",
            ("sha256:1", "sha256:2"),
        ),
        ({}, {}, {"model": "/models/a"}, "MODEL_DIFFERS", ("org/model", "/models/a")),
        ({}, {}, {"num_layers": 60}, "LAYERS_DIFFER", ("61", "60")),
        ({}, {}, {"total_num_kv_heads": 4}, "KV_HEADS_DIFFER", ("8", "4")),
        ({}, {}, {"is_mla": True}, "MLA_DIFFERS", ("false", "true")),
        ({}, {}, {"head_size": 64}, "HEAD_SIZE_DIFFERS", ("128", "64")),
        ({"kv_cache_dtype": "fp8"}, {}, {"dtype": "half"}, "DTYPE_DIFFERS", ("bfloat16", "half")),
        ({}, {}, {"kv_cache_dtype": "fp8"}, "KV_CACHE_DTYPE_DIFFERS", ("bfloat16", "fp8")),
        ({}, {"tp_size": 6}, {"tp_size": 4}, "TP_NOT_DIVISIBLE", ("6", "4")),
        ({}, {}, {"block_size": 32}, "BLOCK_SIZE_NOT_DIVISIBLE", ("16", "32")),
        (
            {**PULL, **ONE_STAGE, "tp_size": 2},
            {"block_size": 32},
            {},
            "BLOCK_SIZE_NOT_DIVISIBLE",
            ("32", "16"),
        ),
        (
            {**PULL, **ONE_STAGE, **MLA},
            {"tp_size": 8, "dcp_size": 2},
            {"tp_size": 8},
            "DCP_PARTIAL",
            ("pcp 1, dcp 2", "pcp 1, dcp 1"),
        ),
        (
            {**PULL, **ONE_STAGE, "tp_size": 2},
            {},
            {"dcp_size": 2},
            "DCP_NEEDS_MLA",
            ("pcp 1, dcp 1", "pcp 1, dcp 2"),
        ),
        (
            {**PULL, **ONE_STAGE, **MLA},
            {"tp_size": 2, "pcp_size": 2, "dcp_size": 2},
            {},
            "PCP_DCP_UNSUPPORTED",
            ("pcp 2, dcp 2", "pcp 1, dcp 1"),
        ),
        ({}, {}, {"pcp_size": 2}, "PCP_CONSUMER_UNSUPPORTED", ("pcp 1, dcp 1", "pcp 2, dcp 1")),
        (
            {**PULL, **ONE_STAGE, **MLA},
            {"pcp_size": 2},
            {"dcp_size": 2},
            "PCP_DCP_MIXED",
            ("pcp 2, dcp 1", "pcp 1, dcp 2"),
        ),
        ({}, {}, {"kv_layout": "BLHNC"}, "KV_LAYOUT_DIFFERS", ("LBHNC", "BLHNC")),
        ({"kv_layout": "LBNHC"}, {}, {}, "KV_LAYOUT_NOT_CONTIGUOUS", ("LBNHC", "LBNHC")),
        ({**PULL}, {}, {}, "PULL_PP_PRODUCER_UNSUPPORTED", ("2", "1")),
        ({}, {}, {"pp_size": 2}, "PP_CONSUMER_UNSUPPORTED", ("2", "2")),
        (
            {**PULL, **ONE_STAGE},
            {},
            {"pp_size": 2},
            "PP_CONSUMER_UNSUPPORTED",
            ("1", "2"),
        ),
        ({**MLA, "tp_size": 2}, {}, {"dcp_size": 2}, "PUSH_DCP_UNSUPPORTED", ("1", "2")),
        (
            {**PULL, **ONE_STAGE},
            {"tp_size": 16},
            {"tp_size": 8},
            "REPLICATED_HEADS_UNSUPPORTED",
            ("16", "8"),
        ),
        ({}, {"tp_size": 8}, {"tp_size": 16}, "REPLICATED_HEADS_UNSUPPORTED", ("8", "16")),
        (
            {**PULL, **ONE_STAGE},
            {},
            {"block_size": 32},
            "BLOCK_SIZE_DIFFERS_WITH_TP",
            ("16", "32"),
        ),
        (
            {**MOONCAKE, "pp_size": 2},
            {"stages": ((0, 31), (31, 61))},
            {"stages": ((0, 30), (30, 61))},
            "STAGE_SPLIT_DIFFERS",
            ("[0, 31) [31, 61)", "[0, 30) [30, 61)"),
        ),
    ],
)
def test_a_broken_rule_is_the_only_one_listed_and_shows_both_values(
    both: dict[str, Any],
    producer: dict[str, Any],
    consumer: dict[str, Any],
    reason: str,
    values: tuple[str, str],
) -> None:
    verdict = compare(producer, consumer, **both)
    assert not verdict.compatible
    assert reasons(verdict) == [reason]
    (broken,) = verdict.reasons
    assert (broken.producer, broken.consumer) == values
    assert re.fullmatch(r"[A-Z][A-Z0-9_]{1,62}", broken.reason)


def test_pull_with_a_pipelined_producer_says_which_connector_to_use() -> None:
    (broken,) = compare(**PULL).reasons
    assert "NixlPushConnector" in broken.message
    for also_pull in (
        {"connector": "NixlPullConnector", "transfer_mode": ""},
        {"connector": "", "handshake_format": "vllm.nixl", "transfer_mode": "pull"},
        {"connector": "", "factors": {"connector": "NixlConnector"}, "transfer_mode": ""},
    ):
        assert reasons(compare(**({"factors": {}} | also_pull))) == ["PULL_PP_PRODUCER_UNSUPPORTED"]


def test_token_slices_that_do_not_line_up_are_listed_beside_the_tp_sizes_that_cause_it() -> None:
    verdict = compare(
        {"tp_size": 6, "dcp_size": 6}, {"tp_size": 4, "dcp_size": 4}, **PULL, **ONE_STAGE, **MLA
    )
    assert reasons(verdict) == ["TP_NOT_DIVISIBLE", "DCP_NOT_DIVISIBLE"]


def test_every_broken_rule_is_listed_not_only_the_first() -> None:
    verdict = compare(
        {"tp_size": 6, "num_layers": 60},
        {
            "role": "PRODUCER",
            "tp_size": 4,
            "pp_size": 2,
            "connector": "NixlConnector",
            "transfer_mode": "pull",
            "block_size": 32,
            "head_size": 64,
            "kv_cache_dtype": "fp8",
            "compat_hashes": frozenset({"sha256:2"}),
        },
    )
    assert reasons(verdict) == [
        "ROLE_NOT_CONSUMER",
        "CONNECTOR_MISMATCH",
        "TRANSFER_MODE_MISMATCH",
        "COMPAT_HASH_MISMATCH",
        "LAYERS_DIFFER",
        "HEAD_SIZE_DIFFERS",
        "KV_CACHE_DTYPE_DIFFERS",
        "TP_NOT_DIVISIBLE",
        "BLOCK_SIZE_NOT_DIVISIBLE",
        "PULL_PP_PRODUCER_UNSUPPORTED",
        "PP_CONSUMER_UNSUPPORTED",
    ]


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_multi_connector_speaks_as_its_child_that_shakes_hands(side: str) -> None:
    nixl = {"handshake_format": "vllm.nixl"}
    assert compare(**{side: {"connector": "MultiConnector", **nixl}}).compatible
    other = {"connector": "MultiConnector", "handshake_format": "vllm.none"}
    assert reasons(compare(**{side: other})) == ["CONNECTOR_MISMATCH"]
    pull = {"connector": "NixlConnector", "transfer_mode": "pull", **nixl, **ONE_STAGE}
    both = {"producer": pull, "consumer": pull}
    both[side] = {"connector": "MultiConnector", **nixl}
    assert "CONNECTOR_MISMATCH" in reasons(compare(**both))


def test_96_engines_of_two_versions_do_not_pair_and_the_version_is_named() -> None:
    newer = {
        "compat_hashes": frozenset({"sha256:2"}),
        "factors": {"vllm_version": "0.33.0", "transfer_mode": "push"},
    }
    verdict = compare(consumer=newer)
    assert verdict.factors == (FactorDifference("vllm_version", "0.32.0", "0.33.0"),)
    (broken,) = verdict.reasons
    assert broken.reason == "COMPAT_HASH_MISMATCH"
    assert all(word in broken.message for word in ("vllm_version", "0.32.0", "0.33.0"))
    assert compare(newer, newer).compatible


def test_a_factor_stated_by_one_side_only_is_a_difference() -> None:
    verdict = compare({"factors": {"a": "1", "b": "2"}}, {"factors": {"b": "2", "c": "3"}})
    assert verdict.factors == (FactorDifference("a", "1", ""), FactorDifference("c", "", "3"))
    assert verdict.compatible


def test_a_side_that_states_no_factors_differs_in_none() -> None:
    assert compare(consumer={"factors": {}}).factors == ()


def test_attention_backends_are_named_where_the_factors_leave_them_out() -> None:
    verdict = compare(consumer={"attention_backend": "FLASHINFER"})
    assert verdict.factors == (FactorDifference("attention_backend", "FLASH_ATTN", "FLASHINFER"),)
    assert verdict.compatible
    factors = {"attn_backend_name": "SAME"}
    assert compare(factors=factors, consumer={"attention_backend": "X"}).factors == ()


def test_51_a_draft_layer_that_one_side_lacks_is_shown_and_breaks_no_rule() -> None:
    verdict = compare(consumer={"extra": (ExtraLayer(61, 0, "DRAFT"),)})
    assert verdict.compatible
    assert verdict.factors == (FactorDifference("extra_layers", "", "61:DRAFT"),)
    placed_elsewhere = compare({"extra": (ExtraLayer(61, 1, "MTP"),)}, {"extra": verdict_extra()})
    assert placed_elsewhere.factors == ()


def verdict_extra() -> tuple[ExtraLayer, ...]:
    return (ExtraLayer(61, 0, "MTP"),)


def test_hashes_that_vary_inside_one_engine_fail_too() -> None:
    varied = frozenset({"sha256:1", "sha256:2"})
    assert reasons(compare({"compat_hashes": varied})) == ["COMPAT_HASH_MISMATCH"]
    assert compare(consumer={"compat_hashes": frozenset()}).compatible
    assert compare(consumer={"compat_hashes": frozenset({""})}).compatible


def test_a_hash_is_let_pass_only_where_the_side_that_checks_was_told_so() -> None:
    other = {"compat_hashes": frozenset({"sha256:2"})}
    off = {"enforce_compat": False}
    assert compare(off, {**other, **off}).compatible
    assert compare(off, {"model": "/models/model", **off}).compatible
    assert reasons(compare({}, {"model": "/models/model", **off})) == []
    assert not compare({}, {**other, **off}).compatible
    pull = {**PULL, **ONE_STAGE, "tp_size": 2}
    assert compare({}, {**other, **off}, **pull).compatible
    assert not compare(off, other, **pull).compatible


def test_a_kv_type_of_auto_is_that_of_the_weights() -> None:
    assert compare(consumer={"kv_cache_dtype": "bfloat16"}).compatible


def test_a_consumer_that_permutes_takes_the_other_layout_in_pull() -> None:
    pull = {**PULL, **ONE_STAGE, "tp_size": 2}
    permuting = {"kv_layout": "LBNHC", "permute_kv": True}
    assert compare({}, permuting, **pull).compatible
    assert reasons(compare({"kv_layout": "LBNHC"}, {"permute_kv": True}, **pull)) == [
        "KV_LAYOUT_DIFFERS"
    ]


def test_layouts_and_copies_do_not_matter_to_mla() -> None:
    assert compare({"kv_layout": "LBNHC"}, **MLA).compatible
    assert compare({"tp_size": 8}, {"tp_size": 16}, **MLA).compatible


def test_58_copies_on_the_side_that_starts_the_transfer_are_allowed() -> None:
    pull = {**PULL, **ONE_STAGE, "total_num_kv_heads": 2}
    assert compare({"tp_size": 1}, {"tp_size": 4}, **pull).compatible
    assert compare({"tp_size": 4}, {"tp_size": 2}, total_num_kv_heads=2).compatible


def test_copies_on_the_far_side_need_no_layout_that_keeps_heads_together() -> None:
    loose = {"kv_layout": "LBNHC", "total_num_kv_heads": 4}
    assert compare({"tp_size": 16}, {"tp_size": 8}, **loose).compatible
    assert reasons(compare({"tp_size": 16}, {"tp_size": 4}, **loose)) == [
        "KV_LAYOUT_NOT_CONTIGUOUS"
    ]


def test_62_unequal_tp_gets_its_verdict_before_any_transfer() -> None:
    verdict = compare({"tp_size": 8}, {"tp_size": 1, "block_size": 64}, **PULL, **ONE_STAGE)
    assert reasons(verdict) == ["BLOCK_SIZE_DIFFERS_WITH_TP"]


def test_67_the_number_of_data_parallel_engines_is_nobodys_business() -> None:
    names = {field.name for field in dataclasses.fields(PeerSide)}
    assert not [name for name in names if name.startswith("dp_")]
    for producer in range(4):
        for consumer in range(2):
            assert compare(
                {"engine_id": f"p_dp{producer}"}, {"engine_id": f"d_dp{consumer}"}
            ).compatible


def test_mooncake_pairs_pipelines_of_any_sizes_and_of_equal_splits() -> None:
    assert compare(**MOONCAKE, consumer={"pp_size": 1}).compatible
    three = {"pp_size": 3, "stages": ((0, 20), (20, 40), (40, 61))}
    assert compare(**MOONCAKE, consumer=three).compatible
    assert compare(**MOONCAKE, consumer={"pp_size": 2, "stages": PRODUCER.stages}).compatible


def test_rules_of_a_connector_are_not_asked_of_another() -> None:
    other = {"connector": "LMCacheConnectorV1", "transfer_mode": "", "factors": {}}
    assert compare(**other).compatible
    assert compare(**other, consumer={"pp_size": 2}).compatible
    assert compare({"tp_size": 16}, {"tp_size": 8}, **other).compatible


def test_the_json_shape_is_the_documented_one() -> None:
    verdict = compare(
        consumer={"role": "PRODUCER", "factors": {"vllm_version": "1", "transfer_mode": "push"}}
    )
    shown = json.loads(json.dumps(verdict.as_dict()))
    assert list(shown) == ["compatible", "reasons", "factors"]
    assert shown["compatible"] is False
    assert list(shown["reasons"][0]) == ["reason", "message", "producer", "consumer"]
    assert shown["factors"] == [{"name": "vllm_version", "producer": "0.32.0", "consumer": "1"}]


@given(st.integers(1, 16), st.integers(1, 16))
def test_the_verdict_on_tp_agrees_with_the_topology(producer: int, consumer: int) -> None:
    topology = TransferTopology(0, consumer, 16, "decode", True, 1)
    try:
        topology.handshake_target_ranks(producer)
    except ValueError:
        fits = False
    else:
        fits = True
    assert compare({"tp_size": producer}, {"tp_size": consumer}, **MLA).compatible is fits


def test_every_rule_says_where_it_comes_from() -> None:
    assert all(rule.__doc__ for rule in RULES)
