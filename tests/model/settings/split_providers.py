"""Providers of the released sizes, and ways to split them, for tests of what is refused."""

import copy

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.qwen3_vl import presets

from megatron.bridge import AutoBridge

PROVIDERS = {
    size: AutoBridge.from_hf_config(presets.hf_config(size)).to_megatron_provider(load_weights=False)
    for size in presets.PRESETS
}
DENSE, EXPERTS = "8B", "30B-A3B"
SP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PP2, CP2 = dict(pipeline_model_parallel_size=2), dict(context_parallel_size=2)
VPP2 = dict(PP2, virtual_pipeline_model_parallel_size=2)
OVERLAP = dict(overlap_p2p_comm=True, batch_p2p_comm=False)


def provider_of(size, fields):
    provider = copy.copy(PROVIDERS[size])
    for name, value in fields.items():
        assert hasattr(provider, name), name
        setattr(provider, name, value)
    return provider


def finalized(size, fields):
    provider = provider_of(size, fields)
    provider.finalize()
    return provider
