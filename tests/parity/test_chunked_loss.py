"""The loss of long rows in chunks: values and gradients of the full row, without all of its logits at once."""

import itertools
import weakref
from collections import Counter

from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.batches import make_batch, make_samples
from tests.helpers.noise import check, limits, relative
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.conftest import make_pair
from tests.parity.test_settings import assert_parity

CHUNK = 17  # tokens, of about 150
PADDED = dict(should_pad_vocab=True, make_vocab_size_divisible_by=100)


class Logits(TorchDispatchMode):
    """Records the peak memory of tensors as wide as the vocabulary, except weights, in float32 rows."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.width, self.weight = vocabulary, {vocabulary, hidden}
        self.alive: Counter[int] = Counter()
        self.largest, self.peak = 0.0, 0.0  # rows of one tensor, and of all that were there at one time

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor) and one.ndim and self.width in (one.shape[-1], one.shape[0]):
                self._see(one)
        return made

    def _see(self, one: torch.Tensor) -> None:
        storage = one.untyped_storage()
        if set(one.shape) == self.weight or storage._cdata in self.alive:
            return
        self.alive[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.largest = max(self.largest, storage.nbytes() / 4 / self.width)
        self.peak = max(self.peak, sum(self.alive.values()) / 4 / self.width)


def batch_of(pair, *, packed: bool = True, times: int = 1, with_next_tokens: bool = False):
    samples = [sample for seed in range(times) for sample in make_samples("mixed", pair.config, seed=8 + seed)]
    return make_batch(samples, pair.config, packed=packed).local(with_next_tokens=with_next_tokens)


Both = tuple[torch.Tensor, dict[str, torch.Tensor]]


def both(pair, inputs) -> Both:
    """Return losses of tokens, and gradients of all parameters."""
    pair.megatron.zero_grad()
    losses = pair.megatron(inputs=inputs)
    weights = torch.rand(losses.shape, generator=torch.Generator().manual_seed(1)) * inputs.loss_mask
    (losses * weights).sum().backward()
    return losses.detach(), {name: p.grad for name, p in pair.megatron.named_parameters() if p.grad is not None}


def errors(found: Both, expected: Both) -> dict[str, float]:
    """Return errors relative to the largest loss, and to the largest entry of each gradient."""
    assert found[1].keys() == expected[1].keys()
    of_losses = float((found[0] - expected[0]).abs().max() / expected[0].abs().max())
    return {"losses": of_losses, "gradients": max(relative(found[1], expected[1]).values())}


def limits_of(pair, inputs) -> dict[str, float]:
    """Return the limits of errors against the loss of the full row."""
    return limits(lambda: both(pair, inputs), errors, pair.megatron)


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("kind", "fields"), [("untied", {}), ("tied", {}), ("untied", PADDED), ("tied", PADDED)])
def test_chunked_loss_and_gradients_match_unchunked_loss(kind, fields, packed, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    pair = make_pair(folder, loss_chunk_tokens=0, **fields)
    inputs = batch_of(pair, packed=packed)
    whole, most = both(pair, inputs), limits_of(pair, inputs)
    chunked = both(make_pair(folder, loss_chunk_tokens=CHUNK, **fields), inputs)
    assert chunked[0].dtype == whole[0].dtype and chunked[0].shape == whole[0].shape
    check(errors(chunked, whole), most)


def test_chunked_loss_matches_transformers(tied_folder):
    assert_parity(make_pair(tied_folder, loss_chunk_tokens=CHUNK, **PADDED))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("fusion", [dict(cross_entropy_loss_fusion=True), dict(cross_entropy_loss_fusion=False)])
def test_chunked_loss_in_bfloat16_is_as_accurate_as_unchunked_loss(fusion, untied_folder):
    """Compare the gradient of the output layer, which is summed over chunks, with float32."""
    name, bf16 = "language_model.output_layer.weight", dict(params_dtype=torch.bfloat16, bf16=True)
    errors = {}
    for tokens in (0, CHUNK):
        pair = make_pair(untied_folder, loss_chunk_tokens=tokens, **bf16, **fusion)
        pair.megatron.bfloat16()
        _, rounded = both(pair, batch_of(pair))
        exact_pair = make_pair(untied_folder, loss_chunk_tokens=tokens)
        _, exact = both(exact_pair, batch_of(exact_pair))
        assert rounded[name].dtype == torch.bfloat16
        errors[tokens] = ((rounded[name].float() - exact[name]).norm() / exact[name].norm()).item()
    print(errors)
    assert errors[CHUNK] <= 1.05 * errors[0]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("predicts", [False, True], ids=["", "multi-token prediction"])
def test_chunked_loss_memory_depends_on_chunk_not_on_row_length(untied_folder, tmp_path, monkeypatch, predicts):
    """Without chunks the memory of logits grows with the row; with chunks it does not."""
    # As it is before a schedule sets it: an earlier test has set one on the host.
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    folder, fields, measured = untied_folder, {}, {}
    if predicts:
        folder = make_checkpoint(tmp_path / "model", mtp=ExpertLayout.OUTPUT_MAJOR)
        fields = dict(mtp_loss_scaling_factor=0.5)
    for tokens, times in itertools.product((0, CHUNK), (1, 3)):
        pair = make_pair(folder, loss_chunk_tokens=tokens, **fields)
        text = pair.config.text_config
        inputs = batch_of(pair, times=times, with_next_tokens=predicts)
        with Logits(text.vocab_size, text.hidden_size) as logits:
            both(pair, inputs)
        measured[tokens, times] = (inputs.labels.numel(), logits.largest, logits.peak)
    print(measured)
    (short, largest, _), (long, grown, peak) = measured[0, 1], measured[0, 3]
    assert largest == short and grown == long and long > 2.5 * short and peak >= (1 + predicts) * long
    for times in (1, 3):
        _, largest, peak = measured[CHUNK, times]
        assert largest <= CHUNK and peak <= 3 * CHUNK


def test_chunked_loss_under_no_grad_has_same_values_and_no_gradient(untied_folder):
    pair = make_pair(untied_folder, loss_chunk_tokens=CHUNK)
    inputs = batch_of(pair)
    with torch.no_grad():
        losses = pair.megatron(inputs=inputs)
    assert not losses.requires_grad
    assert torch.equal(losses, pair.megatron(inputs=inputs).detach())


def test_chunked_loss_of_frozen_language_model_has_only_vision_gradients(tied_folder):
    pair = make_pair(tied_folder, loss_chunk_tokens=0, freeze_language_model=True)
    inputs = batch_of(pair)
    whole, most = both(pair, inputs), limits_of(pair, inputs)
    chunked = both(make_pair(tied_folder, loss_chunk_tokens=CHUNK, freeze_language_model=True), inputs)
    assert all(name.startswith("vision_model.") for name in chunked[1])
    check(errors(chunked, whole), most)


def test_logits_and_output_processor_are_not_chunked_if_loss_is_chunked(untied_folder):
    """Also, the loss of a caller is not replaced."""
    pair = make_pair(untied_folder, loss_chunk_tokens=CHUNK)
    inputs = batch_of(pair)
    with torch.no_grad():
        logits = pair.megatron(inputs=inputs.without_labels())
        own = pair.megatron(inputs=inputs, output_processor=lambda *, hidden_states, **_: hidden_states)
    assert logits.shape == (*inputs.labels.shape, pair.config.text_config.vocab_size)
    assert own.shape[0] == inputs.labels.shape[1]


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_chunked_loss_adds_fused_weight_gradients_to_main_grad(kind, request, monkeypatch):
    """`gradient_accumulation_fusion` with a formula instead of Apex's kernel, in megatron-core's layer."""

    class Kernels:
        @staticmethod
        def wgrad_gemm_accum_fp32(inputs, gradient, main_grad):
            main_grad.add_(gradient.t().float() @ inputs.float())

    pair = make_pair(request.getfixturevalue(f"{kind}_folder"), loss_chunk_tokens=CHUNK)
    inputs = batch_of(pair)
    expected, most = both(pair, inputs), limits_of(pair, inputs)
    text = pair.megatron.language_model
    weight = text.shared_embedding_or_output_weight() if kind == "tied" else text.output_layer.weight
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", Kernels, raising=False)
    text.output_layer.gradient_accumulation_fusion = True
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros_like(weight), False, True
    (name,) = (name for name, p in pair.megatron.named_parameters() if p is weight)
    losses, found = both(pair, inputs)
    assert weight.grad_added_to_main_grad
    # As DistributedDataParallel, whose hook adds what autograd brings where a weight has more uses than this.
    found[name] = weight.main_grad + found[name]
    check(errors((losses, found), expected), most)


def test_mask_vocabulary_padding_is_not_recorded_by_autograd(untied_folder):
    """Otherwise its backward pass would copy the gradient of all logits."""
    text = make_pair(untied_folder, **PADDED).megatron.language_model
    logits = 2 * torch.ones(4, 1, 600, requires_grad=True)
    made = logits.grad_fn
    assert text.mask_vocabulary_padding(logits) is logits and logits.grad_fn is made
    assert logits[..., 512:].isneginf().all() and (logits[..., :512] == 2).all()


def test_chunked_loss_raises_if_labels_have_wrong_length(untied_folder):
    pair = make_pair(untied_folder, loss_chunk_tokens=CHUNK)
    text = pair.megatron.language_model
    with pytest.raises(ValueError, match=r"labels have shape \[1, 41\], expected \[1, 40\], or a multiple of 40"):
        text._postprocess(
            torch.zeros(40, 1, pair.config.text_config.hidden_size), input_ids=None, position_ids=None,
            labels=torch.zeros(1, 41, dtype=torch.long), rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_fused_gradient_of_chunked_loss_is_wrong_with_megatron_core_fsdp(kind, request):
    """This is why `fields.complete_ddp` turns fusion off. If this fails, megatron-core has fixed it."""
    pair = make_pair(request.getfixturevalue(f"{kind}_folder"), loss_chunk_tokens=CHUNK)
    inputs = batch_of(pair)
    _, expected = both(pair, inputs)
    text = pair.megatron.language_model
    weight = text.shared_embedding_or_output_weight() if kind == "tied" else text.output_layer.weight
    (name,) = (name for name, p in pair.megatron.named_parameters() if p is weight)
    buffer = torch.zeros_like(weight)
    text.output_layer.gradient_accumulation_fusion = True
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = buffer, False, True
    weight.__fsdp_param__, weight.get_main_grad = True, lambda: buffer
    both(pair, inputs)
    assert weight.grad_added_to_main_grad
    assert relative({name: buffer}, expected)[name] > 0.1
