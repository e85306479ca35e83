"""Every recipe is built and finalized without a network, and has the settings that its name says."""

import importlib.metadata
import inspect
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from qwen3vl_bridge import registry
from qwen3vl_bridge.config.fields import dist_train_replicas
from qwen3vl_bridge.peft.lora import Qwen3VLDoRA, Qwen3VLLoRA
from qwen3vl_bridge.planning.hardware import GIB, GPUS, HOST_BYTES, HOST_RESERVE
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

import pytest
import qwen3vl_recipes
import torch
from qwen3vl_recipes.base import DIST_TRAIN_PATCHES, dist_train
from qwen3vl_recipes.dry_run import estimate_memory, finalize_copy
from qwen3vl_recipes.registry import find, recipes
from qwen3vl_recipes.table import FREE, SIMULATIONS, latest_simulations

from benchmarks import flash_attn_shapes
from benchmarks.simulation import planned_now

ROOT = Path(__file__).parents[2]

NAMES = [name for name, recipe in recipes().items() if recipe.gpus]
KINDS = ("sft", "sft_fsdp", "sft_32k", "sft_128k", "sft_256k", "peft", "pretrain")


def sizes_of(family: str, prefix: str, **other: str) -> dict[str, tuple[str, str]]:
    sizes = registry.family(family).presets.PRESETS
    return {f"{prefix}_{other.get(size, size.lower().replace('-', '_'))}": (family, size) for size in sizes}


SIZES = sizes_of("qwen3_vl", "qwen3_vl")
SIZES_3_5 = sizes_of("qwen3_5", "qwen35_vl", **{"0.8B": "800m"})
SIZES_3_8 = {"qwen38_flash_next": ("qwen4_exp", "Flash-Next")}
KINDS_3_8 = ("sft", "sft_32k", "peft", "pretrain", "sft_b200", "sft_32k_b200", "peft_b200")
ROWS_OF_1M = {f"qwen35_vl_{size}_sft_1m_config" for size in ("9b", "35b_a3b")}
# Of the sizes of which Megatron-Bridge has them.
IN_8_BITS = {
    f"{size}_pretrain_fp8_{kind}_config"
    for kind in ("cs", "mx")
    for size in (
        *("qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b"),
        *("qwen35_vl_35b_a3b", "qwen35_vl_122b_a10b", "qwen35_vl_397b_a17b"),
    )
} | {"qwen38_flash_next_pretrain_fp8_mx_config"}
PROXY = {"qwen35_vl_proxy_sft_config", "qwen35_vl_proxy_sft_fsdp_config"}
DPO = {f"qwen3_vl_{size}_dpo_config" for size in ("2b", "4b", "8b", "32b", "30b_a3b")}
DPO |= {f"qwen35_vl_{size}_dpo_config" for size in ("4b", "9b", "27b", "35b_a3b")}
OBJECTIVES = {
    f"qwen3_vl_{size}_{kind}_config": kind for size in ("2b", "8b") for kind in ("kto", "embedding", "reranker")
}
OBJECTIVES |= dict.fromkeys(DPO, "dpo")
DIST_TRAIN = {f"qwen3_vl_{size}_sft_dist_train_config" for size in ("30b_a3b", "235b_a22b")}
# Recipes with TP * CP above the sixteen key heads of linear attention.
CHUNKWISE = ROWS_OF_1M | {f"qwen35_vl_{size}_sft_256k_config" for size in ("27b", "122b_a10b", "397b_a17b")}
# `--simulate-gpu` refuses separate vision ranks and pairs of answers. The others were not simulated with Transformer
# Engine yet.
NOT_SIMULATED = DIST_TRAIN | {*OBJECTIVES} | CHUNKWISE | {name for name in NAMES if name.startswith(tuple(SIZES_3_8))}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a recipe reaches for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.one_case_in(3)
@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", [name for name in NAMES if "_peft" not in name and name not in OBJECTIVES])
def test_recipe_uses_fully_reshardable_optimizer_only_if_host_memory_suffices(name):
    """All ranks of a machine save at once; with too little memory, the run would end at its first save."""
    recipe = find(name)
    cfg = recipe()
    chosen, cfg.checkpoint.dist_ckpt_optim_fully_reshardable = cfg.checkpoint.dist_ckpt_optim_fully_reshardable, True
    saving, room = estimate_memory(cfg, recipe.gpus).peak_while_saving, (1 - HOST_RESERVE) * HOST_BYTES
    assert (saving.host_gathered > 0) == ("_fsdp_" not in name)
    assert chosen == (saving.host_total <= room)


