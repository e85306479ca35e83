"""Errors of the command line are reported before anything is built."""

import json
import os
import re
import types

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.weights.rows import Component

import pytest
from datasets import Dataset
from qwen3vl_recipes import cli, qwen3_vl_2b_sft_config
from qwen3vl_recipes.dry_run import finalize_copy
from qwen3vl_recipes.early_validation import check_command_line
from qwen3vl_recipes.paths import check_data, set_paths
from qwen3vl_recipes.registry import recipes
from torch.utils.data import DataLoader

RECIPE = ["--recipe", "qwen3_vl_2b_sft_config"]


@pytest.mark.parametrize(("words", "message"), [
    ([], "--recipe is missing"), ([*RECIPE, "train"], "expected settings as NAME=VALUE, found train"),
    ([*RECIPE, "+train.x=1"], r"found \+train.x=1"), ([*RECIPE, "--gpus", "8"], "work only with --dry-run"),
    ([*RECIPE, "--dry-run", "--gpus", "-8"], "--gpus is -8, expected 1 or more"),
    ([*RECIPE, "--save", __file__], "a file; expected a folder"),
    (["--recipe", "qwen3_vl_9b_sft_config"], "there is no recipe 'qwen3_vl_9b_sft_config'; did you mean"),
    (["--recipe", "qwen3_vl_30b_sft_config"], "there is no recipe .*; did you mean qwen3_vl_30b_a3b_sft_config"),
    ([*RECIPE, "--save", "run", "train.gbs=4"], "no setting train.gbs; did you mean train.global_batch_size"),
    (["--recipe", "no.such:function"], "no.such: No module named 'no'; expected a module, or a file"),
    (["--recipe", "wanting.py:make"], "wanting.py: No module named 'absent'; wanting.py imports this module: install"),
    (["--recipe", "mine.py"], "--recipe is mine.py, expected one of its functions: mine.py:FUNCTION"),
    (["--recipe", "mine.py:made"], "mine.py has no function 'made'"),
    (["--recipe", "mine.py:make"], "mine.py:make returned 3, expected a ConfigContainer"),
    (RECIPE, "checkpoint.save is None, expected a folder used only by this run"),
    ([*RECIPE, "--simulate-gpu", "--rank", "8"], "--rank is 8, expected 0 to 7 of 8 GPUs"),
    ([*RECIPE, "--simulate-gpu", "--rank", "2", "--gpus", "2"], "--rank is 2, expected 0 to 1 of 2 GPUs"),
    ([*RECIPE, "--simulate-gpu", "--gpu", "H1000"],
     "unknown GPU 'H1000', expected .*GB200; for another use --gpu-memory"),
    (["--recipe", "qwen3_vl_30b_a3b_sft_dist_train_config", "--simulate-gpu"],
     "--simulate-gpu does not support separate vision ranks"),
    ([*RECIPE, "--save", "run", "--data-path", "/nowhere"],
     r"dataset.path \(--data-path\) is /nowhere: there is no such file or folder"),
])  # fmt: skip
def test_train_command_with_invalid_arguments_exits_with_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def make():\n    return 3\n")
    (tmp_path / "wanting.py").write_text("import absent\n")
    with pytest.raises(SystemExit) as end:
        cli.train(words)
    assert end.value.code == 2 and re.search(message, capsys.readouterr().err)


