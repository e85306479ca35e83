"""Generation with the Megatron model against transformers' `generate`, token for token."""

import shutil
import tempfile
from pathlib import Path

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.inference import decoder
from qwen3vl_bridge.inference.decoder import Decoder
from qwen3vl_bridge.inference.generation import generate
from qwen3vl_bridge.models.common.decoding import PaddedContext
from qwen3vl_bridge.models.common.linear_attention import LinearAttention
from qwen3vl_bridge.training.process_groups import initialize

import numpy as np
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.inference.contexts import StaticInferenceContext
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from tests.helpers.batches import CONTENTS, make_samples, pictures
from tests.helpers.forked import results_of_ranks
from tests.parity.conftest import Pair, make_pair

NEW = 24
SMALLER = 0.1
NEVER: list[int] = []
PAD = 7


def load(folder, **fields) -> Pair:
    """Load both models; the reference has no end token.

    Small embeddings make the next token depend on all tokens before it. Otherwise a tied model repeats one token.
    """
    with tempfile.TemporaryDirectory() as copied:
        folder = shutil.copytree(folder, Path(copied) / "model")
        weights = load_file(folder / "model.safetensors")
        (name,) = [name for name in weights if name.endswith("embed_tokens.weight")]
        save_file(weights | {name: weights[name] * SMALLER}, folder / "model.safetensors", {"format": "pt"})
        pair = make_pair(folder, **fields)
    pair.reference.eval().generation_config = GenerationConfig(do_sample=False)
    return pair


QWEN3_VL, QWEN3_5 = ["untied", "tied", "moe"], ["3.5 dense", "3.5 tied", "3.5 moe"]
of_both_families = pytest.mark.parametrize("pair", QWEN3_VL + QWEN3_5, indirect=True)


def folder_of(kind: str, request) -> Path:
    if kind in QWEN3_5:
        return request.getfixturevalue("qwen3_5_folders")[kind.removeprefix("3.5 ")]
    return request.getfixturevalue(f"{kind}_folder")


@pytest.fixture(scope="module", params=QWEN3_VL)
def pair(request) -> Pair:
    return load(folder_of(request.param, request))


def prompts(content: str, config, *, seed: int = 6, side: str = "left") -> dict[str, torch.Tensor]:
    samples = make_samples(content, config, seed)
    longest = max(len(s.ids) for s in samples)
    ids, mask = torch.full((len(samples), longest), PAD), torch.zeros(len(samples), longest, dtype=torch.long)
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        where = slice(longest - n, None) if side == "left" else slice(n)
        ids[row, where], mask[row, where] = sample.ids, 1
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    return dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds, **pictures(samples))


def answers(pair: Pair, batch: dict[str, torch.Tensor], **settings) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "eos_token_id": NEVER, **settings}
    return generate(pair.megatron, **batch, **settings)[:, batch["input_ids"].shape[1] :]


@pytest.mark.one_case_in(9)
@of_both_families
@pytest.mark.parametrize("content", CONTENTS)
def test_generated_tokens_match_transformers(pair, content):
    batch = prompts(content, pair.config)
    expected = pair.reference.generate(**batch, max_new_tokens=NEW)
    assert expected.shape[1] == batch["input_ids"].shape[1] + NEW
    assert len(expected[:, -NEW:].unique()) >= 5  # not one token for ever
    assert torch.equal(generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=NEVER), expected)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("content", ["many images", "mixed"])
def test_generate_with_right_padding_matches_left_padding(pair, content):
    left, right = (answers(pair, prompts(content, pair.config, side=side)) for side in ("left", "right"))
    assert torch.equal(left, right)


@pytest.mark.one_case_in(3)
@of_both_families
def test_generate_stops_at_eos_tokens_like_transformers(pair):
    batch = prompts("mixed", pair.config)
    free = answers(pair, batch)
    ends = [int(row[2 + 3 * number]) for number, row in enumerate(free)]  # every row meets its own at the latest
    expected = pair.reference.generate(**batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
    found = generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
    assert torch.equal(found, expected)
    new = found[:, batch["input_ids"].shape[1] :]
    assert new.shape[1] < NEW  # all rows have ended
    assert len((new == PAD).sum(-1).unique()) > 1  # not all at once


def test_generate_for_prompts_of_equal_length_matches_transformers(pair):
    config, rng, rows = pair.config, torch.Generator().manual_seed(0), 4
    ids = torch.randint(0, config.image_token_id - 16, (rows, 14), generator=rng)
    ids[:, 3:11] = torch.tensor(
        [config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id]
    )
    pixels = torch.randn(rows * 24, 3 * 2 * 16 * 16, generator=rng)
    kinds = (ids == config.image_token_id).int()
    grids = torch.tensor([[1, 4, 6]] * rows)
    batch = dict(input_ids=ids, mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grids)
    free = pair.reference.generate(**batch, max_new_tokens=NEW)
    assert torch.equal(generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=NEVER), free)
    ends = [int(row[14 + 2 + 3 * number]) for number, row in enumerate(free)]
    expected = pair.reference.generate(**batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
    assert (expected[:, 14:] == PAD).any()
    assert torch.equal(
        generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD), expected
    )


