"""Run on two ranks: losses and gradients under Megatron-FSDP, with other contents on each rank.

    torchrun --nproc_per_node 2 -m tests.parity.split_models.fsdp_on_ranks OUTPUT HF_FOLDER...

Parameters lie in small buckets, so that each module's are gathered when it is called, and reduced on their own. Only
gradients of the first step are looked at; `tests/training/test_run.py` trains.
"""

import os
import sys

from qwen3vl_bridge.parallel.collectives import sum_over_ranks
from qwen3vl_bridge.training.before_step import PartSquares
from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from tests.ranks import begin, leave

from ..batches import Sample, make_batch, make_samples

# What each rank sees; a rank without pictures must not keep the other waiting.
CONTENTS = [("one image", "text only"), ("video", "many images"), ("text only", "text only"), ("mixed", "video")]
ROWS = ("padded", "packed")
# The case whose gradients are averaged too: which folder, content and rows.
MEAN = (0, CONTENTS[-1], "packed")


def samples_of(content: str, config) -> list[Sample]:
    """What a rank sees, for one of its contents."""
    return make_samples(content, config, seed=11)


def build(folder: str, *, chunk: int = 0, per_token: bool = True) -> torch.nn.Module:
    """The model, sharded over all ranks."""
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    provider.calculate_per_token_loss, provider.loss_chunk_tokens = per_token, chunk
    provider.gradient_accumulation_fusion = False
    if provider.moe_layers:
        provider.moe_aux_loss_coeff = 0.0
    provider.finalize()
    groups = initialize(provider, seed=0)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
        gradient_reduce_div_fusion=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=20_000,
    )
    (model,) = provider.provide_distributed_model(
        ddp_config=ddp,
        use_megatron_fsdp=True,
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=groups,
    )
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's rows of the gradients, under the names of the bare model."""
    return {
        name.replace("module.", ""): (p if p.grad is None else p.grad).to_local().clone() * (p.grad is not None)
        for name, p in model.named_parameters()
    }


def norms(model: torch.nn.Module) -> tuple[list[float], float]:
    """Norms of the parts' gradients as they lie there, and megatron-core's of all of them."""
    config = OptimizerConfig(lr=1e-3, min_lr=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    optimizer.prepare_grads()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    squares = PartSquares([model], optimizer, groups).of_this_rank()
    return sum_over_ranks(squares).sqrt().tolist(), optimizer.get_grad_norm()


def step(
    model: torch.nn.Module, samples: list[Sample], config: AutoConfig, rows: str
) -> tuple[float, dict[str, torch.Tensor]]:
    """This rank's loss of a microbatch, a sum over tokens, and its rows of the gradients."""
    model.zero_grad_buffer()
    inputs = make_batch(samples, config, packed=rows == "packed").local()
    loss = (model(inputs=inputs) * inputs.loss_mask).sum()
    loss.backward()
    model.finish_grad_sync()
    return loss.item(), gradients(model)


def main(output: str, *folders: str) -> None:
    """Every model, content and kind of rows; each rank saves its losses, and its part of the gradients.

    Of each model, norms of its last case too.
    """
    losses, found, found_norms = {}, {}, {}
    rank = int(os.environ["RANK"])
    for number, folder in enumerate(folders):
        model, config = build(folder, chunk=16 * number), AutoConfig.from_pretrained(folder)
        for contents in CONTENTS:
            for rows in ROWS:
                case = (folder, contents, rows)
                losses[case], found[case] = step(model, samples_of(contents[rank], config), config, rows)
        found_norms[case] = norms(model)
    folder, contents, rows = MEAN
    config = AutoConfig.from_pretrained(folders[folder])
    samples = samples_of(contents[rank], config)
    _, found["mean"] = step(build(folders[folder], per_token=False), samples, config, rows)
    torch.save((losses, found, found_norms), f"{output}.{rank}")
    leave()


if __name__ == "__main__":
    begin()
    main(*sys.argv[1:])
