"""Which names Megatron-Bridge's own fsdp_dtensor loader finds weights under, whatever layers a model is made of."""

import types

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLMoEModelProvider
from qwen3vl_bridge.training import weight_loading
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import rows_by_name
from qwen3vl_bridge.weights.rows import local_name

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training import checkpointing

WRAPPER = "module."


@pytest.fixture(scope="module")
def model(moe_folder) -> Qwen3VLMoEModelProvider:
    provider = AutoBridge.from_hf_pretrained(str(moe_folder)).to_megatron_provider(load_weights=False)
    provider.finalize()
    initialize(provider, seed=0)
    return provider


def stored_names(model: Qwen3VLMoEModelProvider, spec: str) -> list[str]:
    rows = {row.megatron: row for row in rows_by_name(model).values()}.values()
    names = [name for row in rows for name in row.stored]
    return [WRAPPER + (local_name(name) if spec == "local" else name) for name in names]


@pytest.mark.parametrize(("wanted", "on_disk"), [("local", "te"), ("te", "local"), ("te", "te"), ("local", "local")])
def test_every_weight_is_found_under_either_name(model, wanted, on_disk):
    weights = {name: torch.full((1,), float(i)) for i, name in enumerate(stored_names(model, wanted))}
    found = {f"model.{name}": None for name in stored_names(model, on_disk)}
    renamed, problems = weight_loading.other_names(weights, found, model)
    assert problems == []
    own = weights.keys() & {name.removeprefix("model.") for name in found}
    assert len(own) + len(renamed) == len(weights)
    # Norms of the vision tower, with a bias, and of the text model; experts, whose gate is apart. The norm before
    # experts is a module in either spec.
    norms, experts = 2 * 2 * model.vision_config.depth + model.num_layers + 1, 3 * 3 * model.num_moe_experts
    assert len(renamed) == (0 if wanted == on_disk else norms + experts)
    expected = dict(zip(stored_names(model, on_disk), weights.values(), strict=True))
    assert all(renamed[name] is expected[name] for name in renamed)


def test_what_is_there_under_no_name_is_listed(model):
    names = stored_names(model, "local")
    weights = {name: torch.zeros(2) for name in names} | {"module.language_model.output_layer._extra_state": None}
    found = {f"model.{name}": None for name in stored_names(model, "te")}
    found = {name: None for name in found if "layers.2.mlp.experts.linear_fc2.weight3" not in name}
    _, problems = weight_loading.other_names(weights, found, model)
    expert = "model.module.language_model.decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"
    assert problems == [f"missing: {expert} [2]"]


@pytest.fixture
def asked(model, monkeypatch):
    """A model and a checkpoint of which only names are real, and what Megatron-Bridge's function was given."""
    found = {f"model.{name}": None for name in stored_names(model, "te")}
    reader = types.SimpleNamespace(read_metadata=lambda: types.SimpleNamespace(state_dict_metadata=found))
    monkeypatch.setattr(checkpointing, "_get_filesystem_reader", lambda folder: reader)
    monkeypatch.setattr(checkpointing, "preprocess_fsdp_dtensor_state_dict", lambda cfg, state, chunk: state)
    monkeypatch.setattr(weight_loading.dcp, "load", lambda state, storage_reader: read.append(state))
    chunk, read = torch.nn.Module(), []
    chunk.config = model
    state = {"model": {name: torch.zeros(2) for name in stored_names(model, "local")}, "_model": [chunk]}
    return types.SimpleNamespace(found=found, state=state, read=read, chunk=chunk)


def load(state, **more):
    def theirs(load_dir, ckpt_cfg, rank0, sharded_state_dict, iteration, release=False, checkpoint_path_override=None,
               checkpointing_context=None, cfg=None):  # fmt: skip
        return "theirs"

    arguments = dict(load_dir="RUN", ckpt_cfg=None, rank0=False, sharded_state_dict=state, iteration=3)
    return weight_loading.load_every_weight(theirs, **arguments | more)


def test_weights_under_other_names_are_read_after_the_rest(asked):
    assert load(asked.state) == "theirs"
    (read,) = asked.read
    assert read["model"].keys() < {name.removeprefix("model.") for name in asked.found}
    assert all(any(tensor is own for own in asked.state["model"].values()) for tensor in read["model"].values())


def test_optimizer_state_under_other_names_is_refused(asked):
    asked.state["optimizer"] = {"state": {}}
    load(asked.state)  # there is none in the checkpoint
    asked.found["optimizer.state.module.x.exp_avg"] = None
    with pytest.raises(CheckpointError, match=r"RUN.* its optimizer state uses that spec's names: .*load_optim=False"):
        load(asked.state)


def test_other_models_are_left_to_megatron_bridge(asked):
    asked.chunk.config = types.SimpleNamespace()
    assert load(asked.state) == load(None, rank0=True) == "theirs"
    assert asked.read == []
