"""What we wrote is loaded by megatron-core's own MegatronFSDP, strictly, on two ranks without and with TP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import Topology, import_checkpoint

from .support import hf_tensors


def test_megatron_fsdp_loads_every_shard(untied_folder, tmp_path):
    topology = Topology(tp=2, chunk_bytes=20_000)
    report = import_checkpoint(untied_folder, tmp_path / "megatron", topology=topology, naming="local")
    script = Path(__file__).parent / "megatron_fsdp_load.py"
    found = subprocess.run(
        [sys.executable, script, untied_folder, tmp_path / "megatron", "1", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-4000:]
    text_layers = 4  # each with a gate and an up projection, which are one parameter of the model
    assert report.tensors == len(hf_tensors(untied_folder)) - text_layers * 2
    for tp in (1, 2):
        line = f"same: {report.tensors - text_layers} of {report.tensors} at tp {tp}\n"
        assert found.stdout.count(line) == 2, found.stdout
