"""Runs the collectives of a worker on every rank of a grid, with vLLM's own groups.

    python grid_probe.py PP PCP TP PORT

Prints one JSON line: what each rank got. Ranks are forked after vLLM is loaded.
"""

import json
import os
import sys

from rankbook.model import Slot
from rankbook_vllm import _vllm
from rankbook_vllm.record import Start
from rankbook_vllm.seal import Note


def rank(number: int, sizes: tuple[int, int, int], port: int, pipe: int) -> None:
    import torch.distributed
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    pp, pcp, tp = sizes
    config = VllmConfig()
    config.parallel_config = ParallelConfig(
        pipeline_parallel_size=pp, prefill_context_parallel_size=pcp, tensor_parallel_size=tp
    )
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=pp * pcp * tp,
            rank=number,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=number,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(tp, pp, pcp)
        begun = []

        def begin() -> Start:
            begun.append(number)
            return Start(f"start-by-rank-{number}", 41)

        start = _vllm.agree_on_start(begin)
        slot = _vllm.slot()
        notes = _vllm.gather_over_pcp(Note(slot, number, start))
        sent = _vllm.carrier(None, notes) is not None
        told = {
            "slot": [slot.pp_rank, slot.pcp_rank, slot.tp_rank],
            "start": [start.generation, start.epoch],
            "begun": bool(begun),
            "notes": [[n.slot.pp_rank, n.slot.pcp_rank, n.slot.tp_rank] for n in notes],
            "sent": sent,
        }
        os.write(pipe, json.dumps(told).encode() + b"\n")
        torch.distributed.barrier()
    assert slot == Slot(*told["slot"])


def main() -> None:
    sizes = (int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    port = int(sys.argv[4])
    reader, writer = os.pipe()
    children = []
    for number in range(sizes[0] * sizes[1] * sizes[2]):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank(number, sizes, port, writer)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    os.close(writer)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    with os.fdopen(reader) as lines:
        sys.stdout.write(json.dumps([json.loads(line) for line in lines]) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