RECORD = {"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "Seven."}]}


def train_arguments(folder, tmp_path) -> list[str]:
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    return ["--recipe", "qwen3_vl_digits_sft_config", "--hf-model", str(folder), "--data-path", str(tmp_path),
            "--save", str(tmp_path / "run")]  # fmt: skip


def test_train_options_select_initial_weights(untied_folder, tied_folder, tmp_path, monkeypatch, capsys):
    runs = []

    def note(cfg, needs_weights):
        runs.append((cfg.checkpoint.pretrained_checkpoint, needs_weights))

    monkeypatch.setattr(cli, "_run", note)
    words = train_arguments(untied_folder, tmp_path)
    assert cli.train(words) == cli.train([*words, "--from-scratch"]) == 0
    cli.train([*words, "--pretrained-checkpoint", str(tied_folder)])
    assert runs == [(str(untied_folder), True), (None, False), (str(tied_folder), True)]
    with pytest.raises(SystemExit) as end:
        cli.train([*words, "--from-scratch", "checkpoint.pretrained_checkpoint=MEGATRON"])
    assert end.value.code == 2
    assert "pretrained_checkpoint is MEGATRON with --from-scratch, expected None" in capsys.readouterr().err


def test_set_paths_raises_or_warns_if_model_folder_does_not_match_recipe(untied_folder, moe_folder, tmp_path, caplog):
    for name, folder, message in (
        (
            "qwen35_vl_800m_sft",
            untied_folder,
            r"for a Qwen3\.5-VL without experts, and .* is a Qwen3-VL without experts",
        ),
        (
            "qwen3_vl_30b_a3b_sft",
            untied_folder,
            "for a Qwen3-VL with experts, and .* is a Qwen3-VL without experts: use",
        ),
        ("qwen3_vl_2b_sft", tmp_path / "nothere", "hf_path is .*/nothere: there is no such folder"),
        ("qwen3_vl_2b_sft", "./nothere", "hf_path is ./nothere: there is no such folder"),
    ):
        with pytest.raises(ValueError, match=message):
            set_paths(recipes()[f"{name}_config"](), hf_path=folder)
    for name, warns in (("qwen3_vl_2b_sft", False), ("qwen3_vl_8b_sft", True)):
        caplog.clear()
        set_paths(recipes()[f"{name}_config"](), hf_path=moe_folder)
        assert ("check the parallel sizes" in caplog.text) is warns


def test_hf_model_without_weights_raises_unless_pretrained_checkpoint_is_set(untied_folder, digits, tmp_path):
    (tmp_path / "config.json").write_text((untied_folder / "config.json").read_text())
    words = [
        "--recipe",
        "qwen3_vl_2b_sft_config",
        "--hf-model",
        str(tmp_path),
        "--data-path",
        str(digits),
        "--save",
        "x",
    ]
    check_command_line(cli._parse(cli._parser("train"), [*words, "checkpoint.pretrained_checkpoint=MEGATRON"]))
    with pytest.raises(ValueError, match="has no weights, expected"):
        check_command_line(cli._parse(cli._parser("train"), words))


def test_interruption_message_names_step_where_run_continues(tmp_path):
    folders = types.SimpleNamespace(save=str(tmp_path / "none yet"), load=str(tmp_path))
    without = cli._describe_interruption(None, folders)
    assert without.startswith("interrupted before the end of the first step: there is no checkpoint yet, and the same ")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert cli._describe_interruption(16, folders).startswith(
        "interrupted after step 16: the same command continues from step 10; SIGTERM instead of Ctrl-C would"
    )


class _Broken:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int):
        raise DataError("train.jsonl:1", "found nothing, expected a message")


