"""Stock megatron-core and Megatron-Bridge load our torch_dist checkpoints; what megatron-core saves, we export."""

import json
import os
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import (
    Topology,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    reformat_checkpoint,
)
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest

from ..support import assert_same, hf_tensors

TP, EP, PP = "tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"


@pytest.mark.slow
def test_stock_megatron_core_loads_it_and_what_it_saves_exports(
    untied_folder, tied_folder, moe_folders, all_moe_folder, tmp_path
):
    released = moe_folders[ExpertLayout.INPUT_MAJOR]
    models = {"untied": untied_folder, "tied": tied_folder, "moe": released, "all_moe": all_moe_folder}
    folders = {}
    for name, source in models.items():
        folder = tmp_path / name
        topology = Topology(chunk_bytes=20_000)
        import_checkpoint(source, folder, ckpt_format="torch_dist", naming="local", topology=topology)
        folders[name] = (str(source), str(folder))
    # The same by way of the other format.
    import_checkpoint(released, tmp_path / "fsdp")
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "again", ckpt_format="torch_dist", naming="local")
    loads = [
        (*folders["untied"], {}, "untied"), (*folders["untied"], {TP: 2, "sequence_parallel": True}, "untied-tp2"),
        (*folders["untied"], {PP: 2, "num_layers_in_first_pipeline_stage": 3}, None),
        (*folders["tied"], {TP: 2}, None), (*folders["moe"], {EP: 2}, "moe-ep2"),
        (*folders["all_moe"], {}, "all_moe"), (*folders["all_moe"], {EP: 2}, None),
        (str(released), str(tmp_path / "again"), {TP: 2, "sequence_parallel": True}, None),
    ]  # fmt: skip
    loads = [(*load, save and str(tmp_path / "saved" / save)) for *load, save in loads]
    found = subprocess.run(
        [sys.executable, Path(__file__).parent / "torch_dist_load.py", json.dumps(loads)], capture_output=True,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.count("same: ") == len(loads)
    # The two that one process loaded were loaded by Megatron-Bridge too, with nothing but the checkpoint.
    assert found.stdout.count("same by Megatron-Bridge: ") == 2
    for source, _, _, saved in loads:
        if saved is None:
            continue
        found = inspect_checkpoint(saved)
        assert found["format"] == "torch_dist" and found["other_tensors"] == 2 * found["tensors"]  # Adam's two moments
        export_checkpoint(saved, f"{saved}-hf", hf_model=source)
        doubled = {name: 2 * tensor for name, tensor in hf_tensors(Path(source)).items()}
        assert_same(hf_tensors(Path(f"{saved}-hf")), doubled)
