"""Stored rows of q, k, v, gate and up; checkpoints saved by torch; slices of tensors; number of open files."""

import contextlib
import itertools
import json
import os
import resource
import time
from collections.abc import Iterator

from qwen3vl_bridge.checkpoint import Topology, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.formats import tensors
from qwen3vl_bridge.checkpoint.formats.huggingface import SINGLE, HFWeights
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, TensorSlice, TransposedSlice

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.checkpoint.support import assert_same, before_each_unit, hf_tensors, stock_load


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
def stored_layouts(untied_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "megatron"
    import_checkpoint(untied_folder, folder, topology=Topology(tp=4, chunk_bytes=5_000))
    return stock_load(folder / "iter_0000000")


def test_import_interleaves_q_k_and_v_rows_by_query_group(stored_layouts, untied_folder):
    hf = hf_tensors(untied_folder)
    config = json.loads((untied_folder / "config.json").read_text())
    names = [
        key.removeprefix("model.module.") for key in stored_layouts if "linear_qkv." in key and "layer_norm" not in key
    ]
    assert len(names) == 4 + 2 * 4
    for name in names:
        assert torch.equal(stored_layouts[f"model.module.{name}"], restated(name, hf, config)), name


def test_import_to_fsdp_dtensor_stores_gate_and_up_projections_separately(stored_layouts, untied_folder):
    hf = hf_tensors(untied_folder)
    for layer in range(4):
        for suffix, part in (("_w", "gate"), ("_v", "up")):
            found = stored_layouts[f"model.module.language_model.decoder.layers.{layer}.mlp.linear_fc1.weight{suffix}"]
            assert torch.equal(found, hf[f"model.language_model.layers.{layer}.mlp.{part}_proj.weight"])
    assert not any(key.endswith("language_model.decoder.layers.0.mlp.linear_fc1.weight") for key in stored_layouts)


def resave(stored: dict, folder, change) -> None:
    """Save a checkpoint again as a trainer does, by torch's own writer, with optimizer state beside the model."""
    iteration = folder / "iter_0000007"
    model = {key: change(value) for key, value in stored.items()}
    moments = {f"optimizer.state.module.module.{key.removeprefix('model.')}.exp_avg": torch.ones_like(value)
               for key, value in model.items()}  # fmt: skip
    dcp.save({**model, **moments, "iteration": 7, "args": None}, checkpoint_id=iteration, no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def test_export_writes_weights_of_checkpoint_with_optimizer_state(stored_layouts, untied_folder, tmp_path):
    resave(stored_layouts, tmp_path / "run", lambda tensor: tensor * 2)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", hf_model=untied_folder)
    assert_same(hf_tensors(tmp_path / "hf"), {name: 2 * tensor for name, tensor in hf_tensors(untied_folder).items()})


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


@pytest.mark.slow
def test_export_of_checkpoint_sharded_over_two_ranks_matches_model(stored_layouts, untied_folder, tmp_path):
    run = tmp_path / "run" / "iter_0000001"
    arguments = (str(tmp_path / "store"), str(run), stored_layouts)
    # From a fresh process: forks of one that has joined others cannot join each other.
    torch.multiprocessing.start_processes(_save_sharded, arguments, nprocs=2, start_method="spawn")
    assert len(list(run.glob("*.distcp"))) == 2
    export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder)
    assert_same(hf_tensors(tmp_path / "hf"), hf_tensors(untied_folder))


DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def stored_values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{part} {dtype}": torch.randn(3000, generator=generator).to(getattr(torch, dtype))
        for dtype in DTYPES
        for part in ("gate", "up")
    }
    save_file(values, folder / SINGLE)
    return folder, values


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 50),
    more_rows=st.integers(0, 10),
    columns=st.integers(1, 50),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    strip=st.sampled_from([1, 64, 1000, 1 << 18]),
    cuts=st.lists(st.integers(0, 3000), max_size=3),
)
def test_slice_reader_transposed_slice_matches_torch_transpose(
    stored_values, rows, more_rows, columns, dtypes, strip, cuts
):
    """A matrix from one or two stored slices, read in strips and in parts, in the stored dtype or a different one."""
    folder, values = stored_values
    lengths, (first, second, target) = [rows * columns, more_rows * columns], dtypes
    names = [f"gate {first}", f"up {second}"]
    runs = tuple(TensorSlice(name, 7, length) for name, length in zip(names, lengths, strict=True) if length)
    parts = [values[run.tensor][7 : 7 + run.length].to(getattr(torch, target)) for run in runs]
    expected = torch.cat(parts).view(-1, columns).t().contiguous().view(-1)
    places = sorted({0, len(expected), *(cut for cut in cuts if cut < len(expected))})
    matrix = TransposedSlice(runs, columns, 0, len(expected))
    with pytest.MonkeyPatch.context() as patch, tensors.SliceReader(HFWeights(folder), block_bytes=64) as reader:
        patch.setattr(tensors, "_STRIP_BYTES", strip)
        found = b"".join(
            bytes(block)
            for start, end in itertools.pairwise(places)
            for block in reader.read_blocks([matrix.cut(start, end - start)], target)
        )
    assert len(found) == len(expected) * ITEMSIZE[target]
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=expected.dtype), expected)


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, 50 + max(map(int, os.listdir("/proc/self/fd")))), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_below(folder) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
    return found


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("direction", ["import", "export"])
def test_conversion_on_slow_disk_keeps_at_most_three_files_open(direction, moe_folder, tmp_path):
    source, target, most = tmp_path / "source", tmp_path / "target", []
    if direction == "export":
        import_checkpoint(moe_folder, source)

    def slow(*_):
        time.sleep(0.002)
        most.append(sum(open_below(path) for path in tmp_path.glob(".target.partial-????????????/*")))

    with few_files(), before_each_unit(slow, 1 << 12):
        if direction == "import":
            import_checkpoint(moe_folder, target)
        else:
            export_checkpoint(source, target)
    assert len(most) > 100, "the model has too few units to show it"
    assert max(most) <= 2 + 1  # two are written, and one may be let go
    assert verify_checkpoint(*((moe_folder, target) if direction == "import" else (target, source))).same
