"""A check of everything that needs a GPU, for a machine that has one and little else: `scripts/gpu_check.sh`.

What lives here: packing what such a machine lacks, unpacking it there, the steps, and the table of what they found.
What may not: code that training needs, references of their own (those of `tests/parity` serve).
"""
