"""Fine-tune Qwen3-VL by a recipe.

    python recipes/finetune.py --hf-path HF --data-path DATA --megatron-path MEGATRON --save RUN \
        train.train_iters=400 optimizer.lr=1e-3

On CUDA this is Megatron-Bridge's own loop, started by torchrun; without it a small loop takes the same recipe.

What lives here: the command line. What may not: settings of a run (they are the recipe's).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("qwen3_vl_digits_sft_config",)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `--help` needs no Megatron."""
    parser = argparse.ArgumentParser(
        description="Fine-tune Qwen3-VL by a recipe.",
        epilog="Settings of the recipe are changed as in `optimizer.lr=1e-3 train.train_iters=400`.",
    )
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0], help="default: %(default)s")
    parser.add_argument("--hf-path", required=True, type=Path, help="Hugging Face checkpoint: config and processor")
    parser.add_argument("--data-path", required=True, type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--megatron-path", required=True, type=Path, help="checkpoint to start from")
    parser.add_argument("--save", required=True, type=Path, help="folder of the run; one that is there is continued")
    parser.add_argument("--verbose", action="store_true", help="show what Megatron logs and warns about")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="settings that differ from the recipe")
    args = parser.parse_intermixed_args(arguments)  # settings may stand anywhere
    for name in ("hf_path", "data_path", "megatron_path"):
        if not getattr(args, name).is_dir():
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected a folder that exists")
    if args.save.exists() and not args.save.is_dir():
        parser.error(f"--save is {args.save}, a file; expected a folder, or a name for a new one")
    if wrong := [item for item in args.overrides if "=" not in item]:
        parser.error(f"settings are written NAME=VALUE, found {' '.join(wrong)}")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Build the recipe's configuration, change what the command line says, train."""
    args = parse(arguments)
    if not args.verbose:
        from qwen3vl_bridge.logs import quiet

        quiet()
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # recipes stand beside the package
    try:
        run(args)
    except (ValueError, AssertionError, OSError) as error:  # Megatron-Bridge asserts what it expects of a configuration
        if args.verbose:
            raise
        sys.exit(f"error: {error}\n(--verbose shows where)")


def run(args: argparse.Namespace) -> None:
    """Train as the command line says."""
    import qwen3vl_bridge
    from qwen3vl_bridge.checkpoint.hf_config import ModelConfig

    ModelConfig(args.hf_path)  # refuses another model's folder before Megatron is imported, which takes a while
    import torch
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    from recipes import digits

    recipe = getattr(digits, args.recipe)
    cfg = recipe(hf_path=args.hf_path, data_path=args.data_path, megatron_path=args.megatron_path, save=args.save)
    try:
        cfg = process_config_with_overrides(cfg, cli_overrides=args.overrides or None)
    except OverridesError as error:
        raise ValueError(str(error)) from error
    if torch.cuda.is_available():
        try:
            from megatron.bridge.training.finetune import finetune
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Megatron-Bridge's training loop for CUDA needs {error.name}, which is missing"
            ) from error
        finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))
        return
    from qwen3vl_bridge.training.loop import train
    from qwen3vl_bridge.training.process_group import shutdown

    try:
        train(cfg)
    finally:
        shutdown()


if __name__ == "__main__":
    main()
