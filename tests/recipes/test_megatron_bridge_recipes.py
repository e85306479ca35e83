"""Megatron-Bridge's own recipes of Qwen3-VL work with this package's provider.

Source: megatron/bridge/recipes/qwen_vl/h100/qwen3_vl.py. Nothing is started: each is completed and checked as its
training loop does first.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_loader
from types import ModuleType, SimpleNamespace

from qwen3vl_bridge import Qwen3VLModelProvider, Qwen3VLMoEModelProvider
from qwen3vl_bridge.models.qwen3_vl import presets

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core.utils import is_te_min_version
from qwen3vl_recipes.dry_run import finalize_copy

KINDS = ("pretrain_mock", "sft", "peft")
RECIPES = [f"qwen3_vl_{size}_{kind}_config" for size in ("8b", "30b_a3b", "235b_a22b") for kind in KINDS]


class Anything(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Diffusers(MetaPathFinder, Loader):
    """Finder for a stub of diffusers, which Megatron-Bridge's recipes of image generation import."""

    def find_spec(self, fullname, path=None, target=None):
        return spec_from_loader(fullname, self, is_package=True) if fullname.split(".")[0] == "diffusers" else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def recipes():
    sys.meta_path.append(Diffusers())  # behind the others
    from megatron.bridge.recipes.qwen_vl import qwen3_vl as names
    from megatron.bridge.recipes.qwen_vl.h100 import qwen3_vl

    sys.meta_path.pop()
    for name in [name for name, module in sys.modules.items() if isinstance(module, Anything)]:
        del sys.modules[name]
    return qwen3_vl, names


@pytest.mark.usefixtures("no_groups")
@pytest.mark.parametrize("name", RECIPES)
def test_megatron_bridge_recipe_passes_config_checks_with_our_provider(recipes, name, monkeypatch):
    module, names = recipes
    bridges = SimpleNamespace(
        from_hf_pretrained=lambda path, **_: AutoBridge.from_hf_config(
            presets.hf_config(path.removeprefix("Qwen/Qwen3-VL-").removesuffix("-Instruct"))
        )
    )
    monkeypatch.setattr(module, "AutoBridge", bridges)
    # Those of models with experts ask which GPU there is; they are written for this one.
    h100 = SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    cfg = getattr(names, name)()
    model = cfg.model
    assert type(model) is (Qwen3VLMoEModelProvider if "_a" in name else Qwen3VLModelProvider)
    if not is_te_min_version("2.1.0"):
        model.moe_permute_fusion = False  # Transformer Engine's, which megatron-core asks for
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    experts = (model.expert_model_parallel_size or 1) * (model.expert_tensor_parallel_size or 1)
    world = max(ranks, experts * model.pipeline_model_parallel_size)
    if name == "qwen3_vl_235b_a22b_pretrain_mock_config":
        with pytest.raises(ValueError, match=r"num_layers is 94, expected a multiple of .*, 16: .*account_for_embedd"):
            finalize_copy(cfg, world)
        model.account_for_embedding_in_pipeline_split = model.account_for_loss_in_pipeline_split = True
    complete = finalize_copy(cfg, world)
    assert complete.model.seq_length == complete.dataset.seq_length
    assert complete.model.sequence_parallel or model.tensor_model_parallel_size == 1 or not model.num_moe_experts
