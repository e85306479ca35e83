"""Linear attention of Qwen3.5: megatron-core's layer made fit for packed rows, its rule in torch, and which is used.

What lives here: only the modules. What may not: the layers that contain it (`models/qwen3_5/layer_specs.py`).
"""
