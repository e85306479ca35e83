"""Whether two configurations are of the same model.

What lives here: every field that decides which tensors there are, or what they mean, whichever way a file spells it.
What may not: whether a configuration is one we convert (`hf_config.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron.run_config import TARGET
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.stored_models.run_model import model_of_run
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.models.qwen3_vl.config_checks import check_settings, rope_parameters
from qwen3vl_bridge.weights.dimensions import experts_of, head_dim_of, moe_layers_of

# Fields by section, with what transformers takes where a file has none; a field without that is in every file.
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "model_type": None,
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    },
    "text_config": {
        **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    },
    "vision_config": {
        **dict.fromkeys(("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size")),
        **dict.fromkeys(("temporal_patch_size", "spatial_merge_size", "num_position_embeddings")),
        "out_hidden_size": 3584,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_VISION = "vision_config."
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_PLAIN_ROPE = ("rope_type", "rope_theta", "mrope_section")


def check_same_model(one: ModelConfig, other: ModelConfig) -> None:
    """Check that two configurations are of the same model.

    What a configuration says of dtypes, dropout, initial values and the longest row may differ.

    Args:
        one: a model's.
        other: what it is expected to be.

    Raises:
        CheckpointError: they are of two models; all fields that differ are listed.
    """
    found, expected = _meaning(one.raw), _meaning(other.raw)
    _compare(one, found, expected, found | expected, other.folder / "config.json")


def check_model_of_run(config: ModelConfig, run: Mapping[str, Any], path: Path) -> bool:
    """Check that a configuration is of the model that a run has trained.

    Args:
        config: a model's.
        run: what the run's file says.
        path: that file.

    Returns:
        Whether it says anything of the model.

    Raises:
        CheckpointError: they are of two models; all fields that differ are listed.
    """
    model = run.get("model")
    if not isinstance(model, Mapping):
        return False
    found = _meaning(config.raw)
    if model.get("_target_") == TARGET:  # which a conversion has written, of a whole `config.json`
        hf_config = model.get("hf_config")
        try:
            check_settings(hf_config)  # pyright: ignore[reportArgumentType]  (which it refuses)
        except ValueError as error:
            raise CheckpointError(f"{path}, model.hf_config: {error}") from error
        expected = _meaning(hf_config)  # pyright: ignore[reportArgumentType]
        _compare(config, found, expected, found | expected, path)
        return True
    expected = model_of_run(model)
    vision = model.get("vision_config")
    if isinstance(vision, Mapping):
        expected |= {name: vision[_last(name)] for name in found if name.startswith(_VISION) and _last(name) in vision}
    vocabulary, named = model.get("vocab_size"), "text_config.vocab_size"
    if type(vocabulary) is int and vocabulary < found[named]:  # of a larger one, the rows beyond are looked at
        expected[named] = vocabulary
    _compare(config, found, expected, expected, path)
    return bool(expected)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _compare(
    config: ModelConfig, found: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str], path: Path
) -> None:
    """Check some fields of a configuration against those of another.

    Raises:
        CheckpointError: some differ.
    """
    names = [name for name in names if found.get(name) != expected.get(name)]
    if names:
        lines = [f"{name} is {found.get(name)!r}, expected {expected.get(name)!r}" for name in names]
        first = f"{config.folder / 'config.json'} describes another model than {path}:"
        raise CheckpointError("\n  ".join([first, *lines]))


def _meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by the names that `config.json` has, each in one spelling."""
    found: dict[str, Any] = {}
    for section, fields in _FIELDS.items():
        values = config[section] if section else config
        prefix = f"{section}." if section else ""
        found |= {prefix + name: values.get(name, default) for name, default in fields.items()}
    if found["text_config.hidden_act"] == "swish":  # another name of it
        found["text_config.hidden_act"] = "silu"
    text = config["text_config"]
    found["vision_config.deepstack_visual_indexes"] = list(config["vision_config"]["deepstack_visual_indexes"])
    return found | {f"text_config.{name}": value for name, value in _text(text).items()}


def _text(text: Mapping[str, Any]) -> dict[str, Any]:
    moe_layers = list(moe_layers_of(text))
    found = {
        "num_key_value_heads": text["num_key_value_heads"] or text["num_attention_heads"],
        "head_dim": head_dim_of(text),
        "num_experts": experts_of(text),
    }
    if len(moe_layers) < text["num_hidden_layers"]:  # else no layer has that width
        found["intermediate_size"] = text["intermediate_size"]
    if moe_layers:
        found |= {name: text.get(name) for name in _EXPERTS}
        found["layers with experts (decoder_sparse_step, mlp_only_layers)"] = moe_layers
    rope = rope_parameters(text)
    names = _PLAIN_ROPE if rope["rope_type"] == "default" else rope
    values = {name: rope[name] for name in names if rope[name] is not None}
    values["mrope_section"] = list(values["mrope_section"])
    return found | {f"rope_parameters.{name}": value for name, value in values.items()}
