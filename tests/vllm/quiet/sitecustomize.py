"""For engines under test on few cores; on PYTHONPATH of those processes only.

vLLM's message queues poll with `sched_yield`, and NIXL's progress thread polls
without a pause: a handful of processes then starve everything else on a small
machine. Both are replaced by something that sleeps. Neither has an option.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

os.sched_yield = lambda: time.sleep(0.0002)


class _QuietNixl(importlib.abc.MetaPathFinder):
    """Makes agents without a progress thread, whatever their caller asks for."""

    def find_spec(self, name, path=None, target=None):
        if name != "nixl_cu12._api":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_quietly(module):
            run(module)
            made = module.nixl_agent_config.__init__

            def without_thread(self, *args, **options):
                made(self, *args, **{**options, "num_threads": 0})
                self.enable_pthread = False

            module.nixl_agent_config.__init__ = without_thread

        spec.loader.exec_module = run_quietly
        return spec


sys.meta_path.insert(0, _QuietNixl())