def test_recipes_cover_all_model_sizes_and_training_kinds():
    expected = {f"{size}_{kind}_config" for size in (*SIZES, *SIZES_3_5) for kind in KINDS} | ROWS_OF_1M
    expected |= {f"{size}_{kind}_config" for size in SIZES_3_8 for kind in KINDS_3_8}
    with_dora = {f"{size}_peft_dora_config" for size in SIZES}
    assert expected | with_dora | DIST_TRAIN | PROXY | IN_8_BITS | {*OBJECTIVES} == set(NAMES)
    assert {name for name in NAMES if "_dist_train_" in name} == DIST_TRAIN
    for name in NAMES:
        assert getattr(qwen3vl_recipes, name) is recipes()[name]
        assert recipes()[name].summary.endswith(".") and len(recipes()[name].summary) < 115


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", NAMES)
def test_finalized_recipe_has_settings_that_recipe_name_states(name):
    recipe = find(name)
    cfg = finalize_copy(recipe(), recipe.gpus)
    model, data = cfg.model, cfg.dataset
    parallel = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    vision = model.dist_train.vision_world_size if model.dist_train.use_dist_train else 0
    assert vision + cfg.data_parallel_size * parallel == recipe.gpus and (vision > 0) == ("_dist_train_" in name)
    assert cfg.train.global_batch_size % cfg.data_parallel_size == 0 and cfg.train.micro_batch_size == 1
    assert data.pack and data.seq_length == model.seq_length
    assert data.for_context_parallel(model.context_parallel_size).multiple % (2 * model.context_parallel_size) == 0 or (
        model.context_parallel_size == 1
    )
    assert not (model.freeze_language_model or model.freeze_vision_model or model.freeze_vision_projection)
    assert model.bf16 and cfg.optimizer.bf16 and cfg.ddp.grad_reduce_in_fp32
    assert cfg.ddp.use_megatron_fsdp == ("fsdp" in name)
    assert cfg.checkpoint.ckpt_format == ("fsdp_dtensor" if "fsdp" in name else "torch_dist")
    assert (cfg.peft is not None) == ("_peft_" in name or name in OBJECTIVES)
    assert cfg.objective.kind == OBJECTIVES.get(name, "sft")
    assert (model.fp8, model.fp8_param) == ({"cs": "hybrid", "mx": "e4m3"}.get(name[-9:-7]), name in IN_8_BITS)
    for length in ("32k", "128k", "256k"):
        assert (f"_{length}_" in name) == (data.seq_length == int(length[:-1]) * 1024)
    known = SIZES | SIZES_3_5 | SIZES_3_8 | {"qwen35_vl_proxy": ("qwen3_5", "proxy")}
    family, size = next(found for begin, found in known.items() if name.startswith(f"{begin}_"))
    presets = registry.family(family).presets
    assert model.family == family
    expected = presets.config_dict(size)["text_config"]
    assert (model.num_layers, model.hidden_size) == (expected["num_hidden_layers"], expected["hidden_size"])
    assert model.hf_model_id == data.hf_processor_path == cfg.tokenizer.tokenizer_model == presets.hub_ids(size)[0]


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", sorted(DIST_TRAIN))
def test_dist_train_recipe_raises_if_gpu_count_differs(name):
    recipe = find(name)
    cfg = finalize_copy(recipe(), recipe.gpus)
    split, replicas = cfg.model.dist_train, dist_train_replicas(cfg.model)
    assert split.vision_world_size + split.language_world_size == recipe.gpus
    assert replicas.language == cfg.data_parallel_size and replicas.vision % replicas.language == 0
    assert cfg.train.global_batch_size // replicas.language >= 2 * cfg.model.pipeline_model_parallel_size
    assert cfg.model.variable_seq_lengths and cfg.dist.use_decentralized_pg and not cfg.dist.use_gloo_process_groups
    assert cfg.dataset.max_patches == DIST_TRAIN_PATCHES
    for world in (8, recipe.gpus - 8, recipe.gpus + 8):
        with pytest.raises(ValueError, match=f"add up to {recipe.gpus}, expected {world}, the number of processes"):
            finalize_copy(recipe(), world)


@pytest.mark.usefixtures("no_groups")
def test_dist_train_config_raises_if_required_setting_is_off():
    for section, name, other in (
        ("model", "variable_seq_lengths", False),
        ("dist", "use_decentralized_pg", False),
    ):
        cfg = dist_train(qwen3vl_recipes.qwen3_vl_2b_sft_config(), vision=1, language=2)
        finalize_copy(cfg, 3)
        setattr(getattr(cfg, section), name, other)
        with pytest.raises(ValueError, match=f"{name} is {other}"):
            finalize_copy(cfg, 3)


def test_recipe_raises_if_called_with_arguments():
    with pytest.raises(TypeError, match=r"found {'peft_scheme': 'dora'}.* such as qwen3_vl_8b_peft_dora_config"):
        qwen3vl_recipes.qwen3_vl_8b_peft_config(peft_scheme="dora")
    assert not inspect.signature(qwen3vl_recipes.qwen3_vl_8b_peft_config).parameters  # its launcher looks there
    assert "qwen3_vl_8b_peft_dora_config" in recipes()


def test_recipe_calls_return_independent_configs():
    first, second = (qwen3vl_recipes.qwen3_vl_8b_sft_config() for _ in range(2))
    first.train.global_batch_size, first.model.vision_config.depth = 7, 1
    assert second.train.global_batch_size != 7 and second.model.vision_config.depth != 1


