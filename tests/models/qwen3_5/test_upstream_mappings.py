"""Names and values of loaded models against Megatron-Bridge's own bridge, tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.config.fields import default_transformer_impl
from qwen3vl_bridge.models.qwen3_5.model import Qwen35VLModel
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider, Qwen35VLMoEModelProvider
from qwen3vl_bridge.training.weight_loading import Pretrained, load_model
from qwen3vl_bridge.weights.rows import expand, local_name

import pytest
import torch
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl import qwen35_vl_provider
from megatron.bridge.training.model_load_save import load_megatron_model, load_model_config, save_megatron_model
from megatron.bridge.utils.instantiate_utils import instantiate
from megatron.core.utils import unwrap_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from tests.helpers.stock_qwen3_5 import build_stock, make_bridge, stock_provider
from tests.helpers.stock_qwen3_vl import SAVED_WITH_EXPERTS, SAVED_WITH_TE, as_saved
from tests.models.qwen3_5.test_conversion import check_same, load_strictly, weights
from tests.training.checkpointing.journeys import Journey, export, go_on, on_ranks


def stock_bridge(folder: Path) -> Any:
    bridge = make_bridge(config := AutoConfig.from_pretrained(folder))
    names = list(load_file(folder / "model.safetensors"))
    state = SimpleNamespace(source=SimpleNamespace(get_all_keys=lambda: names))
    bridge.hf_pretrained = SimpleNamespace(state=state, config=config)
    return bridge


def module_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a parameter, with the model's configuration, as Megatron-Bridge's loading passes it.

    The module of a single expert gets its weight also under the first name of grouped experts: the mappings are for
    Transformer Engine's grouped layers, which name experts weight0, weight1 and so on.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    if not hasattr(module, "config"):
        module.config = model.config
    if ".experts." in name:
        module.weight0 = module.weight
    return module


def stock_values(folder: Path, model: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    stored, registry = load_file(folder / "model.safetensors"), stock_bridge(folder).mapping_registry()
    values = {}
    for name in names:
        mapping = registry.megatron_to_hf_lookup(name)
        assert mapping is not None, name
        hf = mapping.hf_param
        given = stored[hf] if isinstance(hf, str) else {part: stored[one] for part, one in hf.items()}
        module = module_of(model, local_name(name))
        values[local_name(name)] = mapping.hf_to_megatron(given, module)
        if ".experts." in name:
            del module.weight0
    return values


KINDS = ("dense", "moe", "3.6")
# What its provider has otherwise than ours of the same folder, and no weight depends on.
OTHERWISE = {"attention_softmax_in_fp32", "bos_token_id", "eos_token_id", "hf_model_id", "use_cpu_initialization",
             "hetereogenous_dist_checkpoint", "moe_router_load_balancing_type", "mtp_loss_scaling_factor"}  # fmt: skip


def names_of(folder: Path) -> list[str]:
    config = ModelConfig(folder)
    shapes = {name: tuple(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
    return [row.megatron for row in expand(config.rows(config.expert_layout(shapes)), config.dimensions)]


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_parameters_equal_values_of_megatron_bridge_mappings(qwen3_5_folders, kind):
    folder = qwen3_5_folders[kind]
    (model,) = load_model(folder)
    values, parameters = stock_values(folder, model, names_of(folder)), dict(model.named_parameters())
    assert values.keys() == parameters.keys()
    for name, value in values.items():
        assert torch.equal(value, parameters[name]), name


@pytest.fixture(scope="module", params=KINDS)
def stock(request, qwen3_5_folders) -> tuple[Path, nn.Module, dict[str, torch.Tensor]]:
    folder = qwen3_5_folders[request.param]
    model = build_stock(folder)
    values = stock_values(folder, model, names_of(folder))
    assert values.keys() == dict(model.named_parameters()).keys()
    return folder, model, values


def test_megatron_bridge_qwen3_5_model_loads_our_imported_checkpoint(stock, tmp_path):
    folder, model, values = stock
    import_checkpoint(folder, tmp_path / "megatron", ckpt_format="torch_dist")
    load_strictly(model, tmp_path / "megatron")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name


@pytest.fixture(scope="module")
def saved(stock, tmp_path_factory) -> Path:
    _, model, values = stock
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    checkpoint = tmp_path_factory.mktemp("saved")
    save_megatron_model([model], checkpoint)
    written = yaml.safe_load((checkpoint / "iter_0000000/run_config.yaml").read_text())["model"]
    assert written["_target_"].startswith("megatron.bridge.models.qwen_vl.qwen35_vl_provider.Qwen35VL")
    wanted = SAVED_WITH_TE | (SAVED_WITH_EXPERTS if written.get("num_moe_experts") else {})
    assert {name: written[name] for name in wanted} == wanted
    return checkpoint


@pytest.mark.one_case_in(3)
def test_checkpoint_saved_by_megatron_bridge_model_loads_and_exports_exactly(stock, saved, tmp_path):
    """Our loader fills our model with it, and our converter restores the bytes of the folder."""
    folder, _, values = stock
    assert verify_checkpoint(folder, saved).same
    export_checkpoint(saved, tmp_path / "hf", hf_model=folder)
    check_same(weights(tmp_path / "hf"), weights(folder))
    (ours,) = load_model(folder, saved)
    assert {local_name(name) for name in names_of(folder)} == dict(ours.named_parameters()).keys()
    assert all(torch.equal(parameter, values[name]) for name, parameter in ours.named_parameters())


def check_ours(checkpoint: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Check that `load_megatron_model` returns our model with local layers and these weights."""
    (model,) = unwrap_model(load_megatron_model(str(checkpoint / "iter_0000000"), use_cpu_init=True))
    kind = Qwen35VLMoEModelProvider if model.config.num_moe_experts else Qwen35VLModelProvider
    assert type(model) is Qwen35VLModel and type(model.config) is kind
    assert model.config.transformer_impl == default_transformer_impl()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == values.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, values[name]), name


