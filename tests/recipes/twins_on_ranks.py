"""Run on ranks: one training step of recipes' twins, as recipes train and in float32.

torchrun --nproc_per_node N -m tests.recipes.twins_on_ranks OUTPUT NAMES FOLDERS DATA

NAMES is a JSON list of recipes for N ranks; FOLDERS a JSON object with the tiny checkpoint of each family.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration

import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext

from tests.ranks import begin, leave
from tests.training.running import train

from .twin import family, pattern, twin

# Adapters' parts that a first step need not move: one has no gradient yet, the other moves less than bfloat16 shows.
SLOW = ("adapter.linear_in.weight", "adapter.weight_magnitude")


class Changes(Callback):
    """Counts this rank's parameters that a run is to change, and those that it changes.

    Attributes:
        trained: that are trained, and move in a first step.
        changed: of these, with other values at the end.
        strayed: that are not trained, with other values at the end.
    """

    trained = changed = strayed = 0

    def on_train_start(self, context: CallbackContext) -> None:
        """Keep the first values."""
        named = (named for chunk in context.model for named in chunk.named_parameters())
        self._before = [(name, parameter, parameter.detach().clone()) for name, parameter in named]

    def on_train_end(self, context: CallbackContext) -> None:
        """Compare."""
        for name, parameter, first in self._before:
            moved = not torch.equal(parameter, first)
            if not parameter.requires_grad:
                self.strayed += moved
            elif not name.endswith(SLOW):
                self.trained += 1
                self.changed += moved


def main(output: str, names: list[str], folders: dict[str, str], data: str) -> None:
    """Rank 0 writes losses, the exact gradient norm and all ranks' counts of each."""
    found = {}
    # Groups of one kind after the other: each kind is made anew.
    for name in sorted(names, key=lambda name: (str(pattern(name)), name)):
        changes = Changes()
        save = f"{output}.{name}"
        (entry,) = train(twin(name, folders[family(name)], data, save=save), callbacks=[changes])
        counts = {key: torch.tensor(getattr(changes, key)) for key in ("trained", "changed", "strayed")}
        for count in counts.values():
            dist.all_reduce(count)
        counts = {key: int(count) for key, count in counts.items()}
        (exact,) = train(twin(name, folders[family(name)], data, exact=True))
        found[name] = dict(rounded=entry["loss"], loss=exact["loss"], grad_norm=exact["grad_norm"], **counts)
        found[name]["saved"] = sum(one.numel for one, _ in read_metadata(find_iteration(Path(save))).tensors.values())
        if dist.get_rank() == 0:
            print(name, found[name], flush=True)
    leave(found, output)


if __name__ == "__main__":
    begin()
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
