"""Runs that resume with other trained components, and parameters that stay exact in float32."""

import json
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, merge_adapters
from qwen3vl_bridge.models.common import linear_attention
from qwen3vl_bridge.training.weight_loading import load_model

import pytest
import torch
from megatron.bridge import AutoBridge
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.helpers.steps import Run, save, set_up, train_step
from tests.models.qwen3_5.test_linear_attention import attention, renamed
from tests.models.qwen3_5.tiny import FLOAT32, hf_text_config, megatron_config, one_rank, perturb, weights
from tests.training.adapters.test_peft_run import CASES
from tests.training.running import Inputs, replicate, replicated, sharded, stored, train

FACTOR = "model__mtp_loss_scaling_factor"
STEPS = dict(train__train_iters=6, validation__eval_iters=0, scheduler__lr_warmup_iters=0)
NUMBERED = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)


@pytest.fixture(scope="module")
def inputs(qwen3_5_folders, digits) -> Inputs:
    return Inputs(qwen3_5_folders["dense"], digits, qwen3_5_folders["dense"])


def run(make, inputs: Inputs, into: Path, load: Path | None = None, **settings):
    return set_up(make(inputs, into, **STEPS | dict(checkpoint__load=str(load or into)) | settings))


def step(made) -> dict[str, torch.Tensor]:
    train_step(made)
    save(made)
    return stored(Path(made.cfg.checkpoint.save))


def weights_resume(tensors: dict[str, torch.Tensor], *, mtp: bool) -> dict[str, torch.Tensor]:
    return {
        key: one
        for key, one in tensors.items()
        if "language_model." in key and not key.startswith(("optimizer", "rng")) and (".mtp." in key) == mtp
    }


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys() and ours
    return all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [replicated, pytest.param(sharded, marks=pytest.mark.slow)], ids=["distributed optimizer", "Megatron-FSDP"]
)
def test_resume_that_starts_training_mtp_raises_unless_load_optim_is_false(make, inputs, tmp_path):
    kept, trained, again = (tmp_path / name for name in ("kept", "trained", "again"))
    first = step(run(make, inputs, kept, **{FACTOR: 0.0}))
    message = "mtp_loss_scaling_factor is 0.1, the checkpoint has 0.0: .* does not have the state of .*load_optim=false"
    with pytest.raises(CheckpointError, match=message):
        run(make, inputs, trained, kept, **{FACTOR: 0.1})
    made = run(make, inputs, trained, kept, **{FACTOR: 0.1}, checkpoint__load_optim=False)
    assert made.progress.step == 1
    second = step(made)
    assert not same(weights_resume(first, mtp=True), weights_resume(second, mtp=True))
    made = run(make, inputs, again, trained, **{FACTOR: 0.0})  # the other parameters' state is loaded
    third = step(made)
    assert made.progress.step == 3
    before, after = (weights_resume(one, mtp=True) for one in (second, third))
    if make is sharded:  # Megatron-FSDP has frozen parameters in bfloat16 alone
        before = {key: one.bfloat16() for key, one in before.items()}
    assert same(before, after)
    assert not same(weights_resume(second, mtp=False), weights_resume(third, mtp=False))
    assert not any(".mtp." in key for key in third if key.startswith("optimizer"))
    with pytest.raises(CheckpointError, match=r"mtp_loss_scaling_factor is 0.1"):
        run(make, inputs, tmp_path / "more", again, **{FACTOR: 0.1})


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("change", [(0.0, 0.1), (0.1, 0.0)])
def test_resume_with_optimizer_state_by_index_raises_if_mtp_changes(change, inputs, tmp_path):
    before, after = change
    step(run(replicated, inputs, tmp_path / "before", **{FACTOR: before}, **NUMBERED))
    with pytest.raises(
        CheckpointError, match=f"is {after}, the checkpoint has {before}: .* by index, and fits only the same"
    ):
        run(replicated, inputs, tmp_path / "after", tmp_path / "before", **{FACTOR: after}, **NUMBERED)


