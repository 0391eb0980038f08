"""A real vLLM engine signs in, is looked at, and loses a worker. About a minute.

    make demo-vllm

Starts a registry and an engine of two pipeline stages (NIXL, on CPU), prints
its topology as an operator sees it, kills one worker, and prints what a peer
that watches was told, and when.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rankbook

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.engine import Engine, Registry, make_model
from tests.vllm.watcher import Watcher

ENGINE = "prefill-a-0"


def say(text: str) -> None:
    """One step of the demo."""
    sys.stdout.write(f"\n== {text}\n")
    sys.stdout.flush()


def show(address: str, *arguments: str) -> int:
    """Runs the operator's tool and shows what it prints."""
    command = [str(Path(sys.executable).with_name("rankbook")), "--server", address, *arguments]
    sys.stdout.write(f"$ rankbook {' '.join(arguments)}\n")
    sys.stdout.flush()
    return subprocess.run(command, check=False).returncode


def run(folder: Path) -> int:
    """The demo; 0 when everything happened as it should."""
    say("a registry, and a model made on the spot")
    registry = Registry(folder)
    model = make_model(folder / "model")
    say("vLLM with --pipeline-parallel-size 2, its four layers split 3,1 (half a minute)")
    engine = Engine(
        model,
        folder,
        engine_id=ENGINE,
        settings={"endpoints": registry.address, "group": "prefill-a"},
        env={"VLLM_PP_LAYER_PARTITION": "3,1"},
        fork=False,
    )
    watcher = Watcher(registry.address, ENGINE)
    try:
        engine.wait_serving()
        _, topology = watcher.wait_for(lambda state: state is rankbook.State.READY, 30)
        say("every stage signed in, and the engine core sealed them")
        failed = show(registry.address, "engines")
        failed |= show(registry.address, "topology", ENGINE)
        for worker in topology.workers:
            layers = worker.layers
            sys.stdout.write(
                f"pp{worker.slot.pp_rank}: layers [{layers.start_layer}, {layers.end_layer}), "
                f"{len(worker.handshake.payload)} bytes of {worker.handshake.format} "
                f"from pid {worker.process.pid}\n"
            )
        victim = topology.workers[-1].process.pid
        say(f"kill -9 {victim}: the worker of the second stage")
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        at, _ = watcher.wait_for(lambda state: state is not rankbook.State.READY, 10, since=killed)
        watcher.wait_for(lambda state: state is rankbook.State.GONE, 60, since=killed)
        say("what a peer that watches was told")
        for when, event in watcher.seen:
            now = event.topology.engine
            sys.stdout.write(
                f"{when - killed:+8.2f} s  {now.state:<9} {now.present} of {now.declared} ranks\n"
            )
        return int(bool(failed) or at - killed > 2.0)
    finally:
        watcher.close()
        engine.kill()
        registry.stop()


def main() -> int:
    """Runs the demo in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="rankbook-demo-") as folder:
        return run(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
