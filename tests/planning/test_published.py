"""What others have published: formulas as a special case, an estimator, and memory that people have seen."""

import re
from fractions import Fraction
from pathlib import Path

from qwen3vl_bridge.models.qwen3_vl import presets
from qwen3vl_bridge.planning import activations
from qwen3vl_bridge.planning.estimate import estimate, microbatches_in_flight
from qwen3vl_bridge.planning.hardware import GIB, GPUS
from qwen3vl_bridge.planning.split import ModelSplit
from qwen3vl_bridge.planning.training_settings import FULL, LoraSettings, TrainingSettings
from qwen3vl_bridge.registry import dimensions_of
from qwen3vl_bridge.weights.rows import Dimensions, Part

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
TOWER = frozenset({Part.VISION_MODEL, Part.VISION_PROJECTION})
H100 = GPUS["H100"].memory_bytes


def gpt(hidden: int = 4800) -> Dimensions:
    """As many keys as queries as hidden numbers, and a gated MLP that keeps what GPT's of 4 h does: 3 f = 8 h."""
    sizes = dict(hidden=hidden, q=hidden, kv=hidden, ffn=8 * hidden // 3, heads=48, kv_heads=48, head_dim=hidden // 48)
    return Dimensions(sizes, dict(text_layers=range(1), dense_layers=(0,), moe_layers=()), "qwen3_vl")


# What Korthikanti et al. (arXiv 2205.05198) do not have: norms of queries and keys, attention's logarithms; and
# statistics of norms, which they leave out as small.
OURS = ("norm of queries", "norm of keys", "statistic", "log-sum-exp")


@pytest.mark.parametrize(
    ("tp", "sequence", "expected"), [(1, False, 34), (8, False, 10 + Fraction(24, 8)), (8, True, Fraction(34, 8))],
    ids=["equation 1", "equation 2", "equation 4"],
)  # fmt: skip
def test_korthikanti_et_al(tp, sequence, expected):
    """Bytes of a layer for each hidden number of a token, without attention's matrix. Their two masks of dropout, one
    byte each, are not here; under tensor parallelism alone they are whole on every rank.
    """
    dims, split = gpt(), ModelSplit(tp, tp=tp, sequence_parallel=sequence)
    r = activations.RankWidths(dims, split, TrainingSettings())
    saved = activations.attention(r) | activations.dense_mlp(r)
    found = sum(nbytes for name, nbytes in saved.items() if not any(word in name for word in OURS))
    masks = Fraction(2, tp if sequence else 1)
    assert found == dims["hidden"] * (expected - masks)


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (8, 1), (4, 3), (8, 4)])
def test_microbatches_of_the_first_stage(stages, chunks):
    """Korthikanti et al., section 4.2.3: L layers' worth, times 1 + (p - 1) / (p m) where interleaved."""
    split = ModelSplit(stages, pp=stages, vpp=chunks if chunks > 1 else None)
    counts = microbatches_in_flight(split, 0, 4 * stages, [1.0] * chunks)
    assert sum(counts) == (stages if chunks == 1 else stages * chunks + stages - 1)


def test_the_softmax_of_the_loss():
    """3.79 GiB for [4096, 1, 248320]: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5508."""
    dims = dimensions_of(presets.config_dict("8B")).with_vocab(248_320)
    widths = activations.RankWidths(dims, ModelSplit(1), TrainingSettings(loss_fusion=None))
    saved = activations.output_layer(widths, in_chunks=False)
    assert saved["loss: softmax"] * 4096 / GIB == pytest.approx(3.79, abs=0.005)


