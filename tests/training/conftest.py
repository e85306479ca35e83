"""Inputs of a small run: conversations about digits, and a tiny checkpoint in both formats."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models.qwen3_5.tiny import make_checkpoint


@dataclass(frozen=True)
class Inputs:
    hf: Path
    data: Path
    megatron: Path

    def config(self, save: Path | None, **settings):
        """Return the digits recipe, shortened and in float32. Settings are written `train__train_iters=4`."""
        from qwen3vl_recipes.paths import set_paths

        from tests.helpers.digits_recipe import digits_recipe_for

        cfg = set_paths(
            digits_recipe_for(self.hf), hf_path=self.hf, data_path=self.data, pretrained_checkpoint=self.megatron,
            save=save or "unused",
        )  # fmt: skip
        cfg.mixed_precision = None
        if save is None:
            cfg.checkpoint.save = cfg.checkpoint.load = cfg.logger.tensorboard_dir = None
        for name, value in {**SHORT, **settings}.items():
            section, _, field = name.partition("__")
            setattr(getattr(cfg, section), field, value)
        return cfg


SHORT = dict(
    train__train_iters=6, scheduler__lr_warmup_iters=1, validation__eval_interval=4, checkpoint__save_interval=3,
    model__seq_length=128, dataset__seq_length=128, dataset__num_workers=0, logger__log_interval=2,
)  # fmt: skip


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, untied_folder) -> Inputs:
    from qwen3vl_bridge.checkpoint import import_checkpoint
    from qwen3vl_bridge.testing.digits import make_dataset

    folder = tmp_path_factory.mktemp("run")
    data = folder / "data"
    make_dataset(data)
    for split, keep in (("train", 40), ("test", 8)):
        path = data / f"{split}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:keep]))
    import_checkpoint(untied_folder, folder / "megatron", progress=False)
    return Inputs(untied_folder, data, folder / "megatron")


# Metrics that are not reproducible between equal runs.
TIMED = ("seconds", "tokens_per_second", "images_per_second", "tflops_per_gpu", "mfu", "memory_gb")


@pytest.fixture(scope="session")
def folders(moe_folder, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Hugging Face folders of other models than the model of `inputs`."""
    own = {
        ("qwen3_5", kind): make_checkpoint(tmp_path_factory.mktemp(f"qwen3_5_{kind}"), moe=kind == "moe")
        for kind in ("dense", "moe")
    }
    return own | {("qwen3_vl", "moe"): moe_folder}


def losses(log: list[dict]) -> list[tuple]:
    return [tuple((name, value) for name, value in entry.items() if name not in TIMED) for entry in log]


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
