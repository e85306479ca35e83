"""A frozen n-gram table in FP8: lookups, gradients of the other weights, loading, resuming and export."""

import shutil
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import NgramEmbedding, NgramInjection
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import load_model, load_weights
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import save_megatron_model
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from tests.checkpoint.support import model_with
from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import largest
from tests.helpers.steps import save, set_up, train_step
from tests.models.qwen3_5.test_resume import config_of, moved, parameters, wrapped
from tests.models.qwen3_5.tiny import one_rank
from tests.models.qwen4_exp import test_ngram_embedding as whole
from tests.models.qwen4_exp.test_conversion import (
    FORMATS,
    PLE,
    SCALE,
    check_same_bytes,
    in_bfloat16,
    in_fp8,
    tensors_of,
)
from tests.models.qwen4_exp.test_training import exported, gradients
from tests.models.qwen4_exp.tiny import make_checkpoint
from tests.training.running import Inputs, stored

E4M3 = "float8_e4m3fn"
FP8_TABLE = dict(freeze_ngram_table=True, ngram_table_dtype=E4M3)
ROWS, DIM = whole.ROWS, whole.DIM


def make_table(heads: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """Return random e4m3 bytes of each hash head, with every finite value, and scales that bfloat16 would round."""
    random = torch.Generator().manual_seed(heads)
    finite = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    tables = {
        f"weight{head}": finite[torch.randint(0, len(finite), (rows, DIM), generator=random)]
        for head, rows in enumerate(ROWS[heads])
    }
    return tables, 0.001 + 0.001 * torch.rand(heads, generator=random)


def dequantize(tables: dict[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
    """Return the values of a table in float32."""
    return {
        name: table.view(torch.float8_e4m3fn).float() * scale
        for (name, table), scale in zip(tables.items(), scales, strict=True)
    }


def index_rows(values: dict[str, Tensor], ids: Tensor) -> Tensor:
    return torch.cat([table[ids[..., head]] for head, table in enumerate(values.values())], -1)


def set_table(module: NgramEmbedding) -> None:
    tables, scales = make_table(len(module.rows))
    state = {f"weight{head}": tables[f"weight{head}"][:, module.columns] for head in module.heads}
    module.load_state_dict(state | {"weight_scale": scales.view(torch.uint8)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_lookup_equals_indexing_of_dequantized_table(dtype):
    module = NgramEmbedding(whole.make_config(4, E4M3, params_dtype=dtype), ROWS[4], DIM, one_rank())
    ids = torch.randint(0, 11, (30, 2, 4))
    assert not module(ids).any()  # a new table
    set_table(module)
    expected = index_rows(dequantize(*make_table()), ids)
    found = module(ids)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    assert not found.requires_grad and not list(module.parameters())
    for head, table in enumerate(dequantize(*make_table()).values()):
        assert torch.equal(module.gather_table(head), table.to(dtype))


def test_casting_model_does_not_change_fp8_ngram_table():
    module = NgramInjection(whole.make_config(4, E4M3), ROWS[4], one_rank())
    set_table(module.ngram_embedding)
    before = {name: one.clone() for name, one in module.ngram_embedding.named_buffers()}
    module.bfloat16().half().to(torch.float32)
    assert not moved(dict(module.ngram_embedding.named_buffers()), before)
    assert module.key_proj.weight.dtype == torch.float32 and len(before) == 5


def test_encode_maps_largest_element_of_head_to_448():
    module = NgramEmbedding(whole.make_config(4, E4M3), ROWS[4], DIM, one_rank())
    values = torch.randn(ROWS[4][1], DIM)
    values[7, 2] = -9
    found = torch.cat(list(module.encode(1, lambda: values.split(5))))
    assert module.scales[1] == values.abs().max() / 448
    assert torch.equal(found.view(torch.float8_e4m3fn), (values / module.scales[1]).to(torch.float8_e4m3fn))
    assert torch.equal(torch.cat(list(module.encode(1, lambda: [values], 1.0))).view(torch.float8_e4m3fn),
                       values.to(torch.float8_e4m3fn))  # fmt: skip
    assert module.scales[1] == 1
    assert not any(block.any() for block in module.encode(1, lambda: [torch.zeros_like(values)]))
    assert module.scales[1] == 1
    with pytest.raises(ValueError, match=r"magnitude \S+ exceeds 448 times the scale, which is 0.001"):
        list(module.encode(1, lambda: [values], 0.001))


def look_up_on_ranks(folder: Path) -> dict[str, float]:
    """Return the largest errors of looked-up rows and gathered tables, also after a checkpoint of other ranks."""
    errors = {}
    for number, topology in enumerate(("EP4, two ranks per head", "SP2 CP2 EP2")):
        module = whole.begin(*whole.TOPOLOGIES[topology][:-1], 2, E4M3)[0].ngram_embedding
        if number == 0:
            set_table(module)
            dist_checkpointing.save(module.sharded_state_dict("table."), str(folder))
        else:
            state = dist_checkpointing.load(module.sharded_state_dict("table."), str(folder), strict="raise_all")
            module.load_state_dict({name.removeprefix("table."): tensor for name, tensor in state.items()})
        values, ids = dequantize(*make_table(2)), torch.randint(0, 11, (4, 3, 2))
        errors[topology] = float((module.eval()(ids) - index_rows(values, ids)).abs().max())
        gathered = [(module.gather_table(head), table) for head, table in enumerate(values.values())]
        errors[f"{topology}, gathered"] = max(float((found - table).abs().max()) for found, table in gathered)
        parallel_state.destroy_model_parallel()
    return largest(errors)


@pytest.mark.slow
def test_fp8_lookup_on_four_ranks_equals_one_process(tmp_path):
    """The checkpoint of one topology is loaded in the other. Every value is equal."""
    errors = results_of_ranks(look_up_on_ranks, 4, tmp_path)
    assert len(errors) == 4 and not any(errors.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return a model in three dtypes; FP8 is as released."""
    root = tmp_path_factory.mktemp("fp8_table")
    full = make_checkpoint(root / "float32", seed=11, experts=ExpertLayout.PER_EXPERT)
    return {"float32": full, "bfloat16": in_bfloat16(full, root / "bfloat16"), "FP8": in_fp8(full, root / "fp8")}


def head_tables(folder: Path, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the stored rows of each hash head: the parts one after the other, divided by heads."""
    stored = tensors_of(folder)
    parts = [stored[f"{PLE}ngram_embedding.shard_{part}.weight"] for part in range(4)]
    in_fp8 = parts[0].dtype is torch.float8_e4m3fn
    return torch.cat([part.view(torch.uint8) if in_fp8 else part for part in parts]).split(rows)


def check_table(model: list[torch.nn.Module], folder: Path) -> None:
    """Check that a model has the bytes and the scale of an FP8 folder, or those of a quantized bfloat16 folder."""
    (table,) = (module for module in unwrap_model(model)[0].modules() if isinstance(module, NgramEmbedding))
    for head, rows in enumerate(head_tables(folder, table.rows)):
        scale = tensors_of(folder)[SCALE].float() if rows.dtype == torch.uint8 else rows.abs().max().float() / 448
        expected = rows if rows.dtype == torch.uint8 else (rows.float() / scale).to(torch.float8_e4m3fn)
        assert torch.equal(table.scales[head], scale.squeeze()), head
        assert torch.equal(getattr(table, f"weight{head}"), expected.view(torch.uint8)), head


@pytest.mark.parametrize("kind", ["FP8", "bfloat16"])
@pytest.mark.parametrize("source", ["hf", *FORMATS])
def test_load_model_keeps_bytes_of_released_fp8_ngram_table(folders, kind, source, tmp_path):
    if source != "hf":
        import_checkpoint(folders[kind], tmp_path, ckpt_format=source)
    check_table(load_model(folders[kind], None if source == "hf" else tmp_path, **FP8_TABLE), folders[kind])


def test_saved_fp8_ngram_table_loads_and_exports_exactly(folders, tmp_path):
    """The scales differ, because the table was quantized when it was loaded."""
    model = load_model(folders["bfloat16"], **FP8_TABLE)
    expected = exported(folders["bfloat16"], model)
    save_megatron_model(model, tmp_path / "saved")
    check_table(load_model(folders["bfloat16"], tmp_path / "saved", **FP8_TABLE), folders["bfloat16"])
    export_checkpoint(tmp_path / "saved", tmp_path / "hf", hf_model=folders["bfloat16"], verify=True)
    found = tensors_of(tmp_path / "hf")
    parts = [name for name in found if ".ngram_embedding.shard_" in name]
    assert len(parts) == 4 and not moved({n: found[n] for n in parts}, {n: expected[n] for n in parts})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_fp8_ngram_table_match_dequantized_table(folders, dtype):
    settings = dict(params_dtype=dtype, bf16=dtype == torch.bfloat16, freeze_ngram_table=True)
    expected = gradients(folders["FP8"], **settings)
    found = gradients(folders["FP8"], **settings, ngram_table_dtype=E4M3)
    assert not moved(found, expected) and any(".ple.key_proj" in name for name in found)


def test_export_dequantizes_fp8_ngram_table_of_model(folders, caplog):
    model = load_model(folders["FP8"], **FP8_TABLE)
    found, stored = exported(folders["FP8"], model), tensors_of(folders["FP8"])
    parts = [name for name in found if ".ngram_embedding.shard_" in name]
    for name in parts:
        assert torch.equal(found[name], (stored[name].float() * stored[SCALE].float()).bfloat16()), name
    assert len(parts) == 4 and "No mapping found" not in caplog.text


def load_on_ranks(fp8: Path, checkpoint: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Load an FP8 folder, and then a checkpoint, on these ranks. Return the largest errors of the gathered tables."""
    provider, errors = AutoBridge.from_hf_pretrained(str(fp8)).to_megatron_provider(load_weights=True), {}
    for name, value in (FP8_TABLE | settings).items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups, mixed_precision_wrapper=None
    )
    (table,) = (module for module in model[0].modules() if isinstance(module, NgramEmbedding))
    heads = head_tables(fp8, table.rows)
    scale = tensors_of(fp8)[SCALE].float()
    for source in ("hf", "checkpoint"):
        for head, rows in enumerate(heads):
            expected = (rows.view(torch.float8_e4m3fn).float() * scale).to(provider.params_dtype)
            errors[f"{source}, {head}"] = float((table.gather_table(head) - expected).float().abs().max())
        for buffer in table.buffers():
            buffer.fill_(7)
        load_weights(checkpoint, model, groups)
    return largest(errors)


TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "settings"), [
    (2, TP2 | dict(expert_tensor_parallel_size=1, expert_model_parallel_size=2)),
    pytest.param(8, dict(expert_model_parallel_size=8), marks=pytest.mark.slow),
])  # fmt: skip
def test_load_of_fp8_ngram_table_on_ranks_gives_dequantized_values(ranks, settings, tmp_path):
    """With eight ranks two have the columns of a head."""
    folder = make_checkpoint(tmp_path / "float32", num_experts=8, experts=ExpertLayout.PER_EXPERT)
    folder = in_fp8(folder, tmp_path / "fp8")
    import_checkpoint(folder, tmp_path / "megatron")
    errors = results_of_ranks(load_on_ranks, ranks, folder, tmp_path / "megatron", settings)
    assert len(errors) == 8 and not any(errors.values())


@pytest.fixture(scope="module")
def inputs(folders, digits) -> Inputs:
    return Inputs(folders["FP8"], digits, folders["FP8"])


TABLE_OF_RUN = dict(model__freeze_ngram_table=True, model__ngram_table_dtype=E4M3)


def state_of(run: Any) -> dict[str, Tensor]:
    """Return the parameters of a run, and the buffers of its n-gram table."""
    buffers = dict(run.model[0].named_buffers())
    return parameters(run) | {name: one.clone() for name, one in buffers.items() if ".ngram_embedding." in name}


@pytest.mark.one_case_in(3)
@wrapped
def test_run_with_fp8_ngram_table_resumes_and_exports_exactly(inputs, wrap, tmp_path):
    """An export to FP8 has the released bytes of the table, one in bfloat16 their values."""
    run = set_up(config_of(inputs, tmp_path / "run", wrap, **TABLE_OF_RUN))
    before = state_of(run)
    train_step(run)
    save(run)
    train_step(run)
    expected = state_of(run)
    run = set_up(config_of(inputs, tmp_path / "run", wrap, **TABLE_OF_RUN))
    train_step(run)
    assert not moved(state_of(run), expected)
    table = {name for name in before if ".ngram_embedding." in name}
    assert len(table) == 5 and not table & moved(expected, before) and moved(expected, before)
    assert all(expected[name].dtype == torch.uint8 for name in table)
    released = tensors_of(inputs.hf)
    parts = [name for name in released if ".ngram_embedding." in name and ".shard_" in name]
    export_checkpoint(tmp_path / "run", tmp_path / "fp8", quantize="fp8", hf_model=inputs.hf, verify=True)
    found = tensors_of(tmp_path / "fp8")
    check_same_bytes(*({name: one[name] for name in [*parts, SCALE]} for one in (found, released)))
    export_checkpoint(tmp_path / "run", tmp_path / "bf16", torch_dtype="bfloat16", verify=True)
    assert verify_checkpoint(tmp_path / "fp8", tmp_path / "run").same is False
    found = tensors_of(tmp_path / "bf16")
    for name in parts:
        assert torch.equal(found[name], (released[name].float() * released[SCALE].float()).bfloat16()), name
    check_table(load_model(inputs.hf, tmp_path / "run", **FP8_TABLE), inputs.hf)
    loaded = exported(inputs.hf, load_model(inputs.hf, tmp_path / "run"))
    assert all(torch.equal(loaded[name], found[name]) for name in parts)


@pytest.mark.slow
def test_lora_run_with_fp8_ngram_table_saves_no_table_and_resumes(inputs, tmp_path):
    def start() -> Any:
        _, distributed, _ = wrapped.args[1]
        cfg = config_of(inputs, tmp_path, distributed, **TABLE_OF_RUN)
        cfg.peft = Qwen3VLLoRA(dim=4)
        return set_up(cfg)

    run = start()
    before = state_of(run)
    train_step(run)
    save(run)
    train_step(run)
    expected = state_of(run)
    assert not any(".ngram_embedding." in name for name in stored(tmp_path))
    run = start()
    train_step(run)
    assert not moved(state_of(run), expected)
    changed = moved(expected, before)
    assert changed and all(".adapter." in name for name in changed)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("dtypes", [(None, E4M3), (E4M3, None)])
def test_resume_with_other_table_dtype_raises(inputs, dtypes, tmp_path):
    wrap = wrapped.args[1]
    settings = dict(model__freeze_ngram_table=True)
    before, after = ({**settings, "model__ngram_table_dtype": dtype} for dtype in dtypes)
    (_, replicate, _) = wrap
    run = set_up(config_of(inputs, tmp_path, replicate, **before))
    train_step(run)
    save(run)
    message = f"model.ngram_table_dtype is {dtypes[1]}, the checkpoint \\S+ has {dtypes[0]}: use its setting, or start"
    with pytest.raises(CheckpointError, match=message):
        set_up(config_of(inputs, tmp_path, replicate, **after))
    after |= dict(checkpoint__pretrained_checkpoint=str(tmp_path), checkpoint__load=str(tmp_path / "new"))
    check_values = state_of(set_up(config_of(inputs, tmp_path / "new", replicate, **after)))
    assert any(one.dtype == torch.uint8 for one in check_values.values()) == (dtypes[1] == E4M3)


def test_load_model_raises_if_table_has_outgrown_scale_of_imported_model(folders, tmp_path):
    def grow(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PLE}ngram_embedding.shard_1.weight"][2, 3] = 1e3

    import_checkpoint(model_with(tmp_path / "grown", folders["float32"], grow), tmp_path / "megatron")
    import_checkpoint(folders["FP8"], tmp_path / "fp8")
    (scales,) = (tmp_path / "fp8").rglob("weight_scales.fp8")
    (config,) = (tmp_path / "megatron").rglob("hf/config.json")
    shutil.copyfile(scales, config.parent / scales.name)
    message = "table of hash head 1: a value of magnitude 1000 exceeds 448 .*; set ngram_table_dtype=None"
    with pytest.raises(CheckpointError, match=message):
        load_model(folders["float32"], tmp_path / "megatron", **FP8_TABLE)


@pytest.mark.parametrize(("settings", "message"), [
    (dict(ngram_table_dtype=E4M3), "freeze_ngram_table is False with ngram_table_dtype 'float8_e4m3fn', expected True"),
    (dict(ngram_table_dtype="float16"), "ngram_table_dtype is 'float16', expected None or 'float8_e4m3fn'"),
])  # fmt: skip
def test_provider_with_unsupported_table_dtype_raises(folders, settings, message):
    provider = AutoBridge.from_hf_pretrained(str(folders["float32"])).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        setattr(provider, name, value)
    with pytest.raises(ValueError, match=message):
        provider.finalize()
    provider.ngram_table_dtype, provider.freeze_language_model = E4M3, True
    provider.finalize()
