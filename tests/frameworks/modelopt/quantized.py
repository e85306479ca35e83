"""Models that ModelOpt quantises by simulation, Megatron's and transformers', and checkpoints of them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.layout import SequenceLayout

import modelopt.torch.quantization as mtq
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers.batches import Sample, make_batch, make_samples, per_sample
from tests.parity.conftest import Pair, make_pair


def settings(of: dict[str, Any] = mtq.INT8_DEFAULT_CFG) -> dict[str, Any]:
    """As `quantize_vlm.py`: the tower stays as it is."""
    config = copy.deepcopy(of)
    config["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in ("*vision_model*", "*visual*")]
    return config


def known_samples(config: Any) -> list[Sample]:
    """Those that scales are measured with; of even lengths, which two ranks can divide."""
    samples = make_samples("mixed", config, seed=1)
    even = [len(one.ids) // 2 * 2 for one in samples]
    return [replace(one, ids=one.ids[:n], loss_mask=one.loss_mask[:n]) for one, n in zip(samples, even, strict=True)]


@torch.no_grad()
def logits_of(model: nn.Module, samples: list[Sample], config: Any) -> list[Tensor]:
    lengths = [len(sample.ids) for sample in samples]
    batch = make_batch(samples, config, layout=SequenceLayout.padded_rows(lengths, max(lengths)))
    inputs = batch.local(**model.config.local_arguments(model.pg_collection), encode_vision=True)
    return per_sample(model(inputs=replace(inputs, labels=None)), batch.layout)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def quantise(model: nn.Module, config: Any, of: dict[str, Any] = mtq.INT8_DEFAULT_CFG) -> None:
    """Megatron's whole model, in this process."""
    mtq.quantize(model, settings(of), lambda m: [logits_of(m, [one], config) for one in known_samples(config)])


def quantised_pair(folder: Path, of: dict[str, Any] = mtq.INT8_DEFAULT_CFG) -> Pair:
    """A Hugging Face folder's model, of which Megatron's is quantised."""
    pair = make_pair(folder)
    pair.megatron.eval(), pair.reference.eval()
    quantise(pair.megatron, pair.config, of)
    return pair


def quantised_checkpoint(folder: Path, to: Path, of: dict[str, Any] = mtq.INT8_DEFAULT_CFG) -> Path:
    pair = quantised_pair(folder, of)
    pair.bridge.save_megatron_model([pair.megatron], str(to))
    return to


def scales_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.named_buffers() if "_quantizer." in name}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
