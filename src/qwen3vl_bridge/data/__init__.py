"""From conversations with pictures to packed batches.

What lives here: the public names of reading, encoding, packing and collating, loaded on first use so that importing the
package stays cheap. What may not: the model; and Megatron, but in `provider.py` and the modules for energon.
"""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "Admission": "admission",
    "Balance": "rows",
    "BatchStream": "stream",
    "Collator": "collate",
    "Conversation": "conversations",
    "ConversationSource": "sources",
    "DataError": "errors",
    "EncodedSample": "encode",
    "Encoder": "encode",
    "EnergonStream": "energon_stream",
    "HubDataset": "hub",
    "JsonLines": "sources",
    "JsonList": "sources",
    "MediaAccess": "media",
    "NumberedOrder": "order",
    "PackedRows": "packed",
    "Parquet": "parquet",
    "Qwen3VLTaskEncoder": "energon",
    "RowDataset": "rows",
    "RowPlan": "plan",
    "RowSettings": "rows",
    "Samples": "samples",
    "Size": "sizes",
    "StreamedDataset": "streamed",
    "Unreachable": "errors",
    "VisionSettings": "collate",
    "Window": "plan",
    "best_fit": "packing",
    "fill": "packing",
    "load_processor": "processor",
    "one_pass": "stream",
    "open_source": "sources",
    "pad_token_id": "collate",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    return lazy.load(__name__, _PUBLIC, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
