"""Run on ranks: greedy generation without a cache over pipeline stages, as Megatron-Bridge's generate scripts do it.

    torchrun --nproc_per_node 2 -m tests.frameworks.megatron_bridge.generation_on_ranks FOLDER ASKED TOKENS OUTPUT

Once with tensors of fixed sizes between stages, and once with any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from torch import Tensor, nn
from transformers import AutoProcessor

from tests.ranks import begin, leave

from ..support import pass_of

# DeepStack features go to the first three text layers: all of them on the first stage, or not.
SPLITS: dict[str, dict[str, Any]] = {
    "fixed": dict(num_layers_in_first_pipeline_stage=3),
    "variable": dict(variable_seq_lengths=True),
}


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
        output = pass_of(model, batch, forward_step)
        following = torch.ones(1, 1, dtype=ids.dtype)
        if parallel_state.is_pipeline_last_stage():
            following = output[0][:, -1].argmax(-1, keepdim=True)
        dist.broadcast(following, dist.get_world_size() - 1)
        ids = torch.cat([ids, following], dim=-1)
    return ids[0, asked:].tolist()


def main(folder: str, asked: str, tokens: str, output: str) -> None:
    """Answer one question in a model that is split in both ways."""
    begin()
    text, image = torch.load(asked, weights_only=False)
    processor = AutoProcessor.from_pretrained(folder)
    found = {}
    for name, split in SPLITS.items():
        provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider(load_weights=True)
        for field, value in dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, **split).items():
            setattr(provider, field, value)
        provider.finalize()
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=0)
        model = provider.provide_distributed_model(wrap_with_ddp=False)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        given = {key: inputs[key] for key in ("input_ids", "pixel_values", "image_grid_thw")}
        with torch.no_grad():
            found[name] = answer([one.eval() for one in model], given, int(tokens))
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
