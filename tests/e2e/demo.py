"""`make demo`: two prefill engines, a decode engine, a crash, a restart - in under 30 s.

Everything is real but the GPUs: rankbookd on its embedded store, the workers of
prefill-a-0 as processes of their own, kill -9. Every claim that is printed is
checked; the demo fails where the product does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rankbook
from rankbook.cli.synthetic import Shape, make_records

GROUP, ENGINE, OTHER, DECODE = "prefill-a", "prefill-a-0", "prefill-a-1", "decode-0"
SHAPE = Shape(pp_size=4, tp_size=2, num_layers=61, group=GROUP)
RANKS = SHAPE.pp_size * SHAPE.tp_size
TTL_S = 6.0
CRASH_BOUND_S = 2.0
"""A crashed worker is out of every watcher's topology within so long."""
STEP_BOUND_S = 20.0

Event = tuple[float, rankbook.WatchEvent]


def say(words: str = "") -> None:
    """Tells the reader."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def title(number: int, words: str) -> None:
    """A heading."""
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    say(f"\n{bold}{number}. {words}{plain}")


def check(claim: bool, words: str) -> None:
    """Prints a claim that held; ends the demo where it does not."""
    if not claim:
        raise SystemExit(f"DEMO FAILED: {words}")
    say(f"   ok: {words}")


# --------------------------------------------------------------- one worker


def work(server: str, generation: str, rank: int) -> int:
    """A worker process: signs in, stays, and ends when it is told or fenced."""
    boot_ids = [rankbook.new_id() for _ in range(RANKS)]
    record = make_records(SHAPE, engine_id=ENGINE, generation=generation, boot_ids=boot_ids)[rank]
    changed, ended = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        ended.set()
        changed.set()

    signal.signal(signal.SIGTERM, end)
    with rankbook.Registration(
        [record], endpoints=server, ttl_s=TTL_S, on_change=lambda _: changed.set()
    ) as registration:
        registered = registration.wait_registered(STEP_BOUND_S)
        assert registered is not None
        say(
            json.dumps(
                {
                    "boot_id": record.process.boot_id,
                    "digest": registered.record_digests[0].hex(),
                    "epoch": registered.epoch,
                }
            )
        )
        while not ended.is_set():
            changed.wait()
            changed.clear()
            if registration.state is rankbook.RegistrationState.FENCED:
                return 5
    return 0


# ------------------------------------------------------------------ the stage


class Engine:
    """prefill-a-0: eight worker processes, and this process as its engine core."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.generation = rankbook.new_id()
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(rank), server, self.generation],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self._core: rankbook.Registration | None = None
        self.epoch = 0

    def seal(self) -> None:
        """What an engine core does: takes its workers' words and seals."""
        slots = []
        for rank, worker in enumerate(self.workers):
            assert worker.stdout is not None
            told = json.loads(worker.stdout.readline())
            slot = rankbook.Slot(pp_rank=rank // SHAPE.tp_size, tp_rank=rank % SHAPE.tp_size)
            slots.append(rankbook.SealedSlot(slot, told["boot_id"], bytes.fromhex(told["digest"])))
            self.epoch = told["epoch"]
        self._core = rankbook.Registration((), endpoints=self._server, ttl_s=TTL_S)
        self._core.start()
        self._core.seal(
            slots,
            rankbook.CoreRecord(
                process=rankbook.Process(boot_id=rankbook.new_id(), hostname="demo"),
                connector="SimulatedConnector",
            ),
            engine_id=ENGINE,
            generation=self.generation,
            epoch=self.epoch,
        )
        self._core.wait_sealed(STEP_BOUND_S)

    def close(self) -> None:
        """Ends what is left of it."""
        if self._core is not None:
            self._core.stop()
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(5)
            if worker.poll() is None:
                worker.kill()
                worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()


class DecodeSide:
    """What a decode engine does: watches the prefill group and remembers what it saw."""

    def __init__(self, server: str) -> None:
        self._client = rankbook.Client(server)
        self._changed = threading.Condition()
        self.seen: list[Event] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.suppress(rankbook.RankbookError):
            for event in self._client.watch(
                rankbook.EngineFilter(group=GROUP), without_payload=True
            ):
                with self._changed:
                    self.seen.append((time.monotonic(), event))
                    self._changed.notify_all()

    def wait_for(self, words: str, wanted: Callable[[rankbook.WatchEvent], bool]) -> Event:
        """The first event that is as wanted."""
        deadline = time.monotonic() + STEP_BOUND_S
        with self._changed:
            while True:
                for seen in self.seen:
                    if wanted(seen[1]):
                        return seen
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise SystemExit(f"DEMO FAILED: the decode side never saw {words}")

    def close(self) -> None:
        """Ends the watch."""
        self._client.close()
        self._thread.join(5)


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """rankbookd on an embedded store; gives its address."""
    ready = folder / "ready.json"
    with (folder / "rankbookd.log").open("w") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "rankbook_server.app"),
                *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
                *("--store", f"sqlite:{folder / 'book.db'}", "--ready-file", str(ready)),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + STEP_BOUND_S
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(
                        "DEMO FAILED: rankbookd did not start:\n"
                        + (folder / "rankbookd.log").read_text()
                    )
                time.sleep(0.02)
            yield str(json.loads(ready.read_text())["grpc"])
        finally:
            server.terminate()
            server.wait(10)


