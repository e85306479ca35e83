"""What ranks are forked with: nearly everything that one of them imports. What may not live here: anything but imports.

Nothing that is imported may begin threads, which a fork would lose.
"""

from qwen3vl_bridge.upstream.library_logs import quiet

quiet()  # before Megatron says what it misses

# ruff: noqa: E402, F401
import qwen3vl_bridge.dist_train.joint_run
import qwen3vl_bridge.training.step

import megatron.bridge.training.finetune
import megatron.core.distributed.fsdp.mcore_fsdp_adapter
import pytest
import qwen3vl_recipes.digits
import transformers.models.qwen3_vl.modeling_qwen3_vl
import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe
