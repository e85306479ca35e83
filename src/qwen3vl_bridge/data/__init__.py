"""From conversations with pictures to packed batches.

What lives here: reading, encoding, packing, collating. What may not: the model; and Megatron, but in `provider.py`.
"""

from .collate import Collator, VisionSettings, pad_token_id
from .conversations import Conversation, ConversationFile
from .encode import EncodedSample, Encoder
from .errors import DataError
from .packing import best_fit, fill
from .plan import RowPlan, Window
from .processor import load_processor
from .rows import RowDataset, RowSettings, Samples
from .stream import BatchStream, one_pass

__all__ = [
    "BatchStream",
    "Collator",
    "Conversation",
    "ConversationFile",
    "DataError",
    "EncodedSample",
    "Encoder",
    "RowDataset",
    "RowPlan",
    "RowSettings",
    "Samples",
    "VisionSettings",
    "Window",
    "best_fit",
    "fill",
    "load_processor",
    "one_pass",
    "pad_token_id",
]
