"""Count synchronizations of Megatron-Bridge's own Qwen3-VL and training step, with the same batch as for our model.

megatron-core's local layers with torch's attention replace Transformer Engine's, which is not installed.
Synchronizations in that attention do not count. Moving the batch, the step and the model are Megatron-Bridge's code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from qwen3vl_bridge.models.common.attention import SegmentAttention

import torch
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.frameworks.megatron_bridge.test_upstream_steps import join
from tests.helpers import stock_qwen3_vl as stock_models
from tests.helpers.batches import Sample
from tests.helpers.sync_counter import HostSyncCounter, Seen


@contextmanager
def torch_attention(around: Callable[[], Any] = nullcontext) -> Iterator[None]:
    """Build Megatron-Bridge's model with torch's attention in both towers, called within the context `around`."""

    class Attention(SegmentAttention):
        """Torch's attention, which ignores explicit masks: they are causal."""

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **given: Any) -> Any:
            given = {name: given.get(name) for name in ("attn_mask_type", "packed_seq_params")}
            given["attn_mask_type"] = given["attn_mask_type"] or AttnMaskType.causal
            with around():
                return super().forward(query, key, value, None, **given)

    def with_attention(make: Any, mask: AttnMaskType) -> Any:
        def spec(*args: Any, **kwargs: Any) -> ModuleSpec:
            made = make(*args, **kwargs)
            made.submodules.self_attention.params = {"attn_mask_type": mask}  # as in Transformer Engine's specs
            made.submodules.self_attention.submodules.core_attention = Attention
            return made

        return spec

    with (
        mock.patch.object(stock_models, "text_layer", with_attention(stock_models.text_layer, AttnMaskType.causal)),
        mock.patch.object(
            stock_models, "vision_layer", with_attention(stock_models.vision_layer, AttnMaskType.no_mask)
        ),
    ):
        yield


def stock_with_torch_attention(folder: Path) -> torch.nn.Module:
    """Return Megatron-Bridge's model with the weights of a Hugging Face folder."""
    with torch_attention():
        return stock_models.build_stock(folder)


def count_upstream(folder: Path, samples: list[Sample], *, packed: bool) -> Seen:
    """Count forward and backward pass of a microbatch by `qwen3_vl_step`, packed in the step or not."""
    counter = HostSyncCounter()
    with torch_attention(counter.paused):
        model = stock_models.build_stock(folder)
    counter.on_gpu(model)
    batch = join(samples, 1, packed=False)
    counter.pinned([value if name != "visual_inputs" else vars(value) for name, value in batch.items()])
    step: Iterator[Any] = iter([batch])
    dataset = SimpleNamespace(enable_in_batch_packing=packed, skip_getting_attention_mask_from_dataset=False)
    checks = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    state: Any = mock.MagicMock(cfg=SimpleNamespace(dataset=dataset, rerun_state_machine=checks))
    with counter:
        losses, count = qwen3_vl_step.forward_step(state, step, model)
        total, *_ = count(losses)
        torch.autograd.backward(total)
    return counter.seen()
