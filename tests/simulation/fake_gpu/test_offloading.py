"""Offloading to the host keeps values: activations, and steps of an offloaded optimizer."""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from qwen3vl_bridge.simulation import fake_gpu

import pytest

from tests.simulation.fake_gpu.conftest import ROOT

OPTIMIZER = """
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.optim import AdamW

torch.manual_seed(0)
first = [torch.randn(300, 7), torch.randn(11)]
settings = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
there = [torch.nn.Parameter(each.cuda()) for each in first]
here = [torch.nn.Parameter(each.clone()) for each in first]
kinds = dict(cpu_optimizer_cls=AdamW, gpu_optimizer_cls=AdamW)
ours = HybridDeviceOptimizer(there, offload_fraction=1.0, param_update_in_fp32=True, **kinds, **settings)
reference = AdamW(here, **settings)
for _ in range(3):
    for a, b in zip(there, here):
        b.grad = torch.randn_like(b)
        a.grad = b.grad.cuda()
    ours.step()
    reference.step()
result["moved"] = [not torch.equal(a.cpu(), b) for a, b in zip(there, first)]
result["same"] = [torch.equal(a.cpu(), b) for a, b in zip(there, here)]
"""


@pytest.mark.slow
def test_cpu_offloaded_optimizer_steps_equal_torch_adamw(on_fake_gpu):
    assert on_fake_gpu(OPTIMIZER).result == {"moved": [True, True], "same": [True, True]}


INIT_ON_META = """
import qwen3vl_bridge
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from megatron.bridge import AutoBridge
from qwen3vl_bridge.training.process_groups import initialize

make_checkpoint(sys.argv[1])
provider = AutoBridge.from_hf_pretrained(sys.argv[1]).to_megatron_provider(load_weights=False)
provider.transformer_impl, provider.perform_initialization = "local", False
provider.init_model_with_meta_device = True
provider.finalize()
groups = initialize(provider, seed=0)
wanted = dict(wrap_with_ddp=False, init_model_with_meta_device=True, pg_collection=groups)
(model,) = provider.provide_distributed_model(**wanted)
result["devices"] = sorted({str(parameter.device) for parameter in model.parameters()})
"""


@pytest.mark.slow
def test_meta_device_init_leaves_all_parameters_on_meta_device(on_fake_gpu, tmp_path):
    """Local layers create tensors on the GPU explicitly, whatever the default device is."""
    assert on_fake_gpu(INIT_ON_META, str(tmp_path / "hf")).result["devices"] == ["meta"]


def run_offloading(built, folder, recipe: str, *settings: str, **variables: str) -> dict:
    log = Path(tempfile.mkdtemp(dir=folder)) / "log"  # of this run only
    environment = fake_gpu.environment(built, log) | {"PYTHONPATH": ":".join(sys.path), **variables}
    command = [sys.executable, "-m", "tests.simulation.fake_gpu.offloading_run", recipe, *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.slow
def test_cpu_offloaded_optimizer_keeps_moments_in_host_memory(built, tmp_path):
    """Each step copies the rank's float32 gradients to the host, and parameters back."""
    settings = ["optimizer.optimizer_cpu_offload=true", "optimizer.optimizer_offload_fraction=1.0"]
    plain, there = (run_offloading(built, tmp_path, "qwen3_vl_2b_sft_config", *some) for some in ([], settings))
    assert plain["error"] is there["error"] is None
    moved = there["copies"]["device to host"]
    assert 0.3e9 < plain["peak"] - there["peak"] == pytest.approx(2 * moved, rel=0.02)  # two moments
    assert there["copies"]["host to device"] - plain["copies"]["host to device"] == pytest.approx(moved, rel=0.02)


KEPT = [f"model.recompute_{name}=null" for name in ("granularity", "method", "num_layers")]
MODULES = "core_attn,attn_proj,qkv_linear"
FINE = "model.fine_grained_activation_offloading=true"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize(("recipe", "settings"), [
    ("qwen3_vl_8b_sft_config", ["model.cpu_offloading=true", "model.cpu_offloading_num_layers=2"]),
    ("qwen3_vl_8b_sft_config", [FINE, f"model.offload_modules=[{MODULES}]"]),
    ("qwen3_vl_30b_a3b_sft_config", [FINE, f"model.offload_modules=[{MODULES},mlp_norm,expert_fc1,moe_act]"]),
])  # fmt: skip
def test_activations_offloaded_to_host_come_back_unchanged(built, tmp_path, recipe, settings):
    variables = {"NVTE_CPU_OFFLOAD_V1": "1"} if FINE in settings else {}
    seen = run_offloading(built, tmp_path, recipe, *KEPT, *settings, **variables)
    assert seen["error"] is None
    assert seen["counts"]["moved"] > 100 and seen["counts"]["known"] > 0.9 * seen["counts"]["moved"]
    assert not seen["counts"]["different"]