@pytest.mark.slow
def test_resume_that_unfreezes_component_raises_unless_load_optim_is_false(inputs, tmp_path):
    frozen, later = tmp_path / "frozen", tmp_path / "later"
    step(run(replicated, inputs, frozen, model__freeze_vision_model=True))
    with pytest.raises(CheckpointError, match=r"freeze_vision_model is False, the checkpoint has True: .*load_optim="):
        run(replicated, inputs, later, frozen)
    step(run(replicated, inputs, later, frozen, checkpoint__load_optim=False))
    made = run(replicated, inputs, tmp_path / "last", later, model__freeze_vision_model=True)
    assert made.progress.step == 2


OURS = (".A_log", ".out_norm.weight")
WRAPPERS = {
    "replicated": lambda cfg: replicate(cfg), "distributed optimizer": lambda cfg: replicate(cfg, distributed=True),
    "Megatron-FSDP": lambda cfg: cfg,
}  # fmt: skip
wrapped = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())


@pytest.fixture(scope="module")
def released_inputs(released, digits) -> Inputs:
    return Inputs(released, digits, released)


def config_of(inputs: Inputs, save: Path | None, wrap, **settings):
    common = dict(train__train_iters=2, validation__eval_iters=0, scheduler__lr_warmup_iters=0)
    return wrap(sharded(inputs, save, **common | settings))


def moved(found: dict[str, Tensor], expected: dict[str, Tensor]) -> set[str]:
    assert found.keys() == expected.keys()
    return {
        name for name, one in expected.items() if found[name].dtype != one.dtype or not torch.equal(found[name], one)
    }


def text(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in tensors.items() if not name.startswith("model.visual.")}


@pytest.mark.one_case_in(3)
@wrapped
def test_export_keeps_frozen_language_model_after_training_vision_tower(released_inputs, wrap, tmp_path):
    """Only the tower is trained. The export casts all tensors to the dtypes of the released file."""
    assert train(config_of(released_inputs, tmp_path / "run", wrap, model__freeze_language_model=True))
    export_checkpoint(tmp_path / "run", tmp_path / "kept", progress=False)
    export_checkpoint(tmp_path / "run", tmp_path / "cast", torch_dtype="bfloat16", progress=False)
    before, kept, cast = (weights(folder) for folder in (released_inputs.hf, tmp_path / "kept", tmp_path / "cast"))
    assert len(text(before)) == 71 and not moved(text(kept), text(before)) and not moved(text(cast), text(before))
    assert {name for name in moved(cast, before) if name.startswith("model.visual.")}
    (tower,) = {one.dtype for name, one in kept.items() if name.startswith("model.visual.")}
    assert tower is (torch.float32 if wrap is WRAPPERS["Megatron-FSDP"] else torch.bfloat16)
    for folder, dtype in (("kept", tower), ("cast", torch.bfloat16)):  # the tower is most of this model
        said = json.loads((tmp_path / folder / "config.json").read_text())
        assert {f"torch.{said['dtype']}", f"torch.{said['text_config']['dtype']}"} == {str(dtype)}


def parameters(run: Run) -> dict[str, Tensor]:
    named = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in run.model[0].named_parameters())
    return {name: one.detach().clone() for name, one in named}


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by index"])
@wrapped
def test_resumed_run_with_float32_parameters_equals_uninterrupted_run(released_inputs, wrap, by_name, tmp_path):
    """Optimizer states belong to their parameters, and a resumed run is equal to the last bit."""
    if not by_name and wrap is not WRAPPERS["distributed optimizer"]:
        pytest.skip("only that optimizer's state can be saved by index")
    how = dict(checkpoint__dist_ckpt_optim_fully_reshardable=by_name)
    run = set_up(config_of(released_inputs, tmp_path, wrap, **how))
    before = parameters(run)
    assert {name.endswith(OURS) for name, one in before.items() if one.dtype is torch.float32} == {True} or (
        wrap is WRAPPERS["Megatron-FSDP"]  # whose parameters between steps are the main ones
    )
    train_step(run)
    save(run)
    found = stored(tmp_path)
    weight = {name: one for name, one in found.items() if not name.startswith("optimizer") and one.is_floating_point()}
    kept = {name for name in weight if name.endswith(OURS)}
    assert kept and all(weight[name].dtype is torch.float32 for name in kept)
    assert any(not torch.equal(weight[name].bfloat16().float(), weight[name]) for name in kept)
    mains = {
        name: found[key]
        for name in weight
        for key in (f"optimizer.state.param.{name}", f"optimizer.state.fp32_param.{name}")
        if key in found
    }
    assert mains.keys() >= kept or not by_name or wrap is WRAPPERS["Megatron-FSDP"]
    for name, main in mains.items():
        assert torch.equal(main.to(weight[name].dtype), weight[name]), name
    train_step(run)
    expected = parameters(run)
    run = set_up(config_of(released_inputs, tmp_path, wrap, **how))
    train_step(run)
    assert not moved(parameters(run), expected) and moved(expected, before)


