"""What training steps in Megatron-Bridge's loop ask of an H100: kernels, waits of the host, streams of copies."""

import importlib.util
from collections import Counter
from typing import NamedTuple

from qwen3vl_bridge.models.qwen3_5.delta_rule import CHUNK

import pytest

from tests.flash_linear_attention import PYTHONPATH, needs_package

CASES = ["dense packed", "dense padded", "qwen3_5 packed", "moe packed", "LoRA packed", "CP2 packed"]
UPSTREAM = ("megatron-core", "Megatron-Bridge")
# The sums of losses and norms, once in a step: the guard reads them, or without one the log, at the end of the step.
SUMS = "batch/device_transfer.py:tolist"


class Wait(NamedTuple):
    package: str
    function: str


NORM, STEP = Wait("megatron-core", "optimizer/clip_grads.py:get_grad_norm_fp32"), Wait("", "the optimizer's step")


@pytest.fixture(scope="module")
def run(on_fake_gpu, tmp_path_factory):
    return on_fake_gpu("tests.fake_gpu.steps", str(tmp_path_factory.mktemp("models")), *CASES)


def waits_of(run, case: str) -> list[Wait]:
    return [Wait(*wait) for wait in run.result[case]["waits"]]


def waits_of_ours(run, case: str) -> Counter[str]:
    return Counter(wait.function for wait in waits_of(run, case) if wait.package not in UPSTREAM and wait != STEP)


of_each_case = pytest.mark.parametrize("case", CASES)


def is_of_the_delta_rule(product: str) -> bool:
    """By torch functions: of all heads at once with a chunk's tokens in some dimension, or a triangular system."""
    function, *words = product.split()  # its type, m, n, k and the number of matrices
    batched = function == "cublasSgemmStridedBatched" and str(CHUNK) in words[1:4]
    return batched or function in ("cublasStrsm_v2", "cublasStrsmBatched")


class TestAStep:
    """One class: xdist gives a class to one process, and the program runs once."""

    @of_each_case
    def test_no_line_of_ours_waits(self, run, case):
        assert waits_of_ours(run, case) == {SUMS: 1}

    @of_each_case
    def test_the_guard_waits_last_before_the_optimizer_steps(self, run, case):
        """After megatron-core, which waits for the norm unless Transformer Engine computes it. Without a guard nobody
        waits for the sums before Megatron-Bridge has waited for its own.
        """
        waits = waits_of(run, case)
        before, after = waits[: waits.index(STEP)], waits[waits.index(STEP) + 1 :]
        if case == "dense padded":
            assert after[-1].function == SUMS and after[-2].package == "Megatron-Bridge"
        else:
            assert before.pop().function == SUMS
        assert (before[-1:] == [NORM]) == (importlib.util.find_spec("transformer_engine") is None)

    @of_each_case
    def test_nothing_is_compiled_again(self, run, case):
        assert run.result[case]["compiled"] == 0

    @of_each_case
    def test_attention_is_flash_attention(self, run, case):
        events = run.between(f"{case}: step 2", f"{case}: end")
        names = [event.name for event in events if event.kind in ("kernel", "triton")]
        for part in ("flash_fwd_kernel", "flash_bwd_dq_dk_dv"):
            assert any(part in name for name in names)
        assert not [name for name in names if "cudnn" in name or "fmha_cutlass" in name]
        scores = [name for name in names if "softmax" in name.lower()]
        # A router's is of the two experts of each token: a warp's, of rows of 2 ** 1 numbers.
        assert not [name for name in scores if not (case == "moe packed" and "softmax_warp" in name and "Li1E" in name)]

    @of_each_case
    def test_products_are_in_16_bits(self, run, case):
        """All but the gated delta rule, which torch functions compute in float32, and the choice of six experts."""
        products = [event for event in run.between(f"{case}: step 2", f"{case}: end") if event.kind == "gemm"]
        others = [event.name for event in products if " bfloat16 " not in event.name]
        if case == "moe packed":
            others = [name for name in others if not (" float32 " in name and "6" in name.split())]
        elif case == "qwen3_5 packed":
            others = [name for name in others if not is_of_the_delta_rule(name)]
        assert len(products) > 100 and not others

    def test_experts_are_one_product(self, run):
        """Of four microbatches, in three layers, of two linear ones: outputs, gradients of inputs and of weights."""
        events = run.between("moe packed: step 2", "moe packed: end")
        grouped = [event.name for event in events if event.kind == "kernel" and "prepare_grouped_gemm" in event.name]
        assert len(grouped) == 4 * 3 * 2 * 3

    @pytest.mark.parametrize("case", [case for case in CASES if case != "CP2 packed"])
    def test_one_rank_sends_itself_no_tokens_or_images(self, run, case):
        """What is left is megatron-core's: sums of losses and norms, parts of the weights. CP 2 has torch's fake ranks,
        and nothing reaches NCCL.
        """
        events = run.between(f"{case}: step 2", f"{case}: end")
        sent = {event.name for event in events if event.kind == "nccl"}
        assert sent == {"AllReduce", "AllGather", "Broadcast"}

    @of_each_case
    def test_the_batch_is_copied_on_a_stream_of_its_own(self, run, case):
        events = run.between(f"{case}: step 2", f"{case}: end")
        sent = [event for event in events if event.kind == "copy" and event.name == "host to device"]
        (pixels,) = {event.stream for event in sent if event.amount == max(copy.amount for copy in sent)}
        computing = {event.stream for event in events if event.kind == "gemm"}
        assert pixels not in computing

    def test_context_parallel_ranks_exchange_images_and_keys(self, run):
        """In four microbatches: images' features and their gradients, keys and values of four layers, and the weights.
        The second rank is torch's fake, not NCCL's.
        """
        numbers = {name: number for name, (number, _) in run.result["CP2 packed"]["sent"].items()}
        assert (numbers["all_to_all_single"], numbers["all_gather_into_tensor"]) == (4 * 2, 4 * 4 + 1)

    @pytest.mark.parametrize("case", ["dense packed", "moe packed", "LoRA packed"])
    def test_a_save_between_steps_is_complete(self, run, case):
        """The step after it passes the same tests."""
        assert run.result[case]["complete"]


@pytest.mark.slow
@needs_package
def test_linear_attention_takes_the_kernels_of_its_package(on_fake_gpu, tmp_path):
    """Their waits would be those of `with_chunks`, a line of ours, and of gradients without a line."""
    case = "qwen3_5 packed"
    run = on_fake_gpu("tests.fake_gpu.steps", str(tmp_path), case, PYTHONPATH=PYTHONPATH)
    assert waits_of_ours(run, case) == {SUMS: 1} and run.result[case]["compiled"] == 0
    events = run.between(f"{case}: step 2", f"{case}: end")
    names = {event.name for event in events if event.kind == "triton"}
    chunks = {"chunk_fwd_kernel_o", "chunk_bwd_kernel_dqkwg"}
    assert names >= {"causal_conv1d_fwd_kernel", "l2norm_fwd_kernel", *chunks}
    assert all(" bfloat16 " in event.name for event in events if event.kind == "gemm")
