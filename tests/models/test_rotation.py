"""Rotation of queries and keys: Transformer Engine's kernel, compiled functions, and the formula."""

import inspect
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.config import fields
from qwen3vl_bridge.models.common import rope
from qwen3vl_bridge.models.common.layer_specs import ZeroCenteredRMSNorm
from qwen3vl_bridge.models.common.rope import rotate, rotation
from qwen3vl_bridge.upstream import dynamic_shapes

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge.training import setup
from megatron.core import jit
from megatron.core.models.common.embeddings import rope_utils

from tests.helpers.batches import make_batch, make_samples, per_sample
from tests.helpers.noise import check, limits, relative
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.parity.conftest import make_pair
from tests.parity.test_recompute import FULL, of_vision
from tests.parity.test_settings import SCALED, assert_parity, changed


class Kernel:
    """A substitute for Transformer Engine's kernel: one row of angles in float32, and one rounding at the end.

    Sources: transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb, common/fused_rope/fused_rope.cu.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        """Rotate [s, b, heads, d] by angles [s2, 1, 1, r] with s2 >= s and r <= d."""
        self.calls += 1
        assert t.dim() == 4 and freqs.shape[1:3] == (1, 1) and len(freqs) >= len(t) and freqs.size(-1) <= t.size(-1)
        assert freqs.dtype == torch.float32 and freqs.is_contiguous()  # it goes through them by itself
        assert max(len(t) * t.stride(0), t.numel()) < 2**31  # its offsets are integers of 32 bits
        if t.is_meta:
            return torch.empty_like(t, memory_format=torch.contiguous_format)
        turning, staying = t.float().tensor_split([freqs.size(-1)], dim=-1)
        first, second = turning.chunk(2, dim=-1)
        turned = turning * freqs[: len(t)].cos() + torch.cat((-second, first), dim=-1) * freqs[: len(t)].sin()
        return torch.cat((turned, staying), dim=-1).to(t.dtype)


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", kernel)
    turn_off = fields._turn_off

    def keep(provider, name, *why, **how):
        if name != "apply_rope_fusion":
            turn_off(provider, name, *why, **how)

    monkeypatch.setattr(fields, "_turn_off", keep)
    return kernel


def results(pair, *, packed):
    pair.megatron.zero_grad()
    batch = make_batch(make_samples("mixed", pair.config, seed=8), pair.config, packed=packed)
    inputs = batch.local()
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
    with torch.no_grad():
        logits = per_sample(pair.megatron(inputs=inputs.without_labels()), batch.layout)
    return logits, pair.megatron_gradients()


def errors(found, expected) -> dict[str, float]:
    logits = (float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[0], expected[0], strict=True))
    return {"logits": max(logits), "gradients": max(relative(found[1], expected[1]).values())}


def test_model_with_fused_rope_matches_transformers(untied_folder, kernel):
    pair = make_pair(untied_folder, apply_rope_fusion=True)
    assert_parity(pair)
    layers = pair.provider.num_layers + pair.provider.vision_config.depth
    assert kernel.calls and kernel.calls % (2 * layers) == 0  # queries and keys, in every layer of both


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("settings", [{}, FULL | of_vision(FULL)], ids=["plain", "recompute"])
def test_fused_rope_of_qwen3_5_matches_unfused_rope(tmp_path, kernel, packed, settings):
    """Qwen3.5 rotates a quarter of each head in the text model, and full heads in the tower."""
    folder = make_checkpoint(tmp_path / "model")
    found = results(make_pair(folder, apply_rope_fusion=True, **settings), packed=packed)
    assert kernel.calls
    kernel.calls = 0
    pair = make_pair(folder, apply_rope_fusion=False, **settings)
    most = limits(lambda: results(pair, packed=packed), errors, pair.megatron)
    check(errors(found, results(pair, packed=packed)), most)
    assert not kernel.calls


@pytest.mark.parametrize(("kind", "by_kernel"), [("yarn", False), ("linear", True)])
def test_yarn_rope_of_text_model_is_not_fused(untied_folder, tmp_path, kernel, kind, by_kernel):
    """YaRN scales cosines and sines, so the text model uses the formula, and the tower uses the kernel."""
    scaled = dict(rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True, rope_type=kind, **SCALED[kind])
    pair = make_pair(changed(untied_folder, tmp_path / kind, rope_parameters=scaled), apply_rope_fusion=True)
    assert_parity(pair)
    layers = pair.provider.vision_config.depth + pair.provider.num_layers * by_kernel
    assert kernel.calls and kernel.calls % (2 * layers) == 0


def test_fused_rope_splits_tensors_beyond_32_bit_offsets(kernel):
    """Queries and keys of the tower are views of one tensor, with a stride of three times their size."""
    tokens, heads, dim = 700_000, 16, 72
    query, key, _ = torch.empty(tokens, 1, heads, 3 * dim, dtype=torch.bfloat16, device="meta").split(dim, -1)
    turned = rotate(query, key, torch.empty(tokens, 1, 1, dim, device="meta"))
    assert [one.shape for one in turned] == [query.shape, key.shape] and kernel.calls == 4


def test_fused_rope_of_several_rows_matches_unfused_rope(kernel):
    angles = torch.randn(7, 3, 4)
    query, key = torch.randn(7, 3, 2, 8), torch.randn(7, 3, 1, 8)
    for found, one in zip(
        rotate(query, key, rotation(angles, torch.float32, fused=True)),
        rotate(query, key, rotation(angles, torch.float32, fused=False)),
        strict=True,
    ):
        assert (found - one).abs().max() <= 1e-6
    assert kernel.calls == 2


def heads(tokens, rows, *, grad, of=(32, 8), dim=128, turning=128, dtype=torch.bfloat16, joint=False):
    """Return queries, keys, cosines and sines as in attention. With `joint`, the first two are views of one tensor."""
    if joint:
        whole = torch.randn(tokens, rows, of[0], 3 * dim, dtype=torch.bfloat16, requires_grad=grad).clone()
        query, key, _ = whole.split(dim, -1)
    else:
        query, key = (torch.randn(tokens, rows, n, dim, dtype=torch.bfloat16, requires_grad=grad).clone() for n in of)
    return query, key, *torch.randn(2, tokens, rows, 1, turning, dtype=dtype)


TOWER = dict(of=(16, 16), dim=72, turning=72, dtype=torch.float32, joint=True)


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[int]]:
    variants, compile_ = [], torch.compile

    def count(graph, _):
        variants.append(1)
        return graph.forward

    torch._dynamo.reset()
    dynamic_shapes._compile.cache_clear()
    monkeypatch.setattr(dynamic_shapes, "can_compile", lambda x: True)
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=count))
    yield variants
    dynamic_shapes._compile.cache_clear()
    torch._dynamo.reset()


@contextmanager
def limit_reached() -> Iterator[list[str]]:
    warnings, logger = [], logging.getLogger("torch._dynamo.convert_frame")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", [{}, dict(of=(16, 1), dim=256, turning=64), TOWER], ids=["text", "partial", "tower"])
def test_rope_compiles_once_per_gradient_mode(compiled, kind):
    """Training, evaluation, recomputation and frozen components compile fewer than torch's limit of eight variants."""
    found = {}
    with limit_reached() as warnings:
        for name, grad, mode in (
            ("training", True, torch.enable_grad),
            ("evaluation", False, torch.no_grad),
            ("frozen", False, torch.enable_grad),
            ("inference", False, torch.inference_mode),
        ):
            for tokens, rows in itertools.product((300, 311, 97), (1,) if kind is TOWER else (1, 4, 2)):
                with mode():
                    given = heads(tokens, rows, grad=grad, **kind)
                    query, key, cos, sin = given
                    rotated = rope.rotate(query, key, torch.stack((cos, sin)))
                    for actual, expected in zip(rotated, rope._rotate_both(*given), strict=True):
                        assert torch.equal(actual, expected)
                    if grad:
                        sum(x.float().sum() for x in rotated).backward()
            found[name] = len(compiled)
    print(found)
    assert found == {"training": 1, "evaluation": 2, "frozen": 3, "inference": 4} and not warnings


