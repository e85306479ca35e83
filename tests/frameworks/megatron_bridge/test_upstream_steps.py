"""Forward steps that Megatron-Bridge and verl have for Qwen3-VL train our models as transformers does in one process.

`qwen3_vl_step` cuts labels over context-parallel ranks and not the tokens; `vlm_step` cuts nothing, numbers tokens from
0 and expects a loss mask back; both give image grids, with or without pixels, to later pipeline stages. verl's
with fused kernels is re-enacted, with torch for its kernel. Qwen3.5 trains multi-token prediction along, which reads
labels of other ranks.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.training import vlm_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from tests.frameworks.support import log_probs_of, packed_row, padded_lengths, padded_rows
from tests.helpers.batches import Sample, pictures
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check
from tests.helpers.ranks import largest
from tests.helpers.steps import forward_backward
from tests.models.inputs.support import offsets, packed_params, share_of
from tests.parity.matrix import MODELS, with_references
from tests.parity.on_ranks import Split
from tests.parity.references import MICROBATCHES, step_samples, worst
from tests.parity.topologies import TOPOLOGIES

CONTENT, MULTIPLE = "mixed", 16


def fused_step(_: Any, data_iterator: Iterator[list[Sample]], model: torch.nn.Module) -> tuple[Any, Callable]:
    """As verl's engine: whole rows with their mask, labels of the packed row that are cut over ranks, and its hook."""
    samples, cp = next(data_iterator), get_attr_wrapped_model(model, "cp_group")
    rows, lengths = join(samples, 1, packed=False), [len(sample.ids) for sample in samples]
    padded = padded_lengths(lengths, MULTIPLE)

    def own(values: list[Tensor]) -> Tensor:
        return share_of(packed_row(values, padded), padded, cp.size(), cp.rank())

    loss_mask = own([sample.loss_mask for sample in samples])
    output = model(
        input_ids=rows["input_ids"], attention_mask=rows["attention_mask"].bool(), position_ids=None,
        packed_seq_params=packed_params(offsets(padded), offsets(padded)),
        labels=own([sample.labels for sample in samples]), output_processor=log_probabilities,
        output_processor_context=samples,
        **({} if rows["visual_inputs"] is None else rows["visual_inputs"].normalized_for_model()),
    )  # fmt: skip

    def count(output: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, tokens = -(output["log_probs"] * loss_mask).sum(), loss_mask.sum().int()
        return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.float()))}

    return output, count


def log_probabilities(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, context: Any, **_: Any
) -> dict[str, Tensor]:
    """[b, s] of labels [b, s], from hidden states [s, b, h]."""
    assert isinstance(context[0], Sample)
    logits = F.linear(hidden_states, output_layer.weight if output_weight is None else output_weight).transpose(0, 1)
    return {"log_probs": log_probs_of(logits, labels)}


STEPS = {"qwen3_vl_step": qwen3_vl_step.forward_step, "vlm_step": vlm_step.forward_step, "fused": fused_step}


def join(samples: list[Sample], multiple: int, *, packed: bool) -> dict[str, Any]:
    """What Megatron-Bridge's collators make of samples: rows, or one row of padded documents with their offsets."""
    lengths = [len(sample.ids) for sample in samples]
    padded = padded_lengths(lengths, multiple)

    def place(values: list[Tensor], fill: int) -> Tensor:
        return packed_row(values, padded, fill) if packed else padded_rows(values, max(padded), fill)

    labels, pixels = [one.labels.masked_fill(one.loss_mask == 0, -100) for one in samples], pictures(samples)
    ids = place([sample.ids for sample in samples], 0)
    batch = dict(
        input_ids=ids, labels=place(labels, -100), loss_mask=place([sample.loss_mask for sample in samples], 0),
        position_ids=torch.arange(ids.shape[1]).expand(ids.shape),
        attention_mask=place([torch.ones_like(sample.ids) for sample in samples], 0),
        visual_inputs=GenericVisualInputs(**pixels) if pixels else None,
    )  # fmt: skip
    if packed:
        logical, physical = (F.pad(torch.tensor(n).cumsum(0), (1, 0)).int() for n in (lengths, padded))
        batch |= dict(cu_seqlens_q=logical, cu_seqlens_kv=logical)
        batch |= dict(cu_seqlens_q_padded=physical, cu_seqlens_kv_padded=physical)
        batch |= dict(max_seqlen_q=torch.tensor(max(padded)), max_seqlen_kv=torch.tensor(max(padded)))
        batch["position_ids"] = torch.cat([torch.arange(size) for size in padded])[None]
    return batch


def batches(split: Split, step: str, rows: str) -> Iterator[Any]:
    groups = split.run.groups
    samples = step_samples(CONTENT, split.hf_config, 0)[groups.dp.rank() :: groups.dp.size()]
    for one in samples:
        yield one if step == "fused" else join(one, MULTIPLE, packed=rows == "packed" and step == "vlm_step")


def compare(split: Split, step: str, rows: str, expected: dict[str, Any]) -> dict[str, float]:
    run = split.run
    split.begin(iter(()), "packed")
    run.forward_step = STEPS[step]
    run.cfg.dataset.enable_in_batch_packing = rows == "packed"
    mine = MICROBATCHES // run.cfg.data_parallel_size
    loss, tokens = forward_backward(run, batches(split, step, rows), mine).tolist()
    return dict(
        loss=abs(loss / tokens / expected["losses"][0] - 1), gradient=worst(split.gradients(), expected["gradients"])
    )


def errors_of_cases(cases: list[tuple[str, ...]], folders: dict[str, Path]) -> dict[tuple[str, ...], dict[str, float]]:
    found = {}
    for (family, name), group in itertools.groupby(cases, key=lambda case: case[:2]):
        split = Split(folders[family], TOPOLOGIES[name])
        expected = torch.load(folders[family] / f"reference_{CONTENT}.pt", mmap=True)
        for _, _, step, rows in group:
            found[family, name, step, rows] = largest(compare(split, step, rows, expected))
            if dist.get_rank() == 0:
                print(family, name, step, rows, found[family, name, step, rows], flush=True)
    return found


QWEN3_5 = MODELS["qwen3_5"]
SPLITS = {"dense": ["CP2", "PP2"], "MoE": ["CP2"], "Qwen3.5": ["CP2"]}
UPSTREAM = [("qwen3_vl_step", "rows"), ("qwen3_vl_step", "packed"), ("vlm_step", "rows"), ("vlm_step", "packed")]
CASES = [
    (family, topology, *step)
    for family, topologies in SPLITS.items()
    for topology in topologies
    # verl's fused kernels give the model no mask, by which multi-token prediction would know what is trained on.
    for step in [*UPSTREAM, *[("fused", "packed")] * (family != "Qwen3.5")]
]


@pytest.fixture(scope="module")
def found(untied_folder, moe_folder, tmp_path_factory):
    qwen3_5 = QWEN3_5.make(tmp_path_factory.mktemp("Qwen3.5"), **QWEN3_5.options["dense"])
    root, models = tmp_path_factory.mktemp("references"), {"dense": untied_folder, "MoE": moe_folder}
    folders, limits = with_references(models, root, [CONTENT])
    others, other_limits = with_references({"Qwen3.5": qwen3_5}, root, [CONTENT], **QWEN3_5.settings)
    return results_of_ranks(errors_of_cases, 2, CASES, folders | others, timeout=500), limits | other_limits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_forward_steps_of_megatron_bridge_and_verl_on_ranks_match_transformers(found, case):
    errors, limits = found
    check(errors[case], limits[case[0]])