def test_generate_pads_row_that_ends_early_like_transformers(pair):
    batch = prompts("many images", pair.config)
    free = answers(pair, batch)
    end = next(int(token) for token in free[0] if token not in free[-1])
    expected = pair.reference.generate(**batch, max_new_tokens=NEW, eos_token_id=end)
    found = generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=end)
    assert torch.equal(found, expected)
    assert torch.equal(found[-1, -NEW:], free[-1])
    assert (found[0, -1] == end).all()  # padding, for want of another id


def test_generate_uses_eos_token_id_of_provider_by_default(pair, monkeypatch):
    batch = prompts("one image", pair.config)
    end = int(answers(pair, batch)[0, 3])
    monkeypatch.setattr(pair.provider, "eos_token_id", end)
    assert torch.equal(answers(pair, batch, eos_token_id=None), answers(pair, batch, eos_token_id=end))
    assert answers(pair, batch, eos_token_id=None).shape[1] <= 4


def conversation(*parts: dict) -> list[dict]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which digit is this?"}]}]


def test_generate_with_image_and_video_matches_transformers(pair):
    from qwen3vl_bridge.testing.tiny_processor import make_processor

    noise = np.random.default_rng(0).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
    batch = make_processor(512).apply_chat_template(
        [
            conversation({"type": "image", "image": Image.fromarray(noise[0])}),
            conversation({"type": "video", "video": [Image.fromarray(frame) for frame in noise]}), conversation(),
        ],
        tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
        processor_kwargs=dict(padding=True, padding_side="left", do_sample_frames=False),
    )  # fmt: skip
    assert {"pixel_values", "pixel_values_videos", "mm_token_type_ids"} <= set(batch)
    expected = pair.reference.generate(**batch, max_new_tokens=NEW)
    assert torch.equal(generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=NEVER), expected)


@pytest.fixture(scope="module")
def one(untied_folder) -> Pair:
    return load(untied_folder, should_pad_vocab=True, make_vocab_size_divisible_by=384)


def test_generate_never_chooses_vocabulary_padding(one):
    batch = prompts("one image", one.config)
    weight = one.megatron.language_model.output_layer.weight
    assert len(weight) == 768
    expected = one.reference.generate(**batch, max_new_tokens=1)[0, -1]
    with torch.no_grad():
        weight[512:] = 3 * weight[expected]  # wins wherever the right token does
    assert answers(one, batch, max_new_tokens=1) == expected


def test_generate_runs_vision_tower_once_and_restores_training_modes(one):
    model, seen = one.megatron.train(), []
    model.language_model.embedding.eval()
    modes = [module.training for module in model.modules()]
    batch = prompts("mixed", one.config)
    hooks = [
        model.vision_model.register_forward_hook(lambda *_: seen.append("tower")),
        model.language_model.register_forward_hook(lambda module, *_: seen.append(module.training)),
    ]
    try:
        answers(one, batch, max_new_tokens=3)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(batch["attention_mask"].sum(-1).unique()) > 1
    assert seen == ["tower", *[False] * 3]  # rows of all lengths in one call
    assert [module.training for module in model.modules()] == modes


def test_generate_restores_training_modes_if_forward_raises(one):
    def fail(*_):
        raise RuntimeError("on purpose")

    model = one.megatron.train()
    hook = model.language_model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="on purpose"):
            answers(one, prompts("text only", one.config))
    finally:
        hook.remove()
    assert all(module.training for module in model.modules())


def test_generate_accepts_ddp_wrapped_model_and_list_of_models(one):
    batch = prompts("one image", one.config)
    wrapped = DistributedDataParallel(one.provider, DistributedDataParallelConfig(), one.megatron)
    for model in ([one.megatron], wrapped, [wrapped]):
        found = generate(model, **batch, max_new_tokens=3, eos_token_id=NEVER)
        assert torch.equal(found, generate(one.megatron, **batch, max_new_tokens=3, eos_token_id=NEVER))


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(max_new_tokens=0), "max_new_tokens is 0, expected 1 or more"),
    (dict(attention_mask=torch.ones(2, 5)), r"input_ids has shape \[2, 6\] and attention_mask \[2, 5\]"),
    (dict(attention_mask=torch.tensor([[1] * 6, [0] * 6])), r"found 2 prompts, and prompts \[1\] have no tokens"),
    (dict(image_grid_thw=torch.tensor([[1, 2, 2]]), pixel_values=torch.zeros(4, 1536)), "image"),
])  # fmt: skip
def test_generate_raises_if_arguments_are_invalid(one, arguments, message):
    arguments = {"input_ids": torch.ones(2, 6, dtype=torch.long), "max_new_tokens": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(one.megatron, **arguments)


def test_generate_raises_if_model_class_or_layout_is_unsupported(one, monkeypatch):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"model is \['Linear'\], expected a VisionLanguageModel"):
        generate(torch.nn.Linear(1, 1), ids, max_new_tokens=1)
    monkeypatch.setattr(one.megatron, "vision_model", None)
    with pytest.raises(ValueError, match="the vision tower is on separate ranks"):
        generate(one.megatron, ids, max_new_tokens=1)


