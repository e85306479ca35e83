"""Conversion plans: wrong plans raise, released sizes are planned from shapes, chunks end where a rank's rows end."""

import itertools
import json
import math

from qwen3vl_bridge.checkpoint import CheckpointError, Topology, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import make_plan, prove, tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, OwnedRows, TorchDist, find_row_owners
from qwen3vl_bridge.checkpoint.formats.tensors import SliceList, TensorSlice, TensorSpec, TransposedSlice, ZeroSlice
from qwen3vl_bridge.models.qwen3_vl.presets import PRESETS, config_dict, hf_config, parameter_count
from qwen3vl_bridge.models.qwen3_vl.table import table
from qwen3vl_bridge.registry import dimensions_of, family, preset
from qwen3vl_bridge.weights.rows import ExpertLayout, expand

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.expert_layouts import LAYOUTS


def specs(shapes, dtype="bfloat16") -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, dtype, shape) for name, shape in shapes.items()}


def sides(dimensions, naming="transformer_engine"):
    return HuggingFace(dimensions), FsdpDtensor(dimensions, naming), TorchDist(dimensions)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ["32B", pytest.param("235B-A22B", marks=pytest.mark.slow)])
def test_make_plan_covers_all_parameters_between_any_two_formats(size, layout):
    dimensions = dimensions_of(config_dict(size))
    if not dimensions.indices["moe_layers"] and layout is not ExpertLayout.INPUT_MAJOR:
        return
    rows = list(expand(table(layout), dimensions))
    for source, target in itertools.permutations(sides(dimensions), 2):
        plan = make_plan(rows, source, target, specs(tensors_of(rows, source)), where="here")
        assert plan.numel == parameter_count(size)
        assert {name: spec.shape for name, spec in plan.specs.items()} == tensors_of(rows, target)
        turned = layout is ExpertLayout.INPUT_MAJOR and HuggingFace in (type(source), type(target))
        assert bool(plan.transposed) == (turned and size == "235B-A22B") and not plan.cast


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("size", PRESETS)
def test_fsdp_dtensor_shapes_are_equal_with_local_and_te_layer_names(size):
    dimensions = dimensions_of(config_dict(size))
    rows = list(expand(table(), dimensions))
    te, local = (tensors_of(rows, FsdpDtensor(dimensions, naming)) for naming in ("transformer_engine", "local"))
    assert len(te) == len(local) and sorted(te.values()) == sorted(local.values()) and te.keys() != local.keys()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("size", PRESETS)
def test_hf_tensor_names_and_shapes_match_transformers_state_dict(size):
    from transformers import Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration

    dimensions = dimensions_of(config_dict(size))
    moe = bool(dimensions.indices["moe_layers"])
    with torch.device("meta"):
        model = (Qwen3VLMoeForConditionalGeneration if moe else Qwen3VLForConditionalGeneration)(hf_config(size))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if PRESETS[size].tied:
        del theirs["lm_head.weight"]
    rows = expand(table(ExpertLayout.OUTPUT_MAJOR), dimensions)
    assert tensors_of(rows, HuggingFace(dimensions)) == theirs


def tasks(*runs, shape=(4,), name="out"):
    segments = tuple(run if isinstance(run, TransposedSlice | ZeroSlice) else TensorSlice(*run) for run in runs)
    return [(TensorSpec(name, "float32", shape), segments)]


TURNED = TransposedSlice((TensorSlice("a", 0, 4),), 2, 0, 4)


@pytest.mark.parametrize(("plan", "message"), [
    (tasks(("a", 0, 3)), "produces 3 of 4 elements"), (tasks(("a", 0, 2), ("a", 1, 2)), "not read exactly once"),
    (tasks(("a", 0, 2), ("a", 3, 2)), "not read exactly once"), (tasks(("a", 1, 4)), "not read exactly once"),
    (tasks(("a", 0, 4)) * 2, "planned twice"),
    (tasks(("a", 0, 4), name="other"), "planned twice or in another shape|other"), ([], "produces no elements"),
    (tasks(("a", 0, 3), ZeroSlice(1)), "the plan adds zeros"),
    (tasks(TURNED.cut(0, 2), TURNED.cut(0, 2)), "not read exactly once"),
    (tasks(TURNED.cut(0, 3), ZeroSlice(1)), "zeros"), (tasks(TURNED.cut(0, 2), ("a", 2, 2)), "not read completely"),
    (tasks(TURNED._replace(columns=3)), "not read completely"),
])  # fmt: skip
def test_prove_raises_if_plan_skips_or_repeats_elements(plan, message):
    with pytest.raises((AssertionError, KeyError), match=message):
        prove(plan, specs({"a": (4,)}), {"out": (4,)})


