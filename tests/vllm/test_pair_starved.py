"""A machine that had no time is told from a fault."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.vllm

STOPPED_S = 0.5
WATCHED = """
import sys, time
from tests.vllm.starved import StarvationWatch
watch, began = StarvationWatch(), time.time()
print("watching", flush=True)
sys.stdin.readline()
print(*watch.starved(began, time.time()))
"""


def test_time_without_cpu_is_measured_as_long_as_it_was():
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "watching\n"
        began = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOPPED_S)
        process.send_signal(signal.SIGCONT)
        stopped = time.monotonic() - began
        told, _ = process.communicate("\n", timeout=30)
    total, longest = map(float, told.split())
    assert total >= longest >= STOPPED_S - 0.15  # less the nap it was in
    assert longest <= stopped
