"""A connector that needs its peers' handshake metadata and knows nothing of stages.

vLLM has none such at the moment; out-of-tree ones do.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class FirstStageConnector(ExampleConnector):
    """Keeps what it gets by TP rank: of several stages that would be one."""

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.served = dict(metadata)