@pytest.mark.one_case_in(3)
@wrapped
def test_adapter_training_keeps_float32_parameters_of_base_model_exact(released_inputs, wrap, tmp_path):
    """The base model is loaded exactly and merged unchanged, because it is served with the adapters."""
    cfg = config_of(released_inputs, tmp_path / "run", wrap)
    cfg.peft = CASES["linear attention"]()
    run = set_up(cfg)
    exact = {name: one.float() - int(name.endswith(FLOAT32[1])) for name, one in weights(released_inputs.hf).items()}
    ours = {name: one for name, one in parameters(run).items() if name.endswith(OURS)}
    assert len(ours) == 6 and all(one.dtype is torch.float32 for one in ours.values())
    for name, one in ours.items():
        number, _, last = name.rpartition("decoder.layers.")[2].partition(".self_attention.")
        theirs = {"A_log": "A_log", "out_norm.weight": "norm.weight"}[last]
        assert torch.equal(one.flatten(), exact[f"model.language_model.layers.{number}.linear_attn.{theirs}"]), name
    train_step(run)
    save(run)
    merge_adapters(tmp_path / "run", tmp_path / "merged", progress=False)
    changed = moved(weights(tmp_path / "merged"), weights(released_inputs.hf))
    assert changed and not any(name.endswith(FLOAT32) for name in changed)


@pytest.mark.parametrize("name", ["released", "released_3_6"])
def test_autobridge_export_keeps_values_of_float32_parameters(name, request, tmp_path):
    """Qwen3.6 has them in bfloat16. They become float32 with the same values."""
    folder = request.getfixturevalue(name)
    model, bridge = load_model(folder), AutoBridge.from_hf_pretrained(str(folder))
    bridge.save_hf_pretrained(model, str(tmp_path), show_progress=False)
    before = {name: one.float() if name.endswith(FLOAT32) else one for name, one in weights(folder).items()}
    assert not moved(weights(tmp_path), before)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_float32_parameters_stored_in_bfloat16_are_float32_after_loading(released_3_6, ckpt_format, tmp_path):
    """Megatron-Bridge's own model saves them so. They are float32 after loading."""
    expected = {name: one.clone() for name, one in load_model(released_3_6)[0].named_parameters()}
    import_checkpoint(released_3_6, tmp_path, ckpt_format=ckpt_format)
    found = dict(load_model(released_3_6, tmp_path)[0].named_parameters())
    assert not moved(found, expected) and {one.dtype for one in found.values()} == {torch.float32, torch.bfloat16}


def test_save_hf_pretrained_writes_dtype_and_zero_mtp_layers_to_config(qwen3_5_folders, tmp_path):
    """Also for a model without multi-token prediction, or with another precision than its file."""
    bridge = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["dense"]))
    provider = bridge.to_megatron_provider()
    provider.mtp_num_layers, provider.bf16, provider.params_dtype = None, True, torch.bfloat16
    provider.finalize()
    one_rank()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_hf_pretrained(model, str(tmp_path), show_progress=False)
    said = json.loads((tmp_path / "config.json").read_text())
    assert not any(name.startswith("mtp.") for name in weights(tmp_path))
    assert said["text_config"]["mtp_num_hidden_layers"] == 0
    assert {said["dtype"], said["text_config"]["dtype"]} == {"bfloat16"}
    loaded = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path)
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}


