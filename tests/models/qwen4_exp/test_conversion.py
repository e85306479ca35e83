"""Conversion of Qwen3.8-Flash-Next to both formats and back: bytes, hash constants, runs and FP8."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    Topology,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
)
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.core.collectives import gather_objects
from qwen3vl_bridge.models.qwen4_exp import FAMILY
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import load_model, load_weights
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file

from benchmarks.convert import measure_apart
from tests.checkpoint.support import broken_disk, contents, model_with
from tests.helpers import fp8
from tests.helpers.forked import results_of_ranks
from tests.helpers.steps import save, set_up, train_step
from tests.models.qwen3_5.test_conversion import check_parameters, load_strictly, parameters
from tests.models.qwen4_exp.tiny import make_checkpoint
from tests.training.running import Inputs, replicated, sharded

FORMATS = ("fsdp_dtensor", "torch_dist")
KINDS = {
    "fused": {}, "per expert": {"experts": ExpertLayout.PER_EXPERT}, "without MTP": {"mtp": False},
    "MTP per expert": {"experts": ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT},
    # The second table has other primes. Parts have rows of two heads, or only a few rows of one.
    "two tables": {"ple_layer_ids": [1, 3], "heads_per_ngram": 4, "split_ngram_parts": 8},
}  # fmt: skip
PLE = "model.language_model.layers.1.ple.ple_embedding."
SCALE = f"{PLE}ngram_embedding.weight_scale"
FLOAT32 = (".linear_attn.A_log", ".linear_attn.norm.weight")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def in_bfloat16(folder: Path, target: Path, float32: tuple[str, ...] = ()) -> Path:
    """Write a copy of a model in bfloat16, except for integers and for names with an ending in `float32`."""

    def cast(tensors):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not name.endswith(float32):
                tensors[name] = tensor.bfloat16()

    config = model_with(target, folder, cast) / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen4_exp")
    made = {kind: make_checkpoint(root / kind, seed=seed, **more) for seed, (kind, more) in enumerate(KINDS.items())}
    made["bfloat16"] = in_bfloat16(made["fused"], root / "bfloat16")
    made["bfloat16, decays in float32"] = in_bfloat16(made["per expert"], root / "float32 decays", FLOAT32)
    return made


@pytest.mark.one_case_in(12)
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16", "bfloat16, decays in float32"])
def test_qwen4_exp_import_and_export_restore_every_byte(folders, kind, ckpt_format, tmp_path):
    folder = folders[kind]
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    assert verify_checkpoint(folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", verify=True, checksums=True)
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folder))
    assert (tmp_path / "hf/config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.slow
def test_qwen4_exp_reformat_for_parallel_ranks_keeps_every_byte(folders, tmp_path):
    topology = Topology(tp=2, ep=2, etp=1, chunk_bytes=2_000)
    import_checkpoint(folders["fused"], tmp_path / "fsdp", topology=topology, verify=True)
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "dist", ckpt_format="torch_dist", topology=topology, verify=True)
    assert verify_checkpoint(folders["fused"], tmp_path / "dist").same
    export_checkpoint(tmp_path / "dist", tmp_path / "hf")
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folders["fused"]))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_qwen4_exp_convert_commands_for_eight_expert_ranks_keep_every_byte(ckpt_format, tmp_path, capsys):
    """There are four hash heads, so two ranks share the columns of each."""
    folder, written = make_checkpoint(tmp_path / "in", num_experts=8), tmp_path / "megatron"
    asked = ["--hf-model", str(folder), "--megatron-path", str(written), "--ckpt-format", ckpt_format, "--ep", "8"]
    assert main(["import", *asked, "--dry-run", "--no-progress"]) == 0 and not written.exists()
    assert main(["import", *asked, "--verify", "--no-progress"]) == 0
    assert main(["verify", *asked[:4], "--no-progress"]) == 0
    assert main(["inspect", "--megatron-path", str(written)]) == 0
    exporting = ["--megatron-path", str(written), "--hf-path", str(tmp_path / "hf")]
    assert main(["export", *exporting, "--verify", "--no-progress"]) == 0
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folder))
    assert main(["import", *asked[:-1], "3", "--overwrite", "--no-progress"]) == 2
    assert "etp is 3, expected a multiple or divisor of (ngram_size - 1) * heads_per_ngram" in capsys.readouterr().err


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_qwen4_exp_import_resumed_after_disk_error_gives_same_bytes(folders, ckpt_format, tmp_path):
    options = dict(ckpt_format=ckpt_format, topology=Topology(ep=2, chunk_bytes=2_000))
    with broken_disk(10_000, unit_bytes=1 << 16):  # also the size of files
        import_checkpoint(folders["fused"], tmp_path / "expected", **options)
    with broken_disk(3, unit_bytes=1 << 16), pytest.raises(CheckpointError, match="Input/output error"):
        import_checkpoint(folders["fused"], tmp_path / "megatron", resume=True, **options)
    assert not (tmp_path / "megatron").exists()
    with broken_disk(10_000, unit_bytes=1 << 16):
        report = import_checkpoint(folders["fused"], tmp_path / "megatron", resume=True, **options)
    assert report.resumed and report.written
    found, expected = (
        {name: data for name, data in contents(tmp_path / name).items() if name.endswith((".distcp", ".metadata"))}
        for name in ("megatron", "expected")
    )
    assert found == expected and found


def test_qwen4_exp_export_resumed_after_disk_error_gives_same_bytes(folders, tmp_path):
    import_checkpoint(folders["fused"], tmp_path / "megatron")
    with broken_disk(3, unit_bytes=1 << 16), pytest.raises(CheckpointError, match="Input/output error"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "hf", resume=True)
    assert not (tmp_path / "hf").exists()
    with broken_disk(10_000, unit_bytes=1 << 16):
        assert export_checkpoint(tmp_path / "megatron", tmp_path / "hf", resume=True, verify=True).resumed
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folders["fused"]))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layer_multipliers", lambda one: one + 2, r"found \[\d+, \d+, \d+\], expected the int64 values \[\d+"),
        ("ngram_heads_vocab_sizes", lambda one: one.flip(0), r"found \[\d+, .*\], expected the int64 values \[101, "),
        ("ngram_heads_offsets", lambda one: one + 1, r"found \[1, 102, .*\], expected the int64 values \[0, 101, "),
        (
            "ngram_heads_offsets",
            lambda one: one[1:].clone(),
            r"found \[3\] int64, expected the int64 values \[0, 101, ",
        ),
        ("ngram_heads_offsets", lambda one: one.int(), r"found \[4\] int32, expected the int64 values \[0, 101, "),
    ],
)
def test_import_and_verify_raise_if_hash_constant_is_wrong(folders, name, change, message, tmp_path):
    def alter(tensors):
        tensors[PLE + name] = change(tensors[PLE + name])

    import_checkpoint(folders["fused"], tmp_path / "good")
    folder = model_with(tmp_path / "bad", folders["fused"], alter)
    with pytest.raises(CheckpointError, match=f"tensor {PLE}{name}: {message}"):
        import_checkpoint(folder, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    with pytest.raises(CheckpointError, match=f"tensor {PLE}{name}: {message}"):
        verify_checkpoint(folder, tmp_path / "good")


def test_import_raises_if_hash_constants_do_not_follow_from_seed_in_config(folders, tmp_path):
    folder = shutil.copytree(folders["fused"], tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["seed"] = 4321
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"tensor {PLE}layer_multipliers: found .* follow from config.json"):
        import_checkpoint(folder, tmp_path / "megatron")


def test_import_reports_missing_hash_constants_and_export_writes_them(folders, tmp_path):
    expected = tensors_of(folders["fused"])
    names = FAMILY.constants(json.loads((folders["fused"] / "config.json").read_text()))
    folder = model_with(tmp_path / "in", folders["fused"], lambda tensors: [tensors.pop(name) for name in names])
    report = import_checkpoint(folder, tmp_path / "megatron")
    assert f"3 of 3 constants are missing, such as {next(iter(names))}; an export writes them" in report.notes
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    check_same_bytes(tensors_of(tmp_path / "hf"), expected)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("kind", ["fused", "per expert", "two tables"])
def test_load_model_after_import_matches_hf_weights(folders, kind, ckpt_format, tmp_path):
    expected = parameters(load_model(folders[kind]))
    assert any(".mtp." in name for name in expected)
    import_checkpoint(folders[kind], tmp_path / "megatron", ckpt_format=ckpt_format)
    check_parameters(load_model(folders[kind], tmp_path / "megatron"), expected)


@pytest.mark.parametrize("kind", ["fused", "two tables", "without MTP"])
def test_megatron_core_strict_load_of_imported_qwen4_exp_restores_weights(folders, kind, tmp_path):
    """All names and shapes in the checkpoint are those that the model itself saves."""
    model = load_model(folders[kind])
    expected = parameters(model)
    import_checkpoint(folders[kind], tmp_path / "megatron", ckpt_format="torch_dist")
    load_strictly(model[0], tmp_path / "megatron")
    check_parameters(model, expected)


def test_megatron_bridge_load_and_save_of_imported_qwen4_exp_keep_weights(folders, tmp_path):
    """Megatron-Bridge needs only the checkpoint with its `run_config.yaml`."""
    folder = folders["fused"]
    expected = parameters(load_model(folder))
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    loaded = unwrap_model(load_megatron_model(str(tmp_path / "megatron" / "iter_0000000"), use_cpu_init=True))
    save_megatron_model(loaded, tmp_path / "saved")
    check_parameters(loaded, expected)
    assert verify_checkpoint(folder, tmp_path / "saved").same
    export_checkpoint(tmp_path / "saved", tmp_path / "hf", hf_model=folder)
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folder))


def load_and_save(folder: Path, checkpoint: Path, saved: Path, settings: dict[str, Any]) -> dict[str, list[str]]:
    """Load a checkpoint on these ranks, save it with megatron-core, and return the parameters that each loader changed.

    What Megatron-Bridge has loaded from the Hugging Face folder is right.
    """
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups, mixed_precision_wrapper=None
    )
    expected, different = parameters([model]), {}
    metadata = {"dp_cp_group": groups.dp_cp}

    def load_with_megatron_core() -> None:
        state = model.sharded_state_dict(metadata=metadata)
        loaded = dist_checkpointing.load(state, str(checkpoint / "iter_0000000"), strict="raise_unexpected")
        model.load_state_dict({name: loaded[name] for name in state})

    for loader in (load_with_megatron_core, lambda: load_weights(checkpoint, [model], groups)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        loader()
        different[loader.__name__] = [name for name, one in parameters([model]).items() if one.ne(expected[name]).any()]
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(saved))
    return {loader: [name for names in gather_objects(found) for name in names] for loader, found in different.items()}


TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
LAYOUTS = {
    "EP2": (2, dict(expert_model_parallel_size=2)),
    "TP2+EP2": (2, TP2 | dict(expert_tensor_parallel_size=1, expert_model_parallel_size=2)),
    "TP2+ETP2": (2, TP2),
    "EP8": (8, dict(expert_model_parallel_size=8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_and_save_of_imported_qwen4_exp_on_ranks_keep_every_byte(layout, tmp_path):
    """With eight ranks and four hash heads, a rank has half of the columns of a head."""
    ranks, settings = LAYOUTS[layout]
    folder = make_checkpoint(tmp_path / "in", num_experts=8)
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    (tmp_path / "saved").mkdir()
    different = results_of_ranks(load_and_save, ranks, folder, tmp_path / "megatron", tmp_path / "saved", settings)
    assert len(different) == 2 and not any(different.values())
    export_checkpoint(tmp_path / "saved", tmp_path / "hf", hf_model=folder)
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [sharded, pytest.param(replicated, marks=pytest.mark.slow)], ids=["fsdp_dtensor", "torch_dist"]
)
def test_export_after_training_matches_weights_of_run(make, folders, digits, tmp_path):
    folder = folders["fused"]
    steps = dict(train__train_iters=1, validation__eval_iters=0, scheduler__lr_warmup_iters=0)
    steps |= dict(model__mtp_loss_scaling_factor=0.1)
    made = set_up(make(Inputs(folder, digits, folder), tmp_path / "run", **steps))
    train_step(made)
    save(made)
    export_checkpoint(tmp_path / "run", tmp_path / "hf", verify=True)
    assert verify_checkpoint(tmp_path / "hf", tmp_path / "run").same
    found, before = tensors_of(tmp_path / "hf"), tensors_of(folder)
    assert found.keys() == before.keys()
    frozen = [name for name in found if torch.equal(found[name].double(), before[name].bfloat16().double())]
    constants = FAMILY.constants(json.loads((folder / "config.json").read_text()))
    assert {name for name in frozen if ".indexer." not in name} <= set(constants), frozen
    expected, stored = parameters(load_model(tmp_path / "hf")), parameters(load_model(folder, tmp_path / "run"))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():  # norms are stored less one, and rounded once: by half of the last place of 1
        largest = 2**-24 if name.endswith(".out_norm.weight") else 0
        assert (stored[name] - tensor).abs().max() <= largest, name


def in_fp8(folder: Path, target: Path) -> Path:
    """Write a copy in FP8 as released: experts in blocks, and the n-gram table with one scale."""
    config = json.loads((folder / "config.json").read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    excluded = set()

    def change(tensors):
        parts = [name for name in tensors if ".ngram_embedding.shard_" in name]
        scale = (max(tensors[name].abs().max() for name in parts) / 448).bfloat16()
        tensors[SCALE] = scale.reshape(1)
        for name, tensor in list(tensors.items()):
            if ".mlp.experts." in name:
                tensors[name], tensors[f"{name}_scale_inv"] = fp8.quantize(tensor, (16, 16), torch.bfloat16)
            elif name in parts:
                tensors[name] = (tensor / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            elif tensor.is_floating_point():
                tensors[name] = tensor.bfloat16()
                excluded.add(name.removesuffix(".weight"))

    made = model_with(target, folder, change)
    config["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": sorted(excluded),
        "quant_method": "fp8", "weight_block_size": [16, 16],
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config, indent=2))
    return made


@pytest.fixture(scope="module")
def in_8_bits(folders, tmp_path_factory):
    return in_fp8(folders["per expert"], tmp_path_factory.mktemp("fp8") / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True], ids=["float32", "FP8"])
def test_conversion_memory_does_not_grow_with_ngram_table(is_fp8, tmp_path):
    """The table has 410 MB in four parts, each larger than the limit."""
    experts = ExpertLayout.PER_EXPERT if is_fp8 else ExpertLayout.OUTPUT_MAJOR
    folder = make_checkpoint(tmp_path / "float32", experts=experts, ngram_vocab_size_base=1_600_000)
    folder = in_fp8(folder, tmp_path / "fp8") if is_fp8 else folder
    peaks = {}
    for ckpt_format in FORMATS:
        written = tmp_path / ckpt_format
        importing = partial(import_checkpoint, folder, written, ckpt_format=ckpt_format)
        _, peaks["import", ckpt_format] = measure_apart(importing)
        exporting = partial(export_checkpoint, written, tmp_path / "hf", quantize="fp8" if is_fp8 else None)
        _, peaks["export", ckpt_format] = measure_apart(exporting)
        shutil.rmtree(tmp_path / "hf")
    print({step: f"{peak / 1e6:.1f} MB" for step, peak in peaks.items()})
    assert max(peaks.values()) <= 64e6, peaks


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in FP8, in the dtypes in which they are exported."""
    found, stored = fp8.read(folder), tensors_of(folder)
    scale = found.pop(SCALE).float()
    for name in list(found):
        if stored[name].dtype is torch.float8_e4m3fn:
            is_part = ".ngram_embedding.shard_" in name
            found[name] = (stored[name].float() * scale if is_part else found[name]).bfloat16()
    return found


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_import_dequantizes_fp8_ngram_table_with_one_scale(in_8_bits, ckpt_format, tmp_path):
    report = import_checkpoint(in_8_bits, tmp_path / "megatron", ckpt_format=ckpt_format, verify=True)
    in_fp8 = sum(one.dtype is torch.float8_e4m3fn for one in tensors_of(in_8_bits).values())
    assert any(f"{in_fp8} of " in note and "are in FP8" in note for note in report.notes)
    assert inspect_checkpoint(in_8_bits)["dtypes"]["float8_e4m3fn"] == in_fp8
    assert verify_checkpoint(in_8_bits, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", verify=True)
    check_same_bytes(tensors_of(tmp_path / "hf"), values_of(in_8_bits))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert "quantization_config" not in config and "ple_embedding_dtype" not in config["text_config"]


def test_autobridge_load_of_fp8_checkpoint_gives_dequantized_values(in_8_bits, folders, tmp_path):
    def dequantized(tensors):
        tensors.clear()
        tensors.update(values_of(in_8_bits))

    models = (load_model(in_8_bits), load_model(model_with(tmp_path / "hf", folders["per expert"], dequantized)))
    found, expected = (parameters(unwrap_model(model)) for model in models)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():  # which is in float32
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def test_autobridge_load_raises_if_hash_constant_is_wrong(folders, tmp_path):
    def change(tensors):
        (name,) = (name for name in tensors if name.endswith("ngram_heads_offsets"))
        tensors[name][1] += 1

    with pytest.raises(ValueError, match=r"ngram_heads_offsets: found \[0, 102, .* expected \[0, 101,"):
        load_model(model_with(tmp_path / "hf", folders["fused"], change))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_export_fp8_of_unchanged_qwen4_exp_restores_every_byte(in_8_bits, ckpt_format, tmp_path):
    import_checkpoint(in_8_bits, tmp_path / "megatron", ckpt_format=ckpt_format)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", quantize="fp8", verify=True, checksums=True)
    check_same_bytes(tensors_of(tmp_path / "hf"), tensors_of(in_8_bits))
    assert (tmp_path / "hf/config.json").read_bytes() == (in_8_bits / "config.json").read_bytes()
    assert verify_checkpoint(tmp_path / "hf", tmp_path / "megatron").same


def test_fp8_export_of_bfloat16_model_keeps_ngram_table_in_bfloat16(folders, tmp_path):
    import_checkpoint(folders["bfloat16"], tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", quantize="fp8", verify=True)
    found, before = tensors_of(tmp_path / "hf"), tensors_of(folders["bfloat16"])
    parts = [name for name in before if ".ple." in name]
    check_same_bytes({name: found[name] for name in parts}, {name: before[name] for name in parts})
    in_8_bits = {name for name, tensor in found.items() if tensor.dtype is torch.float8_e4m3fn}
    assert in_8_bits == {name for name in found if ".mlp.experts." in name and name.endswith("_proj.weight")}
    assert len(in_8_bits) == 5 * 4 * 3  # layers, experts and projections
    import_checkpoint(tmp_path / "hf", tmp_path / "again", verify=True)


def test_fp8_export_raises_if_ngram_table_value_exceeds_range_of_scale(in_8_bits, folders, tmp_path):
    """A trained table may have outgrown the scale of the imported model."""

    def grow(tensors):
        tensors[f"{PLE}ngram_embedding.shard_1.weight"][2, 3] = 1e3

    import_checkpoint(model_with(tmp_path / "grown", folders["fused"], grow), tmp_path / "megatron")
    message = (
        r"weight\d: a value of magnitude 1000 exceeds 448 times the scale, which is \S+; export without --quantize"
    )
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(tmp_path / "megatron", tmp_path / "hf", quantize="fp8", hf_model=in_8_bits)
    assert not (tmp_path / "hf").exists()


def test_import_raises_if_scale_of_fp8_ngram_table_is_missing_or_wrong(in_8_bits, tmp_path):
    def break_scale(scale):
        return model_with(
            tmp_path / str(len(list(tmp_path.iterdir()))),
            in_8_bits,
            lambda tensors: tensors.pop(SCALE) if scale is None else tensors.update({SCALE: scale}),
        )

    part = f"{PLE}ngram_embedding.shard_0.weight"
    for scale, message in (
        (None, rf"tensor {part} .*: found nothing as {part}_scale_inv, expected a scale for each block"),
        (torch.ones(2), rf"tensor {part} .*: found \[2\] float32 as {SCALE}, expected one scale, in float32"),
        (
            torch.tensor(0.0),
            rf"tensor {part}: the scale of block \[0, 0\] of \[1, 1\] is 0.0, expected a finite number",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(break_scale(scale), tmp_path / "megatron")