def test_train_command_prints_data_error_of_worker_without_traceback(untied_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", lambda cfg, needs_weights: next(iter(DataLoader(_Broken(), num_workers=1))))
    with pytest.raises(SystemExit) as end:
        cli.train(train_arguments(untied_folder, tmp_path))
    expected = "error: train.jsonl:1: found nothing, expected a message\n(--verbose shows the traceback)\n"
    assert end.value.code == 2 and capsys.readouterr().err.endswith(expected)


@pytest.mark.usefixtures("no_groups")
def test_dry_run_full_and_json_print_settings_and_memory_plan(capsys, tmp_path):
    file = tmp_path / "more.yaml"
    file.write_text("optimizer:\n  lr: 3.0e-5\n")
    words = ["--recipe", "qwen3_vl_30b_a3b_sft_config", "--dry-run", "--gpus", "32", "--gpu", "H200", "--config"]
    words.append(str(file))
    cli.train([*words, "train.global_batch_size=64", "--full"])
    said = capsys.readouterr().out
    assert "lr: 3.0e-05" in said and "global_batch_size: 64" in said and "DP 32" in said and "of 139.7 GiB" in said
    assert "the first parallel layout that fits is EP 8, DP 32 (optim; " in said
    cli.train([*words, "train.global_batch_size=64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["optimizer"]["lr"] == 3e-5 and found["no_plan"] is None
    assert found["plan"]["fits"] and found["plan"]["parallel_layout"]["dp"] == 32
    assert found["summary"]["rate"] == "3e-05 after 50 steps, then cosine to 1e-06"


@pytest.mark.usefixtures("no_groups")
def test_dry_run_summary_describes_model_data_and_steps(untied_folder, digits, capsys, tmp_path, monkeypatch):
    """The summary fits a screen; it opens the data and reads the free disk space."""
    monkeypatch.chdir(tmp_path)
    words = ["--recipe", "qwen3_vl_digits_sft_config", "--hf-model", str(untied_folder), "--dry-run"]
    cli.train([*words, "--data-path", str(digits), "--save", "run", "train.global_batch_size=4"])
    said = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in said.splitlines()[:-1])
    assert len(lines) == 15 and "--full" in said.splitlines()[-1]
    assert lines["model"].startswith(f"{untied_folder}: 1.03 million parameters, 4 layers of width 80; all trained")
    assert lines["weights"].startswith(f"from {untied_folder}: 122 tensors of 4.11 MB, as its config.json")
    assert lines["parallelism"] == "one process on a CPU" and lines["memory"].startswith("not estimated for a CPU")
    assert lines["accuracy"].startswith("not measured") and lines["duration"].startswith("unknown until this")
    assert lines["steps"] == "400 of 4 rows of 512 tokens" and lines["rate"] == "0.003 after 40 steps, then cosine to 0"
    assert lines["data"] == f"{digits}/train.jsonl: 1,437 samples" and lines["validation"].startswith("every 100 steps")
    epochs, steps = map(float, re.findall(r"about ([\d.]+) of ([\d.]+) steps each", lines["epochs"])[0])
    assert 12 < steps < 17 and epochs == pytest.approx(400 / steps, rel=0.01)
    assert re.fullmatch(
        r"run: metrics.jsonl, tensorboard, 2 checkpoints of 14.\d+ MB, the last 2 kept", lines["writes"]
    )
    assert lines["disk"].startswith("enough: 28.")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("no_groups")
def test_dry_run_without_data_or_processor_says_what_is_missing(untied_folder, digits, capsys, tmp_path, monkeypatch):
    words = ["--recipe", "qwen3_vl_2b_sft_config", "--dry-run", "--json"]
    model = ["--hf-model", str(untied_folder)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def lines(*more: str) -> dict[str, str]:
        cli.train([*words, *more])
        return json.loads(capsys.readouterr().out)["summary"]

    found = lines(*model, "--from-scratch")
    assert (found["weights"], found["data"], found["writes"]) == (
        "random",
        "none yet: --data-path",
        "nothing yet: --save",
    )
    found = lines("--data-path", str(digits), "--save", str(tmp_path), "checkpoint.save_interval=1000")
    assert "tensorboard, 1 checkpoint of " in found["writes"]
    assert found["data"] == f"{digits}/train.jsonl: 1,437 samples"
    assert "no sample could be measured: Qwen/Qwen3-VL-2B-Instruct is neither a folder nor" in found["rows"]
    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}]}\n')
    assert cli.train([*words, *model, "--data-path", str(tmp_path)]) == 1
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert "samples would be dropped as bad or too long" in error


@pytest.mark.usefixtures("no_groups")
def test_dry_run_prints_each_of_many_errors_once(capsys, tmp_path):
    (tmp_path / "file").touch()
    words = ["--recipe", "qwen3_vl_30b_a3b_sft_config", "--dry-run", "--gpus", "12", "--data-path", "/nowhere"]
    words += [
        "--hf-model",
        "/nomodel",
        "--pretrained-checkpoint",
        "/noweights",
        "--save",
        str(tmp_path / "file" / "run"),
    ]
    words += ["train.global_batch_size=31", "train.gbs=4", "dataset.seq_length=4096"]
    assert cli.train(words) == 1
    said = capsys.readouterr().err
    assert "the run would fail:\n1. there is no setting train.gbs; did you mean train.global_batch_size?" in said
    for message in (
        "dataset.path (--data-path) is /nowhere: there is no such file or folder",
        "--pretrained-checkpoint is /noweights, expected a folder",
        "/nomodel does not exist, expected a folder",
        "12 GPUs, expected a multiple of etp * ep * pp, which is 8",
        "train.global_batch_size is 31, expected a multiple of 12",
        "dataset.seq_length is 4096, expected model.seq_length, 8192",
        f"{tmp_path / 'file'} is a file: use a folder",
    ):
        assert said.count(message) == 1
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("no_groups")
def test_dry_run_fails_if_gpu_memory_does_not_suffice(capsys):
    assert cli.train(["--recipe", "qwen3_vl_8b_sft_config", "--dry-run", "--json", "--gpu", "A100-40GB"]) == 1
    found = json.loads(capsys.readouterr().out)
    (error,) = found["errors"]
    assert (
        error.startswith("the memory of one A100-40GB does not suffice: does not fit: ") and not found["plan"]["fits"]
    )
    assert "the first parallel layout that fits is " in error


