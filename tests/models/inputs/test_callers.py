"""Calls in the formats of callers return logits, losses and gradients in the caller's order."""

from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext

from tests.helpers.batches import make_batch, make_samples
from tests.models.inputs.support import SIDES, no_grad, offsets, packed_params, reference_logits, rows_of, unpack

# Absolute errors, measured over all cases of this file.
LOGITS = 1e-5  # measured 2.1e-6, of logits up to about 2
LOSS = 1e-6  # measured 1.2e-7 relative, of a summed loss
GRADIENT = 1e-6  # measured 0, relative to the largest entry of each gradient: the layouts are the same


@pytest.mark.parametrize("side", SIDES)
def test_logits_and_losses_of_padded_rows_match_transformers(pair, side):
    rows = rows_of(pair, side)
    expected = reference_logits(pair, rows)
    call = dict(attention_mask=rows.attention_mask, **rows.pixels)
    logits = no_grad(pair.megatron, rows.input_ids, **call)
    losses = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)

    assert logits.shape[:2] == losses.shape == rows.input_ids.shape
    assert (rows.real(logits) - rows.real(expected)).abs().max() <= LOGITS
    wanted = F.cross_entropy(rows.real(expected), rows.real(rows.labels), reduction="none") @ rows.real(rows.loss_mask)
    assert (losses * rows.loss_mask).sum().item() == pytest.approx(wanted.item(), rel=LOSS)


def test_gradients_do_not_depend_on_padding_side(pair):
    gradients = {}
    for side in SIDES:
        rows = rows_of(pair, side)
        pair.megatron.zero_grad()
        losses = pair.megatron(rows.input_ids, attention_mask=rows.attention_mask, labels=rows.labels, **rows.pixels)
        (losses * rows.loss_mask).sum().backward()
        gradients[side] = {name: p.grad.clone() for name, p in pair.megatron.named_parameters()}
    for side in ("left", "mixed", "both"):
        for name, expected in gradients["right"].items():
            error = (gradients[side][name] - expected).abs().max() / expected.abs().max()
            assert error <= GRADIENT, f"{side}: {name} {error:.1e}"


def test_row_of_padding_only_leaves_logits_of_other_rows_unchanged(pair):
    rows = rows_of(pair, "left")
    expected = no_grad(pair.megatron, rows.input_ids, attention_mask=rows.attention_mask, **rows.pixels)
    blank = torch.full((1, rows.input_ids.shape[1]), 7)
    logits = no_grad(
        pair.megatron, torch.cat((rows.input_ids[:2], blank, rows.input_ids[2:])),
        attention_mask=torch.cat((rows.attention_mask[:2], 0 * blank, rows.attention_mask[2:])), **rows.pixels,
    )  # fmt: skip
    assert torch.isfinite(logits).all()
    assert (rows.real(logits[[0, 1, 3, 4]]) - rows.real(expected)).abs().max() <= LOGITS


@pytest.mark.parametrize("axes", [3, 4])
def test_logits_with_caller_position_ids_and_left_padding_match_transformers(pair, axes):
    rows = rows_of(pair, "left")
    positions = torch.randint(0, 50, (axes, *rows.input_ids.shape), generator=torch.Generator().manual_seed(0))
    expected = reference_logits(pair, rows, position_ids=positions)
    logits = no_grad(
        pair.megatron, rows.input_ids, positions, rows.attention_mask, mm_token_type_ids=rows.types(pair.config),
        **rows.pixels,
    )  # fmt: skip
    assert (rows.real(logits) - rows.real(expected)).abs().max() <= LOGITS


@pytest.mark.parametrize("masked", [False, True])
def test_text_logits_with_two_dimensional_position_ids_match_transformers(pair, masked):
    rows = rows_of(pair, "left", "text only")
    if not masked:
        rows.attention_mask = torch.ones_like(rows.attention_mask)
    positions = 5 + torch.arange(rows.input_ids.shape[1]).expand(rows.input_ids.shape)
    expected = reference_logits(pair, rows, position_ids=positions)
    logits = no_grad(pair.megatron, rows.input_ids, positions, rows.attention_mask if masked else None)
    assert (rows.real(logits) - rows.real(expected)).abs().max() <= LOGITS


def test_model_called_with_processor_output_matches_transformers(pair):
    """`model(**processor(...))` works as with transformers, with padding on the left."""
    from qwen3vl_bridge.testing.tiny_processor import make_processor

    processor = make_processor(pair.config.text_config.vocab_size)
    processor.tokenizer.padding_side = "left"
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    inputs = processor(
        text=[f"see <|vision_start|>{processor.image_token}<|vision_end|> it", "no picture in here at all, is there?"],
        images=[image], padding=True, return_tensors="pt",
    )  # fmt: skip
    assert {"mm_token_type_ids", "attention_mask"} < inputs.keys() and not inputs["attention_mask"].all()
    real = inputs["attention_mask"].bool()
    expected = no_grad(pair.reference, **inputs).logits
    assert (no_grad(pair.megatron, **inputs) - expected)[real].abs().max() <= LOGITS


