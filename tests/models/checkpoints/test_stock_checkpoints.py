"""Checkpoints of Megatron-Bridge's own Qwen3-VL load as our models when the plugin is imported."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    Topology,
    export_checkpoint,
    import_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
)
from qwen3vl_bridge.checkpoint.formats.dcp import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import run_config
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, check_model_of_run
from qwen3vl_bridge.config.fields import default_transformer_impl, gelu_tanh
from qwen3vl_bridge.config.hf_config import TOKEN_IDS
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.config import Qwen3VLConfigContainer
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import load_model, load_weights
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl import qwen3_vl_provider as stock
from megatron.bridge.training.model_load_save import load_megatron_model, load_model_config
from megatron.bridge.training.utils.checkpoint_utils import read_run_config
from megatron.bridge.utils.instantiate_utils import instantiate
from megatron.core.utils import unwrap_model
from qwen3vl_recipes.digits import qwen3_vl_digits_sft_config
from qwen3vl_recipes.paths import set_paths
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.checkpoint.support import stock_load
from tests.helpers.batches import make_samples
from tests.helpers.expert_layouts import rewrite
from tests.helpers.stock_qwen3_vl import SAVED_WITH_EXPERTS, SAVED_WITH_TE, as_saved, save_stock, stock_provider
from tests.models.inputs.support import make_rows, no_grad, reference_logits

KINDS = {"untied": Qwen3VLModelProvider, "tied": Qwen3VLModelProvider, "experts": Qwen3VLMoEModelProvider}
OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
LOGITS = 1e-5  # measured 2.4e-6


@pytest.fixture(scope="module")
def sources(folders, tmp_path_factory) -> dict[str, Path]:
    experts = rewrite(folders["experts"], tmp_path_factory.mktemp("released"), ExpertLayout.INPUT_MAJOR)
    return {"untied": folders["untied"], "tied": folders["tied"], "experts": experts}


@pytest.fixture(scope="module")
def checkpoints(sources, tmp_path_factory) -> dict[str, Path]:
    saved = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in saved.items():
        save_stock(sources[kind], folder)
        model = yaml.safe_load((folder / "iter_0000000/run_config.yaml").read_text())["model"]
        assert model["_target_"].startswith("megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VL")
        wanted = SAVED_WITH_TE | (SAVED_WITH_EXPERTS if kind == "experts" else {})
        assert {name: model[name] for name in wanted} == wanted
    return saved


@pytest.mark.parametrize("kind", KINDS)
def test_load_megatron_model_builds_our_model_from_megatron_bridge_checkpoint(kind, sources, checkpoints, folders):
    """Megatron-Bridge's inference scripts call `load_megatron_model`."""
    (loaded,) = load_megatron_model(str(checkpoints[kind] / "iter_0000000"), use_cpu_init=True)
    (model,) = unwrap_model([loaded])
    assert type(model).__module__ == "qwen3vl_bridge.models.qwen3_vl.model"
    assert type(model.config) is KINDS[kind]
    assert model.config.transformer_impl == default_transformer_impl()
    reference = AutoModelForImageTextToText.from_pretrained(folders[kind], attn_implementation="eager")
    both = SimpleNamespace(reference=reference, config=reference.config)
    rows = make_rows(make_samples("mixed", reference.config, seed=5), [0, 0, 0, 0])
    expected = rows.real(reference_logits(both, rows))
    found = no_grad(model.eval(), rows.input_ids, attention_mask=rows.attention_mask, **rows.pixels)
    assert (rows.real(found)[:, : expected.shape[-1]] - expected).abs().max() < LOGITS


@pytest.mark.parametrize("kind", KINDS)
def test_auto_bridge_loads_and_exports_megatron_bridge_checkpoint_unchanged(kind, sources, checkpoints, tmp_path):
    """NeMo-RL's converter calls `AutoBridge.load_megatron_model` and `save_hf_pretrained`."""
    bridge = AutoBridge.from_hf_pretrained(str(sources[kind]))
    model = bridge.load_megatron_model(checkpoints[kind], wrap_with_ddp=False)
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    source = load_file(sources[kind] / "model.safetensors")
    assert all(torch.equal(exported[name], source[name]) for name in source)


