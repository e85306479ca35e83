"""How RL frameworks call a Qwen3-VL model today, with the framework stubbed and the model not."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.nn.functional as F

from tests.model.inputs.support import gaps, make_rows, no_grad, offsets, packed_params, reference_logits, sides, unpack
from tests.parity.batches import make_samples
from tests.parity.conftest import Pair, make_pair

LOGITS = 1e-5  # absolute, measured 2.0e-6, of logits up to about 2 and log-probabilities up to 8
GRADIENT = 1e-6  # relative to the largest entry of each gradient, measured 0: both ways are the same sums


@pytest.fixture(scope="module", params=["dense", "moe"])
def pair(request) -> Pair:
    if request.param == "dense":
        return make_pair(request.getfixturevalue("tied_folder"))
    return make_pair(request.getfixturevalue("moe_folder"), moe_aux_loss_coeff=0.0)


@pytest.fixture(scope="module")
def samples(pair):
    return make_samples("mixed", pair.config, seed=2)


@dataclass
class Output:
    """What verl's fused kernels return in place of logits."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


@dataclass
class Context:
    temperature: float


def fused_output_processor(
    *, hidden_states: Any, output_layer: Any, output_weight: Any, labels: Any, context: Any, config: Any, **_: Any
) -> Output:
    """As verl's, with torch for its kernel: hidden states [s, b, h], labels [b, s]."""
    weight = output_layer.weight if output_weight is None else output_weight
    logits = (hidden_states @ weight.T / context.temperature)[..., : config.vocab_size].transpose(0, 1)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return Output(log_probs.gather(-1, labels[..., None]).squeeze(-1), entropy)