def test_empty_pixel_tensors_give_same_logits_as_no_pixels(pair):
    rows = rows_of(pair, "left", "text only")
    expected = no_grad(pair.megatron, rows.input_ids, attention_mask=rows.attention_mask)
    width = pair.megatron.vision_model.values_per_patch
    empty = dict(pixel_values=torch.zeros(0, width), image_grid_thw=torch.zeros(0, 3, dtype=torch.long))
    logits = no_grad(pair.megatron, rows.input_ids, attention_mask=rows.attention_mask, **empty, loss_mask=None)
    assert torch.equal(logits, expected)
    assert (rows.real(logits) - rows.real(reference_logits(pair, rows))).abs().max() <= LOGITS


def test_pipeline_stage_hidden_states_do_not_depend_on_padding_side(pair):
    stage = pair.provider.provide(pre_process=True, post_process=False)
    stage.load_state_dict(pair.megatron.state_dict(), strict=False)
    hidden = []
    for side in ("right", "left"):
        rows = rows_of(pair, side)
        hidden.append(no_grad(stage, rows.input_ids, attention_mask=rows.attention_mask, **rows.pixels))
    assert hidden[0].shape[:2] == rows.input_ids.T.shape
    real = rows_of(pair, "right").attention_mask.T.bool()
    assert (hidden[0] - hidden[1])[real].abs().max() <= LOGITS


def test_forward_raises_if_given_model_inputs_and_batch_arguments(pair):
    batch = make_batch(make_samples("one image", pair.config, seed=2), pair.config, packed=True)
    no_grad(pair.megatron, inputs=batch.local(), pixel_values=None)
    for name in ("input_ids", "position_ids", "attention_mask", "labels", "pixel_values"):
        with pytest.raises(ValueError, match=f"inputs is a complete batch, and {name} is given too"):
            pair.megatron(inputs=batch.local(), **{name: batch.input_ids})


def test_losses_do_not_change_if_labels_with_loss_mask_0_are_minus_100(pair):
    """The caller multiplies by the mask, because it may need the other log-probabilities too."""
    rows = rows_of(pair, "left")
    masked = rows.labels.masked_fill(rows.loss_mask == 0, -100)
    arguments = dict(attention_mask=rows.attention_mask, **rows.pixels)
    losses = no_grad(pair.megatron, rows.input_ids, labels=masked, loss_mask=rows.loss_mask, **arguments)
    expected = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **arguments)
    assert torch.equal(losses * rows.loss_mask, expected * rows.loss_mask)
    arguments["loss_mask"] = rows.loss_mask
    assert torch.equal(no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **arguments), expected)


TEXT = torch.tensor([[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]])


@pytest.mark.parametrize("given", [
    dict(), dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])),
    dict(attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])), dict(packed_seq_params=packed_params([0, 4, 10])),
    dict(packed_seq_params=packed_params([0, 4, 10], [0, 6, 12])),
    dict(input_ids=TEXT.view(1, 12), packed_seq_params=packed_params([0, 6, 12])),
    dict(input_ids=TEXT.view(1, 12), packed_seq_params=packed_params([0, 4, 10], [0, 6, 12])),
], ids=["rows", "left", "right", "rows packed", "rows packed and padded", "flat", "flat and padded"])  # fmt: skip
def test_text_only_batch_of_any_format_gives_every_parameter_gradient(pair, given):
    """Without images no layer gets DeepStack features, but every parameter gets a gradient."""
    pair.megatron.zero_grad()
    features = []
    layers = pair.megatron.language_model.decoder.layers
    hooks = [
        layer.register_forward_pre_hook(lambda _, a, named: features.append(named["context"]), with_kwargs=True)
        for layer in layers
    ]
    ids = given.get("input_ids", TEXT)
    pair.megatron(**{"input_ids": TEXT, **given}, labels=ids).sum().backward()
    for hook in hooks:
        hook.remove()
    assert len(features) == len(layers)  # None after the last layer that adds features
    assert any(f is not None for f in features) and all(f is None or f.shape[1] == 0 for f in features)
    assert all(p.grad is not None for p in pair.megatron.parameters())
    assert not any(p.grad.any() for p in pair.megatron.vision_model.parameters())


