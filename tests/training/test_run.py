"""Runs in Megatron-Bridge's loop on one process: log, checkpoints, resuming, and validation of settings."""

import gc
import math
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint
from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
from qwen3vl_bridge.training import run_validation
from qwen3vl_bridge.training import step as training_step
from qwen3vl_bridge.training.callbacks import CollectGarbageAfterFirstStep, training_callbacks
from qwen3vl_bridge.training.checkpoint_manager import Qwen3VLCheckpointManager
from qwen3vl_bridge.training.guard import optimizers_of
from qwen3vl_bridge.training.step import check_rows
from qwen3vl_bridge.training.weight_loading import load_model

import pytest
import qwen3vl_recipes
import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import runtime_config_update
from qwen3vl_recipes.dry_run import finalize_copy
from safetensors.torch import load_file
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.noise import SEEDS, allowed, rounded_folder
from tests.helpers.noise import check as check_errors
from tests.helpers.receipts import write_receipts
from tests.helpers.steps import Run, save, set_up, train_step
from tests.helpers.sync_counter import HostSyncCounter
from tests.training.running import losses, read_log, replicate, replicated, sharded, stored, train


def documents(batch):
    """Yield (ids, labels, mask, pixels) of each conversation in a packed row; each has one image of 4 x 4 patches."""
    starts = batch.layout.cu_seqlens_padded.tolist()
    for i, n in enumerate(length for length in batch.layout.lengths if length):
        place = slice(starts[i], starts[i] + n)
        pixels = batch.vision.pixel_values[16 * i : 16 * (i + 1)]
        yield batch.input_ids[0, place], batch.labels[0, place], batch.loss_mask[0, place], pixels


def sum_of_losses(model, ids, labels, mask, pixels):
    kinds = (ids == model.config.image_token_id).int()[None]
    grid = torch.tensor([[1, 4, 4]])
    out = model(input_ids=ids[None], mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grid)
    return (F.cross_entropy(out.logits[0], labels, reduction="none") * mask).sum(), mask.sum().item()