@pytest.mark.usefixtures("no_groups")
def test_dry_run_succeeds_if_excess_memory_is_within_estimation_error(capsys):
    words = ["--recipe", "qwen3_vl_2b_peft_dora_config", "--dry-run", "--json", "--gpu", "A100-40GB"]
    assert cli.train(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["memory"].startswith("may not fit: 40.3 GiB on stage 0, of 39.3 GiB")
    assert found["errors"] == [] and not found["plan"]["fits"]
    assert cli.train([*words, "model.seq_length=16384", "dataset.seq_length=16384"]) == 1
    assert json.loads(capsys.readouterr().out)["summary"]["memory"].startswith("does not fit: ")


@pytest.mark.usefixtures("no_groups")
def test_dry_run_with_mixture_names_all_missing_paths(digits, capsys, tmp_path):
    file = tmp_path / "mixture.yaml"
    sets = "".join(f"- {{path: {digits}, name: {name}, weight: 1}}\n" for name in "abcd")
    file.write_text(sets)
    words = ["--recipe", "qwen3_vl_2b_sft_config", "--dry-run", "--json", f"dataset.mixture={file}"]
    assert cli.train(words) == 0
    found = json.loads(capsys.readouterr().out)["summary"]
    assert found["validation"].startswith("every 100 steps") and found["validation"].count(str(digits)) == 1
    assert found["data"].startswith(f"{digits}/train.jsonl: ") and "linear layers in 16 bits" in found["memory"]
    file.write_text("- {path: /nothere/p, weight: 1}\n" + sets + "- {path: /nothere/q, weight: 1}\n")
    assert cli.train(words) == 1
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert "of p in dataset.mixture is /nothere/p, the path of q in dataset.mixture is /nothere/q: there is no" in error


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("words", "memory"), [
    (["peft.adapt_vision_model=True"], "cannot be estimated: peft.adapt_vision_model is True, expected False"),
    ([], "fits: 40.3 GiB on stage 0, of 79.1 GiB"),
])  # fmt: skip
def test_dry_run_shows_parallelism_even_if_memory_cannot_be_estimated(words, memory, capsys):
    """The parallelism is shown even if the planner does not support the adapters."""
    cli.train(["--recipe", "qwen3_vl_2b_peft_dora_config", "--dry-run", "--json", *words])
    found = json.loads(capsys.readouterr().out)["summary"]
    assert found["parallelism"].startswith("1 x H100: one GPU") and found["memory"].startswith(memory)


@pytest.mark.usefixtures("no_groups")
def test_dry_run_with_dist_train_shows_vision_and_language_ranks(capsys):
    words = ["--recipe", "qwen3_vl_235b_a22b_sft_dist_train_config", "--dry-run", "--full"]
    cli.train(words)
    said = capsys.readouterr().out
    assert "use_dist_train: true" in said and "16 vision (TP 2) + TP 4, SP, PP 16, EP 8, DP 2" in said
    assert "vision ranks" in said and "stage 15" in said and "stage 2 " not in said  # as wide as a terminal
    assert "the first parallel layout that fits is 16 vision (TP 2) + " in said
    cli.train([*words, "--gpus", "136", "model.dist_train.vision_world_size=8"])
    assert "8 vision (TP 2) + TP 4, SP, PP 16, EP 8, DP 2" in capsys.readouterr().out
    assert cli.train([*words, "--gpus", "128"]) == 1
    assert "language_world_size 128 add up to 144, expected 128, the number of processes" in capsys.readouterr().err


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("settings", "message"), [
    (dict(dataset__seq_length=4096), "dataset.seq_length is 4096, expected model.seq_length, 8192"),
    ({f"model__freeze_{c.value}": True for c in Component}, "are all True: nothing would be trained; set one to"),
    (dict(train__train_iters=0), "train.train_iters is 0, expected 1 or more"),
    (dict(train__global_batch_size=0), "train.global_batch_size is 0, expected 1 or more"),
    (dict(optimizer__lr=-1.0), "optimizer.lr is -1.0, expected 0 or more"),
    (dict(optimizer__lr=1e-7), "optimizer.min_lr is 1e-06, expected 0 to optimizer.lr, 1e-07"),
    (dict(train__train_iters=40), "lr_warmup_iters is 50 with train.train_iters 40: .*such as .*lr_warmup_iters=2"),
    (dict(scheduler__lr_decay_iters=50), "lr_warmup_iters is 50 with scheduler.lr_decay_iters 50"),
    (dict(train__global_batch_size=30), "train.global_batch_size is 30, expected a multiple of 8"),
    (dict(dataset__balance_over=512), r"balance_over is 512 with .* 32, .*set dataset.balance_over=32"),
])  # fmt: skip
def test_finalize_copy_raises_if_settings_are_invalid_or_contradictory(settings, message):
    cfg = qwen3_vl_2b_sft_config()
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(cfg, section), field, value)
    with pytest.raises(ValueError, match=message):
        finalize_copy(cfg, 8)