def test_forward_with_inference_context_raises_for_invalid_arguments(pair):
    context = StaticInferenceContext(2, 8)
    more = dict(inference_context=context, runtime_gather_output=True, position_ids=torch.arange(6).expand(2, 6))
    for _ in range(2):  # Megatron-Bridge's inference wrapper passes all tokens again for each new token
        assert torch.equal(no_grad(pair.megatron, TEXT, **more), no_grad(pair.megatron, TEXT))
    with pytest.raises(ValueError, match="runtime_gather_output is True with labels"):
        pair.megatron(TEXT, labels=TEXT, runtime_gather_output=True)
    context.increment_sequence_len_offset(6)
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 2\] .* and inference_context holds 6 tokens"):
        pair.megatron(TEXT[:, :2], inference_context=context)
    with pytest.raises(ValueError, match="pixel_values is given and inference_context holds 6 tokens"):
        pair.megatron(TEXT[:, :1], inference_context=context, pixel_values=torch.zeros(4, 1536))
    with pytest.raises(ValueError, match="inference_context is a SimpleNamespace, expected a StaticInferenceContext"):
        pair.megatron(TEXT, inference_context=SimpleNamespace(is_static_batching=lambda: False))


@pytest.mark.parametrize("rounded", [False, True], ids=["true lengths", "lengths rounded up"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_forward_of_padded_rows_with_packed_seq_params_returns_packed_logits(pair, side, rounded):
    """RL frameworks pass rows with a mask, and expect the packed row that the parameters describe."""
    rows = rows_of(pair, side)
    lengths, padded = rows.lengths, [-(-n // 8) * 8 for n in rows.lengths]
    params = packed_params(offsets(padded if rounded else lengths), offsets(padded))
    call = dict(attention_mask=rows.attention_mask.bool(), packed_seq_params=params, **rows.pixels)
    expected = reference_logits(pair, rows)

    logits = no_grad(pair.megatron, rows.input_ids, **call)
    assert logits.shape[:2] == (1, sum(padded))
    assert (unpack(logits, lengths, padded) - rows.real(expected)).abs().max() <= LOGITS

    wanted = F.cross_entropy(rows.real(expected), rows.real(rows.labels), reduction="none")
    losses = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)
    assert losses.shape == rows.labels.shape
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS
    assert not losses[rows.attention_mask == 0].any()

    labels = torch.cat([F.pad(s.labels, (0, p - len(s.ids))) for s, p in zip(rows.samples, padded, strict=True)])[None]
    losses = no_grad(pair.megatron, rows.input_ids, labels=labels, **call)
    assert losses.shape == labels.shape
    assert (unpack(losses, lengths, padded) - wanted).abs().max() <= LOGITS


def test_logits_with_packed_seq_params_and_no_mask_match_transformers(pair):
    """Without a mask, the offsets determine the real tokens of rows padded on the right."""
    rows = rows_of(pair, "right")
    params = packed_params(offsets(rows.lengths))
    logits = no_grad(pair.megatron, rows.input_ids, packed_seq_params=params, **rows.pixels)
    assert (logits[0] - rows.real(reference_logits(pair, rows))).abs().max() <= LOGITS


def test_logits_and_losses_of_rows_with_several_documents_match_transformers(pair):
    """The concatenated rows are the packed row, as in Megatron-Bridge's step with full rows."""
    alone = rows_of(pair, "right")
    samples, lengths = alone.samples, alone.lengths
    length = max(len(a.ids) + len(b.ids) for a, b in (samples[:2], samples[2:])) + 3
    padded = [lengths[0], length - lengths[0], lengths[2], length - lengths[2]]
    flat = torch.cat([F.pad(s.ids, (0, p - len(s.ids)), value=7) for s, p in zip(samples, padded, strict=True)])
    labels = torch.cat([F.pad(s.labels, (0, p - len(s.ids))) for s, p in zip(samples, padded, strict=True)])
    expected = alone.real(reference_logits(pair, alone))
    wanted = F.cross_entropy(expected, alone.real(alone.labels), reduction="none")

    call = dict(packed_seq_params=packed_params(offsets(lengths), offsets(padded)), **alone.pixels)
    logits = no_grad(pair.megatron, flat.view(2, length), **call)
    assert logits.shape[:2] == (1, 2 * length)
    assert (unpack(logits, lengths, padded) - expected).abs().max() <= LOGITS
    for shape in ((2, length), (1, 2 * length)):
        losses = no_grad(pair.megatron, flat.view(2, length), labels=labels.view(shape), **call)
        assert losses.shape == shape
        assert (unpack(losses.view(1, -1), lengths, padded) - wanted).abs().max() <= LOGITS
