"""Adapters saved from a model on two ranks give the same losses in transformers and `peft`.

As in verl and Megatron-Bridge's training, a hook inserts adapters before wrapping, and `AutoBridge.save_hf_adapter` is
called on all ranks. The file also tests the adapter settings that the command line reads.
"""

import copy
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_adapters, import_checkpoint
from qwen3vl_bridge.checkpoint.formats.megatron import read_run_config
from qwen3vl_bridge.peft.adapter_rows import LINEAR_LAYERS, OF_LINEAR_ATTENTION
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
from qwen3vl_bridge.peft.stored_adapters import adapter_settings
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.peft.utils import create_peft, create_peft_hook
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.helpers.batches import make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check, limit
from tests.helpers.ranks import leave_groups
from tests.peft.test_export import reference_logits, with_adapter

SETTINGS = dict(dim=4, alpha=8, lora_B_init_method="normal")  # B is not zero, so that there is something to see
PATTERN = "*.layers.3.*.linear_qkv"  # of the whole model


@dataclass(frozen=True)
class Job:
    name: str
    folder: str
    kind: str
    fields: dict[str, int | bool] = field(default_factory=dict)
    peft: dict[str, object] = field(default_factory=dict)

    def adapters(self) -> object:
        settings = SETTINGS | self.peft
        return Qwen3VLLoRA(**settings) if self.kind == "ours" else create_peft({"type": self.kind, **settings})


def save_all(jobs: list[Job], out: Path) -> dict[str, dict[str, list]]:
    """Return the adapted names of each job, and losses if a rank has all stages."""
    everything = {}
    for job in jobs:
        bridge, peft = AutoBridge.from_hf_pretrained(job.folder), job.adapters()
        provider = bridge.to_megatron_provider(load_weights=True)
        for name, value in job.fields.items():
            setattr(provider, name, value)
        provider.register_pre_wrap_hook(create_peft_hook(peft))
        provider.finalize()
        leave_groups()
        groups = initialize(provider, seed=0)
        model = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
        )
        names = sorted(name for name, _ in bridge.export_adapter_weights(model, show_progress=False))
        found = everything[job.name] = {"adapters": names}
        if groups.pp.size() == 1:
            sample = make_samples("mixed", bridge.hf_pretrained.config, seed=9)[0]
            # A token more behind an odd number, which sequence parallelism cannot divide; nothing sees it.
            ids, labels = (F.pad(row, (0, len(row) % 2))[None] for row in (sample.ids, sample.labels))
            with torch.no_grad():
                losses = model[0](ids, labels=labels, **sample.pixels)
            found["losses"] = losses[0, : len(sample.ids)].tolist()
        bridge.save_hf_pretrained(model, out / job.name / "merged", show_progress=False)
        bridge.save_hf_adapter(model, out / job.name / "adapter", peft)
    return everything


EP = dict(expert_model_parallel_size=2)
TP = dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
PP = dict(pipeline_model_parallel_size=2, pipeline_dtype=None)
DENSE = [
    Job("tensors LoRA", "", "lora", TP), Job("tensors CanonicalLoRA", "", "canonical_lora", TP),
    Job("stages VLMLoRA", "", "vlm_lora", PP), Job("stages pattern", "", "lora", PP, dict(target_modules=[PATTERN])),
]  # fmt: skip
MOE = [
    Job("experts ours", "", "ours", EP, dict(adapt_experts=True)), Job("experts LoRA", "", "lora", EP),
    Job("experts normalized", "", "lora", EP, dict(normalize_moe_lora=True)),
    Job("experts CanonicalLoRA", "", "canonical_lora", EP),
]  # fmt: skip
ALL = dict(target_modules=[*LINEAR_LAYERS, *OF_LINEAR_ATTENTION])
QWEN3_5 = [
    Job("tensors", "dense", "ours", TP, ALL), Job("tensors LoRA", "dense", "lora", TP, ALL),
    Job("tensors experts", "moe", "ours", TP, ALL | dict(adapt_experts=True)),
    Job("experts", "moe", "ours", EP, ALL | dict(adapt_experts=True)), Job("stages", "dense", "ours", PP, ALL),
    Job("stages pattern", "dense", "ours", PP, dict(target_modules=["*.layers.2.*.in_proj"])),
]  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def jobs(request):
    if request.param == "qwen3_5":
        folders = request.getfixturevalue("qwen3_5_folders")
        return [replace(job, folder=str(folders[job.folder])) for job in QWEN3_5]
    untied, moe, layouts = (request.getfixturevalue(name) for name in ("untied_folder", "moe_folder", "moe_folders"))
    jobs = [replace(job, folder=str(untied)) for job in DENSE] + [replace(job, folder=str(moe)) for job in MOE]
    return jobs + [
        Job(f"experts {layout.name}", str(layouts[layout]), "lora", EP)
        for layout in (ExpertLayout.INPUT_MAJOR, ExpertLayout.PER_EXPERT)
    ]


