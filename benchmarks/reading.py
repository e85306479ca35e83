"""Count the bytes that each rank reads of a converted checkpoint, with and without parallel sizes given to the import.

    python -m benchmarks.reading
    python -m benchmarks.reading --sizes 8B --ranks 8 --csv /tmp/reading.csv

No file is written: files are planned from the shapes of released sizes, as `import` does. megatron-core's own functions
say which rows of a tensor a rank of Megatron-FSDP holds; ranks of torch_dist hold equal parts. A loader reads complete
items, once for each tensor. Prints, and appends to a CSV file, the bytes that a rank holds and reads and the files that
it opens, as mean and maximum.
"""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import Topology
from qwen3vl_bridge.checkpoint.commands import MegatronTarget
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, make_plan, tensors_of
from qwen3vl_bridge.checkpoint.formats.dcp import DcpWriter
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE, HuggingFace
from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS, key_of
from qwen3vl_bridge.checkpoint.formats.tensors import Shape, TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.weights.rows import ExpertLayout, WeightRow

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as megatron_fsdp
from megatron.core.distributed.fsdp.src.megatron_fsdp.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)

from benchmarks import measurement

_STRATEGY = "optim_grads_params"
# (rank, name of the tensor, indices in its leading dimensions, first row, end row)
Held = Iterator[tuple[int, str, Shape, int, int]]


class Layer(torch.nn.Module):
    """Module for the parameters of one layer. Megatron-FSDP shards the parameters of such a module together."""


