"""For engines under test on few cores without a GPU; on PYTHONPATH of those processes only.

vLLM's message queues poll with `sched_yield`, and NIXL's progress thread polls
without a pause: a handful of processes then starve everything else on a small
machine. Both are replaced by something that sleeps. Neither has an option.

Without its progress thread NIXL does not lock what it has in UCX, while vLLM
calls it from several threads: writes of requests at once then never complete.
So an agent lets one caller in at a time.

vLLM's Mooncake connector asks torch for the number of its accelerator, hands it
to vLLM's platform, which has no use for it on CPU, and uses it nowhere else;
without an accelerator torch raises. It gets 0 instead. Nothing else of Mooncake
is touched: what moves, moves.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import time

os.sched_yield = lambda: time.sleep(0.0002)

if "FORK_READY" in os.environ:
    import fork_ready

    fork_ready.put_in_place()


def _quiet_nixl(module):
    """Makes agents without a progress thread, whatever their caller asks for."""
    made = module.nixl_agent_config.__init__

    def without_thread(self, *args, **options):
        made(self, *args, **{**options, "num_threads": 0})
        self.enable_pthread = False
        self.sync_mode = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT

    module.nixl_agent_config.__init__ = without_thread


def _number_of_no_accelerator(module):
    """Numbers an accelerator that is not there, as 0."""
    ask = module.current_device_index
    module.current_device_index = lambda: ask() if module.is_available() else 0


def _slow_stage(module):
    """Makes the push of one stage slow: SLOW_STAGE is "pp_rank:seconds"."""
    stage, _, seconds = os.environ["SLOW_STAGE"].partition(":")
    push = module.NixlPushConnectorWorker._do_start_push_kv

    @functools.wraps(push)  # the shim looks at its parameters
    def push_slowly(self, *args, **options):
        from vllm.distributed.parallel_state import get_pp_group

        if get_pp_group().rank_in_group == int(stage):
            time.sleep(float(seconds))
        push(self, *args, **options)

    module.NixlPushConnectorWorker._do_start_push_kv = push_slowly


_AFTER_IMPORT = {
    "nixl_cu12._api": _quiet_nixl,
    "torch.accelerator": _number_of_no_accelerator,
}

if "SLOW_STAGE" in os.environ:
    _AFTER_IMPORT["vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker"] = _slow_stage


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes modules once they are loaded."""

    def find_spec(self, name, path=None, target=None):
        change = _AFTER_IMPORT.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, _AfterImport())
