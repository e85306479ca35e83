"""Runs start from initial weights in any format, loaded before the model is wrapped, and resume."""

import shutil

from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.checkpoint import CheckpointError, import_checkpoint
from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training.callbacks import training_callbacks
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.resuming import has_checkpoint
from qwen3vl_bridge.training.weight_loading import _allocate_on_host

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import runtime_config_update
from safetensors.torch import load_file

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import SEEDS, allowed, check, rounded_folder
from tests.training.bridges_loop import Start, run, run_all

pytestmark = pytest.mark.slow

_SECONDS = 1800  # about 120 on a quiet machine; limits a hang
KINDS = ("Hugging Face", "fsdp_dtensor", "torch_dist")
TP2, EP2 = dict(model__tensor_model_parallel_size=2), dict(model__expert_model_parallel_size=2)
ON_HOST = dict(model__init_model_with_meta_device=True)
LORA = dict(dim=4, alpha=8)
MEANS = dict(model__calculate_per_token_loss=False)


@pytest.fixture(scope="module")
def weights(inputs, moe_folder, tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for name, hf in (("dense", inputs.hf), ("MoE", moe_folder)):
        for ckpt_format in KINDS[1:]:
            import_checkpoint(hf, folder / name / ckpt_format, ckpt_format=ckpt_format, progress=False)
        found[name] = {KINDS[0]: hf, **{kind: folder / name / kind for kind in KINDS[1:]}}
    return found


def steps(count: int, **settings) -> dict[str, object]:
    return dict(train__train_iters=count, checkpoint__save_interval=2) | settings


@pytest.fixture(scope="module")
def found(weights, inputs, tied_folder, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")

    def start(name, kind, count, model="dense", save=None, first=None, settings=TP2, **others):
        save = None if save is None else str(saved / save)
        first = str(first or weights[model][kind])
        hf, data = str(weights[model][KINDS[0]]), str(inputs.data)
        return Start(name, hf, data, first, save, steps(count, **settings), **others)

    hf, fsdp, dist = KINDS
    sharded = dict(settings={}, fsdp=True, bf16=True, save="sharded")
    shared = dict(settings={}, distributed=True)
    chain = [(n + 1, sizes | dict(checkpoint__save_interval=1)) for n, sizes in enumerate((EP2, {}, EP2))]
    # Resumed runs name other initial weights, which would raise an error if they were loaded.
    starts = [
        *(start(f"split, {kind}", kind, 2, save="split" if kind == fsdp else None) for kind in KINDS),
        start("split, goes on", None, 4, first=tied_folder, save="split"),
        *(start(f"experts, {kind}", kind, 1, model="MoE", settings=EP2) for kind in (fsdp, dist)),
        *(start(f"experts, {n} steps", hf, n, model="MoE", settings=sizes, save="EP") for n, sizes in chain),
        start("experts, unsplit", hf, 3, model="MoE", settings={}),
        start("sharded, exact", hf, 4, fsdp=True, settings={}),
        start("sharded, made on the host", hf, 2, fsdp=True, settings=ON_HOST), start("sharded", dist, 2, **sharded),
        start("sharded, goes on", None, 4, first=tied_folder, **sharded | dict(settings=ON_HOST)),
        start("sharded, whole", dist, 4, **sharded | dict(save=None)), start("distributed, whole", hf, 4, **shared),
        start("distributed", hf, 2, save="distributed", **shared),
        start("distributed, goes on", None, 4, first=tied_folder, save="distributed", **shared),
        start("adapters, whole", hf, 4, peft=LORA), start("adapters", fsdp, 2, peft=LORA, save="adapters"),
        start("adapters, go on", dist, 4, peft=LORA, save="adapters"),
        start("of another model", None, 1, first=tied_folder),
        start("adapters alone", None, 1, first=saved / "adapters"), start("per microbatch", hf, 2, settings=MEANS),
    ]  # fmt: skip
    return results_of_ranks(run_all, 2, starts, timeout=_SECONDS)


def alone(inputs, count: int, hf=None, bf16: bool = False, **settings) -> list[tuple[float, float]]:
    hf = str(hf or inputs.hf)
    return run(Start("whole", hf, str(inputs.data), hf, None, steps(count, **settings), bf16=bf16))["log"]


@pytest.fixture(scope="module")
def expected(inputs) -> list[tuple[float, float]]:
    return alone(inputs, 4)


def errors(log, expected) -> dict[str, float]:
    pairs = list(zip(log, expected, strict=True))
    return {name: max(abs(one[i] / other[i] - 1) for one, other in pairs) for i, name in enumerate(("loss", "norm"))}


@pytest.fixture(scope="module")
def most(inputs, tmp_path_factory) -> dict[torch.dtype, dict[str, float]]:
    root, limits = tmp_path_factory.mktemp("neighbours"), {}
    for dtype in (torch.float32, torch.bfloat16):
        folders = [rounded_folder(inputs.hf, root / f"{dtype}{seed}", seed, dtype) for seed in SEEDS[:2]]
        log, *near = (alone(inputs, 4, hf=hf, bf16=dtype is torch.bfloat16) for hf in (inputs.hf, *folders))
        limits[dtype] = allowed([errors(one, log) for one in near], dtype)
    return limits


def same_as(folder, exported) -> bool:
    stored = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    return exported.keys() == stored.keys() and all(torch.equal(exported[name], t) for name, t in stored.items())


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_run_starts_from_any_checkpoint_format(found, expected, most, inputs, kind):
    run = found[f"split, {kind}"]
    assert run["first_step"] == 0 and same_as(inputs.hf, run["weights"])
    check(errors(run["log"], expected[:2]), most[torch.float32])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_expert_parallel_run_starts_from_each_megatron_format(found, moe_folder, kind):
    run = found[f"experts, {kind}"]
    assert run["first_step"] == 0 and same_as(moe_folder, run["weights"]) and len(run["log"]) == 1


def test_loss_on_two_ranks_without_per_token_loss_matches_one_process(found, most, inputs):
    """`calculate_per_token_loss=False` on two data-parallel ranks still reports the mean over tokens."""
    log, right = found["per microbatch"]["log"], alone(inputs, 2, **MEANS)
    check(errors(log, right), most[torch.float32])


def test_moe_run_resumed_with_changed_ep_size_matches_one_process(found, most):
    """EP 2, then EP 1 on both ranks, then EP 2 again."""
    chain = [found[f"experts, {n} steps"] for n in (1, 2, 3)]
    assert [run["first_step"] for run in chain] == [0, 1, 2]
    log = [step for run in chain for step in run["log"]]
    check(errors(log, found["experts, unsplit"]["log"]), most[torch.float32])
    warned = [[line for line in run["warnings"] if "random states" in line] for run in chain]
    split, whole = "PP 1, TP 1, DP with EP 2", "PP 1, TP 1"
    assert not warned[0] and len(warned[1]) == len(warned[2]) == 1
    assert f"has random states for {split}, and this run has {whole}:" in warned[1][0]
    assert f"has random states for {whole}, and this run has {split}:" in warned[2][0]


@pytest.mark.parametrize(("name", "step"), [("split, goes on", 2), ("sharded, exact", 0)])
def test_run_from_checkpoint_or_initial_weights_matches_one_process(found, expected, most, name, step):
    run = found[name]
    assert run["first_step"] == step
    check(errors(run["log"], expected[step:]), most[torch.float32])


def test_fsdp_run_losses_do_not_depend_on_meta_device_init(found):
    """`cfg.model.init_model_with_meta_device`, as in Megatron-Bridge's recipes for Megatron-FSDP."""
    run = found["sharded, made on the host"]
    assert run["first_step"] == 0 and run["log"] == found["sharded, exact"]["log"][:2]


def test_fsdp_run_from_torch_dist_checkpoint_resumes_bit_exactly(found, expected, most):
    """Also covers ranks that have no elements of some parameters of this small model."""
    first, second = found["sharded"], found["sharded, goes on"]
    log = first["log"] + second["log"]
    assert (first["first_step"], second["first_step"]) == (0, 2)
    check(errors(log, expected), most[torch.bfloat16])
    assert log == found["sharded, whole"]["log"]


def test_run_with_distributed_optimizer_resumes_bit_exactly(found, expected, most):
    first, second = found["distributed"], found["distributed, goes on"]
    assert (first["first_step"], second["first_step"]) == (0, 2)
    assert first["log"] + second["log"] == found["distributed, whole"]["log"]
    check(errors(found["distributed, whole"]["log"], expected), most[torch.float32])


def test_lora_run_resumed_equals_uninterrupted_run_bit_exactly(found, expected, most, inputs):
    whole, first, second = (found[f"adapters{name}"] for name in (", whole", "", ", go on"))
    assert same_as(inputs.hf, first["weights"])  # adapters add nothing yet
    check({"loss": errors(first["log"][:1], expected[:1])["loss"]}, most[torch.float32])
    assert (first["first_step"], second["first_step"]) == (0, 2)
    assert first["log"] + second["log"] == whole["log"]


@pytest.mark.parametrize(("name", "message"), [
    ("of another model", "holds a different model from the run's"),
    ("adapters alone", "holds only the adapters and other parameters"),
])  # fmt: skip
def test_set_up_raises_if_initial_weights_are_adapters_or_of_different_model(found, name, message):
    assert message in found[name]["error"] and found[name]["error"].startswith("CheckpointError")


class TestConfiguration:
    @pytest.fixture
    def cfg(self, inputs):
        hf = str(inputs.hf)
        cfg = Start("whole", hf, str(inputs.data), hf, None, steps(1)).config()
        training_callbacks(cfg)
        initialize(cfg.model, seed=0)
        return cfg

    def build(self, cfg):
        runtime_config_update(cfg)
        return cfg.model.provide_distributed_model(
            ddp_config=cfg.ddp, use_cpu_initialization=True, pg_collection=cfg.model._pg_collection
        )

    def exported(self, cfg, model):
        bridge = AutoBridge.from_hf_pretrained(cfg.model.hf_model_id)
        return dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))

    @pytest.mark.parametrize("kind", KINDS)
    def test_built_model_has_weights_of_pretrained_checkpoint(self, cfg, weights, inputs, kind):
        cfg.checkpoint.pretrained_checkpoint = str(weights["dense"][kind])
        cfg.validate()  # a second time changes nothing
        assert same_as(inputs.hf, self.exported(cfg, self.build(cfg)))
        assert len(cfg.model._pre_wrap_hooks) == len(cfg.model._post_wrap_hooks) == 1

    def test_initial_weights_are_not_loaded_if_run_has_checkpoint(self, cfg, weights, inputs, tmp_path):
        cfg.checkpoint.save = cfg.checkpoint.load = str(tmp_path)
        assert not has_checkpoint(cfg.checkpoint)
        assert Qwen3VLCheckpointManager(cfg.checkpoint).load(None) == (0, 0)
        shutil.copytree(weights["dense"]["torch_dist"], tmp_path, dirs_exist_ok=True)
        assert has_checkpoint(cfg.checkpoint)
        assert not same_as(inputs.hf, self.exported(cfg, self.build(cfg)))

    def test_validate_adds_no_initial_weights_hook_for_custom_checkpoint_manager(self, cfg):
        own = cfg.checkpoint.custom_manager_class = "qwen3vl_bridge.mine.Manager"
        cfg.validate()
        assert cfg.checkpoint.custom_manager_class == own and cfg.model.pre_wrap_hook is None

    def test_fsdp_run_raises_if_model_to_save_is_float32(self, inputs, tmp_path):
        def cfg(**given):
            places = str(inputs.hf), str(inputs.data), None, str(tmp_path)
            made = Start("sharded", *places, steps(1), **given).config()
            training_callbacks(made)
            return made

        for given in (dict(fsdp=True, bf16=True), dict()):
            runtime_config_update(cfg(**given))
        with pytest.raises(ValueError, match="the model is in float32, which Megatron-FSDP can train but not save"):
            runtime_config_update(cfg(fsdp=True))

    @pytest.mark.parametrize(("settings", "message"), [
        (dict(ddp__use_megatron_fsdp=False), "ddp.use_megatron_fsdp is False with .*, expected True"),
        (dict(model__tensor_model_parallel_size=2), "model.tensor_model_parallel_size is 2 with .*, expected 1"),
        (dict(checkpoint__pretrained_checkpoint=None), "pretrained_checkpoint is None with .*, expected a checkpoint"),
    ])  # fmt: skip
    def test_meta_device_init_raises_if_setting_is_unsupported(self, cfg, settings, message):
        for name, value in (ON_HOST | dict(ddp__use_megatron_fsdp=True) | settings).items():
            section, _, field = name.partition("__")
            setattr(getattr(cfg, section), field, value)
        with pytest.raises(ValueError, match=message):
            run_checks(run_validation.ON_META_DEVICE, cfg)

    def test_allocate_on_host_raises_if_buffers_are_on_meta_device(self):
        module = torch.nn.BatchNorm1d(3, device="meta")
        with pytest.raises(CheckpointError, match=r"no values for the buffers .*running_mean, running_var, "):
            _allocate_on_host(module)

    def test_allocate_on_host_keeps_attributes_and_sharing_of_parameters(self):
        with torch.device("meta"):
            one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        two.weight = one.weight
        one.weight.allreduce = False
        one.bias.requires_grad_(False)
        _allocate_on_host(model := torch.nn.Sequential(one, two))
        assert one.weight is two.weight and one.weight.allreduce is False and not one.bias.requires_grad
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}

    def test_peft_setting_is_restored_after_failed_model_setup(self, cfg):
        def fail(chunks):
            raise RuntimeError("no room")

        cfg.peft = peft = Qwen3VLLoRA(**LORA)
        cfg.validate()
        cfg.model.register_pre_wrap_hook(fail)
        with pytest.raises(RuntimeError, match="no room"):
            self.build(cfg)
        cfg.model._pre_wrap_hooks.remove(fail)
        (model,) = self.build(cfg)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert cfg.peft is peft and trained and all(".adapter." in name for name in trained)

    def test_build_raises_if_pretrained_checkpoint_folder_has_no_checkpoint(self, cfg, tmp_path):
        cfg.checkpoint.pretrained_checkpoint = str(tmp_path)
        with pytest.raises(CheckpointError, match="is not a Megatron checkpoint"):
            self.build(cfg)
