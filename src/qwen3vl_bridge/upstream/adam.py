"""Adam in plain PyTorch with the state that megatron-core expects, without Transformer Engine and Apex.

Replaced if neither is installed: `Adam` and `USING_PYTORCH_OPTIMIZER` in `megatron.core.optimizer`; `Adam`,
`USING_TE_OPTIMIZER` and `HAVE_APEX_OR_TE` in `megatron.core.optimizer.distrib_optimizer`. megatron-core chooses between
fused optimizers and torch's by these names. With torch's Adam, sharded optimizers cannot save and load their states.
Delete this module when they can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from qwen3vl_bridge.upstream.replacements import When, replace

import torch
from torch.optim.adam import adam


class Adam(torch.optim.Optimizer):
    """Adam in plain PyTorch with the state that megatron-core expects, for machines without Transformer Engine and
    Apex.

    megatron-core's sharded optimizers save and load the state that the fused optimizers have: one step count per
    parameter group and, once a group has stepped, float32 moments for each of its parameters, even if a parameter had
    no gradient. torch's own Adam counts steps per parameter and has moments only for parameters that had a gradient.
    With torch's Adam, a Megatron-FSDP rank with an empty shard of a parameter has no moments to save, so that all ranks
    hang, and a checkpoint of a distributed optimizer cannot be loaded.

    Sources: https://arxiv.org/abs/1412.6980, https://arxiv.org/abs/1711.05101.

    Args:
        params: tensors of any floating-point dtype, or groups of them.
        lr, betas, eps, weight_decay: as in torch.
        bias_correction: must be True; an argument of the fused optimizers.
        adam_w_mode: decouple weight decay from the gradient (AdamW).
        capturable: must be False; an argument of the fused optimizers.

    Raises:
        ValueError: `bias_correction` is False, or `capturable` is True.
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


def use_adam(optimizer: ModuleType) -> None:
    """Make `megatron.core.optimizer` build this Adam instead of torch's, and treat it like a fused Adam."""
    if optimizer.USING_PYTORCH_OPTIMIZER:
        replace(optimizer, "Adam", Adam, When.NO_TRANSFORMER_ENGINE)
        replace(optimizer, "USING_PYTORCH_OPTIMIZER", False, When.NO_TRANSFORMER_ENGINE)


def save_state_of_adam(distrib_optimizer: ModuleType) -> None:
    """Make `megatron.core.optimizer.distrib_optimizer` save and load this Adam's state like that of a fused Adam."""
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        replace(distrib_optimizer, "Adam", Adam, When.NO_TRANSFORMER_ENGINE)
        replace(distrib_optimizer, "USING_TE_OPTIMIZER", True, When.NO_TRANSFORMER_ENGINE)
        replace(distrib_optimizer, "HAVE_APEX_OR_TE", True, When.NO_TRANSFORMER_ENGINE)
