"""A step touches the device alone: no tensor of the model's is made on the host, and nothing is asked of the device.

On the meta device there are no numbers to ask for, and an operation refuses tensors of two devices as CUDA does. So a
forward and backward there finds what a test on the CPU cannot see and a GPU would stop at.
"""

from qwen3vl_bridge.batch import ModelInputs

import pytest
import torch
from torch import nn

from tests.parity.batches import make_batch, make_samples
from tests.parity.conftest import make_pair
from tests.qwen3_5.tiny import make_checkpoint


def on_meta(model: nn.Module) -> nn.Module:
    """The model without its numbers; parameters keep what Megatron notes on them, and tied ones stay one."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                moved[id(parameter)] = new = nn.Parameter(parameter.detach().to("meta"))
                vars(new).update(vars(parameter))
            if parameter is not None:
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    return model


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def pair(request, untied_folder, tmp_path_factory):
    is_old = request.param == "qwen3_vl"
    pair = make_pair(untied_folder if is_old else make_checkpoint(tmp_path_factory.mktemp("qwen3_5")))
    on_meta(pair.megatron)
    return pair


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("content", ["mixed", "image and video", "text only"])
def test_nothing_is_made_elsewhere_and_nothing_is_asked(pair, content, packed, monkeypatch):
    equal = torch.equal  # megatron-core compares offsets, ours are one tensor: CUDA answers that without looking
    monkeypatch.setattr(torch, "equal", lambda a, b: a is b or equal(a, b))
    batch = make_batch(make_samples(content, pair.config, seed=3), pair.config, packed=packed)
    inputs: ModelInputs = batch.local().to("meta")
    pair.megatron.zero_grad(set_to_none=True)
    losses = pair.megatron(inputs=inputs)
    (losses * inputs.loss_mask).sum().backward()
    assert losses.device.type == "meta" and losses.shape == inputs.labels.shape
    assert {p.grad.device.type for p in pair.megatron.parameters() if p.grad is not None} == {"meta"}
