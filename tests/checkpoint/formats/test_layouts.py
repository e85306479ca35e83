"""What is stored, against a restatement of the layouts element by element and against stock readers and writers."""

from __future__ import annotations

import json

from qwen3vl_bridge.checkpoint import Topology, export_checkpoint, import_checkpoint, verify_checkpoint

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ..support import hf_tensors, stock_load


def restated(name: str, hf: dict[str, torch.Tensor], config: dict) -> torch.Tensor:
    text, vision = config["text_config"], config["vision_config"]
    layer = name.split(".")[3]
    rows = []
    if name.startswith("language_model"):
        prefix = f"model.language_model.layers.{layer}.self_attn."
        q, k, v = (hf[f"{prefix}{part}_proj.weight"] for part in "qkv")
        dim, groups = text["head_dim"], text["num_key_value_heads"]
        each = text["num_attention_heads"] // groups
        for group in range(groups):
            for head in range(group * each, (group + 1) * each):
                rows += [q[head * dim + i] for i in range(dim)]
            rows += [k[group * dim + i] for i in range(dim)]
            rows += [v[group * dim + i] for i in range(dim)]
    else:
        fused = hf[f"model.visual.blocks.{layer}.attn.qkv.{name.rsplit('.', 1)[1]}"]
        heads, width = vision["num_heads"], vision["hidden_size"]
        for head in range(heads):
            for part in range(3):
                rows += [fused[part * width + head * (width // heads) + i] for i in range(width // heads)]
    return torch.stack(rows)


# torch says so whenever it saves or loads in a single process, as is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:This process .* is multi-threaded")


@pytest.fixture(scope="module")
def stored(untied_folder, tmp_path_factory):
    """The untied model's checkpoint in many chunks, as torch reads it."""
    folder = tmp_path_factory.mktemp("stored") / "megatron"
    import_checkpoint(untied_folder, folder, topology=Topology(tp=4, chunk_bytes=5_000))
    return stock_load(folder / "iter_0000000")


def test_attention_is_interleaved_by_query_group(stored, untied_folder):
    hf = hf_tensors(untied_folder)
    config = json.loads((untied_folder / "config.json").read_text())
    names = [key.removeprefix("model.module.") for key in stored if "linear_qkv." in key and "layer_norm" not in key]
    assert len(names) == 4 + 2 * 4
    for name in names:
        assert torch.equal(stored[f"model.module.{name}"], restated(name, hf, config)), name


def test_gate_and_up_are_stored_apart(stored, untied_folder):
    hf = hf_tensors(untied_folder)
    for layer in range(4):
        for suffix, part in (("_w", "gate"), ("_v", "up")):
            found = stored[f"model.module.language_model.decoder.layers.{layer}.mlp.linear_fc1.weight{suffix}"]
            assert torch.equal(found, hf[f"model.language_model.layers.{layer}.mlp.{part}_proj.weight"])
    assert not any(key.endswith("language_model.decoder.layers.0.mlp.linear_fc1.weight") for key in stored)


def resave(stored: dict, folder, change=lambda key, tensor: tensor) -> None:
    """Save a checkpoint again as a trainer does, by torch's own writer, with optimizer state beside the model."""
    iteration = folder / "iter_0000007"
    model = {key: change(key, value) for key, value in stored.items() if isinstance(value, torch.Tensor)}
    moments = {f"optimizer.state.module.module.{key.removeprefix('model.')}.exp_avg": torch.ones_like(value)
               for key, value in model.items()}  # fmt: skip
    dcp.save({**model, **moments, "iteration": 7, "args": None}, checkpoint_id=iteration, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def test_a_trainers_checkpoint_exports(stored, untied_folder, tmp_path):
    resave(stored, tmp_path / "run", lambda _, tensor: tensor * 2)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", hf_model=untied_folder)
    before, after = hf_tensors(untied_folder), hf_tensors(tmp_path / "hf")
    assert all(torch.equal(after[name], tensor * 2) for name, tensor in before.items())


def test_tensors_that_lie_transposed_in_their_archive_are_read_too(stored, untied_folder, tmp_path):
    resave(stored, tmp_path / "run", lambda _, tensor: tensor.T.contiguous().T if tensor.ndim == 2 else tensor)
    assert verify_checkpoint(untied_folder, tmp_path / "run", iteration=7).same


def _save_sharded(rank: int, store: str, folder: str, tensors: dict[str, torch.Tensor]) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    # By columns where there are any, by rows otherwise.
    state = {key: distribute_tensor(tensor, mesh, [Shard(min(tensor.ndim - 1, 1))]) for key, tensor in tensors.items()}
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def test_what_several_ranks_saved_exports(stored, untied_folder, tmp_path):
    tensors = {key: value for key, value in stored.items() if isinstance(value, torch.Tensor)}
    run = tmp_path / "run" / "iter_0000001"
    arguments = (str(tmp_path / "store"), str(run), tensors)
    # From a fresh process: forks of one that has joined others cannot join each other.
    torch.multiprocessing.start_processes(_save_sharded, arguments, nprocs=2, start_method="spawn")
    assert len(list(run.glob("*.distcp"))) == 2
    export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder)
    before, after = hf_tensors(untied_folder), hf_tensors(tmp_path / "hf")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