def test_casting_model_to_16_bits_keeps_float32_parameters():
    module = attention()
    module.A_log.data.uniform_(-3, 0)
    module.out_norm.weight.data.uniform_(-0.5, 0.5)
    before = {name: (one, one.detach().clone()) for name, one in module.named_parameters()}
    for cast in (nn.Module.bfloat16, nn.Module.half, lambda one: one.to(torch.bfloat16), nn.Module.float):
        cast(module)
        for name in ("A_log", "out_norm.weight"):
            found, (parameter, values) = module.get_parameter(name), before[name]
            assert found is parameter and found.dtype is torch.float32 and torch.equal(found, values)
        assert module.A_log.tensor_model_parallel
    assert not torch.equal(module.dt_bias + 0.1, before["dt_bias"][1])  # the others are cast
    assert module.double().A_log.dtype is torch.float64
    assert attention(torch.bfloat16).to("meta").to_empty(device="cpu").bfloat16().A_log.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_attention_in_16_bits_is_as_accurate_as_transformers(dtype):
    """Both are compared with the layer in float32; the noise is that of transformers' layer in 16 bits."""
    exact, theirs = perturb(Qwen3_5GatedDeltaNet(hf_text_config(), 0)), Qwen3_5GatedDeltaNet(hf_text_config(), 0)
    theirs.to(dtype)
    theirs.A_log.data, theirs.norm.weight.data = theirs.A_log.data.float(), theirs.norm.weight.data.float()
    theirs.load_state_dict(exact.state_dict())
    exact.load_state_dict(theirs.state_dict())  # rounded where the others are
    module = attention(dtype)
    module.load_state_dict(renamed(theirs.state_dict(), norm_shift=-1), strict=False)
    x = torch.randn(2, 150, megatron_config().hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        expected = exact(x.float())
        noise = (theirs(x).float() - expected).abs().mean()
        found, _ = module(x.transpose(0, 1).contiguous(), None)
    error = (found.transpose(0, 1).float() - expected).abs().mean()
    print(f"{dtype}: {error:.1e}, transformers {noise:.1e}")
    assert found.dtype is dtype and error <= 1.5 * noise  # measured 1.2


@pytest.mark.parametrize(("settings", "message"), [
    (dict(dist__use_torch_fsdp2=True), r"dist.use_torch_fsdp2 is True, expected False: .*ddp.use_meg"),
    (dict(optimizer__optimizer="dist_muon"), r"optimizer.optimizer is 'dist_muon' with .*, expected 'adam'.* '"),
    (dict(optimizer__use_layer_wise_distributed_optimizer=True), r"layer_wise\S+ is True with .*, expected False"),
    (dict(model__virtual_pipeline_model_parallel_size=2, ddp__grad_reduce_in_fp32=False),
     r"ddp.grad_reduce_in_fp32 is False with .*virtual_pipeline_model_parallel_size 2 and .*, expected True"),
])  # fmt: skip
def test_validate_raises_if_setting_needs_single_parameter_dtype(released_inputs, settings, message):
    cfg = config_of(released_inputs, None, WRAPPERS["replicated"], **settings)
    cfg.mixed_precision, cfg.model.bf16, cfg.model.params_dtype = None, True, torch.bfloat16
    with pytest.raises(ValueError, match=message):
        cfg.validate()
    cfg.model.freeze_language_model = True
    with pytest.raises(ValueError) as later:
        cfg.validate()
        raise ValueError("nothing else is wrong")
    assert "float32" not in str(later.value)


@pytest.mark.slow
def test_resume_raises_if_checkpoint_has_rounded_float32_parameters(released_inputs, tmp_path, monkeypatch):
    """Megatron-Bridge's own model saves such states. Resuming raises; its weights can be loaded."""
    how = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)
    with monkeypatch.context() as patch:
        patch.setattr(linear_attention.LinearAttention, "float32_parameters", ())
        run = set_up(config_of(released_inputs, tmp_path, WRAPPERS["distributed optimizer"], **how))
    assert {one.dtype for one in parameters(run).values()} == {torch.bfloat16}
    train_step(run)
    save(run)
    with pytest.raises(CheckpointError, match=r"stores language_model\.\S+\.A_log in 16 .*by index.*load_optim=false"):
        set_up(config_of(released_inputs, tmp_path, WRAPPERS["distributed optimizer"], **how))
    run = set_up(
        config_of(released_inputs, tmp_path, WRAPPERS["distributed optimizer"], checkpoint__load_optim=False, **how)
    )
    assert run.progress.step == 1 and {one.dtype for one in parameters(run).values()} == {torch.bfloat16, torch.float32}