def test_norm_compiles_at_most_once_per_width_row_count_and_gradient_mode(compiled):
    """For hidden states and heads; trained, recomputed and frozen."""
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    with limit_reached() as warnings:
        for widths, rows, tokens in itertools.product([(32,), (4, 8)], (1, 2, 3), (40, 24, 7)):
            norm = ZeroCenteredRMSNorm(config, size := widths[-1])
            x = torch.randn(tokens, rows, *widths).bfloat16().requires_grad_()
            exact = F.rms_norm(x.float(), (size,), 1 + norm.weight.float(), norm.eps).bfloat16()
            assert torch.equal(norm(x), exact)
            norm(x).float().sum().backward()
            with torch.no_grad():
                norm(x)
    # For each size: a row and several of them, with a gradient and without.
    assert len(compiled) <= 2 * 2 * 2 and not warnings


@pytest.mark.parametrize(
    ("is_cuda", "off", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_can_compile_is_false_on_cpu_or_with_disable_jit_fuser(monkeypatch, is_cuda, off, expected):
    """Megatron-Bridge's setup calls megatron-core's switch for `dist.disable_jit_fuser`."""
    monkeypatch.setattr(jit, "jit_fuser", jit.jit_fuser)  # restored afterwards; on a CPU it was turned off on import
    (jit.disable_jit_fuser if off else jit.enable_jit_fuser)()
    assert dynamic_shapes.can_compile(SimpleNamespace(is_cuda=is_cuda)) is expected
    assert "cfg.dist.disable_jit_fuser:" in inspect.getsource(setup.setup)
