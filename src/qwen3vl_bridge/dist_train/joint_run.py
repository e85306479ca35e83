"""A run with separate vision and language ranks in Megatron-Bridge's loop: batches, gradients, norm and evaluation of
both modules together, and checkpoints of one model.

Megatron-Bridge's set-up gives each module a separate optimizer. Without this file, the tower's gradients would not be
divided by the tokens of the batch, which language ranks count, and each module would be clipped by its own norm.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.settings import replicas_of, trains_vision
from qwen3vl_bridge.parallel.collectives import broadcast_number, broadcast_object, gather_objects, sum_numbers

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

_STREAMS, _SPLIT = "qwen3vl_vision_batches", "qwen3vl_split"


class Modules(Callback):
    """Joins the two modules in Megatron-Bridge's loop."""

    def on_train_start(self, context: CallbackContext) -> None:
        """Before the first step, after the loop has set its own functions."""
        sharded = context.state.cfg.optimizer.use_distributed_optimizer
        join_modules(get_model_config(context.model[0]), context.optimizer, sharded=sharded)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Count the batch's samples; right after this Megatron-Bridge adds those of its module's replicas. Raises
        ValueError if the vision ranks sent other images or videos than expected in this step.
        """
        for chunk in context.model:
            module = get_attr_wrapped_model(chunk, "pg_collection", return_model_obj=True)
            if hasattr(module, "headers"):  # on a language rank
                module.headers.check_all()
        groups, train = get_attr_wrapped_model(context.model[0], "pg_collection"), context.state.cfg.train
        added = groups.dp.size() * train.micro_batch_size * get_num_microbatches()
        context.state.train_state.consumed_train_samples += get_current_running_global_batch_size() - added

    def on_eval_start(self, context: CallbackContext) -> None:
        """Vision ranks read validation data from now on."""
        setattr(context.state, _SPLIT, "valid")

    def on_test_start(self, context: CallbackContext) -> None:
        """Vision ranks read rows of the test data from now on."""
        setattr(context.state, _SPLIT, "test")

    def on_eval_end(self, context: CallbackContext) -> None:
        """Vision ranks read rows of the training data again."""
        setattr(context.state, _SPLIT, "train")

    on_test_end = on_eval_end


def join_modules(provider: VisionLanguageProvider, optimizer: MegatronOptimizer, *, sharded: bool) -> None:
    """Make steps of both modules those of one model. Every rank calls it, once, with its module's optimizer.

    Megatron-Bridge's groups of a module have none over which the norms of sharded (distributed) optimizers could be
    summed, which to megatron-core means all ranks: those norms are of both modules already.
    """
    if not trains_vision(provider):
        for info in provider._p2p_communicator.rank_module_map.values():
            info.bridge_comms_as_src_module = [OneWayBridge(bridge) for bridge in info.bridge_comms_as_src_module]
            info.bridge_comms_as_dest_module = [OneWayBridge(bridge) for bridge in info.bridge_comms_as_dest_module]
    provider.finalize_model_grads_func = finalize_gradients
    if not sharded:
        contributes = torch.distributed.get_rank() in (0, provider.dist_train.vision_world_size)
        optimizer.get_grad_norm = functools.partial(_joint_norm, optimizer.get_grad_norm, contributes=contributes)


def is_split_unjoined(provider: Any) -> bool:
    """Whether a model (of any provider) has separate vision ranks whose gradients nothing divides by the tokens."""
    split = getattr(provider, "dist_train", None)
    return split is not None and split.use_dist_train and provider.finalize_model_grads_func is not finalize_gradients


def finalize_gradients(
    model: list[torch.nn.Module], num_tokens: Tensor | None = None, *, force_all_reduce: bool | None = False, **_: Any
) -> None:
    """Like megatron-core's `finalize_model_grads`; vision ranks divide by the tokens that language ranks count.

    A function of the module, without additional arguments, because its name is saved with the run's configuration.
    `num_tokens` is changed to those of the whole batch.
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
    """The norm of both modules' gradients, of which one rank of each contributes its module's.

    As in megatron-core, a tensor on the device if Transformer Engine clips by it, else a number.
    """
    norm = own()
    joint = sum_numbers(0.0 if norm is None or not contributes else norm**2).sqrt()
    return joint.to(norm) if isinstance(norm, Tensor) else joint.item()


class OneWayBridge:
    """megatron-core's bridge between modules, without sending gradients back, for a tower that is not trained."""

    def __init__(self, bridge: BridgeCommunicator) -> None:
        self.src_module_name, self.dest_module_name = bridge.src_module_name, bridge.dest_module_name
        self.send_forward = self.send_forward_recv_backward = bridge.send_forward
        self.recv_forward, self.send_backward_recv_forward = bridge.recv_forward, lambda _: bridge.recv_forward()
        self.send_backward, self.recv_backward = lambda _: None, lambda: None


def replicas_read(provider: VisionLanguageProvider, groups: ProcessGroupCollection) -> tuple[Sequence[int], int]:
    """The data-parallel replicas whose batches this rank reads, and the number of replicas."""
    if provider.add_encoder and provider.add_decoder:
        return (groups.dp.rank(),), groups.dp.size()
    replicas, own = replicas_of(provider), groups.dp.rank()
    return ((own,) if provider.add_decoder else replicas.language_replicas_of(own)), replicas.language