class Operator:
    """Somebody at a terminal."""

    def __init__(self, server: str) -> None:
        self._environ = {**os.environ, "RANKBOOK_SERVER": server}
        self._command = [sys.executable, "-m", "rankbook.cli"]

    def shows(self, *words: str) -> None:
        """Runs a command for the reader to see."""
        say(f"\n   $ rankbook {' '.join(words)}")
        if sys.stdout.isatty():
            subprocess.run(
                [*self._command, *words],
                env=self._environ,
                stderr=subprocess.DEVNULL,
                timeout=STEP_BOUND_S,
            )
            return
        shown = subprocess.run(
            [*self._command, *words],
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=STEP_BOUND_S,
        )
        for line in shown.stdout.splitlines():
            say(f"     {line}".rstrip())

    def asks(self, *words: str) -> tuple[int, Any]:
        """Runs a command for its JSON; gives its exit code too."""
        asked = subprocess.run(
            [*self._command, *words, "-o", "json"],
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=STEP_BOUND_S,
        )
        return asked.returncode, json.loads(asked.stdout)

    @contextlib.contextmanager
    def simulates(self, *words: str) -> Iterator[None]:
        """Runs made-up engines beside."""
        simulated = subprocess.Popen(
            [*self._command, "simulate", *words, "--ttl", f"{TTL_S}s"],
            env=self._environ,
            stdout=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            simulated.terminate()
            if simulated.wait(10) != 0:
                raise SystemExit(f"DEMO FAILED: simulate exited {simulated.returncode}")


# ------------------------------------------------------------------- the play


def play(server: str) -> None:
    """The whole story."""
    operator = Operator(server)
    decode = DecodeSide(server)
    shape = ("--pp", "4", "--tp", "2", "--layers", "61")
    title(1, "Three engines sign in: two prefill (PP=4 x TP=2, 61 layers), one decode (TP=2)")
    with contextlib.ExitStack() as stack:
        stack.callback(decode.close)
        first = Engine(server)
        stack.callback(first.close)
        stack.enter_context(operator.simulates("--group", GROUP, "--first", "1", *shape))
        stack.enter_context(
            operator.simulates("--group", "decode", "--role", "consumer", "--tp", "2", *shape[4:])
        )
        first.seal()
        for name in (ENGINE, OTHER, DECODE):
            code, _ = operator.asks("wait", name, "--for", "ready", "--timeout", "20s")
            check(code == 0, f"{name} is READY")
        operator.shows("engines")
        operator.shows("topology", ENGINE)
        _, topology = operator.asks("topology", ENGINE)
        ranges = [(stage["start_layer"], stage["end_layer"]) for stage in topology["stages"]]
        check(
            ranges == [(0, 15), (15, 30), (30, 46), (46, 61)],
            "the stages hold 15, 15, 16 and 15 layers: published, not computed",
        )

        title(2, "The decode engine asks which prefill ranks it must read")
        operator.shows("plan", "--from", ENGINE, "--to", DECODE)
        code, plan = operator.asks("plan", "--from", ENGINE, "--to", DECODE)
        check(code == 0, "there is a plan")
        for consumer in plan["consumers"]:
            layers = sorted((read["start_layer"], read["end_layer"]) for read in consumer["read"])
            check(
                layers == ranges,
                f"decode rank tp{consumer['tp_rank']} reads every layer once, from all 4 stages",
            )
        heads = {(r["start_head"], r["end_head"]) for c in plan["consumers"] for r in c["read"]}
        check(heads == {(0, 4), (4, 8)}, "the two decode ranks share the 8 KV heads")

        title(3, "kill -9 of one prefill worker")
        victim = first.workers[5]
        say(f"   pid {victim.pid} holds pp2 tp1 of {ENGINE}")
        killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        seen_at, event = decode.wait_for(
            f"{ENGINE} DEGRADED",
            lambda e: (
                e.topology.engine.engine_id == ENGINE
                and e.topology.engine.state is rankbook.State.DEGRADED
            ),
        )
        check(
            event.topology.engine.missing == (rankbook.Slot(2, 0, 1),),
            "the decode side was told which rank is gone: pp2 tp1",
        )
        check(
            seen_at - killed_at < CRASH_BOUND_S,
            f"it knew after {(seen_at - killed_at) * 1000:.0f} ms (bound {CRASH_BOUND_S:g} s, "
            f"lease {TTL_S:g} s)",
        )
        operator.shows("topology", ENGINE)
        code, topology = operator.asks("topology", ENGINE)
        check(
            code == 5 and topology["error"]["reason"] == "ENGINE_INCOMPLETE",
            "topology exits 5: the engine takes no new peers",
        )
        code, _ = operator.asks("topology", OTHER)
        check(code == 0, f"{OTHER} is not touched")

        title(4, "The engine is restarted: a new generation takes the name over")
        second = Engine(server)
        stack.callback(second.close)
        second.seal()
        _, event = decode.wait_for(
            "the restarted engine READY",
            lambda e: (
                e.topology.engine.generation == second.generation
                and e.topology.engine.state is rankbook.State.READY
            ),
        )
        check(
            event.topology.engine.epoch == second.epoch > first.epoch,
            f"epoch {second.epoch} replaced epoch {first.epoch}, and is READY",
        )
        check(
            all(
                len({worker.generation for worker in seen.topology.workers}) <= 1
                for _, seen in decode.seen
            ),
            "no answer ever held workers of two generations",
        )
        fenced = [worker for worker in first.workers if worker is not victim]
        for worker in fenced:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(TTL_S)
        check(
            all(worker.returncode == 5 for worker in fenced),
            f"the {len(fenced)} workers left of the old start were fenced, and ended by themselves",
        )
        operator.shows("topology", ENGINE)

        title(5, "What the decode side saw")
        tell(decode.seen)
    decode.close()


def tell(seen: Sequence[Event]) -> None:
    """The watch of the decode side, the steps of signing in left out."""
    start = seen[0][0]
    state: dict[str, tuple[str, int]] = {}
    for at, event in seen:
        engine = event.topology.engine
        now = (str(engine.state), engine.epoch)
        if state.get(engine.engine_id) != now:
            say(
                f"   {at - start:5.2f} s  {event.type:<8}  {engine.engine_id}  {engine.state:<8}  "
                f"{engine.present}/{engine.declared} ranks  epoch {engine.epoch}"
            )
        state[engine.engine_id] = now


def main() -> int:
    """Runs the demo, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=3, metavar=("RANK", "SERVER", "GENERATION"))
    arguments = parser.parse_args()
    if arguments.worker:
        rank, server, generation = arguments.worker
        return work(server, generation, int(rank))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankbook-demo-") as folder:
        say("rankbook demo: registry on an embedded store, every claim checked")
        with registry(Path(folder)) as server:
            play(server)
    say(f"\ndone in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