def target_of(size: str, ckpt_format: str, topology: Topology) -> MegatronTarget:
    """Return the description of a Megatron checkpoint of a released size."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(presets.config_dict(size)))
        config = ModelConfig(folder)
    return MegatronTarget(ckpt_format, TRANSFORMER_ENGINE, topology, config, size, ExpertLayout.INPUT_MAJOR)


def plan_of(target: MegatronTarget) -> Plan:
    """Return the plan that converts a released model to the Megatron checkpoint `target`."""
    rows, source = target.config.rows(), HuggingFace(target.dimensions)
    found = {name: TensorSpec(name, "bfloat16", shape) for name, shape in tensors_of(rows, source).items()}
    return make_plan(rows, source, target.layout, found, where=target.hf_model)


def _tensor_parallel(row: WeightRow, tp: int) -> tuple[int, int]:
    """Return into how many parts tensor parallelism splits the rows and the columns of a parameter."""
    if any(
        part in row.megatron for part in (".linear_qkv.weight", ".linear_fc1.weight", "embeddings.", "output_layer")
    ):
        return tp, 1
    return (1, tp) if ".linear_proj.weight" in row.megatron or ".linear_fc2.weight" in row.megatron else (1, 1)


def _modules(rows: list[WeightRow], target: MegatronTarget) -> tuple[torch.nn.Module, dict[str, WeightRow]]:
    """Return a module with the parameters of the first expert-parallel rank, and each parameter's `WeightRow`."""
    root, found, topology = torch.nn.Module(), {}, target.topology
    experts = target.dimensions["experts"] // topology.ep if target.dimensions["experts"] else 0
    # In the order of the model: attention's output projection before its input projection, the main merger last.
    for row in sorted(rows, key=lambda row: ("linear_proj" not in row.megatron, ".merger." in row.megatron)):
        of_experts = "experts" in row.indices
        if of_experts and row.expert >= experts:
            continue
        *path, name = row.megatron.split(".")
        module = root
        for i, part in enumerate(path):
            if part not in module._modules:
                module.add_module(part, Layer() if i and path[i - 1] == "layers" else torch.nn.Module())
            module = module._modules[part]
        by_rows, by_columns = _tensor_parallel(row, topology.expert_tp if of_experts else topology.tp)
        shape = row.megatron_shape(target.dimensions)
        local = (shape[0] // by_rows, *(shape[1:-1]), shape[-1] // by_columns) if len(shape) > 1 else shape
        module.register_parameter(name, torch.nn.Parameter(torch.empty(local, dtype=torch.bfloat16, device="meta")))
        found[row.megatron] = row
    return root, found


def held_by_fsdp(target: MegatronTarget) -> Held:
    """Yield (rank, tensor, index, first row, end row) for each range of rows that a rank of Megatron-FSDP holds."""
    topology, rows = target.topology, target.config.rows()
    module, by_name = _modules(rows, target)
    names = {parameter: name for name, parameter in module.named_parameters()}
    policy = megatron_fsdp.BucketingPolicy(None, [Layer], _STRATEGY)
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy=_STRATEGY)
    for group in megatron_fsdp._get_parameter_groups(module, policy, {})[0]:
        tp = topology.expert_tp if group.is_expert_param else topology.tp
        ep = topology.ep if group.is_expert_param else 1
        ranks, shapes = topology.ranks // (tp * ep), [parameter.shape for parameter in group.params]
        items, bucket, _ = megatron_fsdp.build_data_parallel_buffer_index(
            shapes, 0, ranks, True, settings, 0, group.chunk_size_factor
        )
        share = bucket.size // ranks
        for number, parameter in enumerate(group.params):
            row, start = by_name[names[parameter]], items[number].global_data_index
            tensors = list(target.layout.tensors(row))
            height, width = parameter.shape[0] // len(tensors), parameter[0].numel()
            by_rows, _ = _tensor_parallel(row, tp)
            for k, tensor in enumerate(tensors):
                first = start + k * height * width
                for shard in range(first // share, (first + height * width - 1) // share + 1):
                    low = max(shard * share - first, 0) // width
                    high = min(-(-(shard * share + share - first) // width), height)
                    for t in range(tp):
                        above = t * height if by_rows > 1 else 0
                        for e in range(ep):
                            name = _of_group(tensor, e * target.dimensions["experts"] // ep) if ep > 1 else tensor
                            yield (shard * ep + e) * tp + t, name, (), above + low, above + high


def _of_group(tensor: str, first_expert: int) -> str:
    head, _, tail = tensor.rpartition(".weight")
    number, dot, part = tail.partition("_")
    return f"{head}.weight{int(number) + first_expert}{dot}{part}"


def held_by_stages(target: MegatronTarget) -> Held:
    """Yield (rank, tensor, index, first row, end row) like `held_by_fsdp`, for torch_dist on one replica."""
    topology, layers = target.topology, len(target.dimensions.indices["text_layers"])
    for row in target.config.rows():
        name, stacked = target.layout.name(row)
        of_experts, shape = "experts" in row.indices, row.megatron_shape(target.dimensions)
        stage = row.position[0] * topology.pp // layers if "language_model.decoder.layers" in row.megatron else 0
        if "final_layernorm" in row.megatron or "output_layer" in row.megatron:
            stage = topology.pp - 1
        tp, halves = topology.expert_tp if of_experts else topology.tp, len(row.stored_names)
        by_rows, _ = _tensor_parallel(row, tp)
        for e in [row.expert * topology.ep // target.dimensions["experts"]] if of_experts else range(topology.ep):
            for t in range(topology.tp):
                height, part = shape[0] // halves // by_rows, t % tp if by_rows > 1 else 0
                for k in range(halves):
                    first = k * (shape[0] // halves) + part * height
                    rank = (stage * topology.ep + e) * topology.tp + t
                    yield rank, name, tuple(number for number, _ in stacked), first, first + height


def count(dcp: DcpWriter, target: MegatronTarget) -> dict[str, list[int]]:
    """Return three lists with a number for each rank: bytes held, bytes read and files opened."""
    is_fsdp = target.ckpt_format == FORMATS[0]
    leading = {} if is_fsdp else {row: len(target.layout.name(row)[1]) for row in target.config.rows()}
    depth = {target.layout.name(row)[0]: count for row, count in leading.items()}
    boxes: dict[tuple[str, Shape], list[tuple[int, int, str, int]]] = defaultdict(list)
    for key, offsets, sizes, file, nbytes in dcp.chunks:
        name = key.removeprefix(key_of("", target.ckpt_format))
        n = depth.get(name, 0)
        row = 2 * math.prod(sizes[n + 1 :])
        boxes[name, offsets[:n]].append((offsets[n] if offsets[n:] else 0, row, file, nbytes))
    held, read, files = defaultdict(int), defaultdict(int), defaultdict(set)
    for found in boxes.values():
        found.sort()
    for rank, name, index, first, end in held_by_fsdp(target) if is_fsdp else held_by_stages(target):
        found = boxes[name, index]
        at = bisect_right(found, first, key=lambda box: box[0]) - 1
        held[rank] += (end - first) * found[at][1]
        while at < len(found) and found[at][0] < end:
            read[rank] += found[at][3]
            files[rank].add(found[at][2])
            at += 1
    return {
        "held": list(held.values()),
        "read": list(read.values()),
        "files": [len(opened) for opened in files.values()],
    }


def main() -> None:
    """Count all cases, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "reading.csv")
    parser.add_argument("--sizes", nargs="+", choices=presets.PRESETS, default=["8B", "235B-A22B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256])
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        ep = 8 if presets.config_dict(size)["model_type"].endswith("moe") else 1
        for ranks in options.ranks:
            topology = Topology(ep=ep, world_size=ranks)
            rows += [_case(size, FORMATS[0], topology, stated=stated) for stated in (False, True)]
        # Data-parallel copies read the same, so any number of them will do.
        topology = Topology(tp=2, pp=2, ep=ep, etp=1)
        rows += [_case(size, FORMATS[1], topology, stated=stated) for stated in (False, True)]
    measurement.append(options.csv, rows)


def _case(size: str, ckpt_format: str, topology: Topology, *, stated: bool) -> dict[str, object]:
    target = target_of(size, ckpt_format, topology)
    written = target_of(size, ckpt_format, topology if stated else Topology())
    written.plan_files(plan_of(target))
    found = count(written.dcp, target)
    mean = {name: sum(values) / len(values) for name, values in found.items()}
    row = {
        "size": size,
        "format": ckpt_format,
        "ranks": topology.ranks,
        "split": f"tp {topology.tp} pp {topology.pp} ep {topology.ep}",
        "stated": "yes" if stated else "no",
        "GB held, mean": f"{mean['held'] / 1e9:.3f}",
        "GB read, mean": f"{mean['read'] / 1e9:.3f}",
        "GB read, most": f"{max(found['read']) / 1e9:.3f}",
        "files opened, mean": f"{mean['files']:.1f}",
        "files opened, most": max(found["files"]),
    }
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
