"""Run by torchrun on two ranks: checkpoints in megatron-core's own format, loaded and saved under model parallelism.

    torchrun --nproc_per_node 2 -m tests.model.torch_dist_on_two_ranks CASES

CASES is a JSON list of objects: `folder` (Hugging Face), `fields` of the provider, the checkpoint to `load` and compare
with the folder's weights, and where to `save` one, or null.
"""

import json
import sys


def main(cases: list[dict]) -> None:
    """Build, load, compare and save, one case after the other."""
    # Here, because megatron-core saves by way of a process that imports this module anew and has no use for Megatron.
    from qwen3vl_bridge.logs import quiet

    import torch

    from tests.model.torch_dist_models import build, save, wrong_after_loading

    quiet()
    torch.set_num_threads(1)
    for case in cases:
        model, groups = build(case["folder"], **case["fields"])
        if wrong := wrong_after_loading(model, groups, case["load"]):
            raise AssertionError(f"{case}: {len(wrong)} tensors differ: {wrong[:5]}")
        if case["save"]:
            save(model, groups, case["save"])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
