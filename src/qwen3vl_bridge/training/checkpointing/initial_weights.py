"""Initial weights in Megatron-Bridge's loop, read by our loader.

What lives here: at which point of Megatron-Bridge's set-up they are read. What may not: reading them
(`weight_loading.py`), preventing Megatron-Bridge from reading them again (`training/checkpoint_manager.py`).

Megatron-Bridge reads them into the wrapped model, in the format in which the run saves; Hugging Face weights cannot be
read into Megatron-FSDP's shards this way. Here they are read before the model is wrapped, in any format, by the
provider's hooks. The model is whole on each rank then: on the GPU, or with `model.init_model_with_meta_device` on the
host, from where Megatron-FSDP moves one group of parameters after the other.
"""

from __future__ import annotations

from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.training.checkpoint_manager import has_checkpoint, is_managed
from qwen3vl_bridge.training.checkpointing.all_or_none import all_or_none
from qwen3vl_bridge.training.checkpointing.weight_loading import Pretrained

import torch
from megatron.bridge.training.config import ConfigContainer

Chunks = list[torch.nn.Module]


class InitialWeights:
    """A hook of a provider: reads a run's initial weights into its chunks before they are wrapped.

    If the run trains adapters they are inserted too. Megatron-Bridge's own hook for that comes later, and would read
    the weights in only one format; it does nothing if `cfg.peft` is None, which is so from here until the model is
    wrapped.

    Attributes:
        cfg: the run's configuration.
        peft: its adapters, while the configuration has none.
    """

    def __init__(self, cfg: ConfigContainer) -> None:
        self.cfg = cfg
        self.peft = None

    def __deepcopy__(self, memo: dict) -> InitialWeights:
        """Itself: layers copy their provider, and must not copy the whole run's configuration."""
        return self

    def __call__(self, chunks: Chunks) -> Chunks:
        """Fill this rank's chunks, unless the run resumes from a checkpoint of its own that has all weights.

        Args:
            chunks: unwrapped, on any device and in any precision.

        Raises:
            CheckpointError: weights that are missing or do not fit.
        """
        cfg = self.cfg
        peft = cfg.peft or self.peft  # already ours if a failed set-up is repeated
        with all_or_none():
            for chunk in chunks:
                _allocate_on_host(chunk)
        if peft is None and has_checkpoint(cfg.checkpoint):
            return chunks
        with all_or_none():
            pretrained = Pretrained.find(cfg.checkpoint.pretrained_checkpoint)
            pretrained.check(cfg.model)
        pretrained.load(chunks, cfg.model._pg_collection)
        if peft is not None:
            chunks = peft(chunks, training=True)
            peft.set_params_to_save(chunks)
            self.peft, cfg.peft = peft, None
        return chunks

    def after(self, chunks: Chunks) -> Chunks:
        """A hook for when chunks are wrapped: restores the configuration's adapters."""
        self.restore_peft()
        return chunks

    def restore_peft(self) -> None:
        """Restore the configuration's adapters, if this hook has them."""
        if self.peft is not None:
            self.cfg.peft, self.peft = self.peft, None


def read_initial_weights(cfg: ConfigContainer) -> None:
    """Make Megatron-Bridge's set-up read a run's initial weights by our loader; no effect without initial weights.

    A user's own checkpoint manager is kept, and loads them itself.

    Args:
        cfg: changed in place; a second call has no effect.
    """
    _remove_hooks(cfg)
    if cfg.checkpoint.pretrained_checkpoint is None or not is_managed(cfg):
        return
    hook = InitialWeights(cfg)
    cfg.model.register_pre_wrap_hook(hook)
    cfg.model.register_post_wrap_hook(hook.after)


def _remove_hooks(cfg: ConfigContainer) -> None:
    """Remove the hooks of an earlier call."""
    hooks = getattr(cfg.model, "_pre_wrap_hooks", ())
    for hook in [hook for hook in hooks if isinstance(hook, InitialWeights)]:
        cfg.model._pre_wrap_hooks.remove(hook)
        cfg.model._post_wrap_hooks.remove(hook.after)
        hook.restore_peft()


def _allocate_on_host(chunk: torch.nn.Module) -> None:
    """Move parameters from the meta device to the host, with the attributes that megatron-core has set on them.

    Raises:
        CheckpointError: a buffer on the meta device, whose values are unknown.
    """
    if lost := [name for name, buffer in chunk.named_buffers() if buffer.is_meta]:
        raise CheckpointError(
            f"model.init_model_with_meta_device is True, expected False: {', '.join(lost)} would have no values"
        )
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for parameter in chunk.parameters():  # tied parameters once
        if parameter.is_meta:
            data = torch.empty_like(parameter, device="cpu")
            made[parameter] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
            vars(made[parameter]).update(vars(parameter))
    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in made:
                setattr(module, name, made[parameter])
