"""Rotation of queries and keys: by Transformer Engine's kernel, by what torch compiles, and by the formula."""

import inspect
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models import compilation, rope, settings
from qwen3vl_bridge.models.layer_specs import ZeroCenteredRMSNorm
from qwen3vl_bridge.models.rope import rotate, rotation

import pytest
import torch
import torch.nn.functional as F
from megatron.bridge.training import setup
from megatron.core import jit
from megatron.core.models.common.embeddings import rope_utils

from tests.noise import check, limits, relative
from tests.parity.batches import make_batch, make_samples, per_sample
from tests.parity.conftest import make_pair
from tests.parity.one_process.test_recompute import FULL, of_vision
from tests.parity.one_process.test_settings import SCALED, assert_parity, changed
from tests.qwen3_5.tiny import make_checkpoint


class Kernel:
    """Transformer Engine's, through megatron-core's function: angles of one row, float32, one rounding at the end.

    Sources: transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb, common/fused_rope/fused_rope.cu.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        """[s, b, heads, d] and [s2, 1, 1, r] with s2 >= s, r <= d."""
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
    turn_off = settings._turn_off

    def keep(provider, name, *why, **how):
        if name != "apply_rope_fusion":
            turn_off(provider, name, *why, **how)

    monkeypatch.setattr(settings, "_turn_off", keep)
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


def test_a_model_with_the_kernel_is_transformers_model(untied_folder, kernel):
    pair = make_pair(untied_folder, apply_rope_fusion=True)
    assert_parity(pair)
    layers = pair.provider.num_layers + pair.provider.vision_config.depth
    assert kernel.calls and kernel.calls % (2 * layers) == 0  # queries and keys, in every layer of both


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("settings", [{}, FULL | of_vision(FULL)], ids=["plain", "recompute"])
def test_partial_rotation_by_the_kernel(tmp_path, kernel, packed, settings):
    """Qwen3.5 turns a quarter of a head in the text model, and whole heads in the tower."""
    folder = make_checkpoint(tmp_path / "model")
    found = results(make_pair(folder, apply_rope_fusion=True, **settings), packed=packed)
    assert kernel.calls
    kernel.calls = 0
    pair = make_pair(folder, apply_rope_fusion=False, **settings)
    most = limits(lambda: results(pair, packed=packed), errors, pair.megatron)
    check(errors(found, results(pair, packed=packed)), most)
    assert not kernel.calls


@pytest.mark.parametrize(("kind", "by_kernel"), [("yarn", False), ("linear", True)])
def test_the_kernel_has_no_factor(untied_folder, tmp_path, kernel, kind, by_kernel):
    """YaRN multiplies cosines and sines; then the text model rotates by the formula, and the tower by the kernel."""
    scaled = dict(rope_theta=5e6, mrope_section=[6, 5, 5], mrope_interleaved=True, rope_type=kind, **SCALED[kind])
    pair = make_pair(changed(untied_folder, tmp_path / kind, rope_parameters=scaled), apply_rope_fusion=True)
    assert_parity(pair)
    layers = pair.provider.vision_config.depth + pair.provider.num_layers * by_kernel
    assert kernel.calls and kernel.calls % (2 * layers) == 0


def test_rows_beyond_32_bits_are_rotated_in_parts(kernel):
    """A picture's queries and keys are views of one tensor, whose tokens are three times as far apart."""
    tokens, heads, dim = 700_000, 16, 72
    query, key, _ = torch.empty(tokens, 1, heads, 3 * dim, dtype=torch.bfloat16, device="meta").split(dim, -1)
    turned = rotate(query, key, torch.empty(tokens, 1, 1, dim, device="meta"))
    assert [one.shape for one in turned] == [query.shape, key.shape] and kernel.calls == 4


def test_rows_of_a_batch_are_rotated_as_one(kernel):
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
    """Queries and keys as attention has them, and cosines and sines; `joint`: both are views of one tensor."""
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
    compilation.compiled.cache_clear()
    monkeypatch.setattr(compilation, "compiles", lambda x: True)
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=count))
    yield variants
    compilation.compiled.cache_clear()
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


@pytest.mark.parametrize("kind", [{}, dict(of=(16, 1), dim=256, turning=64), TOWER], ids=["text", "partial", "tower"])
def test_how_often_torch_compiles(compiled, kind):
    """Training, evaluation and recomputation, frozen parts, rows of every length and number: below torch's eight."""
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
                    turned = rope._by_compiled(*given)
                    for found_one, one in zip(turned, rope._formula(*given), strict=True):
                        assert torch.equal(found_one, one)
                    if grad:
                        sum(one.float().sum() for one in turned).backward()
            found[name] = len(compiled)
    print(found)
    assert found == {"training": 1, "evaluation": 2, "frozen": 3, "inference": 4} and not warnings


def test_how_often_torch_compiles_a_norm(compiled):
    """Of rows of every length and number, of hidden states and of heads, trained, recomputed and frozen."""
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


@pytest.mark.parametrize(("device", "off", "way"), [(True, False, "compiled"), (True, True, ""), (False, False, "")])
def test_compiling_is_turned_off_like_megatron_cores(monkeypatch, device, off, way):
    """By what Megatron-Bridge's setup calls for `dist.disable_jit_fuser`, from the next rotation on."""
    monkeypatch.setattr(jit, "jit_fuser", jit.jit_fuser)  # which is put back; on a CPU it was turned off on import
    for name in ("_by_compiled", "_formula"):
        monkeypatch.setattr(rope, name, lambda *_, way="compiled" if "compiled" in name else "": way)
    query = SimpleNamespace(is_cuda=device)
    (jit.disable_jit_fuser if off else jit.enable_jit_fuser)()
    assert rotate(query, query, torch.zeros(2, 1, 1, 1, 4)) == way
    assert "cfg.dist.disable_jit_fuser:" in inspect.getsource(setup.setup)
