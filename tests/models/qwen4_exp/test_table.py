"""The weight table: parts of n-gram tables, the parameters of the released size, and plans of its conversion."""

import math
import random

from qwen3vl_bridge.checkpoint import Topology, import_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import make_plan, tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TorchDist, find_row_owners
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.models.qwen4_exp import FAMILY
from qwen3vl_bridge.models.qwen4_exp.presets import config_dict
from qwen3vl_bridge.models.qwen4_exp.table import NgramHead, table
from qwen3vl_bridge.weights.rows import ExpertLayout, expand, parameter_count

import pytest
import torch

from tests.models.qwen3_5.test_table import write_holes
from tests.models.qwen4_exp.tiny import make_config

SIZE = "Flash-Next"
# Of the released model: in all, the n-gram table, multi-token prediction.
PARAMETERS, TABLE, MTP = 179_999_981_424, 51_200_245_760, 2_607_150_848
FILES = 94


def heads_of(config):
    dimensions = FAMILY.dimensions(config)
    rows = [row for row in expand(FAMILY.rows(), dimensions) if isinstance(row, NgramHead)]
    return rows, dimensions


@pytest.mark.parametrize("seed", range(20))
def test_ngram_heads_of_random_sizes_match_concatenated_table(seed):
    """A part has rows of one or several heads, a head has rows of one or several parts."""
    chosen = random.Random(seed)
    orders, per_order, parts = chosen.randint(2, 4), chosen.randint(1, 5), chosen.choice((1, 2, 4, 8))
    heads = (orders - 1) * per_order
    config = make_config(
        ngram_size=orders, heads_per_ngram=per_order, ple_embed_dim=heads * chosen.randint(1, 3),
        ngram_vocab_size_base=chosen.randint(2, 60), make_ngram_vocab_size_divisible_by=8 * chosen.randint(1, 40),
        split_ngram_parts=parts, ple_layer_ids=chosen.choice(([2], [1, 3])),
    )  # fmt: skip
    rows, dimensions = heads_of(config)
    layers, dim = dimensions.indices["ple_layers"], dimensions["ngram_dim"]
    assert len(rows) == len(layers) * heads
    for index, layer in enumerate(layers):
        of_layer = rows[index * heads : (index + 1) * heads]
        sizes = [row.megatron_shape(dimensions)[0] for row in of_layer]
        whole = torch.arange(sum(sizes) * dim).view(-1, dim)
        name = f"model.language_model.layers.{layer}.ple.ple_embedding.ngram_embedding.shard_"
        stored = {f"{name}{number}.weight": part for number, part in enumerate(whole.chunk(parts))}
        assert {name for row in of_layer for name in row.hf} == stored.keys() and len(stored) == parts
        for head, (row, expected) in enumerate(zip(of_layer, whole.split(sizes), strict=True)):
            assert row.megatron.endswith(f"layers.{layer}.ple.ngram_embedding.weight{head}")
            assert row.hf_shapes(dimensions) == tuple(tuple(stored[name].shape) for name in row.hf)
            slices = [stored[one.tensor].flatten()[one.start :][: one.length] for one in row.hf_slices(dimensions)]
            assert torch.equal(torch.cat(slices).view(-1, dim), expected)


def test_torch_dist_name_of_ngram_table_contains_layer_and_head():
    rows, dimensions = heads_of(make_config())
    names = [TorchDist.for_model(dimensions).name(row) for row in rows]
    prefix = "language_model.decoder.layers.1.ple.ngram_embedding.weight"
    assert names == [(f"{prefix}{head}", ()) for head in range(4)]


