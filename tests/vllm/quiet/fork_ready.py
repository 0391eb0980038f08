"""Children of an engine come from a process that has imported vLLM, and do not import it again.

On CPU vLLM starts its engine core and workers by "spawn": each imports vLLM and
torch for eight seconds of a core. With `put_in_place`, "spawn" is a fork of
multiprocessing's fork server, a process that did nothing but these imports. A
child has its parent's environment at its start, as it would have.
"""

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

IMPORTED = [
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
]


class Process(ForkServerProcess):
    """A child that is forked."""

    def start(self):
        """Starts it with what is in the environment now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self):
        """The child: the fork server has the environment of an earlier time."""
        os.environ.clear()
        os.environ.update(self._environment)
        # Its own children come from the same server, whose address it has.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running
        super().run()


def put_in_place():
    """Makes "spawn" mean this, in this process and in its children."""
    get_context = multiprocessing.get_context

    def forking(method=None):
        if method != "spawn":
            return get_context(method)
        context = get_context("forkserver")
        context.Process = Process
        context.set_forkserver_preload(IMPORTED)
        return context

    multiprocessing.get_context = forking
