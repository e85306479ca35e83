"""Hugging Face configurations, as all families read them. Standard library only.

What lives here: types of values (`values.py`), fields with their checks (`fields.py`), fields that identify a model
(`identity.py`), released sizes (`size_description.py`). What may not: a family; what needs torch or Megatron
(`models/common`).
"""
