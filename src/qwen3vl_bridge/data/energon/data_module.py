"""Megatron-Bridge's energon data module, with a seed and explicit ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qwen3vl_bridge.data.energon.stream import Share
from qwen3vl_bridge.data.errors import DataError

from megatron.bridge.data.energon.base_energon_datamodule import EnergonMultiModalDataModule
from megatron.energon import WorkerConfig


class EnergonModule(EnergonMultiModalDataModule):
    """Megatron-Bridge's energon data module, with a seed, also for ranks without process groups."""

    def __init__(self, path: str, *, seed: int, share: Share, **settings: Any) -> None:
        """Store the settings.

        Args:
            path: path of the data.
            seed: seed of the order of samples.
            share: data-parallel rank and size, used if there are no process groups.
            settings: as for Megatron-Bridge's class.
        """
        super().__init__(path, tokenizer=None, **settings)
        self._seed, self._share = seed, share

    def _build_worker_config(self, num_workers: int, split: str = "train") -> WorkerConfig:
        if self.pg_collection is not None:
            config = super()._build_worker_config(num_workers, split)
        else:
            config = WorkerConfig(rank=self._share.rank, world_size=self._share.size, num_workers=num_workers)
        config.seed_offset = self._seed
        return config


@contextmanager
def named(path: str) -> Iterator[None]:
    """Add the folder to energon's error about a folder that it cannot read."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, AssertionError, KeyError, TypeError) as error:
        found = f"energon does not read it: {type(error).__name__}: {error}"
        raise DataError(path, f"{found}; expected a folder that 'energon prepare' has been run on") from error


# Differ between ranks.
_OF_A_RANK = {"worker_config", "slice_offsets", "len"}


def digest(config: Any) -> str:
    """A short hash of energon's description of a dataset, without what may change, such as its path."""

    def steady(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: steady(inner) for key, inner in value.items() if key[0] != "_" and key not in _OF_A_RANK}
            return {**kept, **{key: sorted(kept[key]) for key in ("sample_excludes",) if key in kept}}
        return [steady(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    return hashlib.sha256(json.dumps(steady(config), sort_keys=True, default=str).encode()).hexdigest()[:16]
