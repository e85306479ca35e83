"""Parameter names and shapes of the built model are those of the weight table, for each layer spec."""

import importlib.util

from qwen3vl_bridge.models.qwen3_vl import table as mappings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import (
    Dimensions,
    ExpertLayout,
    PackedExpert,
    WeightRow,
    expand,
    expert_layout_of,
    hf_shapes,
    local_name,
)

import pytest

from tests.expert_layouts import LAYOUTS

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None


def megatron_shape(row: WeightRow, dimensions: Dimensions) -> tuple[int, ...]:
    """Every row stacks its tensors along the first dimension; an input-major expert is transposed."""
    shapes = row.numbers(dimensions)
    if isinstance(row, PackedExpert) and row.transposed:
        return shapes[0][::-1]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def build(folder, transformer_impl: str) -> dict[str, tuple[int, ...]]:
    import qwen3vl_bridge  # noqa: F401
    from qwen3vl_bridge.training.process_groups import initialize

    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.transformer_impl, provider.use_cpu_initialization = transformer_impl, True
    provider.init_model_with_meta_device = True
    provider.finalize()
    initialize(provider, seed=0)
    return {name: tuple(p.shape) for name, p in provider.provide(True, True).named_parameters()}


def table(folder, layout=ExpertLayout.INPUT_MAJOR) -> tuple[list[WeightRow], Dimensions]:
    from transformers import AutoConfig

    dimensions = dimensions_of(AutoConfig.from_pretrained(folder).to_dict())
    return list(expand(mappings.table(layout), dimensions)), dimensions


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_spec_has_the_tables_names(kind, layout, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    rows, dimensions = table(folder, layout)
    expected = {local_name(row.megatron): megatron_shape(row, dimensions) for row in rows}
    assert build(folder, "local") == expected


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_transformer_engine_spec_has_the_tables_names(kind, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    rows, dimensions = table(folder)
    expected = {row.megatron: megatron_shape(row, dimensions) for row in rows}
    assert build(folder, "transformer_engine") == expected


def test_the_provider_names_what_the_configuration_does(moe_folder):
    from megatron.bridge import AutoBridge

    _, dimensions = table(moe_folder)
    provider = AutoBridge.from_hf_pretrained(str(moe_folder)).to_megatron_provider(load_weights=False)
    ours = provider.dimensions()
    assert {name: list(found) for name, found in ours.indices.items()} == {
        name: list(found) for name, found in dimensions.indices.items()
    }
    assert ours["untied"] == dimensions["untied"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("hidden", "moe_ffn"), [(64, 24), (64, 32), (64, 64)])
def test_the_layout_of_experts_is_told_by_shapes_even_where_one_is_square(layout, hidden, moe_ffn):
    sizes = dict(hidden=hidden, moe_ffn=moe_ffn, moe_gate_up=2 * moe_ffn, experts=4)
    dimensions = Dimensions(sizes, dict(moe_layers=(1, 2), experts=range(4)), "qwen3_vl")
    shapes = {
        name: shape
        for row in expand([row for row in mappings.table(layout) if "experts" in row.indices], dimensions)
        for name, shape in zip(row.hf, hf_shapes(row, dimensions), strict=True)
    }
    assert expert_layout_of(mappings.table, shapes, dimensions) is layout
    name = next(iter(shapes))
    with pytest.raises(ValueError, match=r"experts of layer 1: found .*expected 4 experts of 64"):
        expert_layout_of(mappings.table, shapes | {name: (4, 63, 1)}, dimensions)
