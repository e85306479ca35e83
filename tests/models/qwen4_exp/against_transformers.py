"""Compare Qwen3.8-Flash-Next with transformers, where a release that knows the model comes first on Python's path.

    python -m tests.models.qwen4_exp.against_transformers

prints errors and their limits by content and kind of rows, as JSON.
"""

import copy
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling  # pyright: ignore

from tests.helpers import noise
from tests.helpers.batches import CONTENTS, Sample, make_batch, make_samples, run_reference
from tests.helpers.ranks import set_threads
from tests.inference.test_generation import NEW, answers, load, prompts
from tests.models.qwen4_exp.tiny import as_stored, freeze_indexers, make_checkpoint
from tests.parity.conftest import Pair, make_pair
from tests.parity.test_parity import run_megatron

FACTOR = 0.5


@dataclass
class StreamPair(Pair):
    """Both models. The reference has the n-gram table of a layer as one tensor, which checkpoints store in parts."""

    def reference_gradients(self) -> dict[str, torch.Tensor]:
        return as_stored(super().reference_gradients())


class MTPReference(nn.Module):
    """Multi-token prediction of modules of transformers, which has none for this model; names are a checkpoint's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        text = copy.deepcopy(config.text_config)
        text.layer_types, text.num_hidden_layers, text.ple_layer_ids = ["indexed_attention"], 1, []
        text._attn_implementation = "eager"
        width, eps, self.streams = text.hidden_size, text.rms_norm_eps, text.hc_count
        self.pre_fc_norm_embedding = modeling.Qwen4ExpTextRMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = modeling.Qwen4ExpTextRMSNorm(self.streams * width, eps=eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.layers = nn.ModuleList([modeling.Qwen4ExpTextDecoderLayer(text, 0)])
        self.hyper_connection_mixer = modeling.Qwen4ExpTextGatedResidual(text, use_combine=False)

    def forward(self, streams: Tensor, embedded: Tensor, angles: tuple[Tensor, ...]) -> Tensor:
        """Return [1, s, h] for tokens with a next token, from their streams and the embeddings of next tokens."""
        hidden = self.fc_hidden(self.pre_fc_norm_hidden(streams).unflatten(-1, (self.streams, -1)))
        joined = hidden + self.fc_embedding(self.pre_fc_norm_embedding(embedded)).unsqueeze(-2)
        mask = torch.full((streams.size(1),) * 2, torch.finfo(streams.dtype).min).triu(1)[None, None]
        return self.hyper_connection_mixer(self.layers[0](joined.flatten(-2), angles, attention_mask=mask))


def with_mtp(model: nn.Module, folder: Path) -> nn.Module:
    """Add multi-token prediction with the weights of a folder to transformers' model."""
    model.mtp = MTPReference(model.config)
    stored = load_file(folder / "model.safetensors")
    model.mtp.load_state_dict(
        {name[4:]: tensor for name, tensor in stored.items() if name.startswith("mtp.")}, strict=True
    )
    return model


def reference_with_mtp(pair: Pair, samples: list[Sample], factor: float) -> dict[str, torch.Tensor]:
    """Return the gradients of the sum of losses plus `factor` times the sum of losses of multi-token prediction."""
    model, seen = pair.reference, {}
    text = model.model.language_model
    hooks = [
        text.register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True),
        text.rotary_emb.register_forward_hook(lambda _, __, angles: seen.update(angles=angles)),
        text.hyper_connection_mixer.register_forward_pre_hook(lambda _, given: seen.update(streams=given[0])),
    ]
    model.zero_grad()
    for sample in samples:
        _, loss = run_reference(model, [sample])
        if len(sample.ids) > 1:
            angles = tuple(one[:, :-1] for one in seen["angles"])
            output = model.mtp(seen["streams"][:, :-1], seen["inputs_embeds"][:, 1:], angles)
            losses = F.cross_entropy(model.lm_head(output)[0], sample.labels[1:], reduction="none")
            loss = loss + factor * (losses * sample.loss_mask[1:]).sum()
        loss.backward()
    for hook in hooks:
        hook.remove()
    return pair.reference_gradients()


def with_short_documents(samples: list[Sample]) -> list[Sample]:
    """Add documents of 1 to 3 tokens."""
    first = samples[0]
    return samples + [Sample(first.ids[:n], first.loss_mask[:n], {}) for n in (1, 2, 3)]


def both(folder: Path, **settings: float) -> StreamPair:
    pair = StreamPair(**vars(make_pair(folder, moe_aux_loss_coeff=0.0, **settings)))
    freeze_indexers(with_mtp(pair.reference, folder))
    return pair


def errors_and_limits(folder: Path) -> dict[str, list[dict[str, float]]]:
    results, pair = {}, both(folder)
    for content in CONTENTS:
        samples = make_samples(content, pair.config, seed=3)
        if content == "text only":
            samples = with_short_documents(samples)
        expected = pair.reference_results(samples)
        limits = pair.limits(samples, expected)
        for rows in ("rows", "packed"):
            found = run_megatron(pair, make_batch(samples, pair.config, packed=rows == "packed"))
            results[f"{content}, {rows}"] = [pair.errors(found, expected), limits]

    pair = both(folder, mtp_loss_scaling_factor=FACTOR)
    pair.provider.calculate_per_token_loss = True

    def of_mtp(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
        return {"gradients": max(pair.gradient_errors(found, expected).values())}

    samples = with_short_documents(make_samples("mixed", pair.config, seed=5))
    expected = reference_with_mtp(pair, samples, FACTOR)
    assert all(g.any() for name, g in expected.items() if name.startswith("mtp.") and ".indexer." not in name)
    limits = noise.limits(lambda: reference_with_mtp(pair, samples, FACTOR), of_mtp, pair.reference, expected=expected)
    for rows in ("rows", "packed"):
        batch = make_batch(samples, pair.config, packed=rows == "packed")
        pair.megatron.zero_grad()
        inputs = batch.local(**pair.provider.local_arguments(pair.megatron.pg_collection))
        (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
        results[f"MTP, {rows}"] = [of_mtp(pair.megatron_gradients(), expected), limits]
    return results


def different_tokens(folder: Path) -> int:
    """Return the number of tokens in answers to prompts of other lengths that differ from those of transformers."""
    pair = load(folder)
    batch = prompts("mixed", pair.config)
    expected = pair.reference.generate(**batch, max_new_tokens=NEW)[:, -NEW:]
    assert len(expected.unique()) >= 5  # not one token for ever
    return int((answers(pair, batch) != expected).sum())


if __name__ == "__main__":
    set_threads()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch), seed=2)
        found = errors_and_limits(folder) | {"different tokens": different_tokens(folder)}
    print()
    json.dump(found, sys.stdout)
