"""Overrides by arguments and YAML files change the configuration, or raise an error before anything starts."""

from qwen3vl_bridge import Qwen3VLLoRA

import pytest
import torch
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.mixed_precision import bf16_mixed
from qwen3vl_recipes import (
    overrides,
    qwen3_vl_8b_peft_config,
    qwen3_vl_8b_sft_config,
    qwen3_vl_30b_a3b_peft_config,
    setting_names,
)
from qwen3vl_recipes.dry_run import finalize_copy
from qwen3vl_recipes.registry import recipes


@pytest.fixture
def cfg():
    return qwen3_vl_8b_sft_config()


def test_apply_reads_override_files_in_order_and_then_command_line(cfg, tmp_path):
    file, other = tmp_path / "one.yaml", tmp_path / "two.yaml"
    file.write_text("train:\n  global_batch_size: 64\n  train_iters: 7\noptimizer:\n  lr: 2.0e-5\n")
    other.write_text("train:\n  train_iters: 8\n")
    words = ["optimizer.lr=3e-5", "dataset.path=/data", "model.freeze_vision_model=true", "guard.on_nan=skip"]
    overrides.apply(cfg, words, [file, other])
    assert (cfg.train.global_batch_size, cfg.train.train_iters, cfg.optimizer.lr) == (64, 8, 3e-5)
    assert cfg.dataset.path == "/data" and cfg.model.freeze_vision_model and cfg.guard.on_nan == "skip"


def test_apply_changes_only_settings_named_by_overrides(cfg):
    before = qwen3_vl_8b_sft_config()
    vision, dtype = cfg.model.vision_config, cfg.model.params_dtype
    overrides.apply(cfg, ["train.train_iters=3"])
    assert cfg.model.vision_config is vision and cfg.model.params_dtype is dtype
    before.train.train_iters = 3
    assert cfg.to_dict() == before.to_dict()


def test_apply_copies_weight_decay_to_scheduler_unless_scheduler_is_overridden(cfg):
    """megatron-core's scheduler replaces the optimizer's weight decay in each step."""
    overrides.apply(cfg, ["optimizer.weight_decay=0.05"])
    assert cfg.scheduler.start_weight_decay == cfg.scheduler.end_weight_decay == cfg.optimizer.weight_decay == 0.05
    overrides.apply(cfg, ["optimizer.weight_decay=0.01", "scheduler.end_weight_decay=0.2"])
    assert (cfg.scheduler.start_weight_decay, cfg.scheduler.end_weight_decay) == (0.01, 0.2)


@pytest.mark.usefixtures("no_groups")
def test_short_run_shortens_warmup_of_recipe_but_not_of_user_override(cfg, caplog, tmp_path):
    """A warm-up from the command line is never shortened; too long, it raises an error."""
    with caplog.at_level("INFO", logger="qwen3vl_bridge"):
        short = finalize_copy(overrides.apply(cfg, ["train.train_iters=40"]), 8)
    assert short.scheduler.lr_warmup_iters == 2 and short.scheduler.lr_warmup_steps == 2 * 32
    assert "the recipe's scheduler.lr_warmup_iters of 50 is shortened to 2: train.train_iters is 40" in caplog.messages
    same = overrides.apply(qwen3_vl_8b_sft_config(), ["train.train_iters=51"])
    assert finalize_copy(same, 8).scheduler.lr_warmup_iters == 50
    other = overrides.apply(qwen3_vl_8b_sft_config(), ["train.train_iters=40", "scheduler.lr_warmup_init=1e-8"])
    assert finalize_copy(other, 8).scheduler.lr_warmup_iters == 2
    (tmp_path / "own.yaml").write_text("scheduler:\n  lr_warmup_iters: 50\n")
    given = overrides.apply(qwen3_vl_8b_sft_config(), ["train.train_iters=40"], [tmp_path / "own.yaml"])
    with pytest.raises(ValueError, match=r"lr_warmup_iters is 50 with train\.train_iters 40"):
        finalize_copy(given, 8)
    given = overrides.apply(qwen3_vl_8b_sft_config(), ["train.train_iters=40", "scheduler.lr_warmup_iters=50"])
    with pytest.raises(ValueError, match=r"lr_warmup_iters is 50 with train\.train_iters 40"):
        finalize_copy(given, 8)


