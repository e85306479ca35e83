"""Conversion of Qwen3.5 to both formats and back, in both precisions."""

import json
from pathlib import Path

from qwen3vl_bridge.checkpoint import (
    Topology,
    export_checkpoint,
    import_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
)
from qwen3vl_bridge.checkpoint.formats.dcp import read_metadata
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import load_model, load_weights

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.metadata import TensorProperties

from tests.models.qwen3_5.conftest import RELEASED
from tests.models.qwen3_5.tiny import make_checkpoint, rewritten, weights

FORMATS = ("fsdp_dtensor", "torch_dist")
SHIFTED = ".linear_attn.norm.weight"


def check_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith(SHIFTED) and tensor.dtype is torch.float32:  # less one, below one half it is rounded
            small = tensor < 0.5
            assert (found[name] - tensor).abs().max() <= 2**-24  # half the last place of numbers below 2
            found[name][small] = tensor[small]
        assert found[name].dtype is tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "per expert", "3.6"])
def test_qwen3_5_import_and_export_restore_every_weight(qwen3_5_folders, kind, ckpt_format, tmp_path):
    folder = qwen3_5_folders[kind]
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", verify=True)
    check_same(weights(tmp_path / "hf"), weights(folder))


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(("kind", "ep"), [("dense", 1), ("moe", 2), ("3.6", 3)])
def test_qwen3_5_reformat_for_parallel_ranks_keeps_every_weight(qwen3_5_folders, kind, ep, tmp_path):
    topology = Topology(tp=2, ep=ep, etp=1, chunk_bytes=2_000)
    import_checkpoint(qwen3_5_folders[kind], tmp_path / "fsdp", topology=topology, verify=True)
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "dist", ckpt_format="torch_dist", topology=topology, verify=True)
    assert verify_checkpoint(qwen3_5_folders[kind], tmp_path / "dist").same
    export_checkpoint(tmp_path / "dist", tmp_path / "hf")
    check_same(weights(tmp_path / "hf"), weights(qwen3_5_folders[kind]))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_qwen3_5_import_for_eight_expert_ranks_keeps_every_weight(ckpt_format, tmp_path, capsys):
    """The import is verified, and is loaded by one rank."""
    folder, written = make_checkpoint(tmp_path / "in", moe=True, mtp=RELEASED, num_experts=8), tmp_path / "megatron"
    asked = ["--hf-model", str(folder), "--megatron-path", str(written), "--ckpt-format", ckpt_format, "--ep", "8"]
    assert main(["import", *asked, "--verify", "--no-progress"]) == 0
    assert main(["verify", *asked[:4], "--no-progress"]) == 0
    export_checkpoint(written, tmp_path / "hf", verify=True)
    check_same(weights(tmp_path / "hf"), weights(folder))
    assert main(["import", *asked[:-1], "3", "--overwrite", "--no-progress"]) == 2
    assert "--ep is 3, expected a divisor of num_moe_experts, which is 8" in capsys.readouterr().err