def test_verls_fused_kernels(pair, samples):
    """Rows and their mask go in, with offsets and labels of the packed row; the hook gets hidden states."""
    parameters = inspect.signature(pair.megatron.language_model.forward).parameters
    assert {"output_processor", "output_processor_context"} <= parameters.keys()  # how verl chooses the hook
    rows, lengths = make_rows(samples, gaps(samples)), [len(s.ids) for s in samples]
    padded = [-(-n // 8) * 8 for n in lengths]
    labels = torch.cat([F.pad(s.labels, (0, p - len(s.ids))) for s, p in zip(samples, padded, strict=True)])[None]
    call = dict(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask.bool(),
        position_ids=None,
        packed_seq_params=packed_params(offsets(padded), offsets(padded)),
        labels=labels,
        **rows.pixels,
    )
    context = Context(temperature=0.7)
    output = pair.megatron(**call, output_processor=fused_output_processor, output_processor_context=context)
    assert isinstance(output, Output) and output.log_probs.shape == labels.shape == output.entropy.shape
    expected = (rows.real(reference_logits(pair, rows)) / 0.7).log_softmax(-1)
    wanted = expected.gather(-1, rows.real(rows.labels)[:, None])[:, 0]
    assert (unpack(output.log_probs, lengths, padded) - wanted).abs().max() <= LOGITS

    gradients = []
    for fused in (True, False):
        pair.megatron.zero_grad()
        if fused:
            total = unpack(pair.megatron(
                **call, output_processor=fused_output_processor, output_processor_context=Context(1.0)
            ).log_probs, lengths, padded).sum()  # fmt: skip
        else:
            total = -unpack(pair.megatron(**call), lengths, padded).sum()
        total.backward()
        gradients.append([p.grad.clone() for p in pair.megatron.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert (ours - plain).abs().max() <= GRADIENT * plain.abs().max().clamp(min=1.0)


def test_a_hook_sees_tokens_in_the_callers_order_or_none(pair, samples):
    rows = make_rows(samples, sides(samples)["left"])
    call = dict(attention_mask=rows.attention_mask, labels=rows.labels, **rows.pixels)
    with pytest.raises(ValueError, match="expected rows padded on the right, or packed_seq_params and labels"):
        pair.megatron(rows.input_ids, output_processor=fused_output_processor, **call)
    rows = make_rows(samples, sides(samples)["right"])
    call = dict(attention_mask=rows.attention_mask, labels=rows.labels, **rows.pixels)
    hook = dict(output_processor=fused_output_processor, output_processor_context=Context(1.0))
    found = no_grad(pair.megatron, rows.input_ids, **call, **hook).log_probs
    assert (rows.real(found) + rows.real(no_grad(pair.megatron, rows.input_ids, **call))).abs().max() <= LOGITS


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        (dict(temperature=1.0), "give output_processor, which divides logits by itself"),  # verl's patch of forward
        (dict(return_logprobs_for_linear_ce_fusion=True), "NeMo-RL: use_fused_linear_logprobs=false"),
    ],
)
def test_what_other_models_compute_themselves_is_refused_with_what_to_set(pair, samples, argument, advice):
    with pytest.raises(ValueError, match=f"is given, expected None: .*{advice}"):
        pair.megatron(samples[1].ids[None], **argument)


def test_verls_rows_by_sequence(pair, samples):
    """`use_remove_padding=False`: rows padded on the right, a mask of booleans, no offsets and no positions."""
    rows = make_rows(samples, sides(samples)["right"])
    output = no_grad(
        pair.megatron,
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask.bool(),
        position_ids=None,
        **rows.pixels,
    )
    assert (rows.real(output) - rows.real(reference_logits(pair, rows))).abs().max() <= LOGITS


def test_nemo_rl_without_sequence_packing(pair, samples):
    """A causal mask for all rows, booleans of what is hidden, and positions that count, of text alone or with pictures.

    With pictures it gives no positions. Rows are padded on the right, and nothing says where.
    """
    rows = make_rows(samples, sides(samples)["right"])
    ids = rows.input_ids
    hidden = torch.tril(torch.ones(1, 1, ids.shape[1], ids.shape[1])) < 0.5
    expected = rows.real(reference_logits(pair, rows))
    for positions in (None, torch.arange(ids.shape[1]).expand_as(ids)):
        output = no_grad(pair.megatron, ids, position_ids=positions, attention_mask=hidden, **rows.pixels)
        assert (rows.real(output) - expected).abs().max() <= LOGITS


def test_nemo_rl_leaves_packing_to_the_model(pair, samples):
    """Rows, a mask and offsets that both count each row's padding, for a model with `model_owns_packing`."""
    assert pair.megatron.model_owns_packing
    lengths = [len(s.ids) for s in samples]
    padded = [-(-n // 4) * 4 for n in lengths]
    padded[-1] += 8  # a fixed length of all rows under pipeline parallelism is reached by the last one
    rows = make_rows(samples, [0] * len(samples), extra=max(padded) - max(lengths), pad=0)
    mask = torch.arange(max(padded)) < torch.tensor(padded)[:, None]
    output = no_grad(
        pair.megatron,
        input_ids=rows.input_ids,
        attention_mask=mask,
        position_ids=None,
        packed_seq_params=packed_params(offsets(padded), offsets(padded)),
        mm_token_type_ids=rows.types(pair.config)[:, : max(lengths) // 2],  # of the question alone, as it comes there
        **rows.pixels,
    )
    expected = rows.real(reference_logits(pair, rows))
    assert (unpack(output, lengths, padded) - expected).abs().max() <= LOGITS


def test_miles_gives_a_loss_mask_and_no_labels(pair, samples):
    """One packed row padded with token 0 as a segment of its own, to train and for log-probabilities."""
    lengths = [len(s.ids) for s in samples]
    total = -(-sum(lengths) // 128) * 128
    rest = total - sum(lengths)
    masks = torch.cat([*[s.loss_mask for s in samples], torch.zeros(rest)])[None]
    rows = make_rows(samples, [0] * len(samples))
    output = no_grad(
        pair.megatron,
        input_ids=F.pad(torch.cat([s.ids for s in samples]), (0, rest))[None],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=packed_params(offsets([*lengths, rest])),
        loss_mask=masks,
        **rows.pixels,
    )
    assert (output[0, : sum(lengths)] - rows.real(reference_logits(pair, rows))).abs().max() <= LOGITS


def test_ms_swifts_rows(pair, samples):
    """What each token sees as a mask, positions on three axes, and labels of -100, which it masks itself."""
    rows = make_rows(samples, sides(samples)["right"])
    room = rows.input_ids.shape[1]
    seen = torch.ones(len(samples), room, room).bool().tril() & rows.attention_mask.bool()[:, None, :]
    labels = rows.labels.masked_fill(rows.loss_mask == 0, -100)
    losses = no_grad(
        pair.megatron, input_ids=rows.input_ids, attention_mask=~seen[:, None], labels=labels, **rows.pixels
    )
    expected = rows.real(reference_logits(pair, rows))
    wanted = F.cross_entropy(expected, rows.real(rows.labels), reduction="none") * rows.real(rows.loss_mask)
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS
