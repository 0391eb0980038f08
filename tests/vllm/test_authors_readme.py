"""The README's example for authors of connectors runs as it is written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
README = HERE.parents[1] / "vllm_integration" / "README.md"


@pytest.fixture(scope="module")
def told(model, registry, tmp_path_factory):
    """What became of two engines with the README's connector."""
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_connector.py").write_text(example)
    done = subprocess.run(
        [sys.executable, str(HERE / "readme_probe.py"), str(model), registry.address],
        env=dict(os.environ, PYTHONPATH=str(folder), HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_consumer_reads_every_layer_from_where_the_producer_published(told):
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(4)]
    assert told["moved"] == dict.fromkeys(names, True)


def test_the_producer_hands_on_its_start_and_is_told_when_all_is_read(told):
    assert told["params"].keys() == {"remote_engine_id", "remote_block_ids", "remote_generation"}
    assert told["params"]["remote_engine_id"] == "prefill-r"
    assert told["params"]["remote_generation"]
    assert told["told"] == ["0 [5, 2]"]


def test_block_ids_of_another_start_are_refused_in_words(told):
    assert "a-start-before of prefill-r" in told["gone"]
    assert "prefill again" in told["gone"]
