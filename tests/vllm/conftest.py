"""A registry, a model, and engines; each engine costs half a minute, so they are shared."""

from pathlib import Path

import pytest
from tests.vllm.engine import Engine, Registry, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory):
    """One registry for the engines that are to find one."""
    server = Registry(tmp_path_factory.mktemp("registry"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def start_engine(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """Starts engines; ends them with the module."""
    engines = []

    def start(**options) -> Engine:
        engine = Engine(model, tmp_path_factory.mktemp("engine"), **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.kill()
