"""Hugging Face configurations, as all families read them. Standard library only.

What lives here: kinds of value (`values.py`), fields with their checks (`fields.py`), which model they describe
(`identity.py`), released sizes (`released.py`). What may not: a family; what needs torch or Megatron
(`models/common`).
"""
