"""Train the vision and the language module on separate ranks, together in Megatron-Bridge's loop.

Megatron-Bridge gives each module a separate optimizer. This file divides the gradients of both by the number of tokens,
which only language ranks count, and clips both by their joint norm. It also lets vision ranks read the batches they
encode, joins the modules in evaluation, and saves both in the checkpoint of one model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from qwen3vl_bridge.config.fields import dist_train_replicas, trains_vision
from qwen3vl_bridge.core.collectives import broadcast_number, broadcast_object, gather_objects, sum_number_over_ranks
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.upstream.joint_evaluation import add_arguments_of_evaluation
from qwen3vl_bridge.upstream.provider_groups import p2p_communicator, provider_groups

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.checkpointing import CheckpointLoadContext, CheckpointSaveContext
from megatron.bridge.training.state import GlobalState
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import extract_nonpersistent, extract_sharded_base
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size, get_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

# Attributes of Megatron-Bridge's state, in which vision ranks keep their data.
_STREAMS, _SPLIT = "qwen3vl_vision_batches", "qwen3vl_split"


class JoinModules(Callback):
    """Callback that trains and evaluates the vision and the language module together in Megatron-Bridge's loop."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Make evaluations use the communicator between the modules, also in a run that does not train."""
        add_arguments_of_evaluation(evaluation_arguments)

    def on_train_start(self, context: CallbackContext) -> None:
        """Call `join_modules` before the first step, after the loop has set its own functions."""
        add_arguments_of_evaluation(evaluation_arguments)  # a script with its own set-up skips `on_data_init_start`
        sharded = context.state.cfg.optimizer.use_distributed_optimizer
        join_modules(get_model_config(context.model[0]), context.optimizer, sharded=sharded)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Check the images received in this step, and correct `consumed_train_samples`.

        Megatron-Bridge has added the samples of this rank's module, computed from its number of data-parallel ranks.
        This method replaces that number by the global batch size.

        Raises:
            ValueError: the vision ranks sent other images or videos than expected in this step.
        """
        for chunk in context.model:
            module = get_attr_wrapped_model(chunk, "pg_collection", return_model_obj=True)
            if hasattr(module, "headers"):  # on a language rank
                module.headers.check_remaining()
        groups, train = get_attr_wrapped_model(context.model[0], "pg_collection"), context.state.cfg.train
        added = groups.dp.size() * train.micro_batch_size * get_num_microbatches()
        context.state.train_state.consumed_train_samples += get_current_running_global_batch_size() - added

    def on_eval_start(self, context: CallbackContext) -> None:
        """Make vision ranks read validation data."""
        setattr(context.state, _SPLIT, "valid")

    def on_test_start(self, context: CallbackContext) -> None:
        """Make vision ranks read test data."""
        setattr(context.state, _SPLIT, "test")

    def on_eval_end(self, context: CallbackContext) -> None:
        """Make vision ranks read training data again."""
        setattr(context.state, _SPLIT, "train")

    on_test_end = on_eval_end


def join_modules(provider: VisionLanguageProvider, optimizer: MegatronOptimizer, *, sharded: bool) -> None:
    """Set up the joint scaling of gradients and the joint gradient norm of both modules.

    Every rank must call this once, with the optimizer of its module. If the optimizer is a distributed optimizer
    (`sharded`), its `get_grad_norm` is not changed, because it sums over the ranks of both modules already.
    """
    if not trains_vision(provider):
        for info in p2p_communicator(provider).rank_module_map.values():
            info.bridge_comms_as_src_module = [OneWayBridge(bridge) for bridge in info.bridge_comms_as_src_module]
            info.bridge_comms_as_dest_module = [OneWayBridge(bridge) for bridge in info.bridge_comms_as_dest_module]
    provider.finalize_model_grads_func = finalize_gradients
    if not sharded:
        contributes = torch.distributed.get_rank() in (0, provider.dist_train.vision_world_size)
        optimizer.get_grad_norm = functools.partial(_joint_norm, optimizer.get_grad_norm, contributes=contributes)


def lacks_joint_gradients(provider: Any) -> bool:
    """Return True if a provider has separate vision ranks, but `join_modules` has not been called for it."""
    split = getattr(provider, "dist_train", None)
    return split is not None and split.use_dist_train and provider.finalize_model_grads_func is not finalize_gradients


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, *, force_all_reduce: bool | None = False, **_: Any
) -> None:
    """Finalize gradients as megatron-core does, and divide them by the number of tokens of the global batch.

    Vision ranks get that number from the language ranks. `num_tokens` is the number of tokens on this rank, to which
    language ranks add the tokens of other ranks in place; with None, gradients are not divided.
    """
    provider, groups = get_model_config(model[0]), get_attr_wrapped_model(model[0], "pg_collection")
    counted = num_tokens if provider.add_decoder else None
    finalize_model_grads(model, counted, pg_collection=groups, force_all_reduce=force_all_reduce)
    if num_tokens is None:
        return
    tokens = broadcast_number(num_tokens, provider.dist_train.vision_world_size)
    if not provider.add_decoder:
        for chunk in model:
            chunk.scale_gradients(1.0 / tokens.clamp(min=1))


def _joint_norm(own: Any, *, contributes: bool) -> Tensor | float:
    """Return the joint norm of the gradients of both modules.

    Args:
        own: function that returns the gradient norm of this rank's module.
        contributes: whether to add the norm of this rank's module to the joint norm; True on one rank of each module.
    """
    norm = own()
    joint = sum_number_over_ranks(0.0 if norm is None or not contributes else norm**2).sqrt()
    # As in megatron-core: a tensor on the device if Transformer Engine clips by it, else a number.
    return joint.to(norm) if isinstance(norm, Tensor) else joint.item()


class OneWayBridge:
    """megatron-core's communicator between two modules for a frozen vision tower: no gradients are sent back to it."""

    def __init__(self, bridge: BridgeCommunicator) -> None:
        self.src_module_name, self.dest_module_name = bridge.src_module_name, bridge.dest_module_name
        self.send_forward = self.send_forward_recv_backward = bridge.send_forward
        self.recv_forward, self.send_backward_recv_forward = bridge.recv_forward, lambda _: bridge.recv_forward()
        self.send_backward, self.recv_backward = lambda _: None, lambda: None


