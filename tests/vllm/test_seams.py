"""What the shim needs of vLLM's insides is looked for, named, and lived without."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path

import pytest
from tests.vllm.source_seams import lacking, reader

from rankbook_vllm.config import Settings

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    import vllm
    from rankbook_vllm import _vllm
    from rankbook_vllm._vllm.seams import missing_seams

INSTALLED = Path(vllm.__file__).parents[1]


def test_the_installed_vllm_has_every_seam():
    assert missing_seams() == ()


def test_a_source_is_judged_as_its_import_is():
    assert lacking(reader(INSTALLED)) == []


def test_what_a_source_lacks_is_named():
    whole = reader(INSTALLED)

    def changed(name: str) -> str:
        text = whole(name)
        text = text.replace("def _do_start_push_kv(", "def _start_push(")
        text = text.replace("expected_engine_id", "engine")
        return text.replace("    zmq_ctx,\n", "").replace("self._remote_agents:", "self._agents:")

    assert lacking(changed) == [
        "base_worker.zmq_ctx",
        "NixlBaseConnectorWorker._nixl_handshake(expected_engine_id)",
        "NixlPushConnectorWorker._do_start_push_kv",
        "NixlBaseConnectorWorker._remote_agents",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda patch, cls: patch.delattr(cls, "_nixl_handshake"),
            "NixlBaseConnectorWorker._nixl_handshake",
        ),
        (
            lambda patch, cls: patch.setattr(cls, "_ensure_handshake", lambda self, where: None),
            "NixlBaseConnectorWorker._ensure_handshake(engine_id)",
        ),
        (
            lambda patch, cls: patch.setattr(cls, "__init__", lambda self: None),
            "NixlBaseConnectorWorker._remote_agents",
        ),
    ],
    ids=["a method is gone", "a parameter has another name", "an attribute is gone"],
)
def test_a_vllm_without_a_seam_publishes_only_and_says_what_is_missing(
    monkeypatch, caplog, change, named
):
    worker_class = base_worker.NixlBaseConnectorWorker
    worker = object.__new__(worker_class)

    class Connector:
        connector_worker = worker

    change(monkeypatch, worker_class)
    logger = logging.getLogger("vllm.rankbook")
    logger.addHandler(caplog.handler)
    try:
        assert _vllm.extend(Connector(), Settings(), pytest.fail) is None
    finally:
        logger.removeHandler(caplog.handler)
    assert type(worker) is worker_class
    assert named in caplog.text
    assert "this engine only publishes" in caplog.text
