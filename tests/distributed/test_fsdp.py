"""Under Megatron-FSDP losses and first gradients are transformers', also where one rank alone has images.

Parameters lie in small buckets, so that each module's are gathered when it is called, and reduced on their own.
"""

import math
import os
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.collectives import sum_over_ranks
from qwen3vl_bridge.training.guard import GradNormsByComponent
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.weights.rows import Component, component_of

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from tests.helpers.batches import Sample, make_batch, make_samples, run_reference
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check, limits, relative
from tests.helpers.ranks import of_all_ranks
from tests.parity.conftest import Pair, make_pair

# What each rank sees; a rank without pictures must not keep the other waiting.
CONTENTS = [("one image", "text only"), ("video", "many images"), ("text only", "text only"), ("mixed", "video")]
ROWS = ("padded", "packed")
# The case whose gradients are averaged too: which folder, content and rows.
MEAN = (0, CONTENTS[-1], "packed")


def samples_of(content: str, config) -> list[Sample]:
    return make_samples(content, config, seed=11)


def build(folder: Path, *, chunk: int = 0, per_token: bool = True) -> torch.nn.Module:
    """Return the model, sharded over all ranks."""
    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
    provider.calculate_per_token_loss, provider.loss_chunk_tokens = per_token, chunk
    provider.gradient_accumulation_fusion = False
    if provider.moe_layers:
        provider.moe_aux_loss_coeff = 0.0
    provider.finalize()
    groups = initialize(provider, seed=0)
    ddp = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True, gradient_reduce_div_fusion=False, overlap_grad_reduce=True,
        overlap_param_gather=True, bucket_size=20_000,
    )  # fmt: skip
    (model,) = provider.provide_distributed_model(
        ddp_config=ddp, use_megatron_fsdp=True, use_cpu_initialization=True, mixed_precision_wrapper=None,
        pg_collection=groups,
    )  # fmt: skip
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's rows of the gradients, by the names of the unwrapped model."""
    return {
        name.replace("module.", ""): (p if p.grad is None else p.grad).to_local().clone() * (p.grad is not None)
        for name, p in model.named_parameters()
    }


def norms(model: torch.nn.Module) -> tuple[list[float], float]:
    """Return the gradient norm of each component, and megatron-core's total norm."""
    config = OptimizerConfig(lr=1e-3, min_lr=0.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    optimizer.prepare_grads()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    squares = GradNormsByComponent([model], optimizer, groups).local_squares()
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


def steps_of_models(*folders: Path) -> list[tuple[dict, dict, dict]]:
    """Of every model, content and kind of rows, each rank's losses and its part of the gradients.

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
    return of_all_ranks((losses, found, found_norms))


_SECONDS = 400  # about 60 where the machine is free; a hang has no end
NORM = 5e-6  # relative; measured 5.0e-7


def run_models(*folders: Path) -> tuple[Any, ...]:
    """Losses of two ranks, gradients and their norms."""
    ranks = results_of_ranks(steps_of_models, 2, *folders, timeout=_SECONDS)
    (first, upper, norms), (second, lower, also) = ranks
    gradients = {
        case: {name: torch.cat((upper[case][name], lower[case][name])) for name in upper[case]} for case in upper
    }
    assert norms == also
    return first, second, gradients, norms


def check_models(pair: Pair, folder: Path, losses: list[dict], gradients: dict) -> None:
    for contents in CONTENTS:

        def reference(contents: tuple[str, ...] = contents) -> tuple[list[float], dict[str, torch.Tensor]]:
            pair.reference.zero_grad()
            found = [run_reference(pair.reference, samples_of(content, pair.config))[1] for content in contents]
            sum(found).backward()
            return [loss.item() for loss in found], pair.reference_gradients()

        def errors(found: tuple, expected: tuple) -> dict[str, float]:
            gradients = pair.gradient_errors(found[1], expected[1])
            loss = max(abs(a / b - 1) for a, b in zip(found[0], expected[0], strict=True))
            return {"loss": loss, "gradients": max(gradients.values())}

        expected = reference()
        most = limits(reference, errors, pair.reference, expected=expected)
        for rows in ROWS:
            case = (folder, contents, rows)
            for name, p in pair.megatron.named_parameters():
                p.grad = gradients[case][name]
            check(errors(([one[case] for one in losses], pair.megatron_gradients()), expected), most)


@pytest.fixture(scope="module")
def found(untied_folder, tied_folder, moe_folder):
    return run_models(untied_folder, tied_folder, moe_folder)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_fsdp_losses_and_gradients_match_transformers(found, kind, request):
    *losses, gradients, _ = found
    folder = request.getfixturevalue(f"{kind}_folder")
    pair = make_pair(folder, **(dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}))
    check_models(pair, folder, losses, gradients)


def test_fsdp_averages_gradients_if_loss_is_not_per_token(found, untied_folder):
    """With `calculate_per_token_loss=False` the framework's loss has the scaling factor."""
    *_, gradients, _ = found
    added_up = gradients[(untied_folder, *MEAN[1:])]
    errors = relative({name: 2 * mean for name, mean in gradients["mean"].items()}, added_up)
    assert max(errors.values()) <= 1e-6, errors


def test_fsdp_gradient_norms_of_components_match_gathered_gradients(found):
    *_, gradients, norms = found
    assert len(norms) == 3
    worst = 0.0
    for case, (parts, total) in norms.items():
        for component, norm in zip(Component, parts, strict=True):
            mine = [gradient for name, gradient in gradients[case].items() if component_of(name) is component]
            worst = max(worst, abs(norm / torch.nn.utils.get_total_norm(mine).item() - 1))
        worst = max(worst, abs(math.hypot(*parts) / total - 1))
    print(f"{worst:.1e}")
    assert worst <= NORM
