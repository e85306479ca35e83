"""torch_dist checkpoints of ours are loaded by stock megatron-core and Megatron-Bridge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import Topology, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.mappings import ExpertLayout

TP, EP, PP = "tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"


def test_stock_megatron_core_loads_it_strictly(untied_folder, tied_folder, moe_folders, tmp_path):
    released = moe_folders[ExpertLayout.INPUT_MAJOR]
    folders = {}
    for name, source in (("untied", untied_folder), ("tied", tied_folder), ("moe", released)):
        folder = tmp_path / name
        topology = Topology(chunk_bytes=20_000)
        import_checkpoint(source, folder, ckpt_format="torch_dist", naming="local", topology=topology)
        folders[name] = (str(source), str(folder))
    # The same by way of the other format.
    import_checkpoint(released, tmp_path / "fsdp")
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "again", ckpt_format="torch_dist", naming="local")
    loads = [
        (*folders["untied"], {}),
        (*folders["untied"], {TP: 2, "sequence_parallel": True}),
        (*folders["untied"], {PP: 2, "num_layers_in_first_pipeline_stage": 3}),
        (*folders["tied"], {TP: 2}),
        (*folders["moe"], {}),
        (*folders["moe"], {EP: 2}),
        (str(released), str(tmp_path / "again"), {TP: 2, EP: 1, "sequence_parallel": True}),
    ]
    found = subprocess.run(
        [sys.executable, Path(__file__).parent / "torch_dist_load.py", json.dumps(loads)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.count("same: ") == len(loads)
