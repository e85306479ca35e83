"""Translate names of settings in other trainers (transformers, ms-swift, LLaMA-Factory) to settings of this package.

Error messages about unknown settings, options and environment variables use the translations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping

# Settings of this package -> names in other trainers. If several settings are listed, each gets the value of the other
# trainer's setting, except those with "=", which always get the value after it.
_NAMES = {
    "optimizer.lr": "learning_rate", "optimizer.min_lr": "min_learning_rate",
    "optimizer_config_override_provider.vision_model_lr": "vit_lr",
    "optimizer_config_override_provider.vision_projection_lr": "aligner_lr",
    "train.num_epochs": "num_train_epochs epochs",
    "train.global_batch_size": "gbs batch_size batchsize gradient_accumulation_steps per_device_train_batch_size",
    "train.micro_batch_size": "mbs", "train.train_iters": "max_steps iters steps",
    "scheduler.lr_warmup_iters": "warmup_steps warmup_iters warmup",
    "scheduler.lr_warmup_iters=0 scheduler.lr_warmup_fraction": "warmup_ratio lr_warmup_fraction",
    "scheduler.lr_decay_style": "lr_scheduler_type",
    "optimizer.clip_grad": "max_grad_norm", "checkpoint.save": "output_dir", "checkpoint.save_interval": "save_steps",
    "checkpoint.most_recent_k": "save_total_limit", "validation.eval_interval": "eval_steps",
    "logger.log_interval": "logging_steps",
    "model.seq_length dataset.seq_length": "max_length max_seq_length seq_length seq_len cutoff_len",
    "dataset.valid_path": "val_dataset eval_dataset", "dataset.pack": "packing neat_packing",
    "dataset.vision.image_max_pixels": "max_pixels", "dataset.num_workers": "dataloader_num_workers",
    "model.tensor_model_parallel_size": "tp", "model.pipeline_model_parallel_size": "pp",
    "model.context_parallel_size": "cp", "model.expert_model_parallel_size": "ep",
    "model.expert_tensor_parallel_size": "etp",
    "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1":
        "gradient_checkpointing activation_checkpointing",
    "model.freeze_vision_model": "freeze_vit freeze_vision freeze_vision_tower freeze_vision_encoder freeze_visual",
    "model.freeze_vision_projection": "freeze_aligner freeze_projector", "model.freeze_language_model": "freeze_llm",
    "peft.dim": "lora_rank rank r", "peft.alpha": "lora_alpha", "peft.dropout": "lora_dropout",
    "peft.target_modules": "target_modules lora_target", "rng.seed": "seed",
}  # fmt: skip
_SETTINGS = {alias: settings for settings, aliases in _NAMES.items() for alias in aliases.split()}
_PER_DEVICE = {"per_device_train_batch_size", "gradient_accumulation_steps"}
ALL_LINEAR = ("all", "all-linear")  # other trainers' words for all linear layers; here an empty list selects them

# Name in other trainers -> settings here with their values. The other trainer's value is in parentheses.
_TRANSLATED_VALUES = {
    **dict.fromkeys(("lora", "lora_config"), "peft, which recipes such as qwen3_vl_8b_peft_config set"),
    "truncation_strategy": "dataset.on_long=drop (delete) or dataset.on_long=truncate (right)",
    "loss_scale": "dataset.answers=last (last_round) or dataset.answers=all (default); fp16's is optimizer.loss_scale",
}
# Name in other trainers without a setting here -> what happens instead.
_UNSUPPORTED = {
    "load_from_cache_file": "samples are encoded during training, and not cached; `qwen3vl data pack` packs "
    "them before, for dataset.train_packing"
}

# Setting of this package -> environment variables that ms-swift reads.
_VARIABLES = {
    "dataset.vision.image_min_pixels": "MIN_PIXELS IMAGE_MIN_TOKEN_NUM",
    "dataset.vision.image_max_pixels": "MAX_PIXELS IMAGE_MAX_TOKEN_NUM",
    "dataset.vision.video_min_pixels": "VIDEO_MIN_PIXELS VIDEO_MIN_TOKEN_NUM",
    "dataset.vision.video_max_pixels": "VIDEO_MAX_PIXELS VIDEO_MAX_TOKEN_NUM VIDEO_TOTAL_PIXELS",
    "dataset.vision.video_fps": "FPS", "dataset.vision.video_min_frames": "FPS_MIN_FRAMES",
    "dataset.vision.video_max_frames": "FPS_MAX_FRAMES", "dataset.media_root": "ROOT_IMAGE_DIR",
}  # fmt: skip
_PIXELS_PER_TOKEN = 32 * 32


def target_setting(alias: str) -> str | None:
    """Return the name of this package's setting for another trainer's setting `alias`; None if there is none."""
    return _SETTINGS[alias].partition(" ")[0].partition("=")[0] if alias in _SETTINGS else None


def translate_setting(alias: str, value: str = "") -> str | None:
    """Translate another trainer's setting `alias`, with its value if given, to settings of this package.

    Returns:
        Text such as "optimizer.lr=1e-5"; None for an unknown name.
    """
    if translated := _TRANSLATED_VALUES.get(alias):
        return translated
    if (settings := _SETTINGS.get(alias)) is None:
        return None
    if alias in _PER_DEVICE:
        return f"{settings}{'=...' if value else ''}, which is per device x accumulation x GPUs"
    if settings == "peft.target_modules" and value:
        value = "[]" if value in ALL_LINEAR else f"[{value.strip('[]')}]"
    separator, end = (" ", f"={value}") if value else (" and ", "")
    return separator.join(name if "=" in name else name + end for name in settings.split())


def explain_unsupported(alias: str) -> str | None:
    """Return what to use instead of a setting that only other trainers have; None for all other names."""
    return _UNSUPPORTED.get(alias)


def suggest_settings(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown setting: the settings that the user may have meant.

    Args:
        name: the unknown setting.
        known: full names of all settings.
    """
    field, by_field = name.rpartition(".")[2], {other.rpartition(".")[2]: other for other in known}
    if instead := explain_unsupported(field):
        return f": {instead}"
    if meant := translate_setting(field) or by_field.get(field):
        close = [meant]
    elif name == field:
        close = [by_field[other] for other in difflib.get_close_matches(field, by_field, n=3)]
    else:
        close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def describe_ignored_variables(
    environment: Mapping[str, str], describe: Callable[[str, str], str | None]
) -> str | None:
    """Return a warning about environment variables of ms-swift that have no effect here; None if none is set.

    Args:
        environment: the environment of this process.
        describe: function from (setting, value) to the command-line arguments that set the value. It returns None if
            the present command line sets the setting already.
    """
    found = {}
    for setting, variables in _VARIABLES.items():
        for variable in variables.split():
            if not (value := environment.get(variable)):
                continue
            if variable.startswith("VIDEO_M"):  # a limit per frame in ms-swift, of all frames together here
                value = "..."
            elif variable.endswith("_TOKEN_NUM") and value.isdecimal():
                value = str(int(value) * _PIXELS_PER_TOKEN)
            if argument := describe(setting, value):
                found[variable] = argument
    if not found:
        return None
    note = " (pixels of all frames together)" if any(name.startswith("VIDEO_M") for name in found) else ""
    return (
        f"warning: environment variables without effect: {', '.join(found)}. Set "
        f"{' '.join(dict.fromkeys(found.values()))} instead{note}"
    )
