"""Megatron-Bridge's own ways to ask a model: its inference wrapper and engine, and the loop of its generate scripts."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.inference._tokenizer import HFTokenizerAdapter
from megatron.bridge.inference.vlm.base import generate, setup_inference_wrapper
from megatron.bridge.inference.vlm.qwenvl_inference_wrapper import QwenVLInferenceWrapper
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.inference.utils import InferenceMode
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.frameworks.support import pass_of
from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.conftest import build

TOKENS = 6
# DeepStack features go to the first three text layers: all of them on the first stage, or not.
SPLITS: dict[str, dict[str, Any]] = {
    "fixed": dict(num_layers_in_first_pipeline_stage=3), "variable": dict(variable_seq_lengths=True),
}  # fmt: skip


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module, **_: Any) -> tuple[Tensor, Callable]:
    """Logits, of whole rows each time; positions are those of text."""
    return model(**next(data_iterator)), lambda output, **_: output


def answer(model: list[nn.Module], inputs: dict[str, Tensor], tokens: int) -> list[int]:
    """The likeliest tokens, one after the other, on every rank."""
    ids = inputs.pop("input_ids")
    asked = ids.shape[1]
    for _ in range(tokens):
        positions = torch.arange(ids.shape[1])[None]
        batch = dict(inputs, input_ids=ids, position_ids=positions, attention_mask=None)
        if "mm_token_type_ids" in inputs:  # that of an answer's tokens is 0
            types = inputs["mm_token_type_ids"]
            batch["mm_token_type_ids"] = F.pad(types, (0, ids.shape[1] - types.shape[1]))
        output = pass_of(model, batch, forward_step)
        following = torch.ones(1, 1, dtype=ids.dtype)
        if parallel_state.is_pipeline_last_stage():
            following = output[0][:, -1].argmax(-1, keepdim=True)
        dist.broadcast(following, dist.get_world_size() - 1)
        ids = torch.cat([ids, following], dim=-1)
    return ids[0, asked:].tolist()


def answers_of_stages(folder: Path, text: str, image: Image.Image) -> dict[str, list[int]]:
    processor = AutoProcessor.from_pretrained(folder)
    found = {}
    for name, split in SPLITS.items():
        provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
        for field, value in dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **split).items():
            setattr(provider, field, value)
        provider.finalize()
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=0)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        given = {key: inputs[key] for key in ("input_ids", "pixel_values", "image_grid_thw")}
        with torch.no_grad():
            found[name] = answer([one.eval() for one in model], given, TOKENS)
    return found


def picture(width: int, height: int) -> Image.Image:
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(width), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def answers(folder, text: str, image: Image.Image) -> list[int]:
    inputs = AutoProcessor.from_pretrained(folder)(text=[text], images=[image], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    found = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_megatron_bridge_inference_engine_tokens_match_transformers(kind, request):
    """`megatron.bridge.inference.vlm`; its wrapper knows no model with experts of Megatron-Bridge's own."""
    folder = request.getfixturevalue(f"{kind}_folder")
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    provider.parallel_output = False
    model = build(provider)
    processor = AutoProcessor.from_pretrained(folder)
    wrapped = setup_inference_wrapper(model, processor.tokenizer, params_dtype=torch.float32)
    assert type(wrapped) is QwenVLInferenceWrapper
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which digit"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    image = picture(96, 64)
    (found,) = generate(
        wrapped, processor.tokenizer, processor.image_processor, [text], [image], processor=processor, random_seed=1,
        sampling_params=SamplingParams(num_tokens_to_generate=TOKENS, top_k=1),
    )  # fmt: skip
    assert found.generated_tokens.tolist() == answers(folder, text, image)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_megatron_core_static_engine_tokens_match_transformers(kind, untied_folder, tmp_path):
    """Texts of two lengths: the engine computes the shorter length, then one token of each at a time."""
    folder = untied_folder if kind == "qwen3_vl" else make_checkpoint(tmp_path, moe=True)
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    provider.parallel_output = False
    wrapped = GPTInferenceWrapper(build(provider).eval(), StaticInferenceContext(2, 64))
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    controller = TextGenerationController(wrapped, HFTokenizerAdapter(tokenizer))
    texts = ["which digit is this digit", "which digit"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's name is deprecated
        engine = StaticInferenceEngine(controller, legacy=True, random_seed=1)
    try:
        found = engine.generate(texts, sampling_params=SamplingParams(num_tokens_to_generate=TOKENS, top_k=1))
    finally:
        InferenceMode.unset_active()
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    for text, request_of_text in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        expected = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        generated = torch.as_tensor(request_of_text.generated_tokens).tolist()
        assert generated[: len(expected)] == expected.tolist()


@pytest.mark.slow
def test_generation_on_pipeline_stages_matches_transformers(untied_folder):
    """Megatron-Bridge's `hf_to_megatron_generate_vlm.py --pp 2`: the schedule is told each row's length, no setting."""
    asked = "<|vision_start|><|image_pad|><|vision_end|>which digit", picture(64, 64)
    found = results_of_ranks(answers_of_stages, 2, untied_folder, *asked)
    expected = answers(untied_folder, *asked)
    assert found == {"fixed": expected, "variable": expected}
