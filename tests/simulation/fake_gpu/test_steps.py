"""Training steps in Megatron-Bridge's loop on an H100: kernels, host-device synchronizations, streams of copies."""

import importlib.util
from collections import Counter
from typing import NamedTuple

from qwen3vl_bridge.models.common.delta_rule import CHUNK

import pytest

from tests.helpers.flash_linear_attention import PYTHONPATH, needs_package

CASES = ["dense packed", "dense padded", "qwen3_5 packed", "moe packed", "LoRA packed", "CP2 packed"]
UPSTREAM = ("megatron-core", "Megatron-Bridge")
# Reads the sums of losses and norms once in a step: the guard, or without it the log at the end of the step.
SUMS = "core/device_transfer.py:tolist"


class Sync(NamedTuple):
    package: str
    function: str


NORM, STEP = Sync("megatron-core", "optimizer/clip_grads.py:get_grad_norm_fp32"), Sync("", "optimizer step")


@pytest.fixture(scope="module")
def run(on_fake_gpu, tmp_path_factory):
    return on_fake_gpu("tests.simulation.fake_gpu.steps", str(tmp_path_factory.mktemp("models")), *CASES)


def syncs_of(run, case: str) -> list[Sync]:
    return [Sync(*sync) for sync in run.result[case]["syncs"]]


def own_syncs(run, case: str) -> Counter[str]:
    """Return the synchronizations outside of Megatron's packages."""
    return Counter(sync.function for sync in syncs_of(run, case) if sync.package not in UPSTREAM and sync != STEP)


of_each_case = pytest.mark.parametrize("case", CASES)


def is_delta_rule_gemm(gemm: str) -> bool:
    """Return True for a batched GEMM with a chunk's tokens in some dimension, or a triangular solve."""
    function, *words = gemm.split()  # dtype, m, n, k and batch size
    batched = function == "cublasSgemmStridedBatched" and str(CHUNK) in words[1:4]
    return batched or function in ("cublasStrsm_v2", "cublasStrsmBatched")


class TestStep:
    """A class, so that xdist runs all tests in one process and the program runs once."""

    @pytest.mark.one_case_in(6)
    @of_each_case
    def test_training_step_has_one_host_sync_in_our_code(self, run, case):
        assert own_syncs(run, case) == {SUMS: 1}

    @of_each_case
    def test_last_sync_before_optimizer_step_is_sync_of_guard(self, run, case):
        """megatron-core reads the norm first, unless Transformer Engine computes it.

        Without a guard the sums are read after Megatron-Bridge has synchronized.
        """
        syncs = syncs_of(run, case)
        before, after = syncs[: syncs.index(STEP)], syncs[syncs.index(STEP) + 1 :]
        if case == "dense padded":
            assert after[-1].function == SUMS and after[-2].package == "Megatron-Bridge"
        else:
            assert before.pop().function == SUMS
        assert (before[-1:] == [NORM]) == (importlib.util.find_spec("transformer_engine") is None)

    @of_each_case
    def test_third_training_step_compiles_no_graph(self, run, case):
        assert run.result[case]["compiled"] == 0

    @of_each_case
    def test_training_step_uses_flash_attention_kernels(self, run, case):
        events = run.between(f"{case}: step 2", f"{case}: end")
        names = [event.name for event in events if event.kind in ("kernel", "triton")]
        for part in ("flash_fwd_kernel", "flash_bwd_dq_dk_dv"):
            assert any(part in name for name in names)
        assert not [name for name in names if "cudnn" in name or "fmha_cutlass" in name]
        scores = [name for name in names if "softmax" in name.lower()]
        # A router has a softmax over the two experts of each token: a warp softmax over 2 ** 1 elements.
        assert not [name for name in scores if not (case == "moe packed" and "softmax_warp" in name and "Li1E" in name)]

    @of_each_case
    def test_training_step_gemms_are_in_bf16(self, run, case):
        """Exceptions in float32: the gated delta rule in torch, and the router of six experts."""
        gemms = [event for event in run.between(f"{case}: step 2", f"{case}: end") if event.kind == "gemm"]
        others = [event.name for event in gemms if " bfloat16 " not in event.name]
        if case == "moe packed":
            others = [name for name in others if not (" float32 " in name and "6" in name.split())]
        elif case == "qwen3_5 packed":
            others = [name for name in others if not is_delta_rule_gemm(name)]
        assert len(gemms) > 100 and not others

    def test_experts_of_each_layer_run_as_one_grouped_gemm(self, run):
        """Four microbatches, three layers, two linear layers: outputs, gradients of inputs and of weights."""
        events = run.between("moe packed: step 2", "moe packed: end")
        grouped = [event.name for event in events if event.kind == "kernel" and "prepare_grouped_gemm" in event.name]
        assert len(grouped) == 4 * 3 * 2 * 3

    @pytest.mark.parametrize("case", [case for case in CASES if case != "CP2 packed"])
    def test_step_on_one_rank_sends_no_tokens_or_images(self, run, case):
        """Only megatron-core's collectives remain: losses, norms and shards of weights.

        CP 2 uses torch's fake process group, which does not call NCCL.
        """
        events = run.between(f"{case}: step 2", f"{case}: end")
        sent = {event.name for event in events if event.kind == "nccl"}
        assert sent == {"AllReduce", "AllGather", "Broadcast"}

    @of_each_case
    def test_batch_is_copied_to_gpu_on_different_stream_than_gemms(self, run, case):
        events = run.between(f"{case}: step 2", f"{case}: end")
        sent = [event for event in events if event.kind == "copy" and event.name == "host to device"]
        (pixels,) = {event.stream for event in sent if event.amount == max(copy.amount for copy in sent)}
        computing = {event.stream for event in events if event.kind == "gemm"}
        assert pixels not in computing

    def test_context_parallel_step_exchanges_image_features_and_gathers_kv(self, run):
        """In four microbatches: image features and their gradients, keys and values of four layers, and weights."""
        numbers = {name: number for name, (number, _) in run.result["CP2 packed"]["sent"].items()}
        assert (numbers["all_to_all_single"], numbers["all_gather_into_tensor"]) == (4 * 2, 4 * 4 + 1)

    @pytest.mark.parametrize("case", ["dense packed", "moe packed", "LoRA packed"])
    def test_checkpoint_saved_between_simulated_steps_has_current_weights(self, run, case):
        """The step after the save passes the other tests."""
        assert run.result[case]["complete"]


@pytest.mark.slow
@needs_package
def test_linear_attention_uses_flash_linear_attention_kernels(on_fake_gpu, tmp_path):
    """The kernels of flash-linear-attention synchronize nowhere."""
    case = "qwen3_5 packed"
    run = on_fake_gpu("tests.simulation.fake_gpu.steps", str(tmp_path), case, PYTHONPATH=PYTHONPATH)
    assert own_syncs(run, case) == {SUMS: 1} and run.result[case]["compiled"] == 0
    events = run.between(f"{case}: step 2", f"{case}: end")
    names = {event.name for event in events if event.kind == "triton"}
    chunks = {"chunk_fwd_kernel_o", "chunk_bwd_kernel_dqkwg"}
    assert names >= {"causal_conv1d_fwd_kernel", "l2norm_fwd_kernel", *chunks}
    assert all(" bfloat16 " in event.name for event in events if event.kind == "gemm")
