"""Run on ranks: checkpoints in megatron-core's own format, loaded and saved by models that are split.

    torchrun --nproc_per_node N -m tests.model.checkpoints.torch_dist_on_ranks CASES

CASES is a JSON list of objects: `folder` (Hugging Face), `fields` of the provider, the checkpoint to `load` and compare
with the folder's weights, where to `save` one, and whether that is done `by_bridge`. What Megatron-Bridge saved it also
loads, beside megatron-core.
"""

import json
import sys
from pathlib import Path

from tests.ranks import begin, leave


def main(cases: list[dict]) -> None:
    # Here, because megatron-core saves by way of a process that imports this module anew and has no use for Megatron.

    from tests.model.checkpoints import test_torch_dist as models

    begin()
    for case in cases:
        folder, fields, checkpoint = case["folder"], case["fields"], Path(case["load"])
        chunks, groups = models.build_chunks(folder, **fields)
        bad = []
        if (iteration := checkpoint / "iter_0000000").exists():
            loaded = models.load_by_bridge(folder, checkpoint, **fields)
            bad += models.wrong(models.tensors(*loaded), models.tensors(*chunks))
            checkpoint = iteration
        if bad := bad + models.wrong_after_loading(chunks, groups, checkpoint):
            raise AssertionError(f"{case}: {len(bad)} tensors differ: {bad[:5]}")
        if case["by_bridge"]:
            models.save_by_bridge(folder, chunks, case["save"])
        else:
            models.save(chunks, groups, case["save"])
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