@pytest.mark.parametrize(("tp", "world"), [(1, 8), (2, 16)])
def test_megatron_bridges_estimator(tp, world, untied_folder):
    """Its count leaves out the tower, has 4 h for the norms of a layer and none for queries and keys."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils.theoretical_memory_utils import estimate_training_memory

    from tests.parity.on_ranks import configuration
    from tests.parity.topologies import Topology

    cfg = configuration(str(untied_folder), Topology(1, distributed_optimizer=True))
    cfg.model = AutoBridge.from_hf_config(presets.hf_config("8B")).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = tp
    cfg.data_parallel_size = world // tp
    theirs = estimate_training_memory(cfg, include_activation=False)
    split, training = ModelSplit(world, tp=tp), TrainingSettings()
    ours = estimate(dimensions_of(presets.config_dict("8B")), split, training).peak.states.total
    tower = 576_388_336 / tp * (6 + 12 * tp / world)
    # Measured 4e-5 of the language model, and what the tower has whole on every rank.
    assert theirs.weight_and_optimizer_bytes == pytest.approx(ours - tower, rel=1e-3)


QWEN_2_5_7B = presets.config_dict("8B")
QWEN_2_5_7B["text_config"].update(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152_064,
)  # fmt: skip
# Their loss is not in chunks, and its softmax in float32.
FULLY = dict(recompute=FULL, vision_recompute=FULL, loss_chunk_tokens=0, loss_fusion=None)
TEXT = dict(**FULLY, frozen=TOWER, max_patches=0)
# ms-swift's examples/megatron, each with the memory its authors have seen. How they read it is not said; the caching
# allocator's is what the usual tools show, which is more than is in use.
SEEN = {
    "Qwen3-30B-A3B, moe/qwen3_moe.sh": (
        60, presets.config_dict("30B-A3B"), ModelSplit(16, pp=2, ep=8),
        TrainingSettings(seq_length=8192, global_batch_size=16, **TEXT),
    ),
    "Qwen2.5-7B, long_text.sh": (
        50, QWEN_2_5_7B, ModelSplit(4, tp=4, sequence_parallel=True),
        TrainingSettings(seq_length=32768, global_batch_size=8, **TEXT),
    ),
    "Qwen2.5-VL-7B, multimodal/dense/full.sh": (
        72, QWEN_2_5_7B, ModelSplit(2, tp=2, sequence_parallel=True),
        TrainingSettings(seq_length=2048, global_batch_size=4, max_patches=2048, frozen=TOWER, **FULLY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_memory_that_others_have_seen(name):
    """Measured 0.81, 0.91 and 0.97 of what is published, the reserve included."""
    seen, config, split, training = SEEN[name]
    found = estimate(dimensions_of(config), split, training).peak.total / GIB / seen
    print(f"{name}: {found:.2f}")
    assert 0.75 <= found <= 1


ROWS = dict(seq_length=4096, micro_batch_size=2, global_batch_size=32, max_patches=4096)
CAPTION = dict(seq_length=4096, max_patches=256)  # a picture of 256 x 256, as their mock data
# Megatron-Bridge 0.6.2: recipes/qwen_vl/h100/qwen3_vl.py and perf_recipes/qwen_vl/h100/qwen3_vl.py.
RECIPES = {
    "8B SFT, 2 H100": ("8B", ModelSplit(2, tp=2), TrainingSettings(**ROWS), False),
    "30B-A3B SFT, 8 H100": ("30B-A3B", ModelSplit(8, ep=8), TrainingSettings(**ROWS), False),
    "235B-A22B SFT, 32 H100": (
        "235B-A22B", ModelSplit(32, tp=4, ep=32, sequence_parallel=True), TrainingSettings(**ROWS), False,
    ),
    "8B LoRA, 1 H100, rows of 4096": ("8B", ModelSplit(1), TrainingSettings(**ROWS, lora=LoraSettings(32)), True),
    "235B-A22B benchmark, 256 H100": (
        "235B-A22B",
        ModelSplit(
            256, tp=2, pp=8, vpp=4, ep=32, etp=1, sequence_parallel=True, embedding_as_layer=True, loss_as_layer=True,
        ),
        TrainingSettings(**CAPTION, global_batch_size=1024), True,
    ),
    "30B-A3B benchmark, 16 H100": (
        "30B-A3B", ModelSplit(16, pp=2, vpp=12, ep=8), TrainingSettings(**CAPTION, global_batch_size=512), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_megatron_bridge_publishes(name):
    """Benchmarks, which have been run, fit, with everything trained too; as published they freeze both towers. Full
    fine-tuning does not fit where rows are full: states alone leave 6 GiB at most.
    """
    size, split, training, fits = RECIPES[name]
    worst = estimate(dimensions_of(presets.config_dict(size)), split, training).peak
    print(f"{name}: {worst.total / GIB:.0f} GiB, of which states {worst.states.total / GIB:.0f}")
    assert (worst.total <= H100) == fits


def table(heading: str) -> list[list[str]]:
    """The cells of the page's table whose first column is called so."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


def figures(config: dict, split: ModelSplit, training: TrainingSettings) -> list[str]:
    """As on the page: the estimate, and the states in it."""
    peak = estimate(dimensions_of(config), split, training).peak
    return [f"{nbytes / GIB:.0f} GiB" for nbytes in (peak.total, peak.states.total)]


def test_the_pages_runs():
    rows = [[run.split(",")[0], published.split()[0], *ours] for run, published, *ours in table("run")]
    assert rows == [[name.split(",")[0], str(seen), *figures(*of)] for name, (seen, *of) in SEEN.items()]


def test_the_pages_recipes():
    rows = [[recipe.split(",")[0], *ours, note.startswith("fits")] for recipe, *ours, note in table("recipe")]
    assert rows == [
        [name.split(",")[0], *figures(presets.config_dict(size), *of), fits]
        for name, (size, *of, fits) in RECIPES.items()
    ]