def test_inspect_command_accepts_folder_without_mtp_weights(tmp_path, capsys):
    """Transformers saves models without multi-token prediction, and does not change the configuration."""
    folder = make_checkpoint(tmp_path / "in", moe=True)
    assert json.loads((folder / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    assert main(["inspect", "--hf-model", str(folder)]) == 0
    assert "experts        output_major" in capsys.readouterr().out


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_export_keeps_dtypes_of_released_checkpoint(released, ckpt_format, tmp_path):
    """float32 parameters stay float32, and the configuration states the dtype of most weights."""
    import_checkpoint(released, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    check_same(weights(tmp_path / "hf"), weights(released))
    assert (tmp_path / "hf/config.json").read_bytes() == (released / "config.json").read_bytes()


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_export_with_torch_dtype_bfloat16_restores_released_dtypes(released, ckpt_format, tmp_path):
    """Megatron-FSDP saves everything in float32. Parameters that the model keeps in float32 are not rounded."""
    whole = rewritten(released, {name: one.float() for name, one in weights(released).items()}, tmp_path / "in")
    import_checkpoint(whole, tmp_path / "megatron", ckpt_format=ckpt_format)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", torch_dtype="bfloat16", verify=True)
    check_same(weights(tmp_path / "hf"), weights(released))
    assert json.loads((tmp_path / "hf/config.json").read_text())["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("torch_dtype", [None, pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_import_and_export_restore_bfloat16_checkpoint_exactly(released_3_6, ckpt_format, torch_dtype, tmp_path):
    """Qwen3.6 is released in bfloat16. Weights minus one need float32, in which they are stored."""
    tensors = weights(released_3_6)
    small = next(one for name, one in tensors.items() if name.endswith(SHIFTED))
    small[:4] = torch.tensor([0.4, 0.013, -0.2, 2**-16])
    assert not torch.equal((small - 1) + 1, small)
    folder = rewritten(released_3_6, tensors, tmp_path / "in")
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format, torch_dtype=torch_dtype, verify=True)
    found = read_metadata(tmp_path / "megatron/iter_0000000").tensors
    in_float32 = {name for name, (spec, _) in found.items() if spec.dtype == "float32"}
    assert in_float32 == {name for name in found if name.endswith((".A_log", ".out_norm.weight"))} != set()
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    other = next(one for one in FORMATS if one != ckpt_format)
    reformat_checkpoint(tmp_path / "megatron", tmp_path / "other", ckpt_format=other, torch_dtype=torch_dtype)
    for source in ("megatron", "other"):
        export_checkpoint(tmp_path / source, tmp_path / f"{source}_hf", torch_dtype=torch_dtype, verify=True)
        check_same(weights(tmp_path / f"{source}_hf"), tensors)


def parameters(model: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model[0].named_parameters()}


def check_parameters(model: list[torch.nn.Module], expected: dict[str, torch.Tensor]) -> None:
    found = parameters(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "moe", "per expert"])
def test_load_model_from_imported_checkpoint_restores_every_weight(qwen3_5_folders, kind, ckpt_format, tmp_path):
    folder = qwen3_5_folders[kind]
    expected = parameters(load_model(folder))
    assert any(".mtp." in name for name in expected) == (kind != "per expert")
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    check_parameters(load_model(folder, tmp_path / "megatron"), expected)


@pytest.mark.skipif(
    "strides" in TensorProperties.__dataclass_fields__,
    reason="megatron-core passes all of torch's TensorProperties to torch.empty, which has no argument strides",
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_megatron_core_strict_load_of_imported_checkpoint_restores_weights(qwen3_5_folders, kind, tmp_path):
    model = load_model(qwen3_5_folders[kind])
    expected = parameters(model)
    import_checkpoint(qwen3_5_folders[kind], tmp_path / "megatron", ckpt_format="torch_dist")
    load_strictly(model[0], tmp_path / "megatron")
    check_parameters(model, expected)


def load_strictly(model: torch.nn.Module, checkpoint: Path) -> None:
    """Load with megatron-core, with an error for any missing or additional tensor."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load(state, str(checkpoint / "iter_0000000"), strict="raise_unexpected")
    model.load_state_dict({name: loaded[name] for name in state})


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_megatron_bridge_loads_and_saves_imported_checkpoint_unchanged(qwen3_5_folders, kind, tmp_path):
    """Megatron-Bridge needs only the checkpoint with its `run_config.yaml`."""
    folder = qwen3_5_folders[kind]
    expected = parameters(load_model(folder))
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    loaded = unwrap_model(load_megatron_model(str(tmp_path / "megatron" / "iter_0000000"), use_cpu_init=True))
    save_megatron_model(loaded, tmp_path / "saved")
    check_parameters(loaded, expected)
    check_parameters(load_model(folder, tmp_path / "saved"), expected)
    assert verify_checkpoint(folder, tmp_path / "saved").same


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_model_without_mtp_loads_imported_checkpoint_with_mtp(qwen3_5_folders, ckpt_format, tmp_path):
    folder = qwen3_5_folders["dense"]
    expected = parameters(load_model(folder))
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format)
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.mtp_num_layers = None
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups, mixed_precision_wrapper=None
    )
    load_weights(tmp_path / "megatron", model, groups)
    check_parameters(model, {name: one for name, one in expected.items() if ".mtp." not in name})
