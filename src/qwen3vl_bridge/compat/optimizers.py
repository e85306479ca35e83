"""Optimizers of megatron-core for these models: Adam and the gradient norm without fused kernels, models with some
float32 parameters, and matrices that Muon splits.

`compat/patches.py` calls the functions named `patch_...` with the module that each docstring names.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam(torch.optim.Optimizer):
    """Adam in plain PyTorch with the state that megatron-core expects, for machines without Transformer Engine and
    Apex.

    megatron-core's sharded optimizers save and load the state that the fused optimizers have: one step count per
    parameter group, and float32 moments for every parameter of a group that has stepped, whether or not it had a
    gradient. torch's own Adam counts steps per parameter and has moments only for parameters that had a gradient. With
    it, a Megatron-FSDP rank whose shard of a parameter is empty has no moments to save, so that all ranks hang, and a
    checkpoint of a distributed optimizer cannot be loaded.

    Sources: https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101.

    Args:
        params: tensors of any floating-point dtype, or groups of them.
        lr, betas, eps, weight_decay: as in torch.
        bias_correction: must be True; an argument of the fused optimizers.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        capturable: must be False; an argument of the fused optimizers.

    Raises:
        ValueError: another value of `bias_correction` or `capturable`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable or not bias_correction:
            raise ValueError(
                f"capturable is {capturable} and bias_correction {bias_correction}, expected False and True: the Adam "
                "used without Transformer Engine and Apex supports nothing else"
            )
        defaults = dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step every parameter that has a gradient; `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            beta1, beta2 = group["betas"]
            adam(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(done)) for _ in parameters],  # torch's function takes one tensor per parameter
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Create the moments of a parameter, all zero."""
        for moment in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][moment] = torch.zeros_like(parameter, dtype=torch.float32)


def l2_norm(
    chunk: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    """The L2 norm of all tensors as one vector, with the arguments of Apex' `amp_C.multi_tensor_l2norm`.

    megatron-core's own function reads the norm of each gradient on the host, so a GPU is waited for once per parameter
    in each step; this one stays on the device. `chunk`, `overflow` and `per_tensor` are ignored.

    Returns:
        [1] float32 on the tensors' device, and None.
    """
    (only,) = tensors
    return torch.nn.utils.get_total_norm(only).float().reshape(1), None


def patch_optimizers(module: Any) -> None:
    """megatron.core.optimizer: build this Adam instead of torch's."""
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam, module.USING_PYTORCH_OPTIMIZER = Adam, False


def patch_clipping(module: Any) -> None:
    """megatron.core.optimizer.clip_grads: this norm instead of its own one, but not instead of a fused one."""
    if module.l2_norm_impl.__module__ == "megatron.core.utils":
        module.l2_norm_impl = l2_norm


# Optimizers of 16-bit models train parameters in float32 too, but find a parameter's state by its index in its group,
# which they count differently when they build a group and when they save it. Where all parameters have one dtype,
# nothing changes.


def patch_distributed_optimizer(module: Any) -> None:
    """megatron.core.optimizer.distrib_optimizer: save and load this Adam's state like the fused optimizers'; and a
    group's float32 parameters come first, as in the groups it builds.

    Otherwise states are saved under the names of other parameters, or not at all if their sizes differ.
    """
    if not module.HAVE_APEX_OR_TE:
        module.Adam, module.USING_TE_OPTIMIZER, module.HAVE_APEX_OR_TE = Adam, True, True
    optimizer = module.DistributedOptimizer
    theirs = optimizer._build_optimizer_group_ranges

    def build(param_groups: list[dict], gbuf_ranges: list[dict]) -> tuple[dict, list[dict]]:
        indices, ranges = theirs(param_groups, gbuf_ranges)
        for number, group in enumerate(ranges):
            group["params"].sort(key=lambda parameter: parameter.dtype != module.torch.float32)
            indices.update((parameter, (number, index)) for index, parameter in enumerate(group["params"]))
        return indices, ranges

    optimizer._build_optimizer_group_ranges = staticmethod(build)


def patch_replicated_optimizer(module: Any) -> None:
    """megatron.core.optimizer.optimizer: the optimizer that is not distributed saves and loads all parameters.

    It has a list of 16-bit parameters and their float32 copies, and takes indices in this list for indices in the
    group.
    """
    optimizer = module.Float16OptimizerWithFloat16Params
    optimizer.sharded_state_dict = _of_all_parameters(optimizer.sharded_state_dict)
    optimizer.load_state_dict = _of_all_parameters(optimizer.load_state_dict)


def _of_all_parameters(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_float32(self):
            return theirs(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def _with_float32(optimizer: Any) -> Iterator[None]:
    """Its lists hold float32 parameters too, in the groups' order: each as its own copy."""
    before = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    models, copies = (itertools.chain.from_iterable(groups) for groups in before)
    of_copy = dict(zip(copies, models, strict=True))
    trained = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    optimizer.fp32_from_float16_groups = trained
    optimizer.float16_groups = [[of_copy.get(parameter, parameter) for parameter in group] for group in trained]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = before


def patch_emerging_optimizers(module: Any) -> None:
    """megatron.core.optimizer.emerging_optimizers: let Muon split our fused projections as their layers do, and leave
    learned positions to Adam.

    Muon orthogonalises matrices. A fused projection holds several, which megatron-core tags by name and splits by the
    head sizes of the text model, right before it builds the optimizer with these arguments: the vision tower would be
    split at wrong rows or not at all, and neither would be linear attention's projection. Its registry has no entry for
    a model; positions of a vision tower are an embedding that it does not know.
    """
    for entry in module._EMERGING_OPTIMIZERS.values():
        entry.default_param_overrides[module.ParamKey(name="*vision_model.pos_embed.weight")] = {"optimizer": "adam"}
        if entry.config_to_kwargs is not None:
            entry.config_to_kwargs = functools.partial(_tag_first, entry.config_to_kwargs)


def _tag_first(arguments: Callable[..., Any], config: Any, model_chunks: Any, pg_collection: Any) -> Any:
    tag_projections(config, model_chunks)
    return arguments(config, model_chunks, pg_collection)


def tag_projections(config: Any, model_chunks: list[torch.nn.Module]) -> None:
    """Tag each fused projection of this rank's chunks with its rows, which Muon splits; models of others are unchanged.

    Raises:
        ValueError: a rank has no whole query group, or only its own part of the gradients.
    """
    for chunk in model_chunks:
        for name, layer in chunk.named_modules():
            if not hasattr(layer, "fused_projection"):
                continue
            layer_wise = config.optimizer.startswith("dist_") or config.use_layer_wise_distributed_optimizer
            if chunk.ddp_config.use_distributed_optimizer and not layer_wise:
                raise ValueError(
                    f"ddp.use_distributed_optimizer is True with optimizer {config.optimizer!r}, expected False: each "
                    "rank sums only a part of the gradients, and would step whole matrices"
                )
            projection, rows = layer.fused_projection()
            weight = getattr(projection, "weight", None)
            if weight is None or not config.muon_split_qkv:  # with adapters, only these are trained
                continue
            if len(weight) % sum(rows):
                raise ValueError(
                    f"{name} has {len(weight)} rows on this rank, expected a multiple of {sum(rows)}, those of a query "
                    "group with its keys and values, to orthogonalise each by itself: reduce "
                    "tensor_model_parallel_size to at most num_query_groups, or set optimizer.muon_split_qkv=False"
                )
            weight.is_qkv, weight.qkv_split_shapes = True, rows
