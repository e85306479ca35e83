"""Run Megatron-Bridge's loop in this process or on these ranks, like a user's script."""

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
from qwen3vl_bridge.training.process_groups import init_distributed
from qwen3vl_bridge.training.run_log import ENTRY

import torch
import torch.distributed.checkpoint as dcp
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.initialize import destroy_global_state
from megatron.bridge.training.pretrain import pretrain
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.helpers.ranks import leave_groups
from tests.helpers.steps import release


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


# Metrics that are not reproducible between equal runs.
TIMED = ("seconds", "tokens_per_second", "images_per_second", "tflops_per_gpu", "mfu", "memory_gb")


def losses(log: list[dict]) -> list[tuple]:
    return [tuple((name, value) for name, value in entry.items() if name not in TIMED) for entry in log]


def read_log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def replicate(cfg: Any, *, distributed: bool = False) -> Any:
    """Change a run to replicated parameters and torch_dist checkpoints."""
    cfg.checkpoint.ckpt_format, cfg.ddp.data_parallel_sharding_strategy = "torch_dist", "no_shard"
    cfg.ddp.use_megatron_fsdp = False
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = distributed
    cfg.ddp.overlap_param_gather = cfg.ddp.overlap_grad_reduce = distributed
    return cfg


def replicated(inputs: Inputs, save: Path | None, *, distributed: bool = True, **settings: Any) -> Any:
    return replicate(_from_hf(inputs, save, settings), distributed=distributed)


def sharded(inputs: Inputs, save: Path | None, **settings: Any) -> Any:
    """Return the digits recipe with Megatron-FSDP in bfloat16; see `replicated`."""
    cfg = _from_hf(inputs, save, settings)
    cfg.mixed_precision = "bf16_mixed"
    return cfg


def _from_hf(inputs: Inputs, save: Path | None, settings: dict[str, Any]) -> Any:
    return inputs.config(save, **{"checkpoint__pretrained_checkpoint": str(inputs.hf)} | settings)


def configured(
    hf: str, data: str, first: str | None, save: str | None, settings: dict[str, Any], *,
    fsdp: bool = False, bf16: bool = False, distributed: bool = False,
) -> Any:  # fmt: skip
    """Return a run that starts from the checkpoint `first`, with Megatron-FSDP or replicated parameters."""
    cfg = Inputs(Path(hf), Path(data), Path("unused")).config(None if save is None else Path(save), **settings)
    cfg.checkpoint.pretrained_checkpoint, cfg.logger.tensorboard_dir = first, None
    cfg.mixed_precision = "bf16_mixed" if bf16 else None
    return cfg if fsdp else replicate(cfg, distributed=distributed)


_latest: list[torch.nn.Module] = []


def run_bridges_loop(cfg: Any, *callbacks: Callback) -> None:
    init_distributed()
    release(_latest)
    _latest.clear()
    destroy_global_state()  # of an earlier run that failed, or of another loop
    leave_groups()
    ours = [*qwen3vl_bridge.training_callbacks(cfg), *callbacks, _Models()]
    loop = pretrain if cfg.checkpoint.pretrained_checkpoint is None else finetune
    loop(cfg, qwen3vl_bridge.forward_step, callbacks=ours)


class _Models(Callback):
    def on_train_start(self, context: CallbackContext) -> None:
        _latest.extend(context.model)


class Entries(Callback):
    def __init__(self, stop_after: int | None = None) -> None:
        self.entries: list[dict[str, float]] = []
        self._stop_after, self._latest = stop_after, None

    def on_train_start(self, context: CallbackContext) -> None:
        if self._stop_after is not None:
            context.state.cfg.train.exit_interval = context.state.train_state.step + self._stop_after

    def _add_entry(self, context: CallbackContext) -> None:
        entry = context.user_state.get(ENTRY)
        if entry is not None and entry is not self._latest:
            self._latest = entry
            self.entries.append(dict(entry))

    on_train_step_end = on_eval_end = _add_entry


def train(cfg: Any, *, stop_after: int | None = None, callbacks: Sequence[Callback] = ()) -> list[dict[str, float]]:
    entries = Entries(stop_after)
    with contextlib.suppress(SystemExit):
        run_bridges_loop(cfg, *callbacks, entries)
    return entries.entries


@contextlib.contextmanager
def messages(logger: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the messages of a logger and its children in the block."""
    found, handler = [], logging.Handler(level)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


def stored(run: Path) -> dict[str, torch.Tensor]:
    folder = find_iteration(run)
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def optimizer_states(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [state for part in parts if part.optimizer for state in part.optimizer.state.values()]
