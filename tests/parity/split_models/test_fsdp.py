"""Under Megatron-FSDP losses and first gradients are transformers', also where one rank alone has pictures."""

import math
from pathlib import Path
from typing import Any

from qwen3vl_bridge.weights.rows import Part, part_of

import pytest
import torch

from tests.forked import run_ranks
from tests.noise import check, limits

from ..batches import run_reference
from ..conftest import Pair, make_pair
from .fsdp_on_ranks import CONTENTS, MEAN, ROWS, samples_of

_SECONDS = 400  # about 60 where the machine is free; a hang has no end
NORM = 5e-6  # relative; measured 5.0e-7


def run_models(output: Path, *folders: Path) -> tuple[Any, ...]:
    """Losses of each of two ranks, gradients, and their norms."""
    run_ranks("tests.parity.split_models.fsdp_on_ranks", 2, output, *folders, timeout=_SECONDS)
    (first, upper, norms), (second, lower, also) = (torch.load(f"{output}.{rank}") for rank in (0, 1))
    gradients = {
        case: {name: torch.cat((upper[case][name], lower[case][name])) for name in upper[case]} for case in upper
    }
    assert norms == also
    return first, second, gradients, norms


def check_models(pair: Pair, folder: Path, losses: list[dict], gradients: dict) -> None:
    """Compare all cases of a model with transformers."""
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
            case = (str(folder), contents, rows)
            for name, p in pair.megatron.named_parameters():
                p.grad = gradients[case][name]
            check(errors(([one[case] for one in losses], pair.megatron_gradients()), expected), most)


@pytest.fixture(scope="module")
def found(untied_folder, tied_folder, moe_folder, tmp_path_factory):
    return run_models(tmp_path_factory.mktemp("fsdp") / "found", untied_folder, tied_folder, moe_folder)


@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_losses_and_gradients_are_those_of_transformers(found, kind, request):
    *losses, gradients, _ = found
    folder = request.getfixturevalue(f"{kind}_folder")
    pair = make_pair(folder, **(dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}))
    check_models(pair, folder, losses, gradients)


def test_without_a_loss_per_token_gradients_are_averaged(found, untied_folder):
    """`calculate_per_token_loss=False`: a framework's loss has the factor for it."""
    *_, gradients, _ = found
    added_up = gradients[(str(untied_folder), *MEAN[1:])]
    errors = {
        name: ((2 * mean - added_up[name]).abs().max() / added_up[name].abs().max().clamp(min=1e-6)).item()
        for name, mean in gradients["mean"].items()
    }
    assert max(errors.values()) <= 1e-6, errors


def test_norms_of_parts_are_those_of_their_gradients(found):
    *_, gradients, norms = found
    assert len(norms) == 3
    worst = 0.0
    for case, (parts, total) in norms.items():
        for part, norm in zip(Part, parts, strict=True):
            mine = [gradient for name, gradient in gradients[case].items() if part_of(name) is part]
            worst = max(worst, abs(norm / torch.nn.utils.get_total_norm(mine).item() - 1))
        worst = max(worst, abs(math.hypot(*parts) / total - 1))
    print(f"{worst:.1e}")
    assert worst <= NORM
