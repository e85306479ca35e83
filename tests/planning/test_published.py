"""Compare estimates with published formulas, Megatron-Bridge's estimator, and published memory of runs."""

from fractions import Fraction

from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning import activations
from qwen3vl_bridge.planning.estimate import estimate, microbatches_in_flight
from qwen3vl_bridge.planning.hardware import GIB, GPUS
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.training_settings import FULL, LoraSettings, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Component, Dimensions

import pytest

TOWER = frozenset({Component.VISION_MODEL, Component.VISION_PROJECTION})
H100 = GPUS["H100"].memory_bytes


def gpt(hidden: int = 4800) -> Dimensions:
    """Return GPT's dimensions: q = kv = h, and a gated MLP that saves as much as GPT's MLP of 4 h (3 f = 8 h)."""
    sizes = dict(hidden=hidden, q=hidden, kv=hidden, ffn=8 * hidden // 3, heads=48, kv_heads=48, head_dim=hidden // 48)
    return Dimensions(sizes, dict(text_layers=range(1), dense_layers=(0,), moe_layers=()), "qwen3_vl")


# Tensors that Korthikanti et al. (arXiv 2205.05198) do not have (norms of queries and keys, log-sum-exp) or neglect.
NOT_IN_GPT = ("norm of queries", "norm of keys", "statistic", "log-sum-exp")


@pytest.mark.parametrize(
    ("tp", "sequence", "expected"), [(1, False, 34), (8, False, 10 + Fraction(24, 8)), (8, True, Fraction(34, 8))],
    ids=["equation 1", "equation 2", "equation 4"],
)  # fmt: skip
def test_saved_activation_bytes_per_layer_match_korthikanti_et_al(tp, sequence, expected):
    """A layer saves 34 bytes per element of the hidden state, without the attention matrix.

    The paper adds two dropout masks of one byte, which are divided only under sequence parallelism. We have none.
    """
    dims, layout = gpt(), ParallelLayout(tp, tp=tp, sequence_parallel=sequence)
    local = activations.LocalSizes(dims, layout, TrainingSettings())
    saved = activations.saved_by_attention(local) | activations.saved_by_mlp(local)
    found = sum(nbytes for name, nbytes in saved.items() if not any(word in name for word in NOT_IN_GPT))
    masks = Fraction(2, tp if sequence else 1)
    assert found == dims["hidden"] * (expected - masks)


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (8, 1), (4, 3), (8, 4)])
def test_microbatches_in_flight_match_korthikanti_et_al(stages, chunks):
    """Korthikanti et al., section 4.2.3: p microbatches, times 1 + (p - 1) / (p m) with interleaved stages."""
    layout = ParallelLayout(stages, pp=stages, vpp=chunks if chunks > 1 else None)
    counts = microbatches_in_flight(layout, 0, 4 * stages, [1.0] * chunks)
    assert sum(counts) == (stages if chunks == 1 else stages * chunks + stages - 1)


def test_loss_softmax_bytes_match_published_size():
    """3.79 GiB for [4096, 1, 248320]: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5508."""
    dims = dimensions_of(presets.config_dict("8B")).with_vocab(248_320)
    local = activations.LocalSizes(dims, ParallelLayout(1), TrainingSettings(loss_fusion=None))
    saved = activations.saved_by_output_layer(local, loss_in_chunks=False)
    assert saved["loss: softmax"] * 4096 / GIB == pytest.approx(3.79, abs=0.005)


