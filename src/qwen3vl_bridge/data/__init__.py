"""Read conversations with images and videos, and turn them into packed training batches."""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "Balance": "qwen3vl_bridge.data.loading",
    "BatchStream": "qwen3vl_bridge.data.loading",
    "Columns": "qwen3vl_bridge.data.conversations",
    "Collator": "qwen3vl_bridge.data.collation",
    "Conversation": "qwen3vl_bridge.data.conversations",
    "ConversationSource": "qwen3vl_bridge.data.sources",
    "DataError": "qwen3vl_bridge.data.errors",
    "EncodedSample": "qwen3vl_bridge.data.encoding",
    "Encoder": "qwen3vl_bridge.data.encoding",
    "EnergonStream": "qwen3vl_bridge.data.webdataset",
    "HubDataset": "qwen3vl_bridge.data.hub",
    "JsonLines": "qwen3vl_bridge.data.sources",
    "JsonList": "qwen3vl_bridge.data.sources",
    "MediaAccess": "qwen3vl_bridge.data.media",
    "Mixture": "qwen3vl_bridge.data.mixture",
    "NumberedOrder": "qwen3vl_bridge.data.packing",
    "PackedRows": "qwen3vl_bridge.data.packing",
    "Parquet": "qwen3vl_bridge.data.tables",
    "Qwen3VLTaskEncoder": "qwen3vl_bridge.data.webdataset",
    "RowDataset": "qwen3vl_bridge.data.loading",
    "RowPlan": "qwen3vl_bridge.data.packing",
    "RowSettings": "qwen3vl_bridge.data.loading",
    "SampleFilter": "qwen3vl_bridge.data.samples",
    "Samples": "qwen3vl_bridge.data.samples",
    "Size": "qwen3vl_bridge.data.packing",
    "StreamedDataset": "qwen3vl_bridge.data.hub",
    "DataUnavailable": "qwen3vl_bridge.data.errors",
    "VisionSettings": "qwen3vl_bridge.core.vision_inputs",
    "Window": "qwen3vl_bridge.data.packing",
    "best_fit": "qwen3vl_bridge.data.packing",
    "load_processor": "qwen3vl_bridge.data.encoding",
    "one_pass": "qwen3vl_bridge.data.loading",
    "open_source": "qwen3vl_bridge.data.sources",
    "pad_token_id": "qwen3vl_bridge.data.collation",
    "read_vision_settings": "qwen3vl_bridge.data.collation",
}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy.attributes(__name__, _PUBLIC)
