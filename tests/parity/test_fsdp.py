"""Under Megatron-FSDP losses and first gradients are transformers', also where one rank alone has pictures."""

import pytest
import torch

from tests.torchrun import torchrun

from .batches import run_reference
from .conftest import make_pair
from .fsdp_on_ranks import CONTENTS, ROWS, samples_of

_SECONDS = 400  # about 60 where the machine is free; a hang has no end
LOSS = 1e-6  # relative
GRADIENT = 2e-5  # relative to the largest entry of each


@pytest.fixture(scope="module")
def found(untied_folder, tied_folder, moe_folder, tmp_path_factory):
    """Losses of each rank, and gradients."""
    output = tmp_path_factory.mktemp("fsdp") / "found"
    torchrun("tests.parity.fsdp_on_ranks", 2, output, untied_folder, tied_folder, moe_folder, timeout=_SECONDS)
    (first, upper), (second, lower) = (torch.load(f"{output}.{rank}") for rank in (0, 1))
    gradients = {
        case: {name: torch.cat((upper[case][name], lower[case][name])) for name in upper[case]} for case in upper
    }
    return first, second, gradients


@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_losses_and_gradients_are_those_of_transformers(found, kind, request):
    *losses, gradients = found
    folder = request.getfixturevalue(f"{kind}_folder")
    pair = make_pair(folder, **(dict(moe_aux_loss_coeff=0.0) if kind == "moe" else {}))
    worst = 0.0
    for contents in CONTENTS:
        pair.zero_grad()
        expected = []
        for content in contents:
            _, loss = run_reference(pair.reference, samples_of(content, pair.config))
            loss.backward()
            expected.append(loss.item())
        for rows in ROWS:
            case = (str(folder), contents, rows)
            assert [one[case] for one in losses] == pytest.approx(expected, rel=LOSS)
            for name, p in pair.megatron.named_parameters():
                p.grad = gradients[case][name]
            worst = max(worst, *pair.gradient_errors().values())
    print(f"{kind}: {worst:.1e}")
    assert worst <= GRADIENT