@pytest.mark.one_case_in(3)
@of_both_families
def test_generate_logits_with_cache_match_logits_without_cache(pair, monkeypatch):
    """Compare the logits of every step with those of a forward pass over the full rows."""
    batch, found = prompts("mixed", pair.config), {True: [], False: []}
    compute = Decoder.next_logits
    for cached in (True, False):
        monkeypatch.setattr(type(pair.megatron.language_model), "keeps_states", cached)

        def record(computing: Decoder, kept=found[cached]) -> torch.Tensor:
            kept.append(compute(computing))
            return kept[-1]

        monkeypatch.setattr(Decoder, "next_logits", record)
        answers(pair, batch)
    error = max((a - b).abs().max() / b.abs().max() for a, b in zip(found[True], found[False], strict=True))
    print("largest error of a logit, relative to the largest logit:", error)
    assert len(found[True]) == NEW and error < 1e-5


@of_both_families
def test_forward_with_inference_context_matches_generate_with_images(pair):
    """A caller's loop with megatron-core's static context, in which rows have the same length."""
    batch = prompts("mixed", pair.config)
    (row,) = (batch["input_ids"] == pair.config.video_token_id).any(-1).nonzero()[:1, 0].tolist() or [0]
    samples = [make_samples("mixed", pair.config, 6)[row]]
    ids, images = samples[0].ids[None].expand(2, -1), pictures(samples * 2)
    expected = answers(pair, dict(input_ids=ids, **images))
    context, model, found = StaticInferenceContext(2, ids.shape[1] + NEW), pair.megatron, []
    with torch.no_grad():
        logits = model(ids, inference_context=context, **images)
        context.increment_sequence_len_offset(ids.shape[1])
        for _ in range(NEW):
            found.append(logits[:, -1:].argmax(-1))
            logits = model(found[-1], inference_context=context)
            context.increment_sequence_len_offset(1)
    assert torch.equal(torch.cat(found, 1), expected)


@of_both_families
def test_generate_cache_size_matches_documented_formula(pair, monkeypatch):
    """The formula of docs/evaluation.md, for padded rows and one rank."""
    caches = []

    class Kept(PaddedContext):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(decoder, "PaddedContext", Kept)
    batch, config = prompts("mixed", pair.config), pair.provider
    answers(pair, batch)
    (cache,) = caches
    rows, slots = cache.visible.shape
    assert slots == batch["input_ids"].shape[1] + NEW
    full, linear = 4 * 2 * slots * config.num_query_groups * config.kv_channels, 0
    if config.experimental_attention_variant is not None:
        keys, values = (
            config.linear_num_key_heads * config.linear_key_head_dim,
            config.linear_num_value_heads * config.linear_value_head_dim,
        )
        linear = 4 * ((2 * keys + values) * (config.linear_conv_kernel_dim - 1) + config.linear_key_head_dim * values)
    layers = [isinstance(layer.self_attention, LinearAttention) for layer in pair.megatron.decoder.layers]
    assert any(layers) == (linear > 0)
    found = sum(x.nbytes for pair_of_layer in cache.key_value_memory_dict.values() for x in pair_of_layer)
    assert found == rows * sum(linear if is_linear else full for is_linear in layers)


