"""Megatron-Bridge itself: its two forward steps, its generation script, its comparison and round trip.

Its recipes: `tests/recipes/test_megatron_bridge_recipes.py`. Sources: megatron/bridge/models/qwen_vl/qwen3_vl_step.py,
training/vlm_step.py, and in its repository scripts/inference/vlm_generation.py,
examples/conversion/{hf_megatron_roundtrip,compare_hf_and_megatron}.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

from qwen3vl_bridge.training.process_groups import shutdown

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.training import vlm_step
from safetensors.torch import load_file
from transformers import AutoProcessor

from tests.frameworks.megatron_bridge.test_generation import TOKENS, answer, answers, picture
from tests.frameworks.support import check_exported
from tests.models.inputs.support import no_grad
from tests.parity.conftest import make_pair
from tests.training.megatron_batches.test_megatron_batches import batch_of, direct, reference_loss, write_conversations

# Relative, of a loss; of each gradient, relative to its largest entry; of logits up to about 2, absolute.
LOSS = 1e-6  # measured 2e-7
GRADIENT = 2e-5  # measured 4e-6
LOGITS = 1e-5  # measured 3e-6


@pytest.fixture(scope="module")
def pair(folder):
    return make_pair(folder, moe_aux_loss_coeff=0.0)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return write_conversations(tmp_path_factory.mktemp("conversations"))


STEPS = {
    "qwen3_vl_step, rows": (qwen3_vl_step, {}),
    "qwen3_vl_step, rows and masks": (qwen3_vl_step, dict(skip_getting_attention_mask_from_dataset=False)),
    "qwen3_vl_step, packed": (qwen3_vl_step, dict(enable_in_batch_packing=True, defer_in_batch_packing_to_step=True)),
    "vlm_step, rows": (vlm_step, {}),
    "vlm_step, rows and masks": (vlm_step, dict(skip_getting_attention_mask_from_dataset=False)),
    "vlm_step, packed": (vlm_step, dict(enable_in_batch_packing=True, in_batch_packing_pad_to_multiple_of=8)),
}


@pytest.mark.slow
def test_import_and_export_ckpt_without_master_address_keep_weights(untied_folder, tmp_path, monkeypatch):
    """`import_ckpt` leaves the groups that it begins, in Megatron-Bridge's own code, and `export_ckpt` begins some."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):  # which it sets
        monkeypatch.setenv(name, "restores it")
        monkeypatch.delenv(name)
    shutdown()  # groups of other tests
    AutoBridge.import_ckpt(str(untied_folder), tmp_path / "megatron")
    shutdown()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    AutoBridge.from_hf_pretrained(str(untied_folder)).export_ckpt(tmp_path / "megatron", tmp_path / "hf")
    check_exported(load_file(tmp_path / "hf" / "model.safetensors"), untied_folder)


@pytest.mark.one_case_in(18)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 4)], ids=["pictures", "text"])
def test_megatron_bridge_forward_steps_match_transformers(pair, untied_folder, conversations, name, numbers):
    """forward_step of both modules on what their collators make: loss, count and gradients are transformers'."""
    module, settings = STEPS[name]
    dataset = direct(untied_folder, conversations, **settings)
    pair.zero_grad()
    expected, _ = reference_loss(pair, batch_of(direct(untied_folder, conversations), numbers))
    expected.backward()
    checks = SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=False)
    cfg = SimpleNamespace(dataset=dataset, rerun_state_machine=checks)
    state = SimpleNamespace(timers=MagicMock(), straggler_timer=MagicMock(), cfg=cfg)
    losses, loss_function = module.forward_step(state, iter([batch_of(dataset, numbers)]), pair.megatron)
    total, tokens, _ = loss_function(losses)
    total.backward()
    assert tokens > 10 and abs(total.item() / expected.item() - 1) <= LOSS
    errors = pair.gradient_errors()
    assert max(errors.values()) <= GRADIENT, max(errors, key=errors.get)


def test_answer_of_vlm_generation_script_matches_transformers(folder):
    """scripts/inference/vlm_generation.py: settings, MTP switched off, and the same answer as transformers'."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = provider.pipeline_model_parallel_size = 1
    provider.expert_model_parallel_size = provider.expert_tensor_parallel_size = 1
    provider.pipeline_dtype = torch.bfloat16
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    for chunk in model:
        chunk.eval()
        chunk.config.mtp_num_layers = None
        chunk.config.grad_scale_func = None
    text, image = "<|vision_start|><|image_pad|><|vision_end|>Which digit?", picture(96, 64)
    inputs = AutoProcessor.from_pretrained(folder)(text=[text], images=[image], return_tensors="pt")
    given = {name: inputs[name] for name in ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids")}
    with torch.no_grad():
        assert answer(model, given, TOKENS) == answers(folder, text, image)


def test_hf_megatron_roundtrip_script_exports_every_weight_unchanged(folder):
    """examples/conversion/hf_megatron_roundtrip.py: built with the weights, and exported one by one."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    model = bridge.to_megatron_model(wrap_with_ddp=False)
    check_exported(dict(bridge.export_hf_weights(model, show_progress=False)), folder)


def test_logits_of_compare_hf_and_megatron_script_match_transformers(pair):
    config, generator = pair.config, torch.Generator().manual_seed(0)
    text = torch.randint(0, config.image_token_id - 16, (1, 12), generator=generator)
    picture = torch.tensor([[config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id]])
    ids = torch.cat((picture, text), 1)
    pictures = dict(
        pixel_values=torch.randn(24, 3 * 2 * 16 * 16, generator=generator), image_grid_thw=torch.tensor([[1, 4, 6]])
    )
    positions = torch.arange(ids.shape[1])[None]
    types = (ids == config.image_token_id).int()
    expected = no_grad(pair.reference, input_ids=ids, mm_token_type_ids=types, **pictures).logits
    found = no_grad(pair.megatron, input_ids=ids, position_ids=positions, attention_mask=None, **pictures)
    assert (found - expected).abs().max() <= LOGITS
