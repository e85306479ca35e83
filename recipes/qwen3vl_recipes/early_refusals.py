"""What `qwen3vl train` refuses before it imports Megatron, which takes ten seconds and more: names and paths."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.data.sources import expect_data
from qwen3vl_bridge.models.rules import unread_variables
from qwen3vl_bridge.terminal import show

from qwen3vl_recipes import setting_names
from qwen3vl_recipes.paths import TITLES, kind_of_model
from qwen3vl_recipes.registry import find, recipes

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig

# A recipe's name: the model's family, whether it has experts, and the kind of training.
_RECIPE = re.compile(r"(qwen35?)_vl_(?:\d+[bm](_a\d+b)?_|(proxy)_)?(\w+)_config")
_FAMILIES = {"qwen3": "qwen3_vl", "qwen35": "qwen3_5"}
_DATA = ("dataset.path", "dataset.train_path", "dataset.valid_path", "dataset.test_path")


def refuse_early(args: Namespace) -> None:
    """Check the words of the command line as far as they tell by themselves, and find the model, which a run downloads.

    Of a recipe that is not of this package only paths are checked: it may have other settings, and set them itself.

    Raises:
        ValueError, OSError: what cannot work.
    """
    from qwen3vl_bridge.data.sources.opening import expect_table, splits_in

    given, ours, runs = _given(args), ":" not in args.recipe, not (args.dry_run or args.rehearse)
    if ours:
        find(args.recipe)
        setting_names.refuse_unknown(given)
        _warn_of_environment(given)
    if ours and runs and args.save is None and "checkpoint.save" not in given:
        raise ValueError("checkpoint.save is None, expected a folder used only by this run: give --save")
    if ours and args.rehearse and "_dist_train_" in args.recipe and "model.dist_train.use_dist_train" not in given:
        raise ValueError(f"{args.recipe} has separate vision ranks, which cannot be rehearsed: expected another recipe")
    names = {"dataset.path (--data-path)": args.data_path} | {name: given[name] for name in _DATA if name in given}
    for name, path in names.items():
        if runs and isinstance(path, str):
            expect_data(name, path)
            if ours and Path(path).is_dir() and splits_in(path) == {"train": path}:
                expect_table(Path(path))
    if ours and runs and not (args.data_path or {*_DATA, "dataset.mixture"} & given.keys()):
        raise ValueError(
            "dataset.path is None: give --data-path, a folder with train.jsonl or a file of conversations; or "
            "dataset.train_path, or dataset.mixture with several data sets"
        )
    if runs and (weights := args.pretrained_checkpoint) is not None:
        _check_weights(Path(weights))
    if args.hf_model is not None:
        others = args.from_scratch or args.pretrained_checkpoint or "checkpoint.pretrained_checkpoint" in given
        _check_model(args, downloads=runs, begins_with_it=ours and not (args.rehearse or others))


def _given(args: Namespace) -> dict[str, Any]:
    """The settings of the command line and its files, by their full names; a word's value is its text."""
    from qwen3vl_bridge.io.parsing import check_yaml

    import yaml

    given = {}
    for file in args.config:
        if not Path(file).is_file():
            raise ValueError(f"--config is {file}, expected a YAML file that exists")
        given |= _flat(yaml.safe_load(check_yaml(Path(file))))
    return given | {name: value.strip("'\"") for name, _, value in (word.partition("=") for word in args.settings)}


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict) or not settings:
        return {prefix: settings} if prefix else {}
    return {
        name: value
        for key, inner in settings.items()
        for name, value in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def _warn_of_environment(given: Collection[str]) -> None:
    """Of variables that other trainers read, unless settings are given for the same; in one process of the command."""
    warning = unread_variables(os.environ, lambda name, value: None if name in given else f"{name}={value}")
    is_again = "FAKE_GPU_LOG" in os.environ  # a rehearsal starts the command a second time, with this
    if warning and not is_again and os.environ.get("RANK", "0") == "0":
        show(warning, error=True)


def _check_weights(folder: Path) -> None:
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
    from qwen3vl_bridge.peft.stored_adapters import refuse_adapters_alone

    if not folder.is_dir():
        raise ValueError(
            f"--pretrained-checkpoint is {folder}, expected a folder that exists, with a Megatron checkpoint or a "
            "Hugging Face model; a model of the hub is given by --hf-model"
        )
    if (folder / "config.json").is_file():
        ModelConfig(folder)
        _check_files(folder)
    else:
        refuse_adapters_alone(find_iteration(folder))


def _check_files(folder: Path) -> None:
    """Refuse a model of which files are missing or damaged, or have other tensors than its config.json says.

    The first rank reads the header of each file; under torchrun the others end with it.
    """
    from qwen3vl_bridge.checkpoint.stored_models import open_model

    if os.environ.get("RANK", "0") == "0":
        open_model(folder, trust_remote_code=True).check()  # no code is run here


def _check_model(args: Namespace, *, downloads: bool, begins_with_it: bool) -> None:
    """Find the model, and refuse one that the recipe is not for."""
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model, has_weights
    from qwen3vl_bridge.checkpoint.formats.megatron import is_megatron_checkpoint
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig

    local = Path(args.hf_model).is_dir()
    folder = Path(args.hf_model) if local else find_model(args.hf_model, weights=downloads)
    config = ModelConfig(folder)
    if begins_with_it and (downloads or has_weights(folder)):
        _check_files(folder)
    if downloads and not local:
        args.hf_model = str(folder)
    if downloads and args.save is not None and is_megatron_checkpoint(args.save):
        _check_run(args, config)
    found = config.family.name, bool(config.dimensions.indices["moe_layers"])
    meant = _meant_for(args.recipe)
    if meant is None or found[0] not in TITLES or (found[0] == meant[0] and found[1] >= meant[1]):
        return
    fitting = [name for name in recipes() if _meant_for(name) == (*found, meant[2])]
    said = kind_of_model(*meant[:2]), kind_of_model(*found)
    raise ValueError(
        f"{args.recipe} is a recipe for {said[0]}, and {args.hf_model} is {said[1]}: "
        + (f"use {' or '.join(fitting[:4])}" if fitting else "--list shows the recipes for it")
    )


def _check_run(args: Namespace, config: ModelConfig) -> None:
    """Refuse to continue a run of a model of other sizes, by the configuration in its checkpoint if there is one."""
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
    from qwen3vl_bridge.checkpoint.stored_models import own_config

    folder = find_iteration(args.save)
    if (own := own_config(folder)) is None:
        return
    theirs, ours = own.dimensions, config.dimensions
    differ = [
        f"{name} is {ours.sizes[name]}, expected {theirs.sizes.get(name)}"
        for name in ours.sizes
        if name != "vocab" and theirs.sizes.get(name) != ours.sizes[name]
    ]
    if theirs.family != ours.family:
        differ = [f"the family is {ours.family}, expected {theirs.family}"]
    if differ:
        raise ValueError(
            f"--save is {args.save}, where the run of another model would be continued than {args.hf_model}: "
            f"{'; '.join(differ)}. Give another folder, or the model of {folder}"
        )


def _meant_for(recipe: str) -> tuple[str, bool, str] | None:
    """A recipe's family, whether it has experts, and the kind of training, by its name."""
    if (found := _RECIPE.fullmatch(recipe)) is None:
        return None
    family, experts, proxy, kind = found.groups()
    return _FAMILIES[family], bool(experts or proxy), kind
