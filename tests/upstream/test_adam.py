"""megatron-core chooses Adam by names of two modules."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("adam")
MODULE = "megatron.core.optimizer"
DISTRIBUTED = f"{MODULE}.distrib_optimizer"


def test_megatron_core_get_optimizer_reads_adam_names_that_we_replace():
    for name in ("Adam", "USING_PYTORCH_OPTIMIZER"):
        CONTRACT.find(MODULE, name)
        CONTRACT.mentions(MODULE, "_get_megatron_optimizer_based_on_param_groups", name)


def test_distributed_optimizer_reads_adam_names_that_we_replace():
    """`find` alone would find the names that this package sets itself."""
    CONTRACT.find(DISTRIBUTED, "Adam")
    if "Adam" not in CONTRACT.find(DISTRIBUTED, "DistributedOptimizer.__init__").__code__.co_names:
        CONTRACT.fail(DISTRIBUTED, "DistributedOptimizer.__init__ does not compare an optimizer with Adam")
    for name in ("USING_TE_OPTIMIZER", "HAVE_APEX_OR_TE"):
        CONTRACT.find(DISTRIBUTED, name)
        CONTRACT.mentions(DISTRIBUTED, "DistributedOptimizer", name)
