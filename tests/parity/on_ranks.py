"""Run on ranks: a model in a parallel layout trains for two steps like transformers in one process."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.dist_train.joint_run import join_modules, replicas_to_read
from qwen3vl_bridge.training import step

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training.losses import create_masked_next_token_loss_function
from megatron.bridge.training.optim import setup_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from qwen3vl_recipes.paths import set_paths
from torch import Tensor

from tests.helpers.batches import Sample, make_batch, pictures
from tests.helpers.digits_recipe import digits_recipe_for
from tests.helpers.ranks import largest, of_all_ranks
from tests.helpers.steps import Run, forward_backward, set_up, train_step
from tests.parity import deep_ep_on_gloo
from tests.parity.conftest import converted_gradients, shifted_names
from tests.parity.references import ADAM, CLIP, DECAY, MICROBATCHES, STEPS, errors, provider_settings, step_samples
from tests.parity.topologies import CHUNKWISE, MODULES, TOPOLOGIES, Topology, split_by
from tests.training.running import replicate


def configuration(folder: str | Path, topology: Topology, balance: float = 0.0) -> Any:
    """Return the digits recipe with the optimizer of the reference, for a parallel layout."""
    cfg = set_paths(digits_recipe_for(folder), hf_path=folder, data_path="unused")
    cfg.mixed_precision = None
    cfg.logger.tensorboard_dir = None
    cfg.model = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    cfg.model.seq_length, cfg.model.calculate_per_token_loss = cfg.dataset.seq_length, True
    split_by(cfg, topology.fields | provider_settings(Path(folder)))
    if cfg.model.moe_token_dispatcher_type == "flex":
        deep_ep_on_gloo.install()
    if cfg.model.moe_layers:
        cfg.model.moe_aux_loss_coeff = balance
    cfg.checkpoint.pretrained_checkpoint = cfg.checkpoint.load = cfg.checkpoint.save = None
    cfg.train.global_batch_size, cfg.train.train_iters = MICROBATCHES, STEPS
    replicate(cfg, distributed=topology.distributed_optimizer)
    cfg.ddp.overlap_param_gather = cfg.ddp.overlap_grad_reduce = False  # weights are looked at after each step
    cfg.scheduler.lr_decay_style, cfg.scheduler.lr_warmup_iters = "constant", 0
    cfg.scheduler.start_weight_decay = cfg.scheduler.end_weight_decay = DECAY
    optimizer, (beta1, beta2) = cfg.optimizer, ADAM["betas"]
    optimizer.lr = optimizer.min_lr = ADAM["lr"]
    optimizer.adam_eps, optimizer.adam_beta1, optimizer.adam_beta2 = ADAM["eps"], beta1, beta2
    optimizer.weight_decay, optimizer.clip_grad = DECAY, CLIP
    return cfg


def layout_of(samples: list[Sample], *, packed: bool, multiple: int, tokens: int | None) -> SequenceLayout:
    """Return the layout: packed with padding after each document, or padded rows, including the longest row."""
    lengths = [len(sample.ids) for sample in samples]
    if packed:
        even = sum(-(-length // multiple) * multiple for length in lengths)
        return SequenceLayout.packed_row(lengths, multiple=multiple, total=tokens or even + multiple)
    longest = -(-(max(lengths) + 1) // multiple) * multiple
    return SequenceLayout.padded_rows(lengths, tokens // len(lengths) if tokens else longest)


@dataclass(frozen=True)
class Shared:
    batch: TokenBatch
    samples: list[Sample]

    def arguments(self, cp_size: int, cp_rank: int) -> dict[str, Any]:
        """Return the arguments of a rank: its tokens, and the offsets and images of the full row."""
        layout = self.batch.layout
        index = token_index(layout, cp_size, cp_rank).T

        def take(whole: Tensor) -> Tensor:
            return whole.flatten()[index]

        return dict(
            input_ids=take(self.batch.input_ids), labels=take(self.batch.labels), loss_mask=take(self.batch.loss_mask),
            packed_seq_params=PackedSeqParams("thd", *[layout.cu_seqlens] * 2, *[layout.cu_seqlens_padded] * 2),
            **pictures(self.samples),
        )  # fmt: skip


def forward_step_of_shares(
    state: Any, data_iterator: Iterator[Shared], model: torch.nn.Module
) -> tuple[Tensor, Callable]:
    """A forward step that calls the model with tokens of this rank, as RL frameworks do."""
    groups = get_attr_wrapped_model(model, "pg_collection")
    arguments = next(data_iterator).arguments(groups.cp.size(), groups.cp.rank())
    checks = state.cfg.rerun_state_machine
    count = create_masked_next_token_loss_function(
        arguments["loss_mask"], checks.check_for_nan_in_loss, checks.check_for_spiky_loss
    )
    return model(**arguments), count


class Split:
    """A model in a parallel layout that can be reset to its initial state."""

    def __init__(self, folder: str | Path, topology: Topology, balance: float = 0.0, **settings: Any) -> None:
        self.tokens, self.prepare = topology.tokens, lambda sample: sample  # samples before they become a batch
        cfg = configuration(folder, topology, balance)
        for name, value in settings.items():
            section, _, field = name.rpartition("__")
            setattr(getattr(cfg, section) if section else cfg, field, value)
        self.run: Run = set_up(cfg, data=False)
        self.bridge = AutoBridge.from_hf_pretrained(folder)
        self.hf_config = self.bridge.hf_pretrained.config
        self.parameters = [p for chunk in self.run.model for p in chunk.parameters()]
        self.start = [p.detach().clone() for p in self.parameters]

    def begin(self, batches: Iterator[TokenBatch | Shared], rows: str) -> None:
        """Reset weights, optimizer and data."""
        run = self.run
        with torch.no_grad():
            for p, first in zip(self.parameters, self.start, strict=True):
                p.copy_(first)
        run.optimizer, run.scheduler = setup_optimizer(
            run.cfg.optimizer, run.cfg.scheduler, run.model, pg_collection=run.groups
        )
        run.cfg.model.grad_scale_func = run.optimizer.scale_loss
        if run.cfg.model.dist_train.use_dist_train:
            join_modules(run.cfg.model, run.optimizer, sharded=run.cfg.optimizer.use_distributed_optimizer)
        for chunk in run.model:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()  # a gradient that lies in the buffer would be added to it
        run.stream = batches
        run.forward_step = forward_step_of_shares if rows == "presharded" else step.forward_step

    def exported(self) -> dict[str, torch.Tensor]:
        exported = self.bridge.export_hf_weights(self.run.model, cpu=True, show_progress=False)
        return {name: tensor.clone() for name, tensor in exported if tensor.is_floating_point()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients under Hugging Face names; Megatron stores some weights minus one."""
        gradients = converted_gradients(self.bridge, self.run.model, lambda p: getattr(p, "main_grad", None))
        shifted = shifted_names(self.run.cfg.model)
        return {name: gradient - int(name.endswith(shifted)) for name, gradient in gradients.items()}

    @torch.no_grad()
    def worst_in_place(self, found: list[torch.Tensor], folder: Path, scale: float | None = None) -> float:
        """Return the largest error of any tensor if the model cannot be exported as one.

        Megatron-Bridge loads the expected values into the model, and each rank compares its own.
        """
        before = [p.clone() for p in self.parameters]
        self.bridge.load_hf_weights(self.run.model, hf_path=folder)
        names = [name for chunk in self.run.model for name, _ in chunk.named_parameters()]
        mine = {
            name: ((one - p).abs().max().item(), p.abs().max().item())
            for name, one, p in zip(names, found, self.parameters, strict=True)
        }
        for p, weight in zip(self.parameters, before, strict=True):
            p.copy_(weight)
        heard = of_all_ranks(mine)
        every = {name for part in heard for name in part}
        errors = {name: [max(part[name][i] for part in heard if name in part) for i in (0, 1)] for name in every}
        return max(error / (scale or max(largest, 1e-6)) for error, largest in errors.values())

    def batches(self, content: str, rows: str, steps: int = STEPS) -> Iterator[Any]:
        """Return the microbatches of this rank in all steps; vision ranks get those of all their replicas."""
        read, size = replicas_to_read(self.run.cfg.model, self.run.groups)
        replicas = [self._batches(content, rows, steps, replica, size) for replica in read]
        return replicas[0] if self.run.cfg.model.add_decoder else zip(*replicas, strict=True)

    def _batches(self, content: str, rows: str, steps: int, replica: int, size: int) -> Iterator[TokenBatch | Shared]:
        model = self.run.cfg.model
        multiple = 2 * model.context_parallel_size * model.tensor_model_parallel_size
        for number in range(steps):
            for samples in step_samples(content, self.hf_config, number)[replica::size]:
                layout = layout_of(samples, packed=rows != "padded", multiple=multiple, tokens=self.tokens)
                samples = list(map(self.prepare, samples))
                batch = make_batch(samples, self.hf_config, layout=layout)
                yield Shared(batch, samples) if rows == "presharded" else batch