def matrices_decay(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [dict(params=matrices, weight_decay=decay), dict(params=others, weight_decay=0.0)]


def reference_steps(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    batches: Sequence,
    rows: int,
    learning_rate: Callable[[int], float],
    clip: float = float("inf"),
    eps: float = 1e-8,
) -> Iterator[tuple[float, float]]:
    """Yield loss and gradient norm (before clipping) of each step. Trains the model in place."""
    optimizer = torch.optim.AdamW(groups, lr=learning_rate(0), betas=(0.9, 0.95), eps=eps)
    trained = [p for group in groups for p in group["params"]]
    for step in range(len(batches) // rows):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        total = tokens = 0.0
        for batch in batches[step * rows : (step + 1) * rows]:
            for document in documents(batch):
                loss, count = sum_of_losses(model, *document)
                total, tokens = total + loss, tokens + count
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        yield total.item() / tokens, norm.item()


COMPARED = ("loss", "grad_norm", "valid_loss")
DTYPES = {replicated: torch.float32, sharded: torch.bfloat16}


@pytest.fixture(
    scope="module",
    params=[replicated, pytest.param(sharded, marks=pytest.mark.slow)],
    ids=["distributed optimizer", "Megatron-FSDP"],
)
def unbroken_run(request, inputs, tmp_path_factory):
    save = tmp_path_factory.mktemp("unbroken")
    return request.param, train(request.param(inputs, save)), save


def test_resumed_run_equals_uninterrupted_run_bit_exactly(unbroken_run, inputs, tmp_path):
    make, log, save = unbroken_run
    first = train(make(inputs, tmp_path), stop_after=3)
    second = train(make(inputs, tmp_path))
    assert [e["step"] for e in first + second if "loss" in e] == [1, 2, 3, 4, 5, 6]
    assert losses(first + second) == losses(log)
    assert losses(read_log(tmp_path)) == losses(read_log(save)) == losses(log)
    resumed, unbroken = stored(tmp_path), stored(save)
    assert resumed.keys() == unbroken.keys() and len(unbroken) > 100
    assert all(torch.equal(resumed[key], unbroken[key]) for key in unbroken)


def test_log_entries_have_all_metrics(unbroken_run):
    _, log, _ = unbroken_run
    assert [e["step"] for e in log if "valid_loss" in e] == [4, 6]
    for entry in (e for e in log if "loss" in e):
        names = {"step", "loss", "lr", "grad_norm", "trained_tokens", "seconds", "grad_norm_vision_model"}
        assert entry.keys() >= names
        assert ("tokens_per_second" in entry) == (entry["step"] % 2 == 0) and "skipped" not in entry


def test_checkpoint_of_run_exports_and_loads_with_same_weights(unbroken_run, inputs, tmp_path):
    """The checkpoint has the Hugging Face files, so an export needs nothing else."""
    _, _, save = unbroken_run
    files = {path.name for path in (save / "iter_0000006" / "hf").iterdir()}
    assert {"config.json", "tokenizer.json"} <= files and not any(name.endswith(".safetensors") for name in files)
    export_checkpoint(save, tmp_path / "hf", progress=False)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == load_file(inputs.hf / "model.safetensors").keys()
    model = load_model(inputs.hf, save)  # also finds names of the other layer spec
    loaded = AutoBridge.from_hf_pretrained(str(inputs.hf)).export_hf_weights(model, cpu=True, show_progress=False)
    assert all(torch.equal(tensor.float(), exported[name].float()) for name, tensor in loaded)


def test_saved_run_config_contains_path_of_final_save_folder(unbroken_run):
    _, _, save = unbroken_run
    text = (save / "iter_0000006" / "run_config.yaml").read_text()
    assert f"save: {save}\n" in text and ".scratch" not in text
    folders = sorted(path.name for path in save.iterdir() if path.name.startswith((".", "iter")))
    assert folders == ["iter_0000003", "iter_0000006"]


def by_step(log: list[dict[str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for entry in log:
        found.setdefault(entry["step"], {}).update(entry)
    return found


def errors(found: dict[int, dict[str, float]], expected: dict[int, dict[str, float]]) -> dict[str, float]:
    return {
        name: max(abs(entry[name] / expected[step][name] - 1) for step, entry in found.items() if name in entry)
        for name in COMPARED
    }


def test_run_losses_and_norms_match_transformers_with_adamw(unbroken_run, inputs, tmp_path):
    make, log, _ = unbroken_run
    cfg = make(inputs, None)
    steps, rows = [e for e in log if "loss" in e], cfg.train.global_batch_size
    stream = cfg.dataset.stream("train")
    batches = [next(stream) for _ in range(len(steps) * rows)]
    model = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    groups = matrices_decay(model, cfg.optimizer.weight_decay)
    reference = reference_steps(model, groups, batches, rows, lambda step: steps[step]["lr"], cfg.optimizer.clip_grad)
    expected = {}
    for step, (loss, norm) in enumerate(reference, 1):
        expected[step] = {"loss": loss, "grad_norm": norm}
        if step in (4, 6):
            read = [document for row in cfg.dataset.evaluation("valid") for document in documents(row)]
            with torch.no_grad():
                found = [sum_of_losses(model, *document) for document in read]
            expected[step]["valid_loss"] = sum(loss.item() for loss, _ in found) / sum(count for _, count in found)
    folders = [rounded_folder(inputs.hf, tmp_path / str(seed), seed, DTYPES[make]) for seed in SEEDS[:2]]
    near = [by_step(train(make(replace(inputs, hf=folder), None))) for folder in folders]
    check_errors(errors(by_step(log), expected), allowed([errors(one, by_step(log)) for one in near], DTYPES[make]))
    tokens = [sum(int(row.loss_mask.sum()) for row in batches[i * rows : (i + 1) * rows]) for i in range(len(steps))]
    assert [e["trained_tokens"] for e in steps] == tokens


@pytest.mark.slow
def test_repeated_validations_read_same_rows(inputs):
    still = dict(optimizer__lr=0.0, optimizer__min_lr=0.0, validation__eval_interval=1, train__train_iters=3)
    valid = [e["valid_loss"] for e in train(replicated(inputs, None, **still)) if "valid_loss" in e]
    assert len(valid) == 3 and valid[0] == valid[1] == valid[2]


def test_resume_raises_if_data_seed_differs(unbroken_run, inputs, tmp_path):
    make, _, save = unbroken_run
    shutil.copytree(save, tmp_path, dirs_exist_ok=True)
    again = make(inputs, tmp_path, train__train_iters=8, dataset__seed=7)
    again.scheduler.override_opt_param_scheduler = True
    with pytest.raises(ValueError, match="position belongs to other data: found seed 7, expected 1234"):
        train(again)


@pytest.mark.slow
def test_resume_raises_if_lr_schedule_differs_from_checkpoint(unbroken_run, inputs, tmp_path):
    make, log, save = unbroken_run
    shutil.copytree(save, tmp_path, dirs_exist_ok=True)
    said = r"train.train_iters \(or .*\) is 7, the checkpoint has 6, in steps of \d rows; set scheduler.override"
    with pytest.raises(CheckpointError, match=said) as refused:
        train(make(inputs, tmp_path, train__train_iters=7, checkpoint__ckpt_step=3))
    assert refused.value.__cause__ is None and refused.value.__suppress_context__
    changed = dict(train__train_iters=7, optimizer__lr=1e-4, optimizer__min_lr=1e-4, checkpoint__ckpt_step=3)
    with pytest.raises(CheckpointError, match=r"scheduler\.override_opt_param_scheduler=true"):
        train(make(inputs, tmp_path, **changed))
    (ours, *_) = train(make(inputs, tmp_path, **changed, scheduler__override_opt_param_scheduler=True), stop_after=1)
    assert ours["step"] == 4 and ours["lr"] == pytest.approx(1e-4)
    changed["checkpoint__save"] = None
    theirs = train(make(inputs, tmp_path, **changed, scheduler__use_checkpoint_opt_param_scheduler=True), stop_after=1)
    assert theirs[0]["lr"] == next(e["lr"] for e in log if e["step"] == 4)


def test_failed_checkpoint_save_keeps_older_checkpoint(inputs, tmp_path, monkeypatch):
    train(replicated(inputs, tmp_path), stop_after=3)

    def full(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3VLCheckpointManager, "_write_side_files", full)
        with pytest.raises(CheckpointError, match="no space"):
            train(replicated(inputs, tmp_path))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert [path.name for path in tmp_path.iterdir() if "iter_" in path.name] == ["iter_0000003"]
    assert [e["step"] for e in train(replicated(inputs, tmp_path)) if "loss" in e] == [4, 5, 6]
    assert [e["step"] for e in read_log(tmp_path) if "loss" in e] == [1, 2, 3, 4, 5, 6]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("most", "steps"), [(2, [2, 3]), (-1, [1, 2, 3])])
def test_most_recent_k_removes_older_checkpoints(inputs, tmp_path, most, steps):
    (tmp_path / "iter_notes").mkdir()
    every_step = dict(train__train_iters=3, validation__eval_iters=0, checkpoint__save_interval=1)
    train(replicated(inputs, tmp_path, checkpoint__most_recent_k=most, **every_step))
    found = sorted(path.name for path in tmp_path.glob("*iter_*"))
    assert found == [*(f"iter_{step:07}" for step in steps), "iter_notes"]


def test_train_raises_if_most_recent_k_is_0_or_save_retain_interval_is_set(inputs, tmp_path):
    for name, value, expected in (("most_recent_k", 0, "at least 1"), ("save_retain_interval", 4, "None")):
        with pytest.raises(ValueError, match=rf"checkpoint\.{name} is {value}, expected {expected}"):
            train(replicated(inputs, tmp_path, **{f"checkpoint__{name}": value}))


THINKING = Path(__file__).parents[1] / "data" / "thinking_template.jinja"


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_loss_falls_in_run_on_cord_v2_receipts(inputs, folders, family, tmp_path):
    """Losses are finite and fall; Qwen3.5 uses a chat template with reasoning."""
    data = write_receipts(tmp_path / "cord", train=8, valid=2)
    if family == "qwen3_5":
        inputs = replace(inputs, hf=shutil.copytree(folders[family, "dense"], tmp_path / "hf"))
        shutil.copyfile(THINKING, inputs.hf / "chat_template.jinja")
    cfg = replicated(
        inputs, None, train__train_iters=3, dataset__path=str(data), dataset__schema_adapter="cord_v2",
        dataset__seq_length=512, model__seq_length=512,
    )  # fmt: skip
    steps = [entry for entry in train(cfg) if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["trained_tokens"] > 0 for entry in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]


# Relative errors in float32: maximum over steps of losses and gradient norms, and of each weight relative to its
# change. Measured after two steps 1.5e-7, 3.1e-5 and 5.1e-4, after fifty 2.6e-7 and 2.3e-6.
LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-2
ROWS, LR, MIN_LR, WARMUP, DECAY = 2, 1e-3, 1e-4, 5, 0.1


def cosine(step: int, steps: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine from LR to MIN_LR, as in megatron-core's scheduler."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / (steps - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("steps", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_training_steps_match_transformers_with_adamw(inputs, steps, record_property):
    """Two steps at a constant rate, compared with weights; fifty with a schedule and clipping."""
    two = steps == 2
    clip = math.inf if two else 1.0
    schedule = dict(scheduler__lr_decay_style="constant") if two else dict(train__train_iters=steps)
    cfg = inputs.config(
        None, optimizer__lr=LR, optimizer__min_lr=LR if two else MIN_LR, optimizer__weight_decay=DECAY,
        optimizer__clip_grad=0.0 if two else clip, scheduler__lr_warmup_iters=0 if two else WARMUP,
        train__global_batch_size=ROWS, **schedule,
    )  # fmt: skip
    stream = inputs.config(None).dataset.stream("train")
    batches = [next(stream) for _ in range(steps * ROWS)]
    reference = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    run = set_up(replicate(cfg))
    rate = (lambda _: LR) if two else (lambda step: cosine(step, steps))
    errors, curve = {"loss": 0.0, "norm": 0.0}, []
    expected = reference_steps(reference, matrices_decay(reference, DECAY), batches, ROWS, rate, clip)
    for step, (loss, norm) in enumerate(expected):
        ours = train_step(run)
        assert math.isclose(ours["lr"], rate(step), rel_tol=1e-9)
        errors["loss"] = max(errors["loss"], abs(ours["loss"] / loss - 1))
        errors["norm"] = max(errors["norm"], abs(ours["grad_norm"] / norm - 1))
        curve.append(loss)
    record_property("errors", errors)
    assert errors["loss"] <= LOSS, errors
    assert errors["norm"] <= NORM, errors
    if not two:
        assert curve[-1] < curve[0] / 2, "the loss did not fall"
        return
    bridge = AutoBridge.from_hf_pretrained(str(inputs.hf))
    trained = dict(bridge.export_hf_weights(run.model, cpu=True, show_progress=False))
    for name, p in reference.named_parameters():
        assert (trained[name] - p).norm() / (p - before[name]).norm() <= WEIGHT, name


STEPS = 2  # before the run is saved, and after


@pytest.fixture
def copied(monkeypatch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    copy = training_step.copy_to_gpu

    def copy_and_note(inputs, device):
        assert device.type == "cuda"
        found.append(inputs.input_ids.clone())
        return copy(inputs, device)

    monkeypatch.setattr(training_step, "copy_to_gpu", copy_and_note)
    return found


def take_steps(run: Run) -> None:
    states = [list(vars(one).values()) for one in optimizers_of(run.optimizer)]
    with HostSyncCounter(*run.model, states):
        for _ in range(STEPS):
            train_step(run)


@pytest.mark.slow
def test_resumed_run_reads_rows_that_follow_last_step(inputs, tmp_path: Path, copied):
    rows = replicated(inputs, None).train.global_batch_size
    whole = replicated(inputs, None).dataset.stream("train")
    expected = [next(whole).input_ids for _ in range(2 * STEPS * rows)]
    for half in (1, 2):
        run = set_up(replicated(inputs, tmp_path))
        assert run.progress.step == (half - 1) * STEPS
        take_steps(run)
        done = half * STEPS * rows
        assert len(copied) == run.progress.consumed_train_samples == done
        save(run)
    assert all(torch.equal(one, other) for one, other in zip(copied, expected, strict=True))


@pytest.mark.slow
def test_data_stream_state_is_position_after_last_step(inputs, copied):
    run = set_up(replicated(inputs, None), data=False)
    run.stream, rows = run.cfg.dataset.stream("train"), run.cfg.train.global_batch_size
    take_steps(run)
    resumed = run.cfg.dataset.stream("train")
    resumed.load_state_dict(run.stream.state_dict())
    following = next(resumed).input_ids
    assert len(copied) == STEPS * rows and not any(torch.equal(following, one) for one in copied)
    take_steps(run)
    assert torch.equal(copied[STEPS * rows], following)


@pytest.mark.parametrize(
    "name", ["optimizer.lr", "optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay"]
)
def test_run_checks_raise_if_learning_rate_or_weight_decay_is_none(name):
    cfg = qwen3vl_recipes.qwen3_vl_2b_sft_config()
    section, field = name.split(".")
    setattr(getattr(cfg, section), field, None)
    with pytest.raises(ValueError, match=f"^{name} is None, expected a number"):
        run_checks(run_validation.BEFORE_VALIDATE, cfg)


def test_optimizer_cpu_offload_raises_without_precision_aware_optimizer(inputs, tmp_path):
    cfg = replicated(inputs, tmp_path, optimizer__optimizer_cpu_offload=True)
    cfg.mixed_precision = "bf16_mixed"
    with pytest.raises(ValueError, match=r"use_precision_aware_optimizer is False with .*_cpu_offload, expected True"):
        runtime_config_update(cfg)
    cfg.optimizer.use_precision_aware_optimizer = True
    training_callbacks(cfg)
    runtime_config_update(cfg)


@pytest.mark.parametrize(("make", "settings", "message"), [
    (replicated, {}, "optimizer_cpu_offload is True with model.params_dtype torch.float32, expected False: megatron"),
    (sharded, {}, "optimizer_cpu_offload is True with ddp.use_megatron_fsdp, expected False: "),
    (replicated, dict(distributed=False), "with optimizer.use_distributed_optimizer False, expected False: Megatron-B"),
    (replicated, {}, "optimizer_cpu_offload is True, expected False: parameters are on the host already: there is no"),
])  # fmt: skip
def test_optimizer_cpu_offload_raises_if_setting_is_unsupported(inputs, make, settings, message):
    cfg = make(inputs, None, optimizer__optimizer_cpu_offload=True, **settings)
    cfg.mixed_precision = None if "float32" in message else "bf16_mixed"
    with pytest.raises(ValueError, match=message):
        train(cfg)


def test_fsdp_with_expert_communication_overlap_raises():
    cfg = qwen3vl_recipes.qwen3_vl_30b_a3b_sft_fsdp_config()
    cfg.model.overlap_moe_expert_parallel_comm = True
    with pytest.raises(ValueError, match=r"^ddp.use_megatron_fsdp is True with model.overlap_.*, expected False: the"):
        run_checks(run_validation.BEFORE_VALIDATE, cfg)


@pytest.mark.usefixtures("no_groups")
def test_fsdp_no_shard_with_expert_parallelism_raises():
    """Megatron-Bridge's default strategy; measured under EP 2: a gradient norm of 2.5614 for 2.5656."""
    cfg = qwen3vl_recipes.qwen3_vl_30b_a3b_sft_fsdp_config()
    cfg.model.expert_model_parallel_size = 8
    cfg.ddp.data_parallel_sharding_strategy = "no_shard"
    with pytest.raises(ValueError, match=r"^ddp\.data_parallel_sharding_strategy is 'no_shard' with .*own experts"):
        finalize_copy(cfg, 8)


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("own", [None, False, True])
def test_finalize_copy_raises_if_comm_overlap_contradicts_model_setting(own):
    cfg = qwen3vl_recipes.qwen3_vl_30b_a3b_peft_config()
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_moe_expert_parallel_comm=own)
    if own:
        assert finalize_copy(cfg, 8).model.overlap_moe_expert_parallel_comm
        return
    with pytest.raises(ValueError, match=f"overlap_moe_expert_parallel_comm is {own} with model.ov.*, expected True: "):
        finalize_copy(cfg, 8)


@pytest.mark.parametrize(("model", "ddp", "message"), [
    (True, False, "ddp.delay_wgrad_compute is False with model.delay_.*, expected True: gradients would be reduced"),
    (False, True, "ddp.delay_wgrad_compute is True with model.delay_wgrad_compute False, expected False: it would be"),
    (True, True, r"peft is Qwen3VLLoRA\(.* with model.delay_.*, expected None: adapters' gradients would"),
])  # fmt: skip
def test_run_checks_raise_if_settings_contradict_delay_wgrad_compute(model, ddp, message):
    cfg = qwen3vl_recipes.qwen3_vl_30b_a3b_peft_config()
    cfg.model.delay_wgrad_compute, cfg.ddp.delay_wgrad_compute = model, ddp
    with pytest.raises(ValueError, match=message):
        run_checks(run_validation.BEFORE_VALIDATE, cfg)


def test_run_raises_at_start_if_host_memory_does_not_suffice_to_save(inputs, monkeypatch, tmp_path):
    """One of two processes on a machine with two GPUs and little memory, as under torchrun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def start(*, room: int, **settings):
        monkeypatch.setattr(run_validation, "host_bytes", lambda: room)
        cfg = inputs.config(tmp_path, checkpoint__ckpt_format="torch_dist", ddp__use_megatron_fsdp=False, **settings)
        training_callbacks(cfg)
        runtime_config_update(cfg)

    by_numbers = dict(checkpoint__dist_ckpt_optim_fully_reshardable=False)
    message = "takes .* on each of 1 ranks, .*optim_fully_reshardable=False. Then .* GiB a rank"
    with pytest.raises(ValueError, match=message):
        start(room=2**20)
    for settings in (dict(room=2**40), dict(room=2**20, **by_numbers), dict(room=2**20, checkpoint__save=None)):
        start(**settings)


@pytest.mark.parametrize("packed", [True, False])
def test_check_rows_raises_if_stages_expect_another_batch_shape(untied_folder, packed):
    config = AutoConfig.from_pretrained(untied_folder)
    batch = make_batch(make_samples("video", config, seed=0), config, packed=packed)
    rows, tokens = batch.input_ids.shape
    provider = provider_from_hf_config(config.to_dict(), seq_length=tokens)
    check_rows(batch, provider, rows=rows + 1)  # a single stage accepts any number
    provider.pipeline_model_parallel_size = 2
    check_rows(batch, provider, rows=rows)
    with pytest.raises(ValueError, match=rf"has {rows} rows, but .* expect train.micro_batch_size, {rows + 1}"):
        check_rows(batch, provider, rows=rows + 1)
    provider.seq_length += 4
    message = rf"have {tokens} tokens, but .* expect model.seq_length, {tokens + 4}: .* set model.var"
    with pytest.raises(ValueError, match=message):
        check_rows(batch, provider, rows=rows)
    provider.variable_seq_lengths = True
    check_rows(batch, provider, rows=rows + 1)


def test_garbage_collection_runs_after_first_step_only():
    def make_cycle():
        tensor = torch.zeros(1)
        tensor.itself = tensor
        return weakref.ref(tensor)

    callback = CollectGarbageAfterFirstStep()
    gc.disable()  # like train.manual_gc
    try:
        first = make_cycle()
        callback.on_train_step_end(None)
        second = make_cycle()
        callback.on_train_step_end(None)
        assert first() is None and second() is not None
    finally:
        gc.enable()
