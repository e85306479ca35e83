"""Logits, loss and every gradient are those of transformers on the same device, whichever kernels are chosen."""

from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.config.fields import has_transformer_engine
from qwen3vl_bridge.config.model_validation import PACKED_UNFUSED
from qwen3vl_bridge.models.common import rope

import pytest
import torch
from megatron.core.utils import get_te_version, is_te_min_version

from tests.gpu.conftest import KINDS
from tests.helpers.batches import CONTENTS, make_batch, make_samples
from tests.helpers.expert_layouts import relayout
from tests.parity.conftest import Pair, make_pair
from tests.parity.test_parity import check_distances, check_parity, distance
from tests.parity.test_recompute import FULL, of_vision

LOCAL = dict(transformer_impl="local", moe_grouped_gemm=False, moe_permute_fusion=False)
KERNELS: dict[str, dict[str, Any]] = {
    "local": LOCAL, "local, recomputed": LOCAL | FULL | of_vision(FULL), "Transformer Engine": {},
}  # fmt: skip


def pair_of(kind: str, folders, device: str, **settings: Any) -> Pair:
    if kind == "moe":
        settings["moe_aux_loss_coeff"] = 0.0  # the reference's loss has no such term
    return make_pair(folders[kind], device=device, **settings)


def need_transformer_engine(device: str) -> None:
    if device == "cpu" or not has_transformer_engine():
        pytest.skip("needs Transformer Engine and a GPU")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_logits_and_gradients_match_transformers(kind, kernels, folders, device):
    """Padded and packed, without TF32; limits are multiples of transformers' noise on the device (`noise.py`)."""
    if kernels == "Transformer Engine":
        need_transformer_engine(device)
        if not is_te_min_version(PACKED_UNFUSED):
            pytest.skip(f"Transformer Engine {get_te_version()} has no attention over packed rows in float32")
    pair = pair_of(kind, folders, device, **KERNELS[kernels])
    for content in CONTENTS if device == "cuda" else ("mixed", "image and video"):
        print(content)
        samples = make_samples(content, pair.config, seed=3)
        check_parity(pair, samples, *(make_batch(samples, pair.config, packed=packed) for packed in (False, True)))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_error_is_at_most_1_5_times_error_of_transformers(kind, packed, folders, device):
    """With flash-linear-attention where that is installed; transformers computes linear attention by torch alone."""
    check_distances(pair_of(kind, folders, device, params_dtype=torch.bfloat16, bf16=True), packed=packed)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_exported_from_device_equal_loaded_weights(kind, folders, device):
    pair = pair_of(kind, folders, device)
    exported = dict(pair.bridge.export_hf_weights([pair.megatron], cpu=True, show_progress=False))
    expected = relayout({name: p.data.cpu() for name, p in pair.reference.named_parameters()}, pair.layout)
    assert [name for name, weight in expected.items() if not torch.equal(exported[name], weight)] == []


@pytest.mark.parametrize("fused", [False, True], ids=["formula", "Transformer Engine's kernel"])
def test_bf16_rope_error_does_not_exceed_error_of_transformers(fused, device):
    """Heads of the 8B's size in bfloat16. On CUDA torch compiles the formula."""
    if fused:
        need_transformer_engine(device)
    random = torch.Generator().manual_seed(0)
    angles = torch.randint(0, 4096, (512, 1, 1), generator=random) * rope.inverse_frequencies(128, 5e6, "cpu")
    heads = [torch.randn(512, 1, count, 128, generator=random).bfloat16() for count in (32, 8)]
    truth = rope.rotate(*(x.double() for x in heads), rope.rotation(angles, torch.float64, fused=False))
    theirs = rope.rotate(*heads, rope.rotation(angles, torch.bfloat16, fused=False))
    turned = rope.rotate(*(x.to(device) for x in heads), rope.rotation(angles.to(device), torch.float32, fused=fused))
    assert distance([x.cpu() for x in turned], truth) <= distance(theirs, truth)
