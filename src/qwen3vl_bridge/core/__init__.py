"""Modules that all packages share: layout and batch of a step, vision inputs, collectives, device transfers and files.

`layout`, `batch`, `vision_inputs`, `vision_sharding` and `device_transfer` import only torch. Ranks are plain integers
there, so that they need no process group. `files` and `atomic` do not import torch.
"""