def test_check_data_raises_if_path_is_missing(tmp_path):
    cfg = qwen3_vl_2b_sft_config()
    cfg.dataset.on_bad = cfg.dataset.on_long = "error"  # no sample is measured then, so that no processor is needed
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    for number in range(2):
        Dataset.from_list([RECORD]).to_parquet(tmp_path / f"part-{number}.parquet")
    for path in ("hf://me/digits#train", str(tmp_path), str(tmp_path / "part-*.parquet")):
        cfg.dataset.path = path
        check_data(cfg)
    cfg.dataset.path, cfg.dataset.train_path = None, str(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"dataset.train_path is .*gone.jsonl: there is no such file"):
        check_data(cfg)


DDP = ["ddp.use_megatron_fsdp=false", "checkpoint.ckpt_format=torch_dist"]
STAGES = ["model.pipeline_model_parallel_size=2", "model.variable_seq_lengths=true"]
LORA = f"{__file__}:with_adapters"
# Settings that would otherwise fail after the model is built, or be ignored.
INVALID = [
    (STAGES, 2, "pipeline_model_parallel_size is 2 with ddp.use_megatron_fsdp, expected 1: .* not support pipeline"),
    ([*DDP, *STAGES, "model.overlap_p2p_comm=true"], 2, "overlap_p2p_comm is True .* expected False"),
    ([*DDP, "model.pipeline_model_parallel_size=2"], 2, "variable_seq_lengths is False and the first pipeline stage"),
    (["model.tensor_model_parallel_size=2"], 3, "the run has 3 processes, expected a multiple of 2"),
    (["model.cuda_graph_modules=[attn]"], 1, r"cuda_graph_modules is \['attn'\], expected \[\]"),
    (["optimizer.optimizer=sgd"], 1, "optimizer.use_distributed_optimizer is True with optimizer.optimizer 'sgd'"),
    (["train.micro_batch_size=2"], 1, "train.micro_batch_size is 2 with dataset.pack, expected 1"),
    (["validation.eval_micro_batch_size=2"], 1, "validation.eval_micro_batch_size is 2 with dataset.pack, expected 1"),
    ([*DDP, "checkpoint.ckpt_format=zarr"], 1, "ckpt_format is 'zarr', expected 'torch_dist' or 'f"),
    (["checkpoint.non_persistent_ckpt_type=in_memory"], 1, "ckpt_type is 'in_memory', expected None, 'g"),
    (["logger.log_l2_norm_grad_to_tensorboard=true"], 1, "log_l2_norm_grad_to_tensorboard is True, expected False"),
    (["logger.mlflow_experiment=x", "logger.mlflow_run_name=y"], 1, "the 'mlflow' package is not installed"),
    (["logger.wandb_project=x"], 1, "wandb is not installed"),
    (["checkpoint.async_save=true"], 1, "async_save is True with .* 'fsdp_dtensor', expected False: .*resiliency-ext"),
    (["scheduler.lr_decay_style=cosin"], 1, "scheduler.lr_decay_style is 'cosin', expected one of .*'cosine'"),
    (["--recipe", LORA, "peft.target_modules=[linear_qvk]"], 1, r"target_modules \['linear_qvk'\] match no linear"),
]


def with_adapters():
    """Return the digits recipe with adapters, as a user's own recipe."""
    from qwen3vl_bridge import Qwen3VLLoRA

    from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config

    cfg = qwen3_vl_digits_sft_config()
    cfg.peft = Qwen3VLLoRA()
    return cfg


@pytest.mark.one_case_in(4)
@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize(("settings", "ranks", "message"), INVALID)
def test_train_and_dry_run_print_same_error_for_invalid_settings(
    settings, ranks, message, untied_folder, tmp_path, monkeypatch, capsys
):
    """Both have the same message, and the run fails before it joins other ranks."""

    def start(**_):
        raise AssertionError("the run has started")

    monkeypatch.setattr("megatron.bridge.training.pretrain._pretrain", start)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", str(ranks))
    words = [*train_arguments(untied_folder, tmp_path), f"train.global_batch_size={2 * ranks}", *settings]
    with pytest.raises(SystemExit) as end:
        cli.train(words)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert cli.train([*words, "--dry-run", "--gpus", str(ranks)]) == 1
    assert re.search(message, said) and said.split("\n(--verbose")[0].removeprefix("error: ") in capsys.readouterr().err