def test_prove_raises_if_plan_leaves_non_padding_elements_unread():
    prove(tasks(("a", 0, 4)), specs({"a": (4,)}), {"out": (4,)})
    prove(tasks(TURNED.cut(2, 2), TURNED.cut(0, 2)), specs({"a": (4,)}), {"out": (4,)})
    prove(tasks(("a", 0, 4), ZeroSlice(2), shape=(6,)), specs({"a": (4,)}), {"out": (6,)}, padded={"out"})
    prove(tasks(("a", 0, 4)), specs({"a": (6,)}), {"out": (4,)}, padded={"a"})
    with pytest.raises(AssertionError, match="reads 4 of 6 elements"):
        prove(tasks(("a", 0, 4)), specs({"a": (6,)}), {"out": (4,)})


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(), (7,), (1, 9), (24, 10), (25, 3, 2), (8, 1000)])
def test_split_into_chunks_cuts_large_tensor_at_owner_boundaries(shape, parts):
    spec = TensorSpec("x", "bfloat16", shape)
    rows = shape[0] if shape else 1
    held = [OwnedRows(i * rows // parts, (i,)) for i in range(parts)] if rows >= parts else [OwnedRows(0, (0,))]
    chunks = list(Topology(chunk_bytes=100).split_into_chunks(spec, owned={(): held}))
    assert sum(math.prod(sizes) for _, _, sizes in chunks) == spec.numel
    position = 0
    for owner, offsets, sizes in chunks:
        assert sizes[1:] == shape[1:] and not any(offsets[1:])
        assert not shape or offsets[0] == position
        assert len(chunks) == 1 or math.prod(sizes) * 2 <= 100 or sizes[0] == 1
        assert owner == max(part for part in held if part.first <= position).owner or spec.nbytes < 200 * parts
        position += sizes[0] if sizes else 0
    if shape and spec.nbytes >= 100 * len(held):
        assert {part.first for part in held} <= {offsets[0] for _, offsets, _ in chunks}


def test_topology_check_accepts_valid_parallel_sizes():
    dense, moe = (dimensions_of(config_dict(size)) for size in ("32B", "30B-A3B"))
    for tp in (1, 2, 4, 8, 16):
        Topology(tp=tp, cp=4, etp=1).check(dense, stages=False)
        Topology(tp=tp, pp=8, ep=16, etp=3, world_size=tp * 384).check(moe, stages=True)


@pytest.mark.parametrize(("size", "sizes", "message"), [
    ("32B", {"tp": 32}, "--tp is 32, expected a divisor of vision_config.num_heads, which is 16"),
    ("32B", {"ep": 2}, "--ep is 2, expected 1: a dense model has no experts"),
    ("32B", {"pp": 3}, "--pp is 3, expected a divisor of the 64 text layers"),
    ("32B", {"tp": 2, "cp": 3, "world_size": 8}, r"--world-size is 8, expected a multiple of tp \* pp \* cp"),
    ("32B", {"world_size": 0}, "--world-size is 0, expected 1 or more"),
    ("30B-A3B", {"ep": 3}, "--ep is 3, expected a divisor of num_moe_experts, which is 128"),
    ("30B-A3B", {"etp": 5}, "--etp is 5, expected a divisor of moe_ffn_hidden_size, which is 768"),
    ("30B-A3B", {"ep": 8, "world_size": 4}, r"--world-size is 4, expected a multiple of etp \* ep \* pp, which is"),
])  # fmt: skip
def test_topology_check_raises_if_parallel_sizes_are_invalid(size, sizes, message):
    with pytest.raises(CheckpointError, match=message):
        Topology(**sizes).check(dimensions_of(config_dict(size)), stages=True)


def test_topology_check_raises_if_tp_and_query_groups_are_indivisible():
    config = config_dict("32B")
    config["text_config"] |= {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    config["vision_config"] |= {"num_heads": 12, "hidden_size": 96, "intermediate_size": 96}
    dimensions = dimensions_of(config).with_vocab(96)
    for tp in (1, 2, 4, 12):
        Topology(tp=tp).check(dimensions, stages=True)
    with pytest.raises(
        CheckpointError, match="--tp is 6, expected a multiple or divisor of num_query_groups, which is 4"
    ):
        Topology(tp=6).check(dimensions, stages=True)


def held(size: str, side_of, **sizes):
    dimensions = dimensions_of(preset(size))
    rows, side = list(expand(family(dimensions.family).rows(), dimensions)), side_of(dimensions)
    return find_row_owners(rows, side, Topology(**sizes)), tensors_of(rows, side)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("sizes", [{"world_size": 64}, {"world_size": 256, "tp": 4}, {"tp": 2, "cp": 4}])
@pytest.mark.parametrize("size", ["8B", "9B"])
def test_find_row_owners_fsdp_assigns_every_row_to_a_rank(size, sizes):
    parts, shapes = held(size, FsdpDtensor, **sizes)
    assert parts.keys() == shapes.keys()
    owners = set()
    for name, shape in shapes.items():
        (of_tensor,) = parts[name].values()
        firsts = [part.first for part in of_tensor]
        assert firsts[0] == 0 and firsts == sorted(set(firsts)) and firsts[-1] < shape[0]
        owners.update(part.owner for part in of_tensor)
    ranks = Topology(**sizes).ranks
    assert len({owner[:3] for owner in owners}) == ranks // sizes.get("tp", 1)


def test_find_row_owners_fsdp_follows_megatron_fsdp_order_within_layer():
    """Megatron-FSDP's order: the widest, then attention's output and input, gate and up; each rank has full rows."""
    parts, _ = held("8B", FsdpDtensor, world_size=8)
    layer = "language_model.decoder.layers.5."
    found = {name.removeprefix(layer): list(rows[()]) for name, rows in parts.items() if name.startswith(layer)}
    share = -(-(4096 * 12288 + (4096 + 6144 + 24576) * 4096 + 2 * 4096 + 256) // (8 * 12288))  # rows of 12,288
    assert found["mlp.linear_fc2.weight"] == [OwnedRows(share * i, (0, 0, i, 0)) for i in range(3)]
    assert found["self_attention.linear_proj.weight"][0] == OwnedRows(0, (0, 0, 2, 0))
    assert found["mlp.linear_fc1.weight_v"][-1].owner == (0, 0, 7, 0)


@pytest.mark.parametrize(("size", "experts", "layer"), [
    ("30B-A3B", 128, "language_model.decoder.layers.3"), ("35B-A3B", 256, "language_model.decoder.layers.3"),
    ("35B-A3B", 256, "language_model.mtp.layers.0.mtp_model_layer"),
])  # fmt: skip
def test_find_row_owners_fsdp_assigns_experts_to_expert_parallel_ranks(size, experts, layer):
    parts, _ = held(size, FsdpDtensor, ep=8, world_size=64)
    first = layer + ".mlp.experts.linear_fc{}.weight{}"
    for expert in range(experts):
        for name in (first.format(1, expert) + "_w", first.format(1, expert) + "_v", first.format(2, expert)):
            assert {part.owner[:2] for part in parts[name][()]} == {(1, expert // (experts // 8))}
    if size == "30B-A3B":
        assert {parts[first.format(2, expert)][()][0].owner[2] for expert in range(16)} == {5, 6, 7}


def test_find_row_owners_torch_dist_assigns_rows_to_pp_ep_and_tp_ranks():
    parts, _ = held("30B-A3B", TorchDist.for_model, pp=2, ep=4, tp=2, etp=1)
    fc1 = parts["language_model.decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fc1[23, 31] == [OwnedRows(0, (0, 1, 0, 0)), OwnedRows(768, (0, 1, 0, 0))]
    assert fc1[24, 96][0].owner == (1, 1, 3, 0)
    (embedding,) = parts["language_model.embedding.word_embeddings.weight"].values()
    assert embedding == [OwnedRows(0, (0, 0, 0, 0)), OwnedRows(151936 // 2, (0, 0, 0, 1))]
    (output,) = parts["language_model.output_layer.weight"].values()
    assert output[0].owner == (1, 0, 0, 0)


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize(("ckpt_format", "sizes"), [
    ("fsdp_dtensor", {"ep": 2}), ("fsdp_dtensor", {"world_size": 4}), ("fsdp_dtensor", {"cp": 2}),
    ("fsdp_dtensor", {"tp": 2, "etp": 1}), ("torch_dist", {"pp": 2}), ("torch_dist", {"ep": 2}),
    ("torch_dist", {"etp": 2}),
])  # fmt: skip
def test_import_with_parallel_sizes_changes_distcp_files_but_no_tensor(ckpt_format, sizes, moe_folders, tmp_path):
    source, contents = moe_folders[ExpertLayout.INPUT_MAJOR], []
    for name, topology in (("plain", Topology(chunk_bytes=4_000)), ("cut", Topology(chunk_bytes=4_000, **sizes))):
        import_checkpoint(source, tmp_path / name, ckpt_format=ckpt_format, topology=topology)
        assert verify_checkpoint(source, tmp_path / name).same
        contents.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.distcp"))])
    assert contents[0] != contents[1]
    manifest = json.loads((tmp_path / "cut" / "iter_0000000" / "qwen3vl_bridge.json").read_text())
    assert manifest["topology"].items() >= sizes.items()


SLICES = (
    TensorSlice("a", 10, 5),
    ZeroSlice(2),
    TransposedSlice((TensorSlice("b", 0, 6),), 2, 0, 6),
    TensorSlice("a", 0, 4),
)


@given(st.integers(0, 17), st.integers(0, 17))
def test_slice_list_select_returns_elements_of_range(one, other):
    def elements(segments):
        for segment in segments:
            if isinstance(segment, TensorSlice):
                yield from ((segment.tensor, segment.start + i) for i in range(segment.length))
            elif isinstance(segment, ZeroSlice):
                yield from [None] * segment.length
            else:
                yield from (("turned", segment.start + i) for i in range(segment.length))

    start, end = sorted((one, other))
    segments = SliceList(SLICES)
    assert list(elements(segments.select(start, end - start))) == list(elements(SLICES))[start:end]
    assert all(segment.length for segment in segments.select(start, end - start))
    with pytest.raises(AssertionError, match="elements up to 18 of 17"):
        list(segments.select(start, 18 - start))


def test_split_into_chunks_joins_small_parts_of_several_owners():
    spec = TensorSpec("x", "bfloat16", (100, 10))
    parts = [OwnedRows(row, (row,)) for row in range(0, 100, 7)]
    (one,) = Topology().split_into_chunks(spec, owned={(): parts})
    assert one == ((0,), (0, 0), (100, 10))
    chunks = list(Topology(chunk_bytes=400).split_into_chunks(spec, owned={(): parts}))  # 20 rows at most, and at least
    assert [(owner[0], offsets[0], sizes[0]) for owner, offsets, sizes in chunks] == [
        (0, 0, 11), (0, 11, 10), (21, 21, 11), (21, 32, 10), (42, 42, 11), (42, 53, 10), (63, 63, 19), (63, 82, 18),
    ]  # fmt: skip


def test_split_into_chunks_never_joins_layers_or_experts():
    spec = TensorSpec("x", "bfloat16", (2, 3, 10, 4))
    halves = {(i, j): (OwnedRows(0, (i,)), OwnedRows(5, (j,))) for i in range(2) for j in range(3)}
    chunks = list(Topology(chunk_bytes=32).split_into_chunks(spec, 2, halves))
    assert {sizes[:2] for _, _, sizes in chunks} == {(1, 1)}
    assert [offsets for _, offsets, _ in chunks[:4]] == [(0, 0, row, 0) for row in (0, 3, 5, 8)]
    assert [sizes for _, _, sizes in chunks[:4]] == [(1, 1, count, 4) for count in (3, 2, 3, 2)]
    assert [offsets[:2] for _, offsets, _ in chunks[::4]] == [(i, j) for i in range(2) for j in range(3)]
    assert [owner for owner, _, _ in chunks[20:]] == [(1,), (1,), (2,), (2,)]


def test_find_row_owners_with_one_rank_splits_fc1_only_for_torch_dist():
    assert held("8B", FsdpDtensor)[0] == {}
    parts, shapes = held("8B", TorchDist.for_model)
    assert {len(of_index) for of_tensor in parts.values() for of_index in of_tensor.values()} == {1, 2}
    fc1 = "language_model.decoder.layers.mlp.linear_fc1.weight"  # read in two, by one rank too
    assert parts[fc1][35,] == [OwnedRows(0, (0, 0, 0, 0)), OwnedRows(shapes[fc1][1] // 2, (0, 0, 0, 0))]