@pytest.mark.parametrize("kind", KINDS)
def test_load_model_restores_hf_weights_from_megatron_bridge_checkpoint(kind, checkpoints, folders):
    """Used for the initial weights of a run and by `generate`."""
    (model,) = unwrap_model(load_model(folders[kind], checkpoints[kind]))
    (other,) = unwrap_model(load_model(folders[kind]))
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_export_of_megatron_bridge_checkpoint_restores_hf_tensors(kind, sources, checkpoints, tmp_path):
    export_checkpoint(checkpoints[kind], tmp_path / "hf", hf_model=sources[kind])
    found, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", sources[kind]))
    assert found.keys() == source.keys()
    assert all(torch.equal(found[name], source[name]) for name in source)


@pytest.mark.parametrize("kind", KINDS)
def test_conversion_raises_if_config_json_differs_from_run_config(kind, sources, checkpoints, tmp_path):
    """The other model has the same shapes: as many heads of another width, or another rotary base."""
    model = shutil.copytree(sources[kind], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["vision_config"]["num_heads"] = 2
    config["text_config"]["rope_parameters"]["rope_theta"] = 10_000
    (model / "config.json").write_text(json.dumps(config))
    how = dict(megatron_path=checkpoints[kind], hf_model=model)
    for refused in (
        lambda: export_checkpoint(**how, hf_path=tmp_path / "hf"),
        lambda: reformat_checkpoint(**how, new_path=tmp_path / "new", ckpt_format="fsdp_dtensor"),
        lambda: verify_checkpoint(**how),
    ):
        with pytest.raises(CheckpointError, match=r"describes another model than .*run_config\.yaml") as error:
            refused()
        assert "vision_config.num_heads is 2, expected 4" in str(error.value)
        assert "text_config.rope_parameters.rope_theta is 10000, expected 5000000" in str(error.value)


@pytest.mark.parametrize("ckpt_format", ["torch_dist", "fsdp_dtensor"])
@pytest.mark.parametrize(("kind", "rows"), [("untied", 600), ("tied", 515)])
def test_reformat_checkpoint_keeps_padded_vocabulary_rows(kind, rows, ckpt_format, sources, tmp_path):
    """Megatron-Bridge reads `run_config.yaml` of the reformatted checkpoint; a training checkpoint does not state
    padding.
    """
    import_checkpoint(sources[kind], tmp_path / "imported")
    stored = stock_load(tmp_path / "imported" / "iter_0000000")
    stored = {name: tensor for name, tensor in stored.items() if isinstance(tensor, torch.Tensor)}
    for name in stored:
        if name.endswith(OF_VOCABULARY):
            stored[name] = torch.nn.functional.pad(stored[name], (0, 0, 0, rows - 512))
    dcp.save(stored, checkpoint_id=tmp_path / "run", no_dist=True)
    new = tmp_path / "new"
    reformat_checkpoint(tmp_path / "run", new, ckpt_format=ckpt_format, hf_model=sources[kind])
    assert vocabulary_rows(new / "iter_0000000") == {rows}
    provider, _ = load_model_config(str(new / "iter_0000000"))
    assert (provider.vocab_size, provider.padded_vocab_size) == (512, rows)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups)
    load_weights(new, model, groups)
    embedding = unwrap_model(model)[0].state_dict()["language_model.embedding.word_embeddings.weight"]
    source = load_file(sources[kind] / "model.safetensors")["model.language_model.embed_tokens.weight"]
    assert torch.equal(embedding[:512], source) and not embedding[512:].any() and len(embedding) == rows


def test_import_checkpoint_pads_vocabulary_for_tensor_parallel_size(sources, tmp_path):
    """Padding to 200 rows for each of two ranks gives 800 rows, where one rank would have 600."""
    import_checkpoint(sources["untied"], tmp_path, topology=Topology(tp=2), vocab_divisor=200)
    assert vocabulary_rows(tmp_path / "iter_0000000") == {800}
    provider, _ = load_model_config(str(tmp_path / "iter_0000000"))
    assert (provider.vocab_size, provider.padded_vocab_size) == (512, 800)


def vocabulary_rows(folder: Path) -> set[int]:
    specs = [spec for spec, _ in read_metadata(folder).tensors.values()]
    return {spec.shape[0] for spec in specs if spec.name.endswith(OF_VOCABULARY)}


