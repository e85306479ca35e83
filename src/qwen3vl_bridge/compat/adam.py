"""Adam in plain PyTorch for machines without Transformer Engine and Apex, with the optimizer state that megatron-core
expects.

megatron-core's sharded optimizers save and load the state that the fused optimizers have: one step count per parameter
group, and moments for every parameter of a group that has stepped, whether or not it had a gradient. torch's own Adam
counts steps per parameter and has moments only for parameters that had a gradient. With torch's Adam, a Megatron-FSDP
rank whose shard of a parameter is empty has no moments to save, so that all ranks hang, and a checkpoint of a
distributed optimizer cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class Adam(torch.optim.Optimizer):
    """Adam with decoupled or coupled weight decay, computed by torch's own function.

    Sources: https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101.

    Args:
        params: tensors of any floating-point dtype, or groups of them. Moments are float32.
        lr: learning rate.
        betas, eps, weight_decay: as in torch.
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
        """Step every parameter that has a gradient.

        Args:
            closure: must be None.
        """
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
            self._step_group(group, done)

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Create the moments of a parameter, all zero."""
        for moment in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][moment] = torch.zeros_like(parameter, dtype=torch.float32)

    def _step_group(self, group: dict[str, Any], done: int) -> None:
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


def replace_in_optimizers(module: Any) -> None:
    """`megatron.core.optimizer`: build this Adam instead of torch's."""
    if module.USING_PYTORCH_OPTIMIZER:
        module.Adam, module.USING_PYTORCH_OPTIMIZER = Adam, False


def replace_in_distributed_optimizer(module: Any) -> None:
    """`megatron.core.optimizer.distrib_optimizer`: save and load this Adam's state like the fused optimizers'."""
    if not module.HAVE_APEX_OR_TE:
        module.Adam, module.USING_TE_OPTIMIZER, module.HAVE_APEX_OR_TE = Adam, True, True