@pytest.fixture(scope="module")
def found(jobs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return folder, results_of_ranks(save_all, 2, jobs, folder)


def losses_of(model, config) -> torch.Tensor:
    sample = make_samples("mixed", config, seed=9)[0]
    (logits,) = reference_logits(model, [sample])
    return F.cross_entropy(logits, sample.labels, reduction="none")


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pack tensors of single experts as transformers does: [experts, 2 * I, H] and [experts, H, I]."""
    whole, experts = {}, {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault((found[1], found[3]), {})[int(found[2])] = tensor
        else:
            whole[name] = tensor
    stacked = {key: torch.stack([each[n] for n in sorted(each)]) for key, each in experts.items()}
    for module in {module for module, _ in stacked}:
        whole[f"{module}.gate_up_proj"] = torch.cat([stacked[module, kind] for kind in ("gate_proj", "up_proj")], 1)
        whole[f"{module}.down_proj"] = stacked[module, "down_proj"]
    return whole


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def check_what_is_saved(job: Job, out: Path, losses: list[float], readable: Path | None = None) -> None:
    base = AutoModelForImageTextToText.from_pretrained(readable or job.folder)
    if readable:
        merged = copy.deepcopy(base)
        merged.load_state_dict(packed(load_file(out / job.name / "merged" / "model.safetensors")))
    else:
        merged = AutoModelForImageTextToText.from_pretrained(out / job.name / "merged")
    before = losses_of(base, base.config)
    adapted = with_adapter(readable or job.folder, out / job.name / "adapter")
    expected = torch.tensor(losses)
    assert (expected - before).abs().max() > 0.1
    for kind, model in (("merged", merged), ("adapter", adapted)):
        compute = partial(losses_of, model, base.config)
        check({kind: difference(expected, compute())}, {kind: limit(compute, difference, model)})


@pytest.mark.slow
def test_losses_with_adapters_saved_on_two_ranks_match_transformers_and_peft(jobs, found, moe_folder):
    out, of_jobs = found
    for job in jobs:
        if "losses" in of_jobs[job.name]:
            readable = moe_folder if "PER_EXPERT" in job.name else None
            check_what_is_saved(job, out, of_jobs[job.name]["losses"], readable)


@pytest.mark.slow
def test_adapter_names_on_pipeline_stages_match_full_model(found):
    """Patterns count layers of the full model. VLMLoRA works on stages without a vision tower."""
    names = {name: of_job["adapters"] for name, of_job in found[1].items()}
    if "stages" in names:  # Qwen3.5
        assert names["stages"] == names["tensors"]
        layer = "model.language_model.layers.2.linear_attn.in_proj"
        parts = [f"{layer}_{part}.lora_{k}.weight" for part in ["qkv", "z", "b", "a"] for k in "AB"]
        assert names["stages pattern"] == sorted(parts)
        return
    assert names["stages VLMLoRA"] == names["tensors LoRA"]
    layers = {name.partition(".self_attn.")[0] for name in names["stages pattern"] if "language_model" in name}
    assert layers == {"model.language_model.layers.3"}


ADAPTERS = Path(__file__).parents[2] / "conversion" / "adapters.py"
LORA = """\
peft: {_target_: qwen3vl_bridge.peft.Qwen3VLLoRA, dim: 4, alpha: 8, target_modules: [linear_qkv], exclude_modules: [],
  adapt_language_model: true, adapt_vision_model: false, adapt_vision_projection: false, adapt_experts: false,
  params_to_save: !!set {a: }}
"""


def test_adapters_help_imports_no_torch():
    code = "import sys; from qwen3vl_bridge.cli import convert as cli; cli._parser(None)"
    code += "; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    for verb in ([], ["export"], ["merge"]):
        found = subprocess.run([sys.executable, ADAPTERS, *verb, "--help"], capture_output=True, text=True, check=True)
        assert "usage: adapters.py" in found.stdout


def test_adapter_settings_are_read_from_run_config_yaml(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA)
    found = adapter_settings(read_run_config(tmp_path), tmp_path)
    assert (found.dim, found.alpha, found.dora, found.components) == (4, 8, False, {"language_model"})
    assert found.adapts("language_model.decoder.layers.3.self_attention.linear_qkv")
    assert not found.adapts("vision_model.decoder.layers.3.self_attention.linear_qkv")
    text = LORA.replace("[linear_qkv]", '["*.experts.linear_fc1"]')
    for asked in ("false", "true"):
        (tmp_path / "run_config.yaml").write_text(text.replace("adapt_experts: false", f"adapt_experts: {asked}"))
        layer = "language_model.decoder.layers.3.mlp.experts.local_experts.1.linear_fc1"
        assert adapter_settings(read_run_config(tmp_path), tmp_path).adapts(layer) == (asked == "true")


@pytest.mark.parametrize(("text", "message"), [
    ("peft: null\n", "was saved by a run without adapters"), ("- 1\n", "holds a list, expected sections"),
    ("a: [\n", "run_config.yaml: while parsing"),
    ("peft: !!python/object/apply:os.system [false]\n", "could not determine a constructor"),
    (LORA.replace("Qwen3VLLoRA", "Other"), "peft is 'qwen3vl_bridge.peft.Other', expected"),
    (LORA.replace("dim: 4", "dim: many"), "peft has dim 'many', alpha 8, .*expected a whole number"),
    (LORA.replace("[linear_qkv]", "linear_qkv"), "target_modules 'linear_qkv' .* lists of names"),
    (LORA.replace("dim: 4, ", ""), "peft lacks the field 'dim'"), ("[" * 50_000, "more than 50 deep"),
    (LORA.replace("dim: 4", "dim: .inf"), "peft.dim is inf, expected a finite number"),
    (LORA.replace("alpha: 8", "alpha: .nan"), "peft.alpha is nan, expected a finite number"),
    ("model: [1]", r"model is \[1\], expected a section of settings"),
    ("peft: x", "peft is x, expected a section of settings"),
])  # fmt: skip
def test_adapter_settings_raises_if_run_config_yaml_is_invalid(text, message, tmp_path):
    (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        adapter_settings(read_run_config(tmp_path), tmp_path)
    assert str(tmp_path) in str(error.value)


def test_export_adapters_raises_if_checkpoint_has_no_adapters(untied_folder, tmp_path):
    import_checkpoint(untied_folder, tmp_path / "megatron", progress=False)
    with pytest.raises(CheckpointError, match="was saved by a run without adapters"):
        export_adapters(tmp_path / "megatron", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_adapter_settings_ignores_infinite_value_in_optimizer_section(tmp_path):
    (tmp_path / "run_config.yaml").write_text(LORA + "optimizer: {grad_norm_skip_threshold: .inf}\n")
    assert adapter_settings(read_run_config(tmp_path), tmp_path).dim == 4
