"""Settings of checkpoints: which ones the small loop follows, and which it refuses.

What lives here: a word on every field of Megatron-Bridge's CheckpointConfig. What may not: following them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron.folder import FORMATS

from megatron.bridge.training.config import CheckpointConfig

FOLLOWED = {
    *("save", "save_interval", "most_recent_k", "save_optim", "save_rng", "ckpt_format", "load"),
    *("load_optim", "load_rng", "finetune", "ckpt_step", "exit_on_missing_checkpoint"),
    *("pretrained_checkpoint",),
}
# How fast another loop writes and reads, or what this one does in any case: tensors that are missing are errors,
# optimizers load at any split, formats are told by the folder, tokenizers travel with the Hugging Face files.
WITHOUT_EFFECT = {
    *("storage_writers_per_rank", "use_persistent_ckpt_worker", "dist_ckpt_workers", "stream_ckpt_dequant"),
    *("async_strategy", "async_write_results_mp_mode", "async_ckpt_cpu_priority", "async_ckpt_io_priority"),
    *("async_ckpt_use_cpu_shm", "fully_parallel_save", "fully_parallel_load"),
    *("ckpt_fully_parallel_load_exchange_algo", "ckpt_assume_constant_structure"),
    *("ckpt_fully_parallel_save_process_group", "ckpt_fully_parallel_load_process_group"),
    *("ckpt_load_validate_sharding_integrity", "strict_fsdp_dtensor_load", "auto_detect_ckpt_format"),
    *("dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient"),
    *("save_tokenizer_assets", "hf_distributed_save", "hf_save_every_n_ranks", "hf_trust_remote_code"),
    *("replication_jump", "replication_factor", "non_persistent_local_ckpt_algo"),
    *("use_tokenizer_model_from_checkpoint_args",),
}
# What is not followed: to be off, or to be unset.
_OFF = (
    *("async_save", "load_main_params_from_ckpt", "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
    *("ckpt_convert_update_legacy_dist_opt_format", "dist_ckpt_save_pre_mcore_014", "replication"),
    *("verify_integrity", "also_save_hf_checkpoint"),
)
_UNSET = (
    *("save_params_interval", "save_activations_interval", "save_tokens_per_expert_interval"),
    *("save_wgrads_interval", "save_dgrads_interval", "save_retain_interval", "non_persistent_save_interval"),
    *("non_persistent_ckpt_type", "non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"),
    *("ckpt_convert_format", "ckpt_convert_save", "custom_manager_class", "hf_source_path"),
)
# The values of it that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_UNSET, (None,)),
    "dist_ckpt_strictness": ("assume_ok_unexpected", "raise_unexpected", "raise_all"),  # always as the last
}


def check_checkpoint_settings(settings: CheckpointConfig) -> None:
    """Refuse what the small loop would ignore.

    Raises:
        ValueError: a setting that asks for something it does not do.
    """
    for name, values in REFUSED.items():
        if (found := getattr(settings, name)) not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"checkpoint.{name} is {found!r}, expected {expected}: the loop for CPUs has no more")
    if settings.save and settings.ckpt_format not in FORMATS:
        raise ValueError(f"checkpoint.ckpt_format is {settings.ckpt_format!r}, expected {' or '.join(FORMATS)}")
    if settings.most_recent_k is not None and settings.most_recent_k == 0:
        raise ValueError("checkpoint.most_recent_k is 0, expected at least 1, or -1 to keep all: a run could not go on")