@pytest.mark.parametrize("kind", KINDS)
def test_from_auto_config_reads_model_dimensions_from_run_config(kind, sources, checkpoints, tmp_path):
    """Megatron-Bridge's `convert.sh` calls `AutoBridge.from_auto_config`. Here the model has fewer layers than the
    reference.
    """
    saved = yaml.safe_load((checkpoints[kind] / "iter_0000000/run_config.yaml").read_text())
    saved["model"] |= dict(num_layers=3, vocab_size=256, seq_length=64)
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(saved))
    bridge = AutoBridge.from_auto_config(str(tmp_path), str(sources[kind]))
    found, reference = bridge.hf_pretrained.to_dict(), AutoConfig.from_pretrained(sources[kind]).to_dict()
    reference["text_config"] |= dict(num_hidden_layers=3, vocab_size=256)
    assert {k: v for k, v in found.items() if v != reference[k]} == {}
    assert bridge.to_megatron_provider(load_weights=False).num_layers == 3


@pytest.mark.parametrize("kind", KINDS)
def test_load_model_config_builds_our_provider_from_megatron_bridge_run(kind, sources, checkpoints):
    """NeMo-RL builds its policy from `load_model_config`, and copies it with other fields."""
    provider, _ = load_model_config(str(checkpoints[kind] / "iter_0000000"))
    saved = yaml.safe_load((checkpoints[kind] / "iter_0000000/run_config.yaml").read_text())["model"]
    fresh = AutoBridge.from_hf_pretrained(str(sources[kind])).to_megatron_provider(load_weights=False)
    assert type(provider) is type(fresh) is KINDS[kind]
    # Megatron-Bridge's model with experts trains its mergers alone unless it is told to do more.
    assert provider.freeze_language_model == saved["freeze_language_model"] == (kind == "experts")
    assert isinstance(provider.dist_train, stock.DistTrainConfig)
    another = dataclasses.replace(provider, seq_length=80)
    another.__post_init__()
    assert (type(another), another.seq_length, another.vocab_size) == (KINDS[kind], 80, provider.vocab_size)
    for name in ("vision_config", "freeze_language_model", "freeze_vision_model", "dist_train"):
        setattr(fresh, name, getattr(provider, name))
    fresh.finalize(), provider.finalize()
    names = ("init_method", "output_layer_init_method", "embedding_init_method")  # functions made anew
    compared = {name: value for name, value in vars(fresh).items() if not name.startswith("_") and name not in names}
    differ = {name for name, value in compared.items() if getattr(provider, name) != value}
    # The first is of a kind of attention that this model has not; the others say where it was made.
    assert differ <= {"attention_softmax_in_fp32", "hf_model_id", "use_cpu_initialization"}, differ


def test_instantiated_megatron_bridge_provider_keeps_non_default_fields(sources):
    provider = stock_provider(sources["experts"])
    provider.seq_length, provider.moe_aux_loss_coeff, provider.freeze_vision_model = 96, 0.25, False
    provider.recompute_granularity = "selective"
    provider.dist_train = stock.DistTrainConfig(vision_world_size=2)
    found = instantiate(as_saved(provider))
    assert (found.seq_length, found.moe_aux_loss_coeff, found.freeze_vision_model) == (96, 0.25, False)
    assert found.recompute_granularity == "selective"
    assert found.dist_train == stock.DistTrainConfig(vision_world_size=2)


def test_instantiated_megatron_bridge_provider_drops_cuda_graph_settings(sources):
    """A run with CUDA graphs can be loaded for export or generation."""
    provider = stock_provider(sources["untied"], cuda_graph_impl="transformer_engine", cuda_graph_scope="full")
    provider.vision_cuda_graph_impl = "transformer_engine"
    found = instantiate(as_saved(provider))
    found.finalize()
    assert found.cuda_graph_impl == "none" and found.calculate_per_token_loss is False


def test_instantiated_megatron_bridge_provider_keeps_scaled_rope(sources):
    """Megatron-Bridge's provider saves it in its text configuration."""
    provider = stock_provider(sources["untied"])
    rope = provider.hf_text_config.rope_parameters
    scaled = rope | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    provider.hf_text_config.rope_parameters = scaled
    found = instantiate(as_saved(provider))
    assert found.rope_parameters == {name: scaled[name] for name in scaled if name != "mrope_interleaved"}


def test_instantiating_megatron_bridge_provider_with_hf_vision_model_raises(sources):
    provider = stock_provider(sources["untied"], use_hf_vision_model=True)
    with pytest.raises(Exception, match="saved with use_hf_vision_model=True, expected False"):
        instantiate(as_saved(provider))


