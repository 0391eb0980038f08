"""A small prefill/decode proxy for trying things out. NOT for production.

    python -m rankbook_vllm.proxy --server 127.0.0.1:7420

It follows the book by a watch, sends each request to a READY producer for the
prefill and then to a READY consumer, and gives the consumer the least that the
shim needs. It knows no load, no prefix cache, no TLS and no users: whoever
reaches its port may use the engines. `routing` and `bodies` decide and do no
I/O, `upstream` talks to the engines, `app` is the HTTP side, `command` the
command line. Nothing else of this package imports it.
"""