@pytest.mark.parametrize(("ep", "etp", "expected"), [
    (1, 1, [0, 0, 0, 0]), (2, 1, [0, 0, 1, 1]), (2, 2, [0, 1, 2, 3]), (4, 2, [0, 1, 2, 3]),
])  # fmt: skip
def test_find_row_owners_assigns_ngram_heads_to_ranks_that_hold_them(ep, etp, expected):
    """With eight ranks, two read each head."""
    rows, dimensions = heads_of(make_config())
    layout = TorchDist.for_model(dimensions)
    owners = find_row_owners(rows, layout, Topology(ep=ep, etp=etp, tp=2))
    assert [owners[row.megatron][()][0].owner[2] for row in rows] == expected
    assert all(len(owners[row.megatron][()]) == 1 for row in rows)


def test_find_row_owners_lets_every_rank_read_replicated_convolution():
    dimensions = FAMILY.dimensions(make_config())
    rows = list(expand(FAMILY.rows(), dimensions))
    for layout in (TorchDist.for_model(dimensions), FsdpDtensor(dimensions)):
        owners = find_row_owners(rows, layout, Topology(tp=2))
        assert len(owners["language_model.decoder.layers.1.ple.conv1d.weight"][()]) == 1
        assert len(owners["language_model.decoder.layers.1.self_attention.conv1d.weight.query"][()]) == 2


@pytest.fixture(scope="module")
def model():
    dimensions = FAMILY.dimensions(config_dict(SIZE))
    return list(expand(table(), dimensions)), {
        "hf": HuggingFace(dimensions),
        "fsdp_dtensor": FsdpDtensor(dimensions),
        "torch_dist": TorchDist.for_model(dimensions),
    }


@pytest.mark.slow
def test_weight_table_of_released_size_has_released_parameter_count(model):
    rows, _ = model
    dimensions = FAMILY.dimensions(config_dict(SIZE))
    assert parameter_count(table(), dimensions) == PARAMETERS
    for layout in ExpertLayout:
        if layout is not ExpertLayout.INPUT_MAJOR:
            shapes = tensors_of(expand(table(layout), dimensions), HuggingFace(dimensions))
            assert sum(map(math.prod, shapes.values())) == PARAMETERS
            assert sum(".ngram_embedding.shard_" in name for name in shapes) == 128
    of_table = (row for row in rows if isinstance(row, NgramHead))
    assert sum(math.prod(row.megatron_shape(dimensions)) for row in of_table) == TABLE
    assert sum(math.prod(row.megatron_shape(dimensions)) for row in rows if ".mtp." in row.megatron) == MTP
    constants = FAMILY.constants(config_dict(SIZE))
    assert {len(values) for values in constants.values()} == {3, 16}
    assert sum(next(values for name, values in constants.items() if name.endswith("_sizes"))) == 320_001_446


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fsdp_dtensor", pytest.param("torch_dist", marks=pytest.mark.slow)])
def test_conversion_plan_of_released_size_covers_every_parameter(model, target):
    rows, layouts = model
    for source, into in (("hf", target), (target, "hf")):
        found = tensors_of(rows, layouts[source])
        there = {name: TensorSpec(name, "bfloat16", shape) for name, shape in found.items()}
        plan = make_plan(rows, layouts[source], layouts[into], there, where="here")
        assert plan.numel == PARAMETERS and not plan.transposed and not plan.cast


@pytest.mark.slow
@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_import_dry_run_of_released_size_counts_all_parameters(model, ckpt_format, tmp_path):
    """Headers are read and the plan is checked, for eight expert ranks. Measured 4.4 and 6.4 s of processor time."""
    rows, layouts = model
    (tmp_path / "hf").mkdir()
    folder = write_holes(tmp_path / "hf", config_dict(SIZE), tensors_of(rows, layouts["hf"]), FILES)
    options = dict(ckpt_format=ckpt_format, topology=Topology(ep=8), dry_run=True)
    report = import_checkpoint(folder, tmp_path / "megatron", **options)
    in_float32 = sum(math.prod(row.megatron_shape(layouts["hf"].dimensions)) for row in rows if row.float32)
    assert report.parameters == PARAMETERS and report.nbytes == 2 * (PARAMETERS + in_float32)