def test_instantiating_megatron_bridge_provider_with_unknown_field_warns(sources, caplog):
    saved = as_saved(stock_provider(sources["untied"])) | dict(of_another_release=1)
    with caplog.at_level("WARNING", logger="qwen3vl_bridge"):
        instantiate(saved)
    assert "which are ignored: of_another_release" in caplog.text


def test_provider_saved_with_transformer_engine_loads_without_it(sources):
    provider = AutoBridge.from_hf_pretrained(str(sources["experts"])).to_megatron_provider(load_weights=False)
    for name, value in (SAVED_WITH_TE | SAVED_WITH_EXPERTS).items():
        setattr(provider, name, value)
    provider.freeze_vision_model = True
    found = instantiate(as_saved(provider))
    assert type(found) is Qwen3VLMoEModelProvider and found.freeze_vision_model
    assert found.transformer_impl == default_transformer_impl()
    assert found.moe_grouped_gemm == (found.transformer_impl == "transformer_engine")
    found.finalize()


def test_instantiate_with_call_false_returns_megatron_bridge_provider_class():
    name = "megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider"
    assert instantiate({"it": {"_target_": name, "_call_": False}})["it"] is stock.Qwen3VLModelProvider


def test_provider_is_instance_of_megatron_bridge_provider_without_inheriting():
    """Megatron-Bridge's `setup_inference_wrapper` uses `isinstance`. No fields or defaults are inherited."""
    assert issubclass(Qwen3VLModelProvider, stock.Qwen3VLModelProvider)
    assert issubclass(Qwen3VLMoEModelProvider, stock.Qwen3VLMoEModelProvider)
    assert isinstance(Qwen3VLModelProvider(num_layers=3), stock.Qwen3VLModelProvider)
    assert isinstance(Qwen3VLMoEModelProvider(num_layers=3), stock.Qwen3VLModelProvider)  # which theirs is not
    assert not issubclass(Qwen3VLModelProvider, stock.Qwen3VLMoEModelProvider)
    assert stock.Qwen3VLModelProvider not in Qwen3VLModelProvider.__mro__


PATH = Path("run_config.yaml")
KINDS_SAVED_MODELS = [("ours", "untied"), ("ours", "tied"), ("ours", "mixed"), ("ours", "experts"), ("stock", "untied"),
         ("stock", "tied"), ("stock", "experts"), ("converted", "mixed")]  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5_000_000,
        "mrope_section": [6, 5, 5], "mrope_interleaved": True}  # fmt: skip
EVERY = {
    "tie_word_embeddings": None,  # the other one
    **dict.fromkeys(TOKEN_IDS, 7), "text_config.vocab_size": 1024, "text_config.rms_norm_eps": 1e-5,
    "text_config.hidden_act": "gelu", "text_config.num_key_value_heads": 4,
    "text_config.rope_parameters.rope_theta": 10_000, "text_config.rope_parameters.mrope_section": [4, 6, 6],
    "text_config.rope_parameters": YARN, "vision_config.num_heads": 2, "vision_config.hidden_act": "gelu",
    "vision_config.deepstack_visual_indexes": [0, 2, 3], "vision_config.num_position_embeddings": 144,
    "vision_config.patch_size": 8, "vision_config.temporal_patch_size": 1, "vision_config.intermediate_size": 88,
}  # fmt: skip
WITH_EXPERTS = {
    "text_config.num_experts_per_tok": 3, "text_config.moe_intermediate_size": 24, "text_config.mlp_only_layers": [2],
}  # fmt: skip


def described(who: str, folder: Path) -> dict[str, Any]:
    """Return the `model` section of a run's file."""
    if who == "converted":
        config = json.loads((folder / "config.json").read_text())
        rows, provider = config["text_config"]["vocab_size"], family("qwen3_vl").provider_target
        return run_config(config, str(folder), "torch_dist", provider=provider, vocabulary=rows, rows=rows)["model"]
    if who == "ours":
        provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
        provider.finalize()
    else:
        provider = stock_provider(folder)
    return as_saved(provider)


@pytest.fixture(scope="module", params=KINDS_SAVED_MODELS, ids=" ".join)
def run_saved_models(request, folders) -> tuple[dict[str, Any], dict[str, Any]]:
    who, kind = request.param
    return {"model": described(who, folders[kind])}, json.loads((folders[kind] / "config.json").read_text())


