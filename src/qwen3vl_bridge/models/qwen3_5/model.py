"""The Megatron Qwen3.5-VL model: a text model of linear and full attention, and a vision tower without DeepStack.

What lives here: what differs from the model that all families share (`models/common/model.py`). What may not: layers
(`layer_specs.py`), anything about rows, packing, ranks or sequence parallelism: layout is data that comes with the
batch.
"""

from __future__ import annotations

from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.common.text_model import MRopeGPTModel
from qwen3vl_bridge.models.qwen3_5.layer_specs import text_block_spec


class Qwen35VLGPTModel(MRopeGPTModel):
    """The text model: megatron-core's GPT with layers of two kinds and heads that turn in part."""

    block_spec = staticmethod(text_block_spec)


class Qwen35VLModel(VisionLanguageModel):
    """Qwen3.5-VL of one pipeline stage: the vision tower on the first stage, the text model on every one."""

    language_model_class = Qwen35VLGPTModel
