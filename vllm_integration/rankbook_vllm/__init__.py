"""rankbook in vLLM: connectors that sign in, by configuration alone.

See `rankbook_vllm.connectors` for how, `rankbook_vllm.config` for the settings,
and `rankbook_vllm.authors` for a connector from outside vLLM.
"""