def compare(
    split: Split, topology: Topology, folder: Path, content: str, rows: str, expected: dict[str, Any]
) -> dict[str, float]:
    run = split.run
    split.begin(split.batches(content, rows), rows)
    mine = MICROBATCHES // run.cfg.data_parallel_size
    first, again = itertools.tee(itertools.islice(run.stream, mine))
    found: dict[str, Any] = {}
    in_place: dict[str, float] = {}
    in_modules = run.cfg.model.dist_train.use_dist_train
    if in_modules:
        forward_backward(run, first, mine)
        gradients = [p.main_grad.clone() for p in split.parameters]
        in_place["gradient"] = split.worst_in_place(gradients, folder / f"gradients_{content}")
    elif not topology.distributed_optimizer:  # which leaves each rank a part of the gradients
        forward_backward(run, first, mine)
        found["gradients"] = split.gradients()
    run.stream = itertools.chain(again, run.stream)
    logs = [train_step(run) for _ in range(STEPS)]
    found |= dict(losses=[log["loss"] for log in logs], norms=[log["grad_norm"] for log in logs])
    if in_modules:
        weights = [p.detach().clone() for p in split.parameters]
        in_place["weight"] = split.worst_in_place(weights, folder / f"weights_{content}", scale=ADAM["lr"])
    else:
        found["weights"] = split.exported()
    return errors(found, expected) | in_place


def errors_of_cases(cases: list[tuple[str, ...]], folders: dict[str, Path]) -> dict[tuple[str, ...], dict[str, float]]:
    """Return errors of cases (family, topology, content, rows); a family's folder has `reference_<content>.pt`."""
    found, world = {}, int(os.environ["WORLD_SIZE"])
    for (family, name), group in itertools.groupby(cases, key=lambda case: case[:2]):
        topology, folder = (TOPOLOGIES | MODULES | CHUNKWISE)[name], folders[family]
        assert topology.ranks == world, name
        split = Split(folder, topology)
        for _, _, content, rows in group:
            started = time.perf_counter()
            expected = torch.load(folder / f"reference_{content}.pt", mmap=True)
            own = compare(split, topology, folder, content, rows, expected)
            found[family, name, content, rows] = largest(own) | dict(seconds=time.perf_counter() - started)
            if dist.get_rank() == 0:
                print(family, name, content, rows, found[family, name, content, rows], flush=True)
    return found
