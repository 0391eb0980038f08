"""Three etcd nodes, three servers, forty publishers, twenty watchers, and everything fails.

RANKBOOK_CHAOS_SECONDS is how long there are faults, over all runs together;
RANKBOOK_CHAOS_SEED is the seed. tests/chaos/README.md tells the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import ALL
from .isolation import namespaces

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("RANKBOOK_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("RANKBOOK_CHAOS_SEED", "20251130"))
AROUND_S = 240.0
"""Most that starting, converging, ending and checking take beside the faults."""
RUNS = [(mix.name, 0.3, ()) for mix in ALL] + [(ALL[0].name, 0.1, ("--sqlite",))]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + AROUND_S + 60)
@pytest.mark.parametrize(
    ("mix", "share", "flags"), RUNS, ids=[f"{m}{''.join(f)}".replace(" ", "-") for m, _, f in RUNS]
)
def test_no_rule_is_broken_whatever_fails(
    mix: str, share: float, flags: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = "-".join((*mix.split(), *(flag.strip("-") for flag in flags), str(SEED)))
    folder = Path(request.config.cache.mkdir("chaos")) / name
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *namespaces(),
        *(sys.executable, "-m", "tests.chaos", str(folder), "--mix", mix, "--seed", str(SEED)),
        *("--seconds", str(SECONDS * share), *flags),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=SECONDS * share + AROUND_S)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    sys.stdout.write(said)
    assert process.returncode == 0, f"the history is kept in {folder}\n{said}"
    shutil.rmtree(folder)