def test_apply_overrides_settings_with_default_none(cfg):
    words = ["dataset.max_patches=4096", "optimizer_config_override_provider.vision_model_lr=1e-6"]
    words += ["train.exit_duration_in_mins=30", "logger.tensorboard_dir=/logs", "checkpoint.ckpt_step=3", "guard=null"]
    overrides.apply(cfg, words)
    assert cfg.dataset.max_patches == 4096 and cfg.optimizer_config_override_provider.vision_model_lr == 1e-6
    assert cfg.train.exit_duration_in_mins == 30 and cfg.logger.tensorboard_dir == "/logs" and cfg.guard is None


@pytest.mark.parametrize("name", [
    "qwen3_vl_2b_sft_fsdp_config", "qwen3_vl_30b_a3b_sft_dist_train_config", "qwen35_vl_35b_a3b_peft_config",
    "qwen3_vl_2b_peft_dora_config",
])  # fmt: skip
def test_check_names_accepts_all_settings_of_recipes(name):
    cfg = recipes()[name]()
    cfg.mixed_precision, cfg.comm_overlap = bf16_mixed(), CommOverlapConfig(tp_comm_overlap=False)
    names = overrides._flat(overrides._settings(cfg)[0])
    assert len(names) > 700
    setting_names.check_names(names)


def test_apply_override_sets_nested_vision_settings(cfg):
    overrides.apply(cfg, ["dataset.vision.image_max_pixels=50176", "dataset.vision.video_fps=0.5"])
    assert cfg.dataset.vision.image_max_pixels == 50176 and cfg.dataset.vision.video_fps == 0.5


def test_apply_raises_if_media_root_is_neither_text_nor_list(cfg):
    assert overrides.apply(cfg, ["dataset.media_root=/mnt/coco"]).dataset.media_root == "/mnt/coco"
    assert overrides.apply(cfg, ["dataset.media_root=[/a,/b]"]).dataset.media_root == ["/a", "/b"]
    assert overrides.apply(cfg, ["dataset.media_root=/c"]).dataset.media_root == "/c"
    with pytest.raises(ValueError, match=r"dataset.media_root is 3, expected text such as '/c'"):
        overrides.apply(cfg, ["dataset.media_root=3"])
    cfg = overrides.apply(qwen3_vl_8b_sft_config(), ["dataset.media_root=[/data,/mnt/coco]", "dataset.path=/data"])
    assert type(cfg.dataset.media_root) is list and cfg.dataset.media_root == ["/data", "/mnt/coco"]
    cfg.dataset.finalize()