@pytest.mark.parametrize(("tp", "world"), [(1, 8), (2, 16)])
def test_estimated_model_states_match_megatron_bridge_estimator(tp, world, untied_folder):
    """The estimator ignores the tower, counts 4 h for the norms of a layer, and no norms of queries and keys."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    from tests.parity.on_ranks import configuration
    from tests.parity.topologies import Topology

    cfg = configuration(str(untied_folder), Topology(1, distributed_optimizer=True))
    cfg.model = AutoBridge.from_hf_config(presets.hf_config("8B")).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = tp
    cfg.data_parallel_size = world // tp
    theirs = estimate_training_memory(cfg, include_activation=False)
    layout, training = ParallelLayout(world, tp=tp), TrainingSettings()
    ours = estimate(dimensions_of(presets.config_dict("8B")), layout, training).peak.states.total
    tower = 576_388_336 / tp * (6 + 12 * tp / world)
    # Measured 4e-5, and parameters of the tower that are replicated.
    assert theirs.weight_and_optimizer_bytes == pytest.approx(ours - tower, rel=1e-3)


QWEN_2_5_7B = presets.config_dict("8B")
QWEN_2_5_7B["text_config"].update(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152_064,
)  # fmt: skip
# These runs compute the loss in one piece, with a float32 softmax.
FULLY = dict(recompute=FULL, vision_recompute=FULL, loss_chunk_tokens=0, loss_fusion=None)
TEXT = dict(**FULLY, frozen=TOWER, max_patches=0)
# ms-swift's examples/megatron with their documented memory. It is not documented how it was measured; the usual tools
# show what the caching allocator reserves, which is more than is in use.
PUBLISHED = {
    "Qwen3-30B-A3B, moe/qwen3_moe.sh": (
        60, presets.config_dict("30B-A3B"), ParallelLayout(16, pp=2, ep=8),
        TrainingSettings(seq_length=8192, global_batch_size=16, **TEXT),
    ),
    "Qwen2.5-7B, long_text.sh": (
        50, QWEN_2_5_7B, ParallelLayout(4, tp=4, sequence_parallel=True),
        TrainingSettings(seq_length=32768, global_batch_size=8, **TEXT),
    ),
    "Qwen2.5-VL-7B, multimodal/dense/full.sh": (
        72, QWEN_2_5_7B, ParallelLayout(2, tp=2, sequence_parallel=True),
        TrainingSettings(seq_length=2048, global_batch_size=4, max_patches=2048, frozen=TOWER, **FULLY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_estimated_memory_is_75_to_100_percent_of_published_memory(name):
    """Measured 0.81, 0.91 and 0.97 of the published memory, including the reserve."""
    seen, config, layout, training = PUBLISHED[name]
    found = estimate(dimensions_of(config), layout, training).peak.total / GIB / seen
    print(f"{name}: {found:.2f}")
    assert 0.75 <= found <= 1


ROWS = dict(seq_length=4096, micro_batch_size=2, global_batch_size=32, max_patches=4096)
CAPTION = dict(seq_length=4096, max_patches=256)  # an image of 256 x 256, as in their mock data
# Megatron-Bridge 0.6.2: recipes/qwen_vl/h100/qwen3_vl.py and perf_recipes/qwen_vl/h100/qwen3_vl.py.
RECIPES = {
    "8B SFT, 2 H100": ("8B", ParallelLayout(2, tp=2), TrainingSettings(**ROWS), False),
    "30B-A3B SFT, 8 H100": ("30B-A3B", ParallelLayout(8, ep=8), TrainingSettings(**ROWS), False),
    "235B-A22B SFT, 32 H100": (
        "235B-A22B", ParallelLayout(32, tp=4, ep=32, sequence_parallel=True), TrainingSettings(**ROWS), False,
    ),
    "8B LoRA, 1 H100, rows of 4096": ("8B", ParallelLayout(1), TrainingSettings(**ROWS, lora=LoraSettings(32)), True),
    "235B-A22B benchmark, 256 H100": (
        "235B-A22B",
        ParallelLayout(
            256, tp=2, pp=8, vpp=4, ep=32, etp=1, sequence_parallel=True, embedding_as_layer=True, loss_as_layer=True,
        ),
        TrainingSettings(**CAPTION, global_batch_size=1024), True,
    ),
    "30B-A3B benchmark, 16 H100": (
        "30B-A3B", ParallelLayout(16, pp=2, vpp=12, ep=8), TrainingSettings(**CAPTION, global_batch_size=512), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_estimated_memory_shows_which_megatron_bridge_recipes_fit_h100(name):
    """Benchmarks fit, even if everything is trained (as published, both towers are frozen).

    Full fine-tuning does not fit with full rows: model states leave at most 6 GiB.
    """
    size, layout, training, fits = RECIPES[name]
    worst = estimate(dimensions_of(presets.config_dict(size)), layout, training).peak
    print(f"{name}: {worst.total / GIB:.0f} GiB, of which states {worst.states.total / GIB:.0f}")
    assert (worst.total <= H100) == fits