def written(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(folder)


def changed(config: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    holder, *names = config, *name.split(".")
    for section in names[:-1]:
        holder = holder[section]
    holder[names[-1]] = not holder[names[-1]] if value is None else value
    return config


def test_check_model_of_run_same_model_passes(run_saved_models, tmp_path):
    saved, config = run_saved_models
    assert check_model_of_run(written(tmp_path, config), saved, PATH)


def test_check_model_of_run_raises_and_names_changed_field(run_saved_models, tmp_path):
    saved, config = run_saved_models
    with_experts = config["model_type"] == "qwen3_vl_moe"
    for name, value in (EVERY | (WITH_EXPERTS if with_experts else {})).items():
        with pytest.raises(CheckpointError, match=r"describes another model than run_config\.yaml") as error:
            check_model_of_run(written(tmp_path, changed(config, name, value)), saved, PATH)
        _, *lines = str(error.value).splitlines()
        assert lines and all(name.rpartition(".")[2] in line for line in lines), (name, lines)


def test_check_model_of_run_raises_if_only_run_or_only_config_has_experts(folders, tmp_path):
    for one, other in (("untied", "experts"), ("experts", "untied")):
        config = json.loads((folders[one] / "config.json").read_text())
        with pytest.raises(CheckpointError, match="model_type is"):
            check_model_of_run(written(tmp_path, config), {"model": described("stock", folders[other])}, PATH)


def test_check_model_of_run_raises_if_rope_scaling_differs(folders, tmp_path):
    config = json.loads((folders["untied"] / "config.json").read_text())
    scaled = changed(config, "text_config.rope_parameters", YARN)
    ours, stock = described("ours", folders["untied"]), described("stock", folders["untied"])
    ours["rope_parameters"] = stock["hf_text_config"]["rope_parameters"] = YARN
    for saved in (ours, stock):
        assert check_model_of_run(written(tmp_path, scaled), {"model": saved}, PATH)
        other = changed(scaled, "text_config.rope_parameters.factor", 8.0)
        with pytest.raises(CheckpointError, match=r"rope_parameters\.factor is 8\.0, expected 4\.0"):
            check_model_of_run(written(tmp_path, other), {"model": saved}, PATH)
        with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_type is 'default', expected 'yarn'"):
            check_model_of_run(written(tmp_path, config), {"model": saved}, PATH)


def test_check_model_of_run_skips_fields_missing_in_run_config(folders, tmp_path):
    config = written(tmp_path, json.loads((folders["mixed"] / "config.json").read_text()))
    for saved in ({}, {"model": None}, {"model": {}}, {"model": {"seq_length": 3}}):
        assert not check_model_of_run(config, saved, PATH)
    assert check_model_of_run(config, {"model": {"num_layers": 4, "vocab_size": 640}}, PATH)
    for model in ({"num_layers": 5}, {"vision_config": {"depth": 7}}, {"moe_layer_freq": 1, "num_moe_experts": 6}):
        with pytest.raises(CheckpointError):
            check_model_of_run(config, {"model": {"num_layers": 4} | model}, PATH)


@pytest.mark.parametrize(("kind", "made"), [("tied", Qwen3VLModelProvider), ("moe", Qwen3VLMoEModelProvider)])
def test_run_config_yaml_round_trip_keeps_provider_and_settings(kind, made, request, tmp_path):
    folder = request.getfixturevalue(f"{kind}_folder")
    cfg = set_paths(
        qwen3_vl_digits_sft_config(), hf_path=folder, data_path=tmp_path, pretrained_checkpoint=tmp_path / "megatron",
        save=tmp_path / "run",
    )  # fmt: skip
    cfg.model.freeze_vision_model, cfg.model.vision_recompute_granularity = True, "selective"
    cfg.model.activation_func = gelu_tanh
    path = tmp_path / "run_config.yaml"
    cfg.to_yaml(str(path))

    again = Qwen3VLConfigContainer.from_yaml(str(path))
    assert type(again.model) is made and type(again.dataset) is type(cfg.dataset)
    found, expected = again.to_dict(), cfg.to_dict()
    del expected["model"]["vision_config"]["model_type"]  # a class attribute; Megatron-Bridge leaves it out
    assert found == expected
    assert again.model.vision_config.to_dict() == cfg.model.vision_config.to_dict()

    provider = instantiate(read_run_config(str(path))["model"])
    fresh = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    assert type(provider) is made and provider.mrope_section == fresh.mrope_section
    assert provider.moe_layers == fresh.moe_layers
    provider.finalize()
    assert provider.activation_func is gelu_tanh