def test_load_megatron_model_builds_our_model_from_megatron_bridge_checkpoint(stock, saved):
    """Megatron-Bridge builds the class that the run's file names."""
    check_ours(saved, stock[2])


@pytest.mark.one_case_in(2)
def test_model_saved_with_transformer_engine_settings_loads_without_it(stock, tmp_path):
    folder, _, values = stock
    (model,) = load_model(folder)
    for name, value in (SAVED_WITH_TE | (SAVED_WITH_EXPERTS if model.config.num_moe_experts else {})).items():
        setattr(model.config, name, value)
    save_megatron_model([model], tmp_path)
    check_ours(tmp_path, values)


def test_load_model_config_builds_our_provider_from_megatron_bridge_run(stock, saved):
    """The provider equals the one of the folder, except for fields with other defaults in Megatron-Bridge."""
    folder, model, _ = stock
    provider, _ = load_model_config(str(saved / "iter_0000000"))
    fresh = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    assert type(provider) is type(fresh)
    found, expected = (one.vision_config.to_dict() for one in (provider, fresh))
    assert {name for name in expected if found[name] != expected[name]} <= {"dtype"}
    fresh.vision_config = provider.vision_config
    fresh.finalize(), provider.finalize()
    # Functions made anew, and how often a field was set.
    names = ("init_method", "output_layer_init_method", "embedding_init_method", "_changes")
    differ = {name for name, value in vars(fresh).items() if getattr(provider, name) != value and name not in names}
    assert differ <= OTHERWISE, differ
    for name in differ:
        assert getattr(provider, name) == getattr(model.config, name), name
    Pretrained.find(folder).check(provider)  # a run of it can start from the folder's weights


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_instantiated_megatron_bridge_provider_keeps_non_default_fields(kind, qwen3_5_folders):
    set_to = dict(seq_length=96, freeze_vision_model=True, mtp_num_layers=1, mtp_loss_scaling_factor=0.3,
                  recompute_granularity="selective", rotary_base=77.0)  # fmt: skip
    provider = stock_provider(qwen3_5_folders[kind], **set_to)
    # How something is computed stays behind: a run that was deterministic is loaded to be exported all the same.
    provider.deterministic_mode, provider.cuda_graph_impl = True, "transformer_engine"
    found = instantiate(as_saved(provider))
    assert {name: getattr(found, name) for name in set_to} == set_to
    assert not found.deterministic_mode
    found.finalize()
    assert found.cuda_graph_impl == "none"


