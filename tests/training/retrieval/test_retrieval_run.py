"""Complete runs of embedding models and rerankers: log, evaluation, resuming, bad steps, and validation of settings."""

import json
from pathlib import Path
from typing import Any

from qwen3vl_bridge import Qwen3VLLoRA
from qwen3vl_bridge.cli.data import main as data
from qwen3vl_bridge.training.guard import BadStepError

import pytest
import torch
from qwen3vl_recipes.registry import recipes

from tests.helpers.forked import results_of_ranks
from tests.recipes.test_twins import twin
from tests.training.objective_steps import few_records
from tests.training.running import losses, replicated, train

METRICS = {
    "embedding": {"accuracy", "similarity/positive", "similarity/negative", "trained_queries"},
    "reranker": {"accuracy", "score/positive", "score/negative", "trained_documents"},
}
FAST = dict(optimizer__lr=5e-3, optimizer__min_lr=5e-3, scheduler__lr_warmup_iters=0, train__train_iters=4)


@pytest.fixture(scope="module")
def records(inputs, tmp_path_factory):
    """Return the folder of a few questions about digits with a right and a wrong answer."""
    return few_records(tmp_path_factory.mktemp("retrieval"), "retrieval")


def config(inputs, records: Path, save: Path | None, kind: str, **settings: Any) -> Any:
    """Return a run of full fine-tuning in float32."""
    common = dict(
        validation__eval_interval=2, checkpoint__save_interval=2, dataset__media_root=str(records.parent),
        model__seq_length=512, dataset__seq_length=512, objective__kind=kind,
    )  # fmt: skip
    if kind == "embedding":
        common |= dict(objective__max_documents=16, objective__temperature=0.1)
    cfg = replicated(inputs, save, **common | FAST | settings)
    cfg.dataset.path = str(records)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_retrieval_run_logs_metrics_and_resumes_bit_exactly(inputs, records, tmp_path, kind):
    log = train(config(inputs, records, tmp_path / "a", kind))
    steps, valid = [e for e in log if "loss" in e], [e for e in log if "valid_loss" in e]
    assert len(steps) == 4 and len(valid) == 2
    assert all(e.keys() >= METRICS[kind] and 0 <= e["accuracy"] <= 1 and e["grad_norm_vision_model"] > 0 for e in steps)
    assert all({f"valid_{name}" for name in METRICS[kind] if "trained" not in name} <= e.keys() for e in valid)
    halves = train(config(inputs, records, tmp_path / "b", kind), stop_after=2)
    assert losses(halves + train(config(inputs, records, tmp_path / "b", kind))) == losses(log)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_retrieval_run_with_adapters_trains_only_adapters(inputs, records, kind):
    cfg = config(inputs, records, None, kind, validation__eval_interval=0)
    cfg.peft = Qwen3VLLoRA(dim=4, alpha=8)
    log = train(cfg)
    assert log[0]["grad_norm_language_model"] > 0 and log[0]["grad_norm_vision_model"] == 0
    assert log[-1]["loss"] != log[0]["loss"]


def fsdp_log(inputs, records: Path, kind: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    cfg = inputs.config(None, **settings)  # float32
    cfg.dataset.path, cfg.checkpoint.pretrained_checkpoint = str(records), str(inputs.hf)
    return train(cfg)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_retrieval_run_under_megatron_fsdp_matches_replicated_ranks(inputs, records, kind):
    settings = dict(
        train__train_iters=2, optimizer__lr=1e-4, optimizer__min_lr=1e-4, optimizer__adam_eps=1e-4,
        validation__eval_interval=0,
    )  # fmt: skip
    one = config(inputs, records, None, kind, **settings)
    sections = {f"objective__{name}": value for name, value in vars(one.objective).items()}
    settings |= FAST | settings | sections | dict(
        model__seq_length=512, dataset__seq_length=512, dataset__media_root=str(records.parent)
    )  # fmt: skip
    sharded = results_of_ranks(fsdp_log, 2, inputs, records, kind, settings)
    replicas = results_of_ranks(replicated_log, 2, inputs, records, kind, settings)
    for a, b in zip(sharded, replicas, strict=True):
        for name in ("loss", "grad_norm", *METRICS[kind]):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-4), name


def replicated_log(inputs, records: Path, kind: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    return train(config(inputs, records, None, kind, **settings))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["embedding", "reranker"])
def test_guard_names_record_with_nan_loss(inputs, records, kind, monkeypatch):
    """The loss of a reranker's document is spoiled alone; a bad embedding spoils all queries of the row."""
    from qwen3vl_bridge.training import retrieval

    pool, calls = retrieval.PooledDocuments.pool_or_score, []

    def spoil(self, **arguments):
        output = pool(self, **arguments)
        calls.append(output)
        weight = torch.ones_like(output)
        weight[1] = torch.nan
        return output * weight if len(calls) == 2 else output

    monkeypatch.setattr(retrieval.PooledDocuments, "pool_or_score", spoil)
    with pytest.raises(BadStepError, match=r"train\.jsonl:\d+" + (r" \(document 2\)" if kind == "reranker" else "")):
        train(config(inputs, records, None, kind, validation__eval_interval=0, guard__on_nan="stop"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"objective__temperature": 0.0}, "objective.temperature is 0.0, expected a number above 0"),
    ({"objective__max_documents": 1}, "objective.max_documents is 1, expected at least 2"),
    ({"objective__matryoshka_dims": [0]}, r"objective.matryoshka_dims is \[0\], expected sizes from 1 to model.hidden"),
    ({"objective__matryoshka_dims": [999]}, r"objective.matryoshka_dims is \[999\], expected sizes from 1"),
    ({"objective__loss_type": "sigmoid"}, "objective.loss_type is set, but objective.kind is 'embedding'"),
    ({"dataset__streaming": True}, "dataset.streaming is True for objective.kind=embedding, expected False"),
])  # fmt: skip
def test_validation_raises_for_embedding_settings_out_of_range(inputs, records, changes, message):
    with pytest.raises(ValueError, match=message):
        config(inputs, records, None, "embedding", **changes).validate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n, one in recipes().items() if n.endswith(("_embedding_config", "_reranker_config")) and one.gpus]
)
def test_retrieval_recipe_trains_tiny_model(name, inputs, records):
    cfg = twin(name, str(inputs.hf), str(records), whole=True)
    cfg.model.seq_length = cfg.dataset.seq_length = 512  # for the longer prompts of rerankers
    cfg.dataset.media_root = str(records.parent)
    (entry,) = train(cfg)
    assert entry["grad_norm_language_model"] > 0 and entry.keys() >= METRICS[cfg.objective.kind]


def test_inspect_shows_documents_of_record(inputs, records, capsys):
    options = ["--hf-model", str(inputs.hf), "--data", str(records), "--media-root", str(records.parent)]
    assert data(["inspect", *options, "--objective", "reranker", "--samples", "1", "--json", "--no-progress"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [one["sample_id"] for one in found["samples"]]
    assert found["records_shown"] == 1 and names == ["train.jsonl:1", "train.jsonl:1 (document 2)"]