def test_apply_peft_overrides_change_adapter_settings(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("peft:\n  alpha: 64\n  target_modules: [linear_qkv]\n")
    cfg = overrides.apply(qwen3_vl_8b_peft_config(), ["peft.dim=16", "peft.adapt_vision_model=true"], [file])
    assert cfg.peft == Qwen3VLLoRA(dim=16, alpha=64, adapt_vision_model=True, target_modules=["linear_qkv"])
    for word, message in (("peft.dims=16", "peft.dims"), ("peft.dim=many", "expected a whole number such as 16")):
        with pytest.raises(ValueError, match=message):
            overrides.apply(cfg, [word])
    assert overrides.apply(cfg, ["peft=null"]).peft is None


def test_apply_sets_adapt_experts_of_peft_from_command_line():
    cfg = qwen3_vl_30b_a3b_peft_config()
    assert not cfg.peft.adapt_experts
    overrides.apply(cfg, ["peft.adapt_experts=true", "peft.dim=8", "model.moe_grouped_gemm=false"])
    assert cfg.peft == Qwen3VLLoRA(dim=8, alpha=32, adapt_experts=True) and not cfg.model.moe_grouped_gemm
    overrides.apply(cfg, ['peft.target_modules=["linear_qkv", "*.layers.0.mlp.experts.linear_fc*"]'])
    assert cfg.peft.settings.adapts("language_model.decoder.layers.0.mlp.experts.local_experts.7.linear_fc2")


@pytest.mark.parametrize(("words", "message"), [
    (["train.global_batchsize=3"], "no setting train.global_batchsize; did you mean train.global_batch_size"),
    (["trainer.train_iters=3"], "no setting trainer.train_iters; did you mean train.train_iters"),
    (["~optimizer.lr"], "settings can be changed, not added or removed"),
    (["+optimizer.rate=1"], "settings can be changed, not added or removed"),
    (["train.exit_duration_in_mins=1h"], "train.exit_duration_in_mins is '1h', expected"),
    (["dataset.max_patches=8k"], "dataset.max_patches is '8k', expected int"),
    (["checkpoint.ckpt_step=abc"], "checkpoint.ckpt_step is 'abc', expected"),
    (["optimizer_config_override_provider.vision_model_lr=small"], "vision_model_lr is 'small', expected float"),
    (["train.train_iters=many"], "train.train_iters is 'many', expected a whole number such as 1000"),
    (["train.train_iters=1.5"], "train.train_iters is 1.5, expected a whole number"),
    (["model.freeze_vision_model=1"], "model.freeze_vision_model is 1, expected true or false such as False"),
    (["mixed_precision=fp16"], "mixed_precision is 'fp16', expected null or a name such as fp16_mixed"),
    (["optimizer.lr=high"], "optimizer.lr is 'high', expected a number"),
    (["train=3"], "train is 3, expected settings"), (["train.train_iters=[1"], "train.train_iters"),
])  # fmt: skip
def test_apply_raises_if_command_line_override_is_invalid(cfg, words, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        overrides.apply(cfg, words)


@pytest.mark.parametrize(("text", "message"), [
    ("train:\n  train_iter: 3\n", r"wrong\.yaml: .*train_iter"), ("train: [\n", r"wrong\.yaml"),
    ("[" * 50_000, r"wrong\.yaml: objects or lists are nested more than 50 deep"),  # parsers exceed the recursion limit
])  # fmt: skip
def test_apply_raises_if_override_file_is_invalid_or_missing(cfg, tmp_path, text, message):
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        overrides.apply(cfg, files=[tmp_path / "wrong.yaml"])
    with pytest.raises(FileNotFoundError):
        overrides.apply(cfg, files=[tmp_path / "nothing.yaml"])


@pytest.mark.parametrize(("word", "message"), [
    ("ddp.grad_reduce_in_fp32=false", "ddp.grad_reduce_in_fp32 is False, but mixed_precision sets it to True"),
    ("model.fp8=hybrid", "model.fp8 is 'hybrid', but mixed_precision sets it to None"),
    ("optimizer.loss_scale=8.0", "optimizer.loss_scale is 8.0, but mixed_precision sets it to None"),
])  # fmt: skip
def test_apply_raises_if_mixed_precision_would_overwrite_setting(cfg, word, message):
    """Megatron-Bridge silently writes fields of `mixed_precision` to other sections."""
    with pytest.raises(ValueError, match=message):
        overrides.apply(cfg, [word])
    overrides.apply(qwen3_vl_8b_sft_config(), [word, "mixed_precision=null"])
    overrides.apply(qwen3_vl_8b_sft_config(), ["model.fp8=null", "ddp.grad_reduce_in_fp32=true"])


def test_pixel_dtype_follows_precision_of_each_run(cfg):
    """The dtype follows the precision for a second run with the same data set, too."""
    for precision, dtype in (("bf16_mixed", torch.bfloat16), (None, torch.float32)):
        cfg.mixed_precision = precision
        if precision is None:
            for section in (cfg.model, cfg.optimizer):
                section.bf16, section.params_dtype = False, torch.float32
        complete = finalize_copy(cfg, 8)
        assert complete.model.params_dtype == complete.dataset.params_dtype == dtype
        assert complete.dataset.pixel_dtype is None
        cfg.dataset = complete.dataset
