"""`required` turns a registry that is away into an engine that does not start."""

import pytest
from tests.vllm.engine import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_engine_that_requires_a_registry_does_not_start_without_and_says_why(start_engine):
    address = f"127.0.0.1:{free_port()}"
    engine = start_engine(
        engine_id="prefill-c-0",
        pp_size=1,
        settings={"endpoints": address, "required": True, "register_timeout_s": 3},
    )
    assert engine.process.wait(240) != 0
    log = engine.log.read_text()
    assert "rankbook: this worker cannot be published" in log
    assert address in log
    assert "Application startup complete" not in log
