"""torch_dist checkpoints: parameter names, loading by configuration alone, and other parallel layouts."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen3vl_bridge.models.qwen3_vl.bridge import provider_from_hf_config
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.testing.tiny_checkpoint import make_model
from qwen3vl_bridge.training.process_groups import initialize

import pytest
import torch
import yaml
from megatron.bridge import AutoBridge
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block import Qwen3VLVisionTransformerBlock
from megatron.bridge.training.checkpointing import generate_state_dict
from megatron.bridge.training.config import CheckpointConfig
from megatron.bridge.training.model_load_save import load_megatron_model, load_model_config
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from tests.helpers.forked import results_of_ranks
from tests.parity.topologies import TOPOLOGIES

Chunks = Sequence[torch.nn.Module]  # one, or one for each virtual pipeline stage of this rank


def make_experts_everywhere(moe_folder: str | Path, folder: Path) -> Path:
    config = AutoConfig.from_pretrained(moe_folder)
    config.text_config.mlp_only_layers = []
    make_model(config, seed=4).save_pretrained(folder)
    return folder


def build_chunks(folder: str | Path, **fields) -> tuple[Chunks, ProcessGroupCollection]:
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
    )
    return chunks, groups


def build(folder: str | Path, **fields) -> tuple[torch.nn.Module, ProcessGroupCollection]:
    """Build a model with one chunk per rank; arguments as for `build_chunks`."""
    (model,), groups = build_chunks(folder, **fields)
    return model, groups


def sharded(model: torch.nn.Module, groups: ProcessGroupCollection, **metadata) -> ShardedStateDict:
    return model.sharded_state_dict(metadata=_metadata(groups) | metadata)


def tensors(*chunks: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{i}." * (len(chunks) > 1) + name: t.clone()
        for i, chunk in enumerate(chunks)
        for name, t in chunk.state_dict().items()
        if isinstance(t, torch.Tensor)
    }


def save(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_state(chunks, groups), str(folder))


def load(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> None:
    state = dist_checkpointing.load(_state(chunks, groups), str(folder), strict="raise_all")
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}" if len(chunks) > 1 else "model"])


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    differ = {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])}
    return sorted(differ | (found.keys() ^ expected.keys()))


def wrong_after_loading(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> list[str]:
    """Load a checkpoint over a model with corrupted weights, and return the names of weights that differ afterwards."""
    expected = tensors(*chunks)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7)
    load(chunks, groups, folder)
    return wrong(tensors(*chunks), expected)


def save_by_bridge(folder: str | Path, chunks: Chunks, checkpoint: str | Path) -> None:
    """Save with Megatron-Bridge, with the configuration; `folder` is the Hugging Face folder of the model."""
    AutoBridge.from_hf_pretrained(str(folder)).save_megatron_model(list(chunks), str(checkpoint))


def load_by_bridge(folder: str | Path, checkpoint: str | Path, **fields) -> Chunks:
    """Load a new model that `save_by_bridge` has saved, in the current groups, with other parallel sizes in `fields`.

    The rest of the configuration is the saved one, with settings that only fit its own parallel layout.
    """
    fitting = dict(expert_tensor_parallel_size=fields.get("tensor_model_parallel_size", 1), variable_seq_lengths=False)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    return bridge.load_megatron_model(str(checkpoint), mp_overrides=fitting | fields)


def _state(chunks: Chunks, groups: ProcessGroupCollection) -> ShardedStateDict:
    weights = CheckpointConfig(save_optim=False, save_rng=False, ckpt_format="torch_dist")
    return generate_state_dict(
        weights, list(chunks), None, None, None, model_sd_kwargs=dict(metadata=_metadata(groups))
    )


def _metadata(groups: ProcessGroupCollection) -> dict:
    return dict(singleton_local_shards=False, dp_cp_group=groups.dp_cp)


KINDS = ("untied", "tied", "mixed", "experts")
LAYERS = 4


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory):
    checkpoints = {}
    for kind, folder in folders.items():
        checkpoints[kind] = tmp_path_factory.mktemp(f"saved_{kind}")
        save(*build_chunks(folder), checkpoints[kind])
    return checkpoints


def shapes(state: ShardedStateDict) -> dict[str, set[tuple]]:
    found = {}
    for entry in state.values():
        for part in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
            name = part.unique_key if isinstance(part, ShardedObject) else part.key
            found.setdefault(name, set()).add((tuple(part.global_shape), tuple(part.global_offset)))
    return found


@pytest.mark.parametrize("metadata", [{}, {"non_homogeneous_layers": True}])
def test_sharded_state_dict_of_vision_tower_matches_megatron_bridge(folders, metadata):
    model, groups = build(folders["untied"])
    tower = model.vision_model.decoder
    tower.pp_group = groups.pp  # theirs keeps it there
    metadata |= dict(singleton_local_shards=False, dp_cp_group=groups.dp_cp)
    theirs = shapes(Qwen3VLVisionTransformerBlock.sharded_state_dict(tower, "decoder.", (), dict(metadata)))
    assert shapes(tower.sharded_state_dict("decoder.", (), dict(metadata))) == theirs


def test_sharded_state_dict_has_norm_names_of_transformer_engine_spec(folders):
    """There the norm before a dense MLP belongs to its first linear layer, and the norm before experts is a module."""
    fused, own = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    names = {kind: shapes(sharded(*build(folders[kind]))) for kind in ("untied", "mixed", "experts")}
    layers = "language_model.decoder.layers."
    expected = {"untied": {f"{layers}{fused}"}, "experts": {f"{layers}{own}"}}
    expected["mixed"] = {f"{layers}{i}.{fused if i == 1 else own}" for i in range(LAYERS)}
    for kind, norms in expected.items():
        assert {name for name in names[kind] if name.startswith(layers) and name.endswith((fused, own))} == norms
        assert not any("input_layernorm" in name for name in names[kind])


@pytest.mark.parametrize(("kind", "frequency"), [("mixed", [1, 0, 1, 1]), ("experts", 1)])
def test_moe_layer_freq_is_list_only_if_some_layers_are_dense(kind, frequency, folders):
    provider = provider_from_hf_config(AutoConfig.from_pretrained(folders[kind]).to_dict())
    assert provider.moe_layer_freq == frequency
    assert provider.moe_layers == tuple(i for i in range(LAYERS) if kind == "experts" or i != 1)


def run_config(folder: Path, checkpoint: Path, **settings) -> dict:
    hf_config = json.loads((folder / "config.json").read_text())
    sizes = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    target = "qwen3vl_bridge.models.qwen3_vl.bridge.provider_from_hf_config"
    model = {"_target_": target, "hf_config": hf_config, **sizes, **settings}
    (checkpoint / "run_config.yaml").write_text(yaml.safe_dump({"model": model}))
    return hf_config


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_load_megatron_model_from_run_config_restores_every_weight(kind, folders, saved):
    run_config(folders[kind], saved[kind])
    expected, _ = build_chunks(folders[kind])
    found = load_megatron_model(str(saved[kind]), use_cpu_init=True)
    assert not wrong(tensors(*found), tensors(*expected))


@pytest.mark.parametrize(("kind", "made"), [("tied", Qwen3VLModelProvider), ("mixed", Qwen3VLMoEModelProvider)])
def test_provider_from_hf_config_sets_fields_given_in_run_config(kind, made, folders, tmp_path):
    hf_config = run_config(folders[kind], tmp_path, hf_model_id="some/model", seq_length=77)
    provider, _ = load_model_config(str(tmp_path))
    assert type(provider) is made
    assert (provider.hf_model_id, provider.seq_length) == ("some/model", 77)
    assert provider.share_embeddings_and_output_weights == hf_config["tie_word_embeddings"]


def test_provider_from_hf_config_does_not_change_given_config(folders):
    config = json.loads((folders["mixed"] / "config.json").read_text())
    provider_from_hf_config(config)
    assert config == json.loads((folders["mixed"] / "config.json").read_text())


def test_provider_from_hf_config_raises_if_field_or_model_type_is_unknown(folders):
    config = json.loads((folders["tied"] / "config.json").read_text())
    with pytest.raises(TypeError, match="Qwen3VLModelProvider has no num_layer, sequence_paralel"):
        provider_from_hf_config(config, num_layer=3, sequence_paralel=True)
    with pytest.raises(ValueError, match="model_type is 'qwen2_vl', expected one of qwen3_vl, qwen3_vl_moe"):
        provider_from_hf_config(config | {"model_type": "qwen2_vl"})


RANKS = 4  # for those that need fewer, the others hold the same as data-parallel ranks
FAMILIES = {"dense": ("untied", "tied"), "MoE": ("mixed", "experts")}
DISPATCHERS = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")  # which place no weights
# 512 rows become 600, and 600 rows 512 again.
PADDED = dict(TOPOLOGIES["TP2+SP"].fields, should_pad_vocab=True, make_vocab_size_divisible_by=300)

Stop = tuple[str, str, dict[str, Any]]


def splits() -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return kinds of models with the fields of every parallel layout that distributes weights differently."""
    found: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {}
    for name, topology in TOPOLOGIES.items():
        kinds = tuple(itertools.chain(*(FAMILIES[family] for family in topology.families)))
        fields = {name: value for name, value in topology.fields.items() if name not in DISPATCHERS}
        if (kinds, fields) not in found.values():  # optimizers are not saved here
            found[name] = kinds, fields
    return found | {"TP2+SP, padded vocabulary": (sum(FAMILIES.values(), ()), PADDED)}


