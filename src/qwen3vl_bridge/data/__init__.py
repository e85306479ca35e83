"""From conversations with images and videos to packed batches."""

from qwen3vl_bridge import lazy

_PUBLIC = {
    "Balance": "qwen3vl_bridge.data.row_loading",
    "BatchStream": "qwen3vl_bridge.data.row_loading",
    "Columns": "qwen3vl_bridge.data.schemas.record_schemas",
    "Collator": "qwen3vl_bridge.data.collation",
    "Conversation": "qwen3vl_bridge.data.schemas.conversations",
    "ConversationSource": "qwen3vl_bridge.data.sources.opening",
    "DataError": "qwen3vl_bridge.data.errors",
    "EncodedSample": "qwen3vl_bridge.data.encoding",
    "Encoder": "qwen3vl_bridge.data.encoding",
    "EnergonStream": "qwen3vl_bridge.data.webdatasets",
    "HubDataset": "qwen3vl_bridge.data.sources.hub",
    "JsonLines": "qwen3vl_bridge.data.sources.opening",
    "JsonList": "qwen3vl_bridge.data.sources.opening",
    "MediaAccess": "qwen3vl_bridge.data.media.media_access",
    "Mixture": "qwen3vl_bridge.data.sources.mixture",
    "NumberedOrder": "qwen3vl_bridge.data.packing.row_plan",
    "PackedRows": "qwen3vl_bridge.data.packing.row_plan",
    "Parquet": "qwen3vl_bridge.data.sources.tables",
    "Qwen3VLTaskEncoder": "qwen3vl_bridge.data.webdatasets",
    "RowDataset": "qwen3vl_bridge.data.row_loading",
    "RowPlan": "qwen3vl_bridge.data.packing.row_plan",
    "RowSettings": "qwen3vl_bridge.data.row_loading",
    "SampleFilter": "qwen3vl_bridge.data.samples",
    "Samples": "qwen3vl_bridge.data.samples",
    "Size": "qwen3vl_bridge.data.packing.sample_sizes",
    "StreamedDataset": "qwen3vl_bridge.data.sources.hub",
    "Unreachable": "qwen3vl_bridge.data.errors",
    "VisionSettings": "qwen3vl_bridge.data.collation",
    "Window": "qwen3vl_bridge.data.packing.row_plan",
    "best_fit": "qwen3vl_bridge.data.packing.row_plan",
    "load_processor": "qwen3vl_bridge.data.encoding",
    "one_pass": "qwen3vl_bridge.data.row_loading",
    "open_source": "qwen3vl_bridge.data.sources.opening",
    "pad_token_id": "qwen3vl_bridge.data.collation",
}

__all__ = sorted(_PUBLIC)
__getattr__, __dir__ = lazy.attributes(__name__, _PUBLIC)