def next_vision_batch(state: GlobalState, given: Iterator[Any], groups: ProcessGroupCollection) -> tuple:
    """The next microbatch of each language replica that a vision rank encodes for.

    Megatron-Bridge's loop assigns rows by the tower's own replicas; if those are as many as the language model's, they
    read the same rows. Otherwise its iterator is not used, and rows are read from the run's position. A script with its
    own iterator yields tuples, with a microbatch of each replica.
    """
    replicas = replicas_of(state.cfg.model)
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
    """The streams of a split, one for each replica, starting where Megatron-Bridge's loader of it does."""
    cfg, done = state.cfg, state.train_state
    read, size = replicas_read(cfg.model, groups)
    rows = cfg.dataset.shared_by(1)
    micro = cfg.train.micro_batch_size if split == "train" else cfg.validation.eval_micro_batch_size
    streams = [rows.stream(split, dp_rank=rank, dp_size=size, micro_batch_size=micro) for rank in read]
    validated = 0 if cfg.validation.skip_train else done.consumed_valid_samples
    row = {"train": done.consumed_train_samples, "valid": validated, "test": 0}[split]
    for stream in streams:
        stream.load_state_dict(stream.state_dict() | {"row": row})
    return streams


def evaluate_both_modules(evaluate: Callable[..., Any], state: GlobalState, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron-Bridge's `evaluate` with a communicator between modules, which its loop does not pass: each rank
    would evaluate its module by itself. Unchanged for other runs.
    """
    provider = state.cfg.model
    if isinstance(provider, VisionLanguageProvider) and provider.dist_train.use_dist_train:
        groups = copy.copy(provider._pg_collection)
        # On language ranks Megatron-Bridge asks the groups of one module for those of the language model.
        groups.get_language_model_collection = lambda: provider._pg_collection
        kwargs["p2p_communicator"], kwargs["pg_collection"] = provider._p2p_communicator, groups
    return evaluate(state, *args, **kwargs)


def as_one_model[Context: (CheckpointSaveContext, CheckpointLoadContext)](ctx: Context) -> Context:
    """Megatron-Bridge's context of a rank's module, whose part of a complete model's checkpoint it saves or loads.

    Names of tensors are unique over both modules, so a run can continue with another number of ranks, or without
    modules. Other state is taken from the first rank, with two exceptions. Random states are stored by a rank's index
    in its module; the tower's get a separate name. And an optimizer without parameters, such as that of experts on
    vision ranks, has no state dict; that of the other module is used.
    """
    provider = ctx.state.cfg.model
    changes: dict[str, Any] = {} if provider.add_decoder else {"module_name": "vision_model"}
    if ctx.optimizer is not None:
        changes["optimizer"] = _JointOptimizer(ctx.optimizer, provider)
    return dataclasses.replace(ctx, **changes)


class _JointOptimizer:
    """The optimizer of one module's ranks: state dicts of the optimizers in its chain that have parameters. State other
    than tensors, such as steps, is merged from both modules. Every rank creates this at the same time.
    """

    is_stub_optimizer = False  # Megatron-Bridge skips an optimizer without any parameters

    def __init__(self, optimizer: MegatronOptimizer, provider: VisionLanguageProvider) -> None:
        self._optimizer = optimizer
        self._chain = getattr(optimizer, "chained_optimizers", [optimizer])
        self._first_language = provider.dist_train.vision_world_size
        here = {i for i, part in enumerate(self._chain) if any(group["params"] for group in part.param_groups)}
        # A rank's part of a distributed optimizer may lack parameters that its module has.
        heard = gather_objects((provider.add_decoder, here))
        self._own = sorted(set().union(*(there for module, there in heard if module == provider.add_decoder)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def sharded_state_dict(self, model: ShardedStateDict, is_loading: bool = False, **kwargs: Any) -> ShardedStateDict:
        """By index in the chain, unless it has only one optimizer; a collective call."""
        own = {i: self._chain[i].sharded_state_dict(model, is_loading, **kwargs) for i in self._own}
        if not is_loading:
            _, lasting = extract_nonpersistent(own)
            sharded, common = extract_sharded_base(lasting)
            common = _merged(broadcast_object(common), broadcast_object(common, self._first_language))
            own = _merged(common, sharded)
        return own if len(self._chain) > 1 else own.get(0, {})

    def load_state_dict(self, state: dict) -> None:
        """Load this rank's part of the whole model's state, which has the structure of `sharded_state_dict`."""
        for i in self._own:
            self._chain[i].load_state_dict(state[i] if len(self._chain) > 1 else state)


def _merged(below: Any, above: Any) -> Any:
    """Two nested structures as one; for entries in both, the value of `above` is used."""
    if isinstance(below, list) and isinstance(above, list) and len(below) == len(above):
        return [_merged(*both) for both in zip(below, above, strict=True)]
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below[key], value) if key in below else value for key, value in above.items()}
