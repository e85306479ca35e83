"""Every optimizer of megatron-core passes through one constructor, and saves by the methods that are corrected."""

import itertools

import pytest
import torch

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("mixed_precision_optimizers")
MODULE, DISTRIBUTED = "megatron.core.optimizer.optimizer", "megatron.core.optimizer.distrib_optimizer"
HALF = "Float16OptimizerWithFloat16Params"


def test_megatron_core_optimizers_call_constructor_of_megatron_optimizer():
    CONTRACT.takes(MODULE, "MegatronOptimizer.__init__", "self", "optimizer", "config", "init_state_fn")
    base = CONTRACT.find(MODULE, "MegatronOptimizer")
    for module, name in ((MODULE, HALF), (DISTRIBUTED, "DistributedOptimizer")):
        if not issubclass(CONTRACT.find(module, name), base):
            CONTRACT.fail(module, f"{name} is no MegatronOptimizer")
        CONTRACT.mentions(module, f"{name}.__init__", "super().__init__")


def test_mixed_precision_optimizers_use_methods_that_we_correct():
    CONTRACT.takes(
        DISTRIBUTED, "DistributedOptimizer._build_optimizer_group_ranges", "cls", "param_groups", "gbuf_ranges"
    )
    CONTRACT.mentions(DISTRIBUTED, "DistributedOptimizer.__init__", "self._build_optimizer_group_ranges")
    CONTRACT.takes(MODULE, f"{HALF}.sharded_state_dict", "self", "model_sharded_state_dict", "is_loading", "metadata")
    CONTRACT.takes(MODULE, f"{HALF}.load_state_dict", "self", "state_dict")
    for name in ("float16_groups", "fp32_from_float16_groups"):
        CONTRACT.mentions(MODULE, f"{HALF}.__init__", f"self.{name}")
    CONTRACT.mentions(MODULE, f"{HALF}.sharded_state_dict", "self.float16_groups")
    CONTRACT.mentions(MODULE, f"{HALF}.load_state_dict", "self.fp32_from_float16_groups")


HALVES, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "groups", [[[HALVES]], [[HALVES, FULL]], [[HALVES], [FULL]], [[FULL], [HALVES]], [[FULL]]],
    ids=["one", "both", "apart", "apart reversed", "float32"],
)  # fmt: skip
def test_float16_optimizer_saves_state_of_float32_and_16_bit_parameters(groups):
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    trained = [[torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in group] for group in groups]
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([{"params": group} for group in trained], momentum=0.9),
        OptimizerConfig(bf16=True), None, lambda *_: None,
    )  # fmt: skip
    assert ("sharded_state_dict" in vars(optimizer)) == any(FULL in group for group in groups)
    names = {id(parameter): f"p{number}" for number, parameter in enumerate(itertools.chain(*trained))}
    model = {}
    for parameter in itertools.chain(*trained):
        name = names[id(parameter)]
        model[name] = ShardedTensor.from_rank_offsets(name, parameter.data)
        model[name].data = parameter  # by which megatron-core finds the parameter
    saved = optimizer.sharded_state_dict(model)["fp32_from_fp16_params"]
    expected = [[f"optimizer.state.fp32_param.{names[id(parameter)]}" for parameter in group] for group in trained]
    assert [[one.key for one in group] for group in saved] == expected
