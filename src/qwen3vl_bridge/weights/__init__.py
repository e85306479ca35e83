"""Building blocks of the weight table.

What lives here: kinds of rows, a model's dimensions and parts, adapters' rows, mappings for Megatron-Bridge.
"""
