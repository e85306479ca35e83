"""What families share.

What lives here: attention, rotary embeddings, vision tower, layer specs, router, freezing, inserted adapters, wrappers,
FLOPs; callers' arguments in `inputs`, checks of settings in `settings`. What may not: a family.
"""