def stops() -> list[Stop]:
    """Return [kind, name, fields]: for each parallel layout the kind of model that is covered least so far."""
    chosen: list[Stop] = []
    for name, (kinds, fields) in splits().items():
        been = Counter(kind for kind, _, _ in chosen)
        chosen.append((min(kinds, key=been.__getitem__), name, fields))
    return chosen


def travel(chosen: list[Stop], folders: dict[str, Path], saved: dict[str, Path], scratch: Path) -> dict[str, Path]:
    """At each stop, load what the previous stop of this kind saved, compare all weights with the folder, and save."""
    cases, last = [], dict(saved)
    for number, (kind, _, fields) in enumerate(chosen):
        save = scratch / f"{number}_{kind}"
        by_bridge = sum(other == kind for other, _, _ in chosen[number + 1 :]) % 2 == 1  # the last by megatron-core
        cases.append((folders[kind], fields, last[kind], save, by_bridge))
        last[kind] = save
    results_of_ranks(go, RANKS, cases)
    return last


def go(cases: list[tuple[Path, dict[str, Any], Path, Path, bool]]) -> None:
    """Run stops: [Hugging Face folder, provider fields, checkpoint to load and compare, where to save, whether by
    Bridge].
    """
    for folder, fields, checkpoint, saved, by_bridge in cases:
        chunks, groups = build_chunks(folder, **fields)
        bad = []
        if (iteration := checkpoint / "iter_0000000").exists():  # Megatron-Bridge saved it, and loads it too
            bad += wrong(tensors(*load_by_bridge(folder, checkpoint, **fields)), tensors(*chunks))
            checkpoint = iteration
        if bad := bad + wrong_after_loading(chunks, groups, checkpoint):
            raise AssertionError(f"{folder} {fields} {checkpoint}: {len(bad)} tensors differ: {bad[:5]}")
        if by_bridge:
            save_by_bridge(folder, chunks, saved)
        else:
            save(chunks, groups, saved)


@pytest.mark.slow
def test_torch_dist_checkpoint_keeps_tensors_in_every_parallel_layout(folders, tmp_path):
    saved = {kind: tmp_path / kind for kind in folders}
    for kind, folder in folders.items():
        save(*build_chunks(folder), saved[kind])
    last = travel(stops(), folders, saved, tmp_path)
    for kind, folder in folders.items():
        assert last[kind] != saved[kind]
        assert wrong_after_loading(*build_chunks(folder), last[kind]) == []
