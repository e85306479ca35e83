"""Check names, paths and the model of `qwen3vl train` before Megatron is imported, which takes ten seconds."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.config.other_trainers import describe_ignored_variables
from qwen3vl_bridge.data.data_paths import check_data_paths
from qwen3vl_bridge.terminal import show

from qwen3vl_recipes import setting_names
from qwen3vl_recipes.paths import describe_model_kind
from qwen3vl_recipes.registry import find, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig

# Matches the name of a recipe: family, size with or without experts, and kind of training.
_RECIPE = re.compile(r"(qwen35?_vl|qwen38_flash)_(?:\d+[bm](_a\d+b)?_|(proxy|next)_)?(\w+)_config")
_FAMILIES = {"qwen3_vl": "qwen3_vl", "qwen35_vl": "qwen3_5", "qwen38_flash": "qwen4_exp"}
_DATA = ("dataset.path", "dataset.train_path", "dataset.valid_path", "dataset.test_path")


def check_command_line(args: Namespace) -> None:
    """Run all `early_checks`. Unless the command is a dry run or a simulation, they also download the model.

    Raises:
        ValueError, OSError: a check fails.
    """
    for check in early_checks(args):
        check()


def early_checks(args: Namespace) -> Iterator[partial[object]]:
    """Yield the checks of a command line, as functions that raise ValueError or OSError. The checks are independent.

    For a recipe from outside this package, check only the paths and the model in the command line: the recipe may have
    other settings, and may set paths itself.
    """
    given, ours, runs = _read_settings(args), ":" not in args.recipe, not (args.dry_run or args.simulate_gpu)
    if ours:
        yield partial(find, args.recipe)
        yield from (partial(setting_names.check_names, [name]) for name in given)
        yield partial(_warn_about_variables, given)
        yield partial(_check_required, args, given, runs=runs)
    names = {"dataset.path (--data-path)": args.data_path} | {name: given[name] for name in _DATA if name in given}
    if not args.simulate_gpu:
        yield from (
            partial(check_data_paths, {name: path}, any_folder=not ours)
            for name, path in names.items()
            if isinstance(path, str)
        )
        if args.pretrained_checkpoint is not None:
            yield partial(_check_weights, Path(args.pretrained_checkpoint))
    if args.hf_model is not None:
        others = args.from_scratch or args.pretrained_checkpoint or "checkpoint.pretrained_checkpoint" in given
        yield partial(check_model, args, downloads=runs, has_first_weights=ours and not (args.simulate_gpu or others))


def _read_settings(args: Namespace) -> dict[str, Any]:
    """Return the settings in YAML files and arguments, by full name. The value of an argument is returned as text."""
    from qwen3vl_bridge.core.files import check_yaml

    import yaml

    given = {}
    for file in args.config:
        if not Path(file).is_file():
            raise ValueError(f"--config is {file}, expected a YAML file that exists")
        given |= setting_names.flatten_settings(yaml.safe_load(check_yaml(Path(file))))
    return given | {name: value.strip("'\"") for name, _, value in (word.partition("=") for word in args.settings)}


def _warn_about_variables(given: Collection[str]) -> None:
    """Warn about environment variables that other trainers read, unless the command sets the matching setting."""
    warning = describe_ignored_variables(os.environ, lambda name, value: None if name in given else f"{name}={value}")
    is_second_start = "FAKE_GPU_LOG" in os.environ  # a simulation starts the command again, with this variable
    if warning and not is_second_start and os.environ.get("RANK", "0") == "0":
        show(warning, error=True)


def _check_required(args: Namespace, given: Collection[str], *, runs: bool) -> None:
    """Raise ValueError if a run has no folder or no data, or if a recipe cannot be simulated.

    `given` are the names of all settings in the command line. `runs` is False for a dry run and a simulation.
    """
    if runs and args.save is None and "checkpoint.save" not in given:
        raise ValueError("checkpoint.save is None, expected a folder used only by this run: give --save")
    if args.simulate_gpu and "_dist_train_" in args.recipe and "model.dist_train.use_dist_train" not in given:
        raise ValueError(
            f"--simulate-gpu does not support separate vision ranks, which {args.recipe} has: use another recipe"
        )
    if runs and not (args.data_path or any(name in given for name in (*_DATA, "dataset.mixture"))):
        raise ValueError(
            "dataset.path is None: give --data-path, a folder with train.jsonl or a file of conversations; or "
            "set dataset.train_path, or dataset.mixture to mix several data sets"
        )


def _check_weights(folder: Path) -> None:
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
    from qwen3vl_bridge.peft.stored_adapters import check_complete_model

    if not folder.is_dir():
        raise ValueError(
            f"--pretrained-checkpoint is {folder}, expected a folder that exists, with a Megatron checkpoint or a "
            "Hugging Face model; for a model of the hub, use --hf-model"
        )
    if (folder / "config.json").is_file():
        ModelConfig(folder)
        _check_files(folder)
    else:
        check_complete_model(find_iteration(folder))


def _check_files(folder: Path) -> None:
    """Check that a model's weight files exist, are not damaged, and contain the tensors that config.json requires.

    Only the first rank reads the files. If it fails, torchrun ends the other ranks.
    """
    from qwen3vl_bridge.checkpoint.stored_models import open_model

    if os.environ.get("RANK", "0") == "0":
        open_model(folder, trust_remote_code=True).check()  # only headers are read; no code of the model runs


def check_model(args: Namespace, *, downloads: bool, has_first_weights: bool) -> None:
    """Find the model of --hf-model; raise ValueError if the recipe, or the run in --save, is for another kind of model.

    Args:
        args: the command line. `hf_model` is replaced by the folder of a downloaded model.
        downloads: download the weights of a model from the hub.
        has_first_weights: the run starts from this model's weights, so check them as well.
    """
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model, has_weights
    from qwen3vl_bridge.checkpoint.formats.megatron import is_megatron_checkpoint
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig

    local = Path(args.hf_model).is_dir()
    folder = Path(args.hf_model) if local else find_model(args.hf_model, weights=downloads)
    config = ModelConfig(folder)
    if has_first_weights and (downloads or has_weights(folder)):
        _check_files(folder)
    if downloads and not local:
        args.hf_model = str(folder)
    if downloads and args.save is not None and is_megatron_checkpoint(args.save):
        _check_continued_run(args, config)
    found = config.family.name, bool(config.dimensions.indices["moe_layers"])
    intended = _parse_recipe_name(args.recipe)
    if intended is None or found[0] not in _FAMILIES.values() or (found[0] == intended[0] and found[1] >= intended[1]):
        return
    fitting = [name for name in recipes() if _parse_recipe_name(name) == (*found, intended[2])]
    raise ValueError(
        f"{args.recipe} is a recipe for {describe_model_kind(*intended[:2])}, and {args.hf_model} is "
        f"{describe_model_kind(*found)}: "
        + (f"use {' or '.join(fitting[:4])}" if fitting else "--list shows all recipes")
    )


def _check_continued_run(args: Namespace, config: ModelConfig) -> None:
    """Raise ValueError if the run in --save trains a model with other dimensions than those in `config`."""
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
    from qwen3vl_bridge.checkpoint.stored_models import own_config

    folder = find_iteration(args.save)
    if (saved := own_config(folder)) is None:
        return
    expected, found = saved.dimensions, config.dimensions
    differences = [
        f"{name} is {found.sizes[name]}, expected {expected.sizes.get(name)}"
        for name in found.sizes
        if name != "vocab" and expected.sizes.get(name) != found.sizes[name]
    ]
    if expected.family != found.family:
        differences = [f"the family is {found.family}, expected {expected.family}"]
    if differences:
        raise ValueError(
            f"--save is {args.save}, which contains the run of another model than {args.hf_model}: "
            f"{'; '.join(differences)}. Use another folder, or the model of {folder}"
        )


def _parse_recipe_name(recipe: str) -> tuple[str, bool, str] | None:
    """Return (family, whether the model has experts, kind of training) from a recipe name; None for other names."""
    if (found := _RECIPE.fullmatch(recipe)) is None:
        return None
    family, experts, has_experts, kind = found.groups()
    return _FAMILIES[family], bool(experts or has_experts), kind