def random_prompts(config, count: int, seed: int) -> dict[str, torch.Tensor]:
    """Return prompts of 3 to 40 tokens, of which some have an image."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    rows, pixels, grids = [], [], []
    image = [config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id]
    for _ in range(count):
        text = torch.randint(0, config.image_token_id - 16, (draw(3, 30),), generator=rng).tolist()
        if draw(0, 2):
            at = draw(0, len(text))
            text = [*text[:at], *image, *text[at:]]
            pixels.append(torch.randn(24, 3 * 2 * 16 * 16, generator=rng))
            grids.append([1, 4, 6])
        rows.append(torch.tensor(text))
    longest = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=PAD) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    kinds = (ids == config.image_token_id).int() * mask.int()
    vision = dict(pixel_values=torch.cat(pixels), image_grid_thw=torch.tensor(grids)) if pixels else {}
    return dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=kinds, **vision)


@pytest.mark.slow
@of_both_families
def test_generate_tokens_of_200_random_prompts_match_transformers(pair):
    for seed in range(10):
        batch = random_prompts(pair.config, 20, seed)
        expected = pair.reference.generate(**batch, max_new_tokens=NEW)
        assert torch.equal(generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=NEVER), expected), seed


LAYOUTS = {
    "TP 2": dict(tensor_model_parallel_size=2),
    "TP 2 + SP": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "PP 2": dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32),
    "EP 2": dict(expert_model_parallel_size=2),
    "CP 2": dict(context_parallel_size=2),
}
CHUNKWISE = {"CP 2, chunkwise": dict(context_parallel_size=2, linear_cp_mode="chunkwise")}
ON_FOUR = {
    "TP 2 x CP 2": dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2),
    "PP 2 x CP 2": dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, context_parallel_size=2),
    "CP 4": dict(context_parallel_size=4),
    "TP 4 + SP": dict(tensor_model_parallel_size=4, sequence_parallel=True),
}


def answers_of_ranks(folder: Path, layout: str) -> torch.Tensor:
    parallel = load(folder, **(LAYOUTS | CHUNKWISE | ON_FOUR)[layout])
    return answers(parallel, prompts("mixed", parallel.config))


def check_ranks(request, kind: str, layout: str, ranks: int) -> None:
    folder = folder_of(kind, request)
    alone = load(folder)
    expected = answers(alone, prompts("mixed", alone.config))
    assert torch.equal(results_of_ranks(answers_of_ranks, ranks, folder, layout), expected)


# The model with experts has a dense layer too.
@pytest.mark.one_case_in(28)
@pytest.mark.parametrize(("kind", "layout"), [
    (kind, layout) for kind in ("untied", "tied", "moe", "3.5 dense", "3.5 tied", "3.5 moe") for layout in LAYOUTS
    # Experts are needed for EP, and linear attention with TP needs SP.
    if (layout != "EP 2" or "moe" in kind) and (layout != "TP 2" or "3.5" not in kind)
] + [("3.5 dense", *CHUNKWISE), ("3.5 moe", *CHUNKWISE)])  # fmt: skip
def test_generate_on_two_ranks_matches_tokens_of_one_rank(request, kind, layout):
    check_ranks(request, kind, layout, ranks=2)


# Linear attention has two key heads, so on CP 4 it is chunk-wise.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [
    *(("untied", layout) for layout in ON_FOUR), ("3.5 dense", "PP 2 x CP 2"), ("3.5 moe", "PP 2 x CP 2"),
    ("3.5 dense", "CP 4"), ("3.5 moe", "TP 2 x CP 2"),
])  # fmt: skip
def test_generate_on_four_ranks_matches_tokens_of_one_rank(request, kind, layout):
    check_ranks(request, kind, layout, ranks=4)


def short_answers(folder: Path, **fields) -> torch.Tensor:
    pair, ids = load(folder, **fields), torch.tensor([[5, 6, 7], [8, PAD, PAD], [9, 10, PAD]])
    return answers(pair, dict(input_ids=ids, attention_mask=(ids != PAD).long()))


def short_answers_of_ranks(folder: Path, fields: dict[str, str]) -> torch.Tensor:
    return short_answers(folder, context_parallel_size=2, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"), [("untied", {}), ("3.5 dense", {}), ("3.5 dense", dict(linear_cp_mode="chunkwise"))]
)
def test_generate_prompts_shorter_than_cp_chunks_matches_one_rank(request, kind, fields):
    folder = folder_of(kind, request)
    assert torch.equal(results_of_ranks(short_answers_of_ranks, 2, folder, fields), short_answers(folder))


def answers_of_virtual_stages(folder: Path) -> torch.Tensor:
    alone = load(folder)  # for its configuration only; the processes have no groups before it
    batch = prompts("mixed", alone.config)
    parallel_state.destroy_model_parallel()
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    for name, value in dict(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
        overlap_p2p_comm=True, batch_p2p_comm=False,
    ).items():  # fmt: skip
        setattr(provider, name, value)
    provider.finalize()
    initialize(provider, seed=0)
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
    )
    assert len(chunks) == 2
    settings = dict(max_new_tokens=NEW, eos_token_id=NEVER)
    return generate(list(chunks), **batch, **settings)[:, batch["input_ids"].shape[1] :]


@pytest.mark.slow
def test_generate_on_interleaved_pipeline_stages_matches_one_rank(untied_folder):
    alone = make_pair(untied_folder)
    expected = answers(alone, prompts("mixed", alone.config))
    assert torch.equal(results_of_ranks(answers_of_virtual_stages, 2, untied_folder), expected)