def replicas_to_read(provider: VisionLanguageProvider, groups: ProcessGroupCollection) -> tuple[Sequence[int], int]:
    """Return the indices of the data-parallel replicas that this rank reads batches for, and the number of replicas."""
    if provider.add_encoder and provider.add_decoder:
        return (groups.dp.rank(),), groups.dp.size()
    replicas, own = dist_train_replicas(provider), groups.dp.rank()
    return ((own,) if provider.add_decoder else replicas.language_replicas_of(own)), replicas.language


def next_vision_batch(state: GlobalState, given: Iterator[Any], groups: ProcessGroupCollection) -> tuple:
    """Return the next microbatch of each language replica that this vision rank encodes for.

    If both modules have equally many replicas, the microbatch is from Megatron-Bridge's iterator, `given`. Otherwise
    `given` would yield other rows than language ranks read. It is ignored, and this rank reads the rows itself. If a
    script passes its own iterator, it must yield tuples with one microbatch per replica.
    """
    replicas = dist_train_replicas(state.cfg.model)
    if not isinstance(given, RerunDataIterator) or replicas.vision == replicas.language:
        batch = next(given)
        return batch if isinstance(batch, tuple) else (batch,)
    if not hasattr(state, _STREAMS):
        setattr(state, _STREAMS, {})
    streams, split = getattr(state, _STREAMS), getattr(state, _SPLIT, "train")
    if split not in streams:
        streams[split] = _resumed_streams(state, split, groups)
    return tuple(next(stream) for stream in streams[split])


