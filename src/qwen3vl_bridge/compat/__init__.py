"""Compatibility with the installation: the import hook, Megatron without CUDA, replaced functions, other libraries'
logs.
"""
