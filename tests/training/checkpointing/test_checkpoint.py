"""Resume from checkpoints; reject checkpoints and weights that do not fit; find weights of other layer specs."""

import multiprocessing
import shutil
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLMoEModelProvider
from qwen3vl_bridge.training import weight_loading
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.resuming import convert_optimizer_state
from qwen3vl_bridge.training.weight_loading import rows_by_name
from qwen3vl_bridge.weights.rows import local_name

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training import checkpointing
from megatron.bridge.training.callbacks import Callback
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.checkpoint.support import model_with_config
from tests.helpers.steps import save, set_up, train_step
from tests.training.running import losses, optimizer_states, replicated, sharded, stored, train

STEPS = dict(train__train_iters=6, validation__eval_iters=0)


@pytest.fixture(
    scope="module",
    params=[replicated, pytest.param(sharded, marks=pytest.mark.slow)],
    ids=["distributed optimizer", "Megatron-FSDP"],
)
def saved(request, inputs, tmp_path_factory):
    """Return the function that creates a run, the folder of a run saved after each of two steps, and its tensors."""
    folder = tmp_path_factory.mktemp("saved")
    run = set_up(request.param(inputs, folder, **STEPS))
    for _ in range(2):
        train_step(run)
        save(run)
    return request.param, folder, stored(folder)


def resume(make, inputs, load: Path, into: Path | None = None, **settings):
    return set_up(make(inputs, into, **STEPS | dict(checkpoint__load=str(load)) | settings))


