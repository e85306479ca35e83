"""Planning: proofs catch wrong plans, released sizes are planned from headers alone, rows are cut as asked."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from qwen3vl_bridge.checkpoint import CheckpointError, Topology
from qwen3vl_bridge.checkpoint.plan import make_table, plan_export, plan_import
from qwen3vl_bridge.checkpoint.proof import prove
from qwen3vl_bridge.checkpoint.tensors import Run, TensorSpec, slice_runs
from qwen3vl_bridge.dimensions import dimensions_of
from qwen3vl_bridge.mappings import TABLE
from qwen3vl_bridge.weight_rows import parameter_count

import pytest

# facts/models.md: the largest dense model
CONFIG_32B = {
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
}  # fmt: skip


def specs(shapes, dtype="bfloat16") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("naming", ["transformer_engine", "local"])
def test_a_large_model_is_planned_at_once(naming):
    begun = time.monotonic()
    dimensions = dimensions_of(CONFIG_32B)
    table = make_table(TABLE, dimensions, naming)
    there = plan_import(TABLE, dimensions, specs(table.hf), where="here", naming=naming)
    back = plan_export(TABLE, dimensions, {t.target.name: t.target for t in there.tasks}, where="there")
    assert there.numel == back.numel == parameter_count(TABLE, dimensions) == 33_357_390_064
    assert there.naming == back.naming == naming
    assert {task.target.name: task.target.shape for task in back.tasks} == table.hf
    assert time.monotonic() - begun < 5  # 0.1 s here


def tasks(*runs: tuple[str, int, int], shape=(4,), name="out"):
    return [(TensorSpec(name, "float32", shape), tuple(Run(*run) for run in runs))]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (tasks(("a", 0, 3)), "3 elements planned of 4"),
        (tasks(("a", 0, 2), ("a", 1, 2)), "read not exactly once"),
        (tasks(("a", 0, 2), ("a", 3, 2)), "read not exactly once"),
        (tasks(("a", 1, 4)), "read not exactly once"),
        (tasks(("a", 0, 4)) * 2, "planned twice"),
        (tasks(("a", 0, 4), name="other"), "planned twice or in another shape|other"),
        ([], "nothing planned"),
    ],
)
def test_a_wrong_plan_is_found_out(plan, message):
    with pytest.raises((AssertionError, KeyError), match=message):
        prove(plan, specs({"a": (4,)}), {"out": (4,)})


def test_elements_that_nobody_reads_are_found_out():
    prove(tasks(("a", 0, 4)), specs({"a": (4,)}), {"out": (4,)})
    prove(tasks(("a", 0, 4)), specs({"a": (6,)}), {"out": (4,)}, padded={"a"})
    with pytest.raises(AssertionError, match="4 elements read of 6"):
        prove(tasks(("a", 0, 4)), specs({"a": (6,)}), {"out": (4,)})


def test_long_lists_are_cut():
    dimensions = dimensions_of(CONFIG_32B)
    with pytest.raises(CheckpointError) as error:
        plan_import(TABLE, dimensions, {}, where="here")
    count = len(make_table(TABLE, dimensions).hf)
    assert f"{count} missing" in str(error.value) and f"and {count - 20} more" in str(error.value)


def test_runs_are_sliced_by_element():
    runs = (Run("a", 10, 5), Run("b", 0, 3), Run("a", 0, 4))
    assert list(slice_runs(runs, 0, 12)) == list(runs)
    assert list(slice_runs(runs, 4, 5)) == [Run("a", 14, 1), Run("b", 0, 3), Run("a", 0, 1)]
    assert list(slice_runs(runs, 6, 1)) == [Run("b", 1, 1)]


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (7,), (1, 9), (24, 10), (25, 3, 2), (8, 1000)])
def test_chunks_cover_a_tensor_and_end_where_ranks_do(shape, tp):
    spec = TensorSpec("x", "bfloat16", shape)
    topology = Topology(tp=tp, chunk_bytes=100)
    chunks = list(topology.chunks(spec))
    assert sum(math.prod(sizes) for _, sizes in chunks) == spec.numel
    position = 0
    for offsets, sizes in chunks:
        assert sizes[1:] == shape[1:] and not any(offsets[1:])
        assert not shape or offsets[0] == position
        assert len(chunks) == 1 or math.prod(sizes) * 2 <= 100 or sizes[0] == 1
        position += sizes[0] if sizes else 0
    if shape and spec.nbytes > 100 and shape[0] % tp == 0:
        assert {rank * shape[0] // tp for rank in range(tp)} <= {offsets[0] for offsets, _ in chunks}


def test_a_topology_is_checked_against_the_model():
    dimensions = dimensions_of(CONFIG_32B)
    for tp in (1, 2, 4, 8, 16):
        Topology(tp=tp, cp=4, etp=1).check(dimensions)
    with pytest.raises(CheckpointError, match="--tp is 32, expected a divisor of v_heads, which is 16"):
        replace(Topology(), tp=32).check(dimensions)
