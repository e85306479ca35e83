"""What a path holds that was given in place of a model or checkpoint, in words for the messages of all commands."""

from __future__ import annotations

from pathlib import Path

# What a folder holds if it has a file of one of these names; the first that fits.
_KINDS = (
    (
        ("adapter_config.json",),
        "adapters in peft's form (adapter_config.json): peft and vLLM load them onto their base model, and peft's "
        "merge_and_unload() makes a whole model of both, which can be trained, converted and asked",
    ),
    (
        (".metadata", "latest_checkpointed_iteration.txt", "latest_train_state.pt"),
        "a Megatron checkpoint, of which `qwen3vl convert export` makes a Hugging Face model; configuration and "
        "processor are in the iteration's folder hf",
    ),
    (("*.distcp",), "files of a Megatron checkpoint without .metadata, whose save was not completed"),
    (
        ("model.safetensors", "model.safetensors.index.json"),
        "a Hugging Face model, of which `qwen3vl convert import` makes a Megatron checkpoint",
    ),
    (
        ("pytorch_model*.bin", "consolidated*.pth"),
        "weights pickled by torch; from_pretrained and save_pretrained of transformers write them as safetensors",
    ),
    (("*.gguf",), "weights for llama.cpp; give the model that they were made from"),
    (("config.json",), "a configuration without weights"),
    (("tokenizer*", "*processor_config.json"), "a tokenizer or processor without a model"),
)


def contents_of(path: Path) -> str:
    """What is there, as the end of a message, such as "it holds a configuration without weights"."""
    if not path.is_dir():
        return "it is a file, not a folder" if path.exists() else "there is no such folder"
    for patterns, what in _KINDS:
        if any(True for pattern in patterns for _ in path.glob(pattern)):
            return f"it holds {what}"
    names = sorted(entry.name for entry in path.iterdir())
    return f"it holds {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}" if names else "it is empty"