def weights_and_moments(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    moments = {key: tensor for key, tensor in tensors.items() if "exp_avg" in key}
    return {key: t for key, t in tensors.items() if not key.startswith(("optimizer", "rng_state"))}, moments


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys() and ours
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_export_of_run_without_steps_equals_initial_weights(inputs, tmp_path):
    save(set_up(replicated(inputs, tmp_path / "run", checkpoint__save_optim=False)))  # saved before any step
    export_checkpoint(tmp_path / "run", tmp_path / "hf", progress=False)
    before, after = (load_file(folder / "model.safetensors") for folder in (inputs.hf, tmp_path / "hf"))
    assert same(before, after)


@pytest.mark.slow
def test_exported_config_has_rope_scaling_of_run(inputs, tmp_path):
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    run = set_up(replicated(inputs, tmp_path / "run", checkpoint__save_optim=False, model__rope_parameters=yarn))
    save(run)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", progress=False)
    found = AutoConfig.from_pretrained(tmp_path / "hf").text_config.rope_parameters
    assert found.items() >= yarn.items() and found["mrope_interleaved"]
    linear = dict(rope_type="linear", factor=2.0)  # replaces all settings of yarn
    settings = dict(checkpoint__save_optim=False, model__rope_parameters=linear)
    save(set_up(replicated(replace(inputs, hf=tmp_path / "hf"), tmp_path / "linear", **settings)))
    export_checkpoint(tmp_path / "linear", tmp_path / "exported", progress=False)
    found = AutoConfig.from_pretrained(tmp_path / "exported").text_config.rope_parameters
    assert found.items() >= linear.items() and "original_max_position_embeddings" not in found
    with pytest.raises(CheckpointError, match=r"rope_parameters is {'rope_type': 'yarn'.*expected None"):
        set_up(replicated(replace(inputs, hf=tmp_path / "hf"), None, model__rope_parameters=None))


@pytest.mark.slow
def test_run_resumes_from_checkpoint_named_by_ckpt_step(saved, inputs):
    make, folder, _ = saved
    assert resume(make, inputs, folder, checkpoint__ckpt_step=1).progress.step == 1
    with pytest.raises(CheckpointError, match=r"iter_0000007 is not a checkpoint.*iterations found"):
        resume(make, inputs, folder, checkpoint__ckpt_step=7)


def test_load_restores_only_weights_if_finetune_is_true(saved, inputs, tmp_path):
    make, folder, before = saved
    run = resume(make, inputs, folder, tmp_path, checkpoint__finetune=True, checkpoint__save_optim=False)
    assert run.progress.step == run.progress.consumed_train_samples == run.scheduler.num_steps == 0
    assert not any(state["exp_avg"].any() for state in optimizer_states(run.optimizer))
    save(run)
    assert same(weights_and_moments(stored(tmp_path))[0], weights_and_moments(before)[0])


@pytest.mark.slow
def test_load_and_save_without_optimizer_state_keep_only_weights(saved, inputs, tmp_path):
    make, folder, before = saved
    run = resume(make, inputs, folder, tmp_path, checkpoint__load_optim=False, checkpoint__save_optim=False)
    assert run.progress.step == 2 and run.scheduler.num_steps == 0
    assert not any(state["exp_avg"].any() for state in optimizer_states(run.optimizer))
    save(run)
    weights, moments = weights_and_moments(stored(tmp_path))
    assert same(weights, weights_and_moments(before)[0]) and not moments
    with pytest.raises(CheckpointError, match=r"saved without optimizer state.*load_optim=false"):
        resume(make, inputs, tmp_path)
    assert resume(make, inputs, tmp_path, checkpoint__load_optim=False).progress.step == 2


def test_resumed_run_saves_hugging_face_files_of_loaded_checkpoint(saved, inputs, tmp_path):
    make, folder, _ = saved
    save(resume(make, inputs, folder, tmp_path, checkpoint__pretrained_checkpoint=None))
    files = (folder / "iter_0000002" / "hf", tmp_path / "iter_0000002" / "hf")
    before, after = (sorted(path.name for path in each.iterdir()) for each in files)
    assert "tokenizer.json" in before and before == after


def test_load_from_empty_folder_raises_only_if_checkpoint_is_required(inputs, tmp_path):
    assert set_up(replicated(inputs, tmp_path)).progress.step == 0
    for first in (str(inputs.hf), None):
        settings = dict(checkpoint__pretrained_checkpoint=first, checkpoint__exit_on_missing_checkpoint=True)
        with pytest.raises(CheckpointError, match=r"which contains no checkpoint\. Set it to a folder with"):
            set_up(replicated(inputs, tmp_path, **settings))


def test_run_resumes_if_it_was_killed_before_writing_first_tracker_file(saved, inputs, tmp_path):
    """Two files name the latest checkpoint, which are written one after the other. Megatron-Bridge reads this one."""
    shutil.copytree(saved[1], tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
    assert resume(saved[0], inputs, tmp_path / "run").progress.step == 2


def test_load_raises_if_tracker_file_names_missing_checkpoint(saved, inputs, tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="iter_0000007 is not a checkpoint"):
        resume(saved[0], inputs, tmp_path)


@pytest.mark.parametrize(("settings", "of_hugging_face", "of_an_import"), [
    (dict(share_embeddings_and_output_weights=True), "weights is False, expected True", "unexpected: .*output_lay"),
    (dict(ffn_hidden_size=64), r"ffn_hidden_size is \d+, expected 64", r"misshapen: .*linear_fc1.weight_v"),
    (dict(num_layers=5), r"different model(.|\n)*num_layers is 4, expected 5", r"missing: .*layers\.4\.mlp"),
])  # fmt: skip
def test_set_up_raises_if_initial_weights_have_different_config(inputs, settings, of_hugging_face, of_an_import):
    for folder, message in ((inputs.hf, of_hugging_face), (inputs.megatron, of_an_import)):
        cfg = replicated(inputs, None, checkpoint__pretrained_checkpoint=str(folder))
        for name, value in settings.items():
            setattr(cfg.model, name, value)
        with pytest.raises(CheckpointError, match=message):
            set_up(cfg)


def test_set_up_raises_if_initial_weights_have_unexpected_layers(inputs, tmp_path):
    short = model_with_config(tmp_path / "short", inputs.hf, {"text_config": {"num_hidden_layers": 3}})
    (short / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "code.Own"}}')  # must not be executed
    cfg = replicated(inputs, None, checkpoint__pretrained_checkpoint=str(short))
    cfg.model.num_layers = 3
    with pytest.raises(CheckpointError, match=r"11 unexpected\n  unexpected: .*layers\.3\.input_layernorm"):
        set_up(cfg)


def test_set_up_raises_if_initial_weights_of_dense_run_have_experts(inputs, moe_folder):
    with pytest.raises(CheckpointError, match=r"moe_layers is \(0, 2, 3\), expected \(\)"):
        set_up(replicated(inputs, None, checkpoint__pretrained_checkpoint=str(moe_folder)))


class Draws(Callback):
    """Draw a random number after each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_step_end(self, context) -> None:
        self.found.append(torch.rand(1).item())


@pytest.mark.slow
def test_resumed_moe_run_restores_random_states_unless_load_rng_is_false(inputs, moe_folder, tmp_path):
    """Resume an MoE run from random weights; experts have their own optimizer."""
    moe, fresh = replace(inputs, hf=moe_folder), dict(checkpoint__pretrained_checkpoint=None, train__train_iters=3)

    def run(folder: str, stop_after: int | None = None, **settings):
        draws = Draws()
        cfg = replicated(moe, tmp_path / folder, **STEPS | fresh | settings)
        return train(cfg, stop_after=stop_after, callbacks=[draws]), draws.found

    whole, drawn = run("whole")
    first, second = run("halves", 2), run("halves")
    assert losses(first[0] + second[0]) == losses(whole) and first[1] + second[1] == drawn
    assert whole[-1]["loss"] < whole[0]["loss"] and len(set(drawn)) == 3
    assert same(stored(tmp_path / "halves"), stored(tmp_path / "whole"))
    anew = dict(checkpoint__load=str(tmp_path / "halves"), checkpoint__ckpt_step=2, checkpoint__load_rng=False)
    log, others = run("anew", **anew)
    assert losses(log) == losses(whole[2:]) and not set(others) & set(drawn[2:])


def test_training_callbacks_raises_in_spawned_process(inputs, monkeypatch):
    """Asynchronous saving spawns a process that imports the script; without a `__main__` guard it would train."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match="put its code under `if __name__ =="):
        qwen3vl_bridge.training_callbacks(inputs.config(None))


def test_checkpoint_save_starts_no_process(inputs, tmp_path, monkeypatch):
    """megatron-core would start a process to pass the results of writer threads."""
    started, start = [], multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda self: [started.append(self), start(self)])
    train(replicated(inputs, tmp_path, **STEPS | dict(train__train_iters=2)))
    assert (tmp_path / "iter_0000002").is_dir() and not started
    assert filesystem_async._results_queue is None  # the queue of that process


KIND = "fully_reshardable"


def group(decay: float, *, experts: bool, **more) -> dict:
    return {"wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False, **more}


def optimizer(*groups: dict) -> SimpleNamespace:
    return SimpleNamespace(param_groups=list(groups))


ONE = [optimizer(group(0.0, experts=False), group(1.0, experts=False))]
TWO = [ONE[0], optimizer(group(1.0, experts=True))]


@pytest.mark.parametrize(("before", "after"), [(TWO, ONE), (ONE, TWO)], ids=["EP to none", "none to EP"])
def test_convert_optimizer_state_to_new_ep_size_keeps_param_groups(before, after):
    groups = [[one | {"step": 7} for one in reversed(part.param_groups)] for part in before]
    settings = [{"optimizer": {"param_groups": each}, "param_state_sharding_type": KIND} for each in groups]
    tensors = [{"param_state": {"tensor": i}} for i in range(len(after))]
    state = dict(enumerate(settings)) if len(before) > 1 else settings[0]
    state |= dict(enumerate(tensors)) if len(after) > 1 else tensors[0]
    found = convert_optimizer_state(state, after)
    for i, (own, tensor) in enumerate(zip(after, tensors, strict=True)):
        part = found[i] if len(after) > 1 else found
        assert part["optimizer"]["param_groups"] == [one | {"step": 7} for one in own.param_groups]
        assert part["param_state"] == tensor["param_state"] and part["param_state_sharding_type"] == KIND
    assert found.keys() == (set(range(len(after))) if len(after) > 1 else tensors[0].keys() | settings[0].keys())


WRAPPER = "module."


@pytest.fixture(scope="module")
def model(moe_folder) -> Qwen3VLMoEModelProvider:
    provider = AutoBridge.from_hf_pretrained(str(moe_folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    initialize(provider, seed=0)
    return provider


def names_of_megatron_fsdp(model: Qwen3VLMoEModelProvider, spec: str) -> list[str]:
    rows = {row.megatron: row for row in rows_by_name(model).values()}.values()
    names = [name for row in rows for name in row.stored_names]
    return [WRAPPER + (local_name(name) if spec == "local" else name) for name in names]


@pytest.mark.parametrize(("wanted", "on_disk"), [("local", "te"), ("te", "local"), ("te", "te"), ("local", "local")])
def test_find_renamed_weights_maps_names_between_local_and_te_layer_specs(model, wanted, on_disk):
    weights = {name: torch.full((1,), float(i)) for i, name in enumerate(names_of_megatron_fsdp(model, wanted))}
    found = {f"model.{name}": None for name in names_of_megatron_fsdp(model, on_disk)}
    renamed, problems = weight_loading.find_renamed_weights(weights, found, model)
    assert problems == []
    own = weights.keys() & {name.removeprefix("model.") for name in found}
    assert len(own) + len(renamed) == len(weights)
    # Norms of the vision tower (weight and bias) and of the language model; experts have three stored tensors. The norm
    # before experts has the same name in both specs.
    norms, experts = 2 * 2 * model.vision_config.depth + model.num_layers + 1, 3 * 3 * model.num_moe_experts
    assert len(renamed) == (0 if wanted == on_disk else norms + experts)
    expected = dict(zip(names_of_megatron_fsdp(model, on_disk), weights.values(), strict=True))
    assert all(renamed[name] is expected[name] for name in renamed)


def test_find_renamed_weights_lists_missing_expert_weight(model):
    names = names_of_megatron_fsdp(model, "local")
    weights = {name: torch.zeros(2) for name in names} | {"module.language_model.output_layer._extra_state": None}
    found = {f"model.{name}": None for name in names_of_megatron_fsdp(model, "te")}
    found = {name: None for name in found if "layers.2.mlp.experts.linear_fc2.weight3" not in name}
    _, problems = weight_loading.find_renamed_weights(weights, found, model)
    expert = "model.module.language_model.decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"
    assert problems == [f"missing: {expert} [2]"]


@pytest.fixture
def fsdp_state(model, monkeypatch):
    """Return a model and a checkpoint with real names only, and record what is loaded."""
    found = {f"model.{name}": None for name in names_of_megatron_fsdp(model, "te")}
    reader = types.SimpleNamespace(read_metadata=lambda: types.SimpleNamespace(state_dict_metadata=found))
    monkeypatch.setattr(checkpointing, "_get_filesystem_reader", lambda folder: reader)
    monkeypatch.setattr(checkpointing, "preprocess_fsdp_dtensor_state_dict", lambda cfg, state, chunk: state)
    monkeypatch.setattr(weight_loading.dcp, "load", lambda state, storage_reader: read.append(state))
    chunk, read = torch.nn.Module(), []
    chunk.config = model
    state = {"model": {name: torch.zeros(2) for name in names_of_megatron_fsdp(model, "local")}, "_model": [chunk]}
    return types.SimpleNamespace(found=found, state=state, read=read, chunk=chunk)


def load(state, **more):
    def theirs(load_dir, ckpt_cfg, rank0, sharded_state_dict, iteration, release=False, checkpoint_path_override=None,
               checkpointing_context=None, cfg=None):  # fmt: skip
        return "theirs"

    arguments = dict(load_dir="RUN", ckpt_cfg=None, rank0=False, sharded_state_dict=state, iteration=3)
    return weight_loading.load_fsdp_weights(theirs, **arguments | more)


def test_load_fsdp_weights_requests_weights_under_names_of_checkpoint(fsdp_state):
    assert load(fsdp_state.state) == "theirs"
    (read,) = fsdp_state.read
    assert read["model"].keys() < {name.removeprefix("model.") for name in fsdp_state.found}
    assert all(any(tensor is own for own in fsdp_state.state["model"].values()) for tensor in read["model"].values())


def test_load_fsdp_weights_raises_if_optimizer_state_is_renamed(fsdp_state):
    fsdp_state.state["optimizer"] = {"state": {}}
    load(fsdp_state.state)  # the checkpoint has no optimizer state
    fsdp_state.found["optimizer.state.module.x.exp_avg"] = None
    with pytest.raises(
        CheckpointError, match=r"RUN.* its optimizer state uses the parameter names of that spec: .*load_optim=False"
    ):
        load(fsdp_state.state)


def test_load_fsdp_weights_for_foreign_provider_calls_megatron_bridge(fsdp_state):
    fsdp_state.chunk.config = types.SimpleNamespace()
    assert load(fsdp_state.state) == load(None, rank0=True) == "theirs"
    assert fsdp_state.read == []
