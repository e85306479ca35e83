"""The vision tower: mergers against transformers, and the number of embedding lookups."""

from functools import partial

from qwen3vl_bridge.models.common.vision_tower import PatchMerger, QwenVLVisionModel, vision_transformer_config
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
from megatron.bridge import AutoBridge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionPatchMerger
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.noise import check, limit
from tests.models.qwen3_5.tiny import make_checkpoint

REFERENCES = {
    "main": partial(Qwen3VLVisionPatchMerger, use_postshuffle_norm=False),
    "deepstack": partial(Qwen3VLVisionPatchMerger, use_postshuffle_norm=True), "Qwen3.5": Qwen3_5VisionPatchMerger,
}  # fmt: skip


@pytest.fixture(params=REFERENCES)
def mergers(request, untied_folder, tmp_path):
    """Return our mergers and those of transformers with the same weights, large enough to tell GELUs apart."""
    folder = make_checkpoint(tmp_path) if request.param == "Qwen3.5" else untied_folder
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    groups = initialize(provider, seed=0)
    vision = provider.vision_config
    after = request.param == "deepstack"
    ours = PatchMerger(vision_transformer_config(provider), vision, groups.tp, norm_after_shuffle=after)
    reference = REFERENCES[request.param](vision)
    with torch.no_grad():
        for (name, target), (_, source) in zip(
            [(n, p) for part in ("patch_norm", "linear_fc1", "linear_fc2") for n, p in named(ours, part)],
            [(n, p) for part in ("norm", "linear_fc1", "linear_fc2") for n, p in named(reference, part)],
            strict=True,
        ):
            assert target.shape == source.shape, name
            source.copy_(torch.randn(source.shape) * (0.1 if source.ndim == 2 else 0.5))
            target.copy_(source)
    return ours, reference, torch.randn(12 * 4, vision.hidden_size)


def named(module: torch.nn.Module, part: str) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, getattr(getattr(module, part), name)) for name in ("weight", "bias")]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def test_patch_merger_matches_transformers(mergers):
    """With the tanh GELU of the layers it would not match."""
    ours, reference, patches = mergers
    found = error(ours(patches), reference(patches))
    check({"output": found}, {"output": limit(lambda: reference(patches), error, reference)})


class OfTable(TorchDispatchMode):
    """Records the names of operations that read or create a tensor of a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.shape == self.shape for x in tree_leaves((args, kwargs, made))):
            self.names.append(operation.name())
        return made


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_vision_tower_looks_up_position_embeddings_once(family, untied_folder, tmp_path):
    folder = make_checkpoint(tmp_path) if family == "qwen3_5" else untied_folder
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    tower = QwenVLVisionModel(vision_transformer_config(provider), provider.vision_config, initialize(provider, seed=0))
    config = AutoConfig.from_pretrained(folder)
    vision = make_batch(make_samples("many images", config, seed=0), config).vision
    with OfTable(tower.pos_embed.weight.shape) as table:
        tower(vision)[0].sum().backward()
    copying = [name for name in table.names if name != "aten::detach"]  # a view, of the gradient that is kept
    assert copying == ["aten::embedding", "aten::embedding_dense_backward"]
