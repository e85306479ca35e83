"""megatron-core builds emerging optimizers by one function, after it has marked fused projections."""

import pytest

from tests.upstream.contracts import Contract

pytestmark = pytest.mark.upstream
CONTRACT = Contract("muon")
MODULE, NAME = "megatron.core.optimizer", "_get_megatron_emerging_optimizer"


def test_get_megatron_optimizer_calls_emerging_optimizer_that_we_replace():
    CONTRACT.takes(MODULE, NAME, "config", "model_chunks", "config_overrides", "pg_collection")
    CONTRACT.mentions(MODULE, NAME, "is_qkv", "qkv_split_shapes", "default_param_overrides", "muon_scalar_optimizer")
    CONTRACT.mentions(MODULE, "get_megatron_optimizer", NAME)


def test_muon_orthogonalize_reads_qkv_attributes_of_parameters():
    muon = "TensorParallelMuon.orthogonalize"
    CONTRACT.mentions(f"{MODULE}.emerging_optimizers", muon, "qkv_split_shapes", "is_qkv_fn")
    CONTRACT.mentions(f"{MODULE}.emerging_optimizers", "_muon_config_to_kwargs", "is_qkv")
    CONTRACT.mentions(f"{MODULE}.optimizer", "Float16OptimizerWithFloat16Params.__init__", "param.main_param")
    CONTRACT.find(MODULE, "ParamKey")
    CONTRACT.takes(f"{MODULE}.optimizer_config", "ParamKey", "name", "attr", "predicate", "with_name_predicate")
    for name in ("muon_scalar_optimizer", "muon_split_qkv", "use_layer_wise_distributed_optimizer"):
        CONTRACT.find(f"{MODULE}.optimizer_config", f"OptimizerConfig.{name}")
