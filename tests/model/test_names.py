"""Parameter names and shapes of the built model are those of the weight table, for each layer spec."""

import importlib.util

from qwen3vl_bridge import mappings

import pytest
import torch

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()


def megatron_shape(row: mappings.Row, dimensions: dict[str, int]) -> tuple[int, ...]:
    """Every row stacks its tensors along the first dimension."""
    shapes = row.numbers(dimensions)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def build(folder, transformer_impl: str) -> dict[str, tuple[int, ...]]:
    import qwen3vl_bridge  # noqa: F401
    from qwen3vl_bridge.training.process_group import initialize

    from megatron.bridge import AutoBridge

    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=False)
    provider.transformer_impl, provider.use_cpu_initialization = transformer_impl, True
    provider.init_model_with_meta_device = True
    provider.finalize()
    initialize(provider, seed=0)
    return {name: tuple(p.shape) for name, p in provider.provide(True, True).named_parameters()}


def table(folder) -> tuple[list[mappings.Row], dict[str, int]]:
    from transformers import AutoConfig

    dimensions = mappings.dimensions_of(AutoConfig.from_pretrained(folder).to_dict())
    return list(mappings.expand(mappings.DENSE_ROWS, dimensions)), dimensions


@pytest.mark.parametrize("tied", [False, True])
def test_local_spec_has_the_tables_names(tied, untied_folder, tied_folder):
    folder = tied_folder if tied else untied_folder
    rows, dimensions = table(folder)
    expected = {mappings.local_name(row.megatron): megatron_shape(row, dimensions) for row in rows}
    assert build(folder, "local") == expected


@pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs Transformer Engine and a GPU")
def test_transformer_engine_spec_has_the_tables_names(untied_folder):
    rows, dimensions = table(untied_folder)
    expected = {row.megatron: megatron_shape(row, dimensions) for row in rows}
    assert build(untied_folder, "transformer_engine") == expected


# facts of the released models: hidden, ffn, layers, heads, kv heads, tied, vision (depth, hidden, ffn, taps), count
RELEASED = {
    "2B": (2048, 6144, 28, 16, 8, True, (24, 1024, 4096, [5, 11, 17]), 2_127_532_032),
    "4B": (2560, 9728, 36, 32, 8, True, (24, 1024, 4096, [5, 11, 17]), 4_437_815_808),
    "8B": (4096, 12288, 36, 32, 8, False, (27, 1152, 4304, [8, 16, 24]), 8_767_123_696),
    "32B": (5120, 25600, 64, 64, 8, False, (27, 1152, 4304, [8, 16, 24]), 33_357_390_064),
}


@pytest.mark.parametrize("size", RELEASED)
def test_parameter_count_of_released_sizes(size):
    hidden, ffn, layers, heads, kv_heads, tied, (depth, v_hidden, v_ffn, taps), count = RELEASED[size]
    text = dict(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
    )
    vision = dict(
        depth=depth,
        hidden_size=v_hidden,
        intermediate_size=v_ffn,
        deepstack_visual_indexes=taps,
        num_heads=16,
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=2,
        num_position_embeddings=2304,
    )
    config = dict(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    assert mappings.parameter_count(mappings.DENSE_ROWS, mappings.dimensions_of(config)) == count
