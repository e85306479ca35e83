"""First weights in Megatron-Bridge's own loop, by the loader of the small one.

What lives here: where in Megatron-Bridge's set-up they are read, and what keeps it from reading them again. What may
not: reading them (`pretrained.py`).

Megatron-Bridge reads them into the model that is wrapped already, in the format that the run saves in; Hugging Face
weights do not get into Megatron-FSDP's shards so. Here they are read before the model is wrapped, in any format. Two
seams of Megatron-Bridge serve: the provider's hooks before wrapping, and its checkpoint manager, which its set-up asks
to load where a run has a checkpoint or first weights.
"""

from __future__ import annotations

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.parallel import tell_all
from qwen3vl_bridge.training.pretrained import Pretrained
from qwen3vl_bridge.training.together import is_first, together

import torch
from megatron.bridge.training.checkpointing import (
    CheckpointLoadContext,
    DefaultCheckpointManager,
    _has_global_non_persistent_checkpoint,
)
from megatron.bridge.training.config import CheckpointConfig, ConfigContainer
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists, is_hf_checkpoint_dir

Chunks = list[torch.nn.Module]


class FirstWeights:
    """A hook of a provider: reads a run's first weights into its chunks before they are wrapped.

    Where the run trains adapters they are put in too. Megatron-Bridge's own hook for that comes later, and would read
    the weights in one format alone; it does nothing where `cfg.peft` is None, which is so from here until the model is
    wrapped.

    Attributes:
        cfg: the run's configuration.
        peft: its adapters, while the configuration has none.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        self.cfg = cfg
        self.peft = None

    def __deepcopy__(self, memo: dict) -> FirstWeights:
        """Itself: layers copy their provider, and the whole run's configuration has no part in that."""
        return self

    def __call__(self, chunks: Chunks) -> Chunks:
        """Fill this rank's chunks, unless the run goes on from a checkpoint of its own that has all weights.

        Args:
            chunks: bare, on any device and in any precision.

        Raises:
            CheckpointError: weights that are not there or don't fit.
        """
        cfg = self.cfg
        peft = cfg.peft or self.peft  # ours already where a set-up that failed is repeated
        if peft is None and has_checkpoint(cfg.checkpoint):
            return chunks
        with together():
            _refuse_meta_device(chunks)
            pretrained = Pretrained.find(cfg.checkpoint.pretrained_checkpoint)
            pretrained.check(cfg.model)
        pretrained.load(chunks, cfg.model._pg_collection)
        if peft is not None:
            chunks = peft(chunks, training=True)
            peft.set_params_to_save(chunks)
            self.peft, cfg.peft = peft, None
        return chunks

    def after(self, chunks: Chunks) -> Chunks:
        """A hook for when chunks are wrapped: the configuration has its adapters again."""
        self.give_back()
        return chunks

    def give_back(self) -> None:
        """Let the configuration have its adapters, where this has them."""
        if self.peft is not None:
            self.cfg.peft, self.peft = self.peft, None


class FirstWeightsManager(DefaultCheckpointManager):
    """Megatron-Bridge's checkpoint manager, which does not load what `FirstWeights` has."""

    def load(self, ctx: CheckpointLoadContext) -> tuple[int, int]:
        """Load the run's own checkpoint, where it has one.

        Args:
            ctx: Megatron-Bridge's.

        Returns:
            The step to go on from, and the operations done so far.
        """
        if has_checkpoint(self.checkpoint_config) or "local_checkpoint_manager" in self.checkpointing_context:
            return super().load(ctx)
        return 0, 0


MANAGER = f"{FirstWeightsManager.__module__}.{FirstWeightsManager.__name__}"


def has_checkpoint(settings: CheckpointConfig) -> bool:
    """Whether a run has a checkpoint of its own to go on from, as Megatron-Bridge sees it. Every rank calls this."""
    found = False
    with together():
        if is_first():
            found = (
                checkpoint_exists(settings.load)
                or is_hf_checkpoint_dir(settings.load)  # which Megatron-Bridge then refuses
                or _has_global_non_persistent_checkpoint(settings.load, settings)
            )
    return tell_all(found)


def read_first_weights(cfg: ConfigContainer) -> None:
    """Let Megatron-Bridge's set-up read a run's first weights by our loader; nothing where it has none.

    A checkpoint manager of the user's own is left alone, and loads them itself.

    Args:
        cfg: changed in place; a second call changes nothing more.
    """
    leave_first_weights(cfg)
    settings = cfg.checkpoint
    if settings.pretrained_checkpoint is None or settings.custom_manager_class is not None:
        return
    settings.custom_manager_class = MANAGER
    hook = FirstWeights(cfg)
    cfg.model.register_pre_wrap_hook(hook)
    cfg.model.register_post_wrap_hook(hook.after)


def leave_first_weights(cfg: ConfigContainer) -> None:
    """Undo `read_first_weights`, for a loop that reads them itself.

    Args:
        cfg: changed in place.
    """
    if cfg.checkpoint.custom_manager_class == MANAGER:
        cfg.checkpoint.custom_manager_class = None
    hooks = getattr(cfg.model, "_pre_wrap_hooks", ())
    for hook in [hook for hook in hooks if isinstance(hook, FirstWeights)]:
        cfg.model._pre_wrap_hooks.remove(hook)
        cfg.model._post_wrap_hooks.remove(hook.after)
        hook.give_back()


def _refuse_meta_device(chunks: Chunks) -> None:
    if any(parameter.is_meta for chunk in chunks for parameter in chunk.parameters()):
        raise CheckpointError(
            "model.init_model_with_meta_device is True, expected False: parameters have no memory then that "
            "checkpoint.pretrained_checkpoint could be read into before they are sharded"
        )