def test_instantiating_unsupported_megatron_bridge_provider_raises(qwen3_5_folders):
    provider = stock_provider(qwen3_5_folders["dense"], use_hf_vision_model=True)
    with pytest.raises(Exception, match="saved with use_hf_vision_model=True, expected False"):
        instantiate(as_saved(provider))
    provider = stock_provider(qwen3_5_folders["dense"], attention_output_gate=False)
    with pytest.raises(ValueError, match="attention_output_gate"):
        instantiate(as_saved(provider)).finalize()


def test_provider_is_instance_of_megatron_bridge_provider_without_inheriting():
    for ours, theirs in (
        (Qwen35VLModelProvider, qwen35_vl_provider.Qwen35VLModelProvider),
        (Qwen35VLMoEModelProvider, qwen35_vl_provider.Qwen35VLMoEModelProvider),
    ):
        assert issubclass(ours, theirs) and theirs not in ours.__mro__
    assert not issubclass(Qwen35VLModelProvider, qwen35_vl_provider.Qwen35VLMoEModelProvider)


# Kind of model, split, what a token's MTP loss weighs (0: it is kept), and how the run is sharded and saved.
RUNS = {
    2: (
        ("dense", "TP2+SP", 0.1, dict(distributed=True)), ("moe", "TP2+SP+EP2", 0.1, {}), ("3.6", "PP2", 0.1, {}),
        ("dense", "DP2", 0.1, dict(fsdp=True)), ("moe", "DP2", 0.1, dict(fsdp=True)), ("moe", "PP2", 0.0, {}),
        ("dense", "DP2", 0.0, dict(distributed=True)), ("dense", "TP2+SP", 0.1, dict(bf16=True, distributed=True)),
        ("moe", "DP2", 0.1, dict(bf16=True)), ("dense", "PP2+VPP2", 0.0, dict(bf16=True, distributed=True)),
        ("moe", "DP2", 0.0, dict(fsdp=True)),
    ),
    4: (("dense", "TP4+SP", 0.1, dict(distributed=True)),),  # two ranks to a query group
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RUNS)
def test_qwen3_5_run_on_ranks_exports_weights_that_it_trained(qwen3_5_folders, digits, tmp_path, ranks):
    journeys = []
    for number, (kind, split, factor, sharding) in enumerate(RUNS[ranks]):
        places = str(qwen3_5_folders[kind]), str(digits), str(tmp_path / f"run_{number}")
        settings = dict(train__train_iters=4, model__mtp_loss_scaling_factor=factor)
        journeys.append(Journey(*places, split, settings=settings, **sharding))
    cases = [(go_on if one.fsdp else export, one, 2) for one in journeys]
    for journey, result in zip(journeys, on_ranks(ranks, cases), strict=True):
        log, in_memory = (result, {}) if journey.fsdp else result
        assert len(log) == 2
        export_checkpoint(journey.save, exported := tmp_path / "exported" / Path(journey.save).name, progress=False)
        stored, before = weights(exported), weights(Path(journey.hf))
        assert stored.keys() == before.keys() and (journey.fsdp or stored.keys() == in_memory.keys())
        for name, tensor in in_memory.items():
            assert torch.equal(stored[name], tensor), name
        moved = {name for name, tensor in stored.items() if not torch.equal(tensor.float(), before[name].float())}
        mtp = {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"}
        if journey.settings["model__mtp_loss_scaling_factor"]:
            assert mtp <= moved
        else:
            assert "model.language_model.norm.weight" in moved
            in_16_bits = journey.fsdp or journey.bf16
            rounded = {name for name in before if name.startswith("mtp.") and in_16_bits}  # to bfloat16, and no more
            assert not {name for name in moved - rounded if name.startswith("mtp.")}
            assert all(torch.equal(stored[name].bfloat16(), before[name].bfloat16()) for name in rounded)
