"""`qwen3vl adapters`: the verbs export and merge, for trained adapters."""

from __future__ import annotations

import argparse

from qwen3vl_bridge.cli import convert_options, convert_output


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add export and merge to a command."""
    parser.description = (
        "Export or merge the adapters that a run trained, from its checkpoint in either format. Needs no GPU and "
        "never holds the model in memory."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    export = verbs.add_parser("export", help="a folder of adapters, for peft.PeftModel.from_pretrained and vLLM")
    _options(export, "folder of adapters to write", "folder or hub id of the base model, if the run does not name it "
    "or names another one")  # fmt: skip
    export.set_defaults(run=_run_export)
    merge = verbs.add_parser("merge", help="a whole Hugging Face model with the adapters merged in")
    _options(merge, "model to write", "initial weights of the run, a Hugging Face model or a Megatron checkpoint, if "
    "they have moved since")  # fmt: skip
    convert_options.vocab_padding(merge)
    merge.set_defaults(run=_run_merge)


def _options(parser: argparse.ArgumentParser, target: str, base: str) -> None:
    convert_options.megatron_path(parser)
    parser.add_argument("--hf-path", required=True, metavar="FOLDER", help=target)
    parser.add_argument("--base-model", metavar="MODEL", help=base)
    convert_options.remote_code(parser)
    convert_options.writing_options(parser)


def _run_export(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.peft.hf_export import export_adapters

    return convert_output.conversion(
        export_adapters(options.megatron_path, options.hf_path, **_asked(options)), options
    )


def _run_merge(options: argparse.Namespace) -> int:
    from qwen3vl_bridge.peft.hf_export import merge_adapters

    asked = _asked(options) | {"drop_vocab_padding": options.drop_vocab_padding}
    return convert_output.conversion(merge_adapters(options.megatron_path, options.hf_path, **asked), options)


def _asked(options: argparse.Namespace) -> dict:
    names = ("base_model", "torch_dtype", "iteration", "trust_remote_code")
    return {name: getattr(options, name) for name in names} | convert_options.conversion_options(options)
