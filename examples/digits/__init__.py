"""The digits example: a tiny Qwen3-VL checkpoint, a dataset of scanned digits, a demo and its report."""