def _resumed_streams(state: GlobalState, split: str, groups: ProcessGroupCollection) -> list[Iterator[Any]]:
    """Return a data stream for each replica that this rank encodes for, at the position of Megatron-Bridge's loader."""
    cfg, progress = state.cfg, state.train_state
    replicas, size = replicas_to_read(cfg.model, groups)
    rows = cfg.dataset.for_context_parallel(1)
    micro = cfg.train.micro_batch_size if split == "train" else cfg.validation.eval_micro_batch_size
    streams = [rows.stream(split, dp_rank=rank, dp_size=size, micro_batch_size=micro) for rank in replicas]
    validated = 0 if cfg.validation.skip_train else progress.consumed_valid_samples
    row = {"train": progress.consumed_train_samples, "valid": validated, "test": 0}[split]
    for stream in streams:
        stream.load_state_dict(stream.state_dict() | {"row": row})
    return streams


def evaluation_arguments(state: GlobalState) -> dict[str, Any]:
    """Return additional arguments of Megatron-Bridge's `evaluate` for a run with separate vision ranks.

    The arguments are the communicator between the two modules, and the process groups of this rank's module. The dict
    is empty if the run has no separate vision ranks.
    """
    provider = state.cfg.model
    if not (isinstance(provider, VisionLanguageProvider) and provider.dist_train.use_dist_train):
        return {}
    own = provider_groups(provider)
    groups = copy.copy(own)
    # On language ranks Megatron-Bridge calls this method for the groups of the language model.
    groups.get_language_model_collection = lambda: own
    return {"p2p_communicator": p2p_communicator(provider), "pg_collection": groups}


def merge_split_model[Context: (CheckpointSaveContext, CheckpointLoadContext)](ctx: Context) -> Context:
    """Return a copy of a save or load context with which both modules save or load one complete checkpoint.

    Names of tensors are unique over both modules, so a run can continue with another number of ranks, or without
    separate vision ranks. State other than tensors is saved by the first rank, with two exceptions:

    - Random states are stored by the index of a rank in its module. The states of vision ranks get a separate name.
    - An optimizer without parameters has no state dict, for example the optimizer of experts on vision ranks. The state
      dict of the other module is used.
    """
    provider = ctx.state.cfg.model
    changes: dict[str, Any] = {} if provider.add_decoder else {"module_name": "vision_model"}
    if ctx.optimizer is not None:
        changes["optimizer"] = _JointOptimizer(ctx.optimizer, provider)
    return dataclasses.replace(ctx, **changes)


class _JointOptimizer:
    """Wrap the optimizer of one module. Its state dicts contain only chained optimizers that have parameters.

    State other than tensors, such as steps, is merged from both modules. All ranks must create this object together.
    """

    is_stub_optimizer = False  # Megatron-Bridge skips an optimizer without any parameters

    def __init__(self, optimizer: MegatronOptimizer, provider: VisionLanguageProvider) -> None:
        self._optimizer = optimizer
        self._chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._first_language = provider.dist_train.vision_world_size
        local = {i for i, member in enumerate(self._chain) if any(group["params"] for group in member.param_groups)}
        # A rank's shard of a distributed optimizer may lack parameters that its module has.
        gathered = gather_objects((provider.add_decoder, local))
        self._own = sorted(set().union(*(indices for module, indices in gathered if module == provider.add_decoder)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """Return the state dicts of chained optimizers by index, or of a single optimizer. All ranks must call this."""
        own = {i: self._chain[i].sharded_state_dict(model, is_loading, **kwargs) for i in self._own}
        if not is_loading:
            _, lasting = extract_nonpersistent(own)
            sharded, common = extract_sharded_base(lasting)
            common = _merge(broadcast_object(common), broadcast_object(common, self._first_language))
            own = _merge(common, sharded)
        return own if len(self._chain) > 1 else own.get(0, {})

    def load_state_dict(self, state: dict) -> None:
        """Load the state of this rank from a state dict with the structure of `sharded_state_dict`."""
        for i in self._own:
            self._chain[i].load_state_dict(state[i] if len(self._chain) > 1 else state)


def _merge(base: Any, override: Any) -> Any:
    """Merge two nested structures. For an entry that both have, the value of `override` is used."""
    if isinstance(base, list) and isinstance(override, list) and len(base) == len(override):
        return [_merge(*pair) for pair in zip(base, override, strict=True)]
    if not (isinstance(base, dict) and isinstance(override, dict)):
        return override
    return base | {key: _merge(base[key], value) if key in base else value for key, value in override.items()}