def test_find_raises_if_recipe_is_unknown():
    with pytest.raises(ValueError, match="no recipe 'qwen3_vl_8b_stf_config'; did you mean qwen3_vl_8b_sft_config"):
        find("qwen3_vl_8b_stf_config")
    with pytest.raises(AttributeError, match="no attribute 'qwen3_vl_9b_sft_config'"):
        qwen3vl_recipes.qwen3_vl_9b_sft_config  # noqa: B018


def test_find_loads_recipe_function_from_user_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from qwen3vl_recipes import qwen3_vl_2b_sft_config as base\n\n\ndef mine():\n"
        "    cfg = base()\n    cfg.train.train_iters = 3\n    return cfg\n\n\nqwen3_vl_2b_sft_config = mine\n"
    )
    for name in ("mine", "qwen3_vl_2b_sft_config"):
        assert find(f"{file}:{name}")().train.train_iters == 3
    with pytest.raises(ValueError, match="has no function 'yours'"):
        find(f"{file}:yours")
    with pytest.raises(ValueError, match="found nothing, expected a Python file"):
        find(f"{tmp_path}/nothing.py:mine")


def test_peft_recipes_use_lora_or_dora_as_named_and_adapt_linear_attention():
    names = [name for name in NAMES if "_peft_" in name]
    assert len(names) == 6 + 6 + 8 + 2  # Qwen3.5-VL and Qwen3.8-Flash-Next have no recipes for DoRA
    for name in names:
        cfg = recipes()[name]()
        assert type(cfg.peft) is (Qwen3VLDoRA if "_dora_" in name else Qwen3VLLoRA)
        whole = cfg.model.tensor_model_parallel_size == cfg.model.pipeline_model_parallel_size == 1
        assert whole or "_dora_" not in name
        assert "in_proj" in cfg.peft.target_modules or name.startswith("qwen3_vl_")


@pytest.mark.parametrize("name", ["qwen3_vl_2b_peft_config", "qwen3_vl_30b_a3b_peft_dora_config"])
def test_adapter_settings_roundtrip_through_run_config_yaml(name, tmp_path):
    cfg = recipes()[name]()
    cfg.peft.dim, cfg.peft.exclude_modules, cfg.peft.target_modules = 8, ["linear_proj"], []
    cfg.peft.params_to_save = {"noted during a run"}
    cfg.to_yaml(str(tmp_path / "run_config.yaml"))
    again = Qwen3VLConfigContainer.from_yaml(str(tmp_path / "run_config.yaml"))
    cfg.peft.params_to_save = set()
    assert type(again.peft) is type(cfg.peft) and again.peft == cfg.peft


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", NAMES)
def test_recipe_estimated_memory_fits_its_gpu(name):
    recipe = recipes()[name]
    assert estimate_memory(recipe(), recipe.gpus).peak.total <= (1 - FREE) * GPUS[recipe.gpu].memory_bytes


def test_stored_simulated_memory_of_recipes_matches_planned_memory():
    """The plan is within 2 %, or 5 % under Megatron-FSDP, and 5 % of the GPU remains free."""
    latest = latest_simulations(ROOT / SIMULATIONS)
    assert latest.keys() == set(NAMES) - NOT_SIMULATED
    for name, ranks in latest.items():
        of_engine = {row["rank"].split()[0] for row in ranks if row["layers"] == "transformer_engine"}
        assert of_engine == {"0", str(recipes()[name].gpus - 1)}, name
        most = 0.95 * GPUS[recipes()[name].gpu].memory_bytes / GIB
        for row in ranks:
            assert not row["error"] and float(row["reserved GiB"]) <= most, row
            if row["planned GiB"]:
                assert float(row["ratio"]) == pytest.approx(1, abs=0.05 if "_fsdp_" in name else 0.02), row


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_stub_returns_tensors_with_right_shapes(tmp_path, monkeypatch):
    """Transformer Engine finds and imports the stub."""
    monkeypatch.syspath_prepend(flash_attn_shapes.provide(tmp_path))
    assert importlib.metadata.version("flash-attn") == flash_attn_shapes.VERSION
    with patch.dict(sys.modules):  # no other test finds it there
        flash_attn = importlib.import_module("flash_attn.flash_attn_interface")
    query, *pair = (torch.ones(6, heads, 256, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        result = flash_attn.flash_attn_varlen_func(query, *pair, None, None, 6, 6, causal=True)
    result.sum().backward()
    assert result.shape == query.shape and [x.grad.shape for x in pair] == [x.shape for x in pair]
    assert [(x.shape, x.dtype) for x in saved[3:5]] == [(query.shape, torch.bfloat16), ((4, 6), torch.float32)]


@pytest.mark.slow
@pytest.mark.usefixtures("no_groups")
def test_planned_memory_in_simulation_csv_equals_present_plan():
    """For Qwen3.5 with local layers it depends on whether flash-linear-attention is installed."""
    for name, ranks in latest_simulations(ROOT / SIMULATIONS).items():
        for row in ranks:
            if row["planned GiB"] and (row["layers"] != "local" or name.startswith("qwen3_vl_")):
                assert planned_now(row) == pytest.approx(float(row["planned GiB"]), abs=0.01), row
