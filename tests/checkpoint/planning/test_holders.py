"""Which ranks hold what, at sizes that are stated: of every element someone, and what the layout makes of it."""

from __future__ import annotations

import json

from qwen3vl_bridge.checkpoint import Topology, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.conversion_plan import tensors_of
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, TorchDist
from qwen3vl_bridge.checkpoint.row_owners import holders
from qwen3vl_bridge.registry import dimensions_of, family, preset
from qwen3vl_bridge.weights.rows import ExpertLayout, Part, expand

import pytest


def held(size: str, side_of, **sizes):
    dimensions = dimensions_of(preset(size))
    rows, side = list(expand(family(dimensions.family).rows(), dimensions)), side_of(dimensions)
    return holders(rows, side, Topology(**sizes)), tensors_of(rows, side)


def test_one_rank_holds_all():
    assert held("8B", FsdpDtensor)[0] == {}
    parts, shapes = held("8B", TorchDist.of)
    assert {len(of_index) for of_tensor in parts.values() for of_index in of_tensor.values()} == {1, 2}
    fc1 = "language_model.decoder.layers.mlp.linear_fc1.weight"  # read in two, by one rank too
    assert parts[fc1][35,] == [Part(0, (0, 0, 0, 0)), Part(shapes[fc1][1] // 2, (0, 0, 0, 0))]


@pytest.mark.parametrize("sizes", [{"world_size": 64}, {"world_size": 256, "tp": 4}, {"tp": 2, "cp": 4}])
@pytest.mark.parametrize("size", ["8B", "9B"])
def test_every_row_of_an_fsdp_checkpoint_has_a_holder(size, sizes):
    """Qwen3.5's parameters are stored in parts of several sizes."""
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


def test_a_layers_weights_lie_one_behind_the_other():
    """The widest first, then attention's output, its input, gate and up; shares are of whole rows of all of them."""
    parts, _ = held("8B", FsdpDtensor, world_size=8)
    layer = "language_model.decoder.layers.5."
    found = {
        name.removeprefix(layer): list(of_tensor[()]) for name, of_tensor in parts.items() if name.startswith(layer)
    }
    share = -(-(4096 * 12288 + (4096 + 6144 + 24576) * 4096 + 2 * 4096 + 256) // (8 * 12288))  # rows of 12,288
    assert found["mlp.linear_fc2.weight"] == [Part(share * i, (0, 0, i, 0)) for i in range(3)]
    assert found["self_attention.linear_proj.weight"][0] == Part(0, (0, 0, 2, 0))
    assert found["mlp.linear_fc1.weight_v"][-1].owner == (0, 0, 7, 0)


@pytest.mark.parametrize(
    ("size", "experts", "layer"),
    [
        ("30B-A3B", 128, "language_model.decoder.layers.3"),
        ("35B-A3B", 256, "language_model.decoder.layers.3"),
        ("35B-A3B", 256, "language_model.mtp.layers.0.mtp_model_layer"),
    ],
)
def test_experts_are_shared_by_the_ranks_of_their_group(size, experts, layer):
    parts, _ = held(size, FsdpDtensor, ep=8, world_size=64)
    first = layer + ".mlp.experts.linear_fc{}.weight{}"
    for expert in range(experts):
        for name in (first.format(1, expert) + "_w", first.format(1, expert) + "_v", first.format(2, expert)):
            assert {part.owner[:2] for part in parts[name][()]} == {(1, expert // (experts // 8))}


def test_a_group_shares_its_experts_out():
    parts, _ = held("30B-A3B", FsdpDtensor, ep=8, world_size=64)
    first = "language_model.decoder.layers.3.mlp.experts.linear_fc{}.weight{}"
    assert {parts[first.format(2, expert)][()][0].owner[2] for expert in range(16)} == {5, 6, 7}


def test_stages_groups_and_tensor_parallel_ranks_of_torch_dist():
    parts, _ = held("30B-A3B", TorchDist.of, pp=2, ep=4, tp=2, etp=1)
    fc1 = parts["language_model.decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert fc1[23, 31] == [Part(0, (0, 1, 0, 0)), Part(768, (0, 1, 0, 0))]
    assert fc1[24, 96][0].owner == (1, 1, 3, 0)
    (embedding,) = parts["language_model.embedding.word_embeddings.weight"].values()
    assert embedding == [Part(0, (0, 0, 0, 0)), Part(151936 // 2, (0, 0, 0, 1))]
    (output,) = parts["language_model.output_layer.weight"].values()
    assert output[0].owner == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("ckpt_format", "sizes"),
    [
        ("fsdp_dtensor", {"ep": 2}),
        ("fsdp_dtensor", {"world_size": 4}),
        ("fsdp_dtensor", {"cp": 2}),
        ("fsdp_dtensor", {"tp": 2, "etp": 1}),
        ("torch_dist", {"pp": 2}),
        ("torch_dist", {"ep": 2}),
        ("torch_dist", {"etp": 2}),
    ],
)
def test_a_size_that_is_stated_changes_the_files(ckpt_format, sizes, moe_folders, tmp_path):
    source, contents = moe_folders[ExpertLayout.INPUT_MAJOR], []
    for name, topology in (("plain", Topology(chunk_bytes=4_000)), ("cut", Topology(chunk_bytes=4_000, **sizes))):
        import_checkpoint(source, tmp_path / name, ckpt_format=ckpt_format, topology=topology)
        assert verify_checkpoint(source, tmp_path / name).same
        contents.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.distcp"))])
    assert contents[0] != contents[1]
    manifest = json.loads((tmp_path / "cut" / "iter_0000000" / "qwen3vl_bridge.json").read_text())
    assert manifest["topology"].items() >= sizes.items()
