"""The digits example: a tiny Qwen3-VL checkpoint, a dataset of scanned digits, a demo and its report.

What lives here: the example's own parts, on stock transformers. What may not: anything the library needs.
"""
