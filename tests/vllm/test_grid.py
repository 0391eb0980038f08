"""What the workers of one engine agree on, with vLLM's own parallel groups."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engine import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROBE = str(Path(__file__).with_name("grid_probe.py"))


@pytest.fixture(scope="module")
def ranks():
    """What every rank of a 2 x 2 x 2 grid (pp, pcp, tp) got."""
    done = subprocess.run(
        [sys.executable, PROBE, "2", "2", "2", str(free_port())],
        env=dict(os.environ, VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == 8
    return {tuple(rank["slot"]): rank for rank in told}


def test_every_rank_has_its_own_slot(ranks):
    assert sorted(ranks) == list(itertools.product(range(2), repeat=3))


def test_all_ranks_get_the_start_that_rank_0_made(ranks):
    assert {tuple(rank["start"]) for rank in ranks.values()} == {("start-by-rank-0", 41)}
    assert [slot for slot, rank in ranks.items() if rank["begun"]] == [(0, 0, 0)]


def test_pcp_ranks_send_their_notes_together_and_only_once(ranks):
    for (pp, pcp, tp), rank in ranks.items():
        assert rank["notes"] == [[pp, 0, tp], [pp, 1, tp]]
        assert rank["sent"] is (pcp == 0)
