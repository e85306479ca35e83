"""Where the loop's microbatches come from: a provider of ours, or a dataset configuration of Megatron-Bridge's.

What lives here: Megatron-Bridge's data sets, in the order that its own samplers give, behind the two methods that the
loop asks of a provider. What may not: what a batch means (`training/foreign_batches.py`), the loop (`loop.py`).

A position in a stream is the number of samples that all ranks have taken, as in Megatron-Bridge's own checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from qwen3vl_bridge.data.loading.worker_processes import ignoring
from qwen3vl_bridge.data.row_settings import ConversationRows
from qwen3vl_bridge.data.sources.fingerprints import check_position
from qwen3vl_bridge.training.exit_signal import ignored_signal

import torch
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.data.builders.direct_hf_sft import DirectHFSFTDatasetConfig
from megatron.bridge.data.builders.energon import EnergonDatasetConfig
from megatron.bridge.data.builders.mock_vlm_sft import MockVLMSFTDatasetConfig
from megatron.bridge.data.loaders import get_train_valid_test_num_samples
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.data import DataLoader

_THEIRS = (DirectHFSFTDatasetConfig, MockVLMSFTDatasetConfig, EnergonDatasetConfig, DatasetProvider)
# Fields that don't change which samples there are, and in which order.
_ORDER_IS_THE_SAME = {
    *("num_workers", "pin_memory", "persistent_workers", "trust_remote_code", "dataloader_save", "dataloader_load"),
    *("do_validation", "do_test", "validation_source", "test_source"),
}


class Data(Protocol):
    """What the loop asks of data. Our own providers have it, with more that is optional."""

    def stream(self, split: str, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> Any:
        """Microbatches of this rank without end, with `state_dict` and `load_state_dict`."""
        ...

    def evaluation(self, split: str, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> Iterator[Any]:
        """Microbatches of this rank from a split's beginning, the same ones each time."""
        ...


def open_data(cfg: ConfigContainer, groups: ProcessGroupCollection) -> Data:
    """The data of a run: `cfg.dataset` where it has a `stream`, else Megatron-Bridge's data sets built from it.

    Args:
        cfg: the run's configuration, validated.
        groups: process groups.

    Raises:
        ValueError: a configuration that this loop cannot read from, settings that it cannot honour, or rows that the
            context-parallel ranks could not share.
    """
    if isinstance(cfg.dataset, ConversationRows):
        return cfg.dataset.shared_by(groups.cp.size())
    return cfg.dataset if hasattr(cfg.dataset, "stream") else BridgeData(cfg, groups)


class BridgeData:
    """Data sets of Megatron-Bridge's configurations. Batches are dicts, as their collators make them."""

    def __init__(self, cfg: ConfigContainer, groups: ProcessGroupCollection) -> None:
        """Build the data sets of training and validation; arguments and errors as for `open_data`."""
        if not isinstance(cfg.dataset, _THEIRS):
            names = ", ".join(kind.__name__ for kind in _THEIRS)
            raise ValueError(f"dataset is {type(cfg.dataset).__name__}, expected one with a stream, or of {names}")
        self._external = cfg.dataset.dataloader_type == "external"
        if self._external and (cfg.checkpoint.save or cfg.checkpoint.load):
            raise ValueError(
                "dataset.dataloader_type is 'external': its position is not in the checkpoints of this loop, so a "
                "resumed run would see other data. Expected checkpoint.save and checkpoint.load None, or a dataset "
                "with a stream, such as qwen3vl_bridge's providers"
            )
        self.cfg = cfg
        self._build = partial(_build, cfg, groups)
        self._sets = dict(zip(("train", "valid", "test"), self._build(), strict=True))
        self._check_sets()

    def _check_sets(self) -> None:
        cfg, train = self.cfg, self._sets["train"]
        if self._external and not hasattr(train, "__next__"):
            raise ValueError(
                f"dataset.dataloader_type is 'external' and the data a {type(train).__name__}, expected an iterator of "
                "batches, or 'single', 'cyclic' or 'batch' for samples by number"
            )
        if not self._external and not cfg.dataset.drop_last and len(train) % cfg.train.global_batch_size:
            raise ValueError(
                f"dataset.drop_last is False with {len(train)} samples, expected True, or a multiple of "
                f"train.global_batch_size, {cfg.train.global_batch_size}: steps of this loop are all of that size"
            )
        if self._sets["valid"] is None and _validation_samples(cfg):
            raise ValueError(
                f"the dataset gives no validation data (do_validation is "
                f"{getattr(cfg.dataset, 'do_validation', None)}) for validation.eval_iters "
                f"{cfg.validation.eval_iters}; set eval_iters to 0, or give it some"
            )

    def stream(self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1) -> SampledStream:
        """Microbatches without end, in the order of the configuration's dataloader_type.

        Args:
            split: "train" or "valid".
            dp_rank: this data-parallel rank.
            dp_size: how many there are.
            micro_batch_size: samples of a microbatch.
        """
        share = dict(dp_rank=dp_rank, dp_size=dp_size, micro_batch_size=micro_batch_size)
        if self._external:
            return SampledStream(lambda _: iter(self._sets[split]), dp_size * micro_batch_size, {})
        load = partial(_loader, self.cfg, self._sets[split], **share)
        unit = self.cfg.train.global_batch_size if self.cfg.dataset.dataloader_type == "batch" else 1
        return SampledStream(load, dp_size * micro_batch_size, _identity(self.cfg, self._sets[split], share), unit)

    def evaluation(
        self, split: str, *, dp_rank: int = 0, dp_size: int = 1, micro_batch_size: int = 1
    ) -> Iterator[Mapping[str, Any]]:
        """A split's samples in order, from the first one on; what does not go round is left out.

        Args:
            split: "valid".
            dp_rank, dp_size, micro_batch_size: as for `stream`.
        """
        if self._external:  # built anew, or each evaluation would go on where the last one ended
            yield from self._build(train=False)[1]
            return
        data, group = self._sets[split], dp_size * micro_batch_size
        for first in range(dp_rank * micro_batch_size, len(data) // group * group, group):
            yield data.collate_fn([data[number] for number in range(first, first + micro_batch_size)])


class SampledStream(Iterator[Mapping[str, Any]]):
    """This rank's microbatches. It can be left after any of them, and taken up there again."""

    def __init__(self, load: Callable[[int], Iterator], group: int, identity: dict[str, Any], unit: int = 1) -> None:
        """Start at the first sample.

        Args:
            load: gives this rank's microbatches after so many samples of all ranks.
            group: samples of a microbatch of all ranks.
            identity: what must be the same for a number of samples to mean the same place.
            unit: samples that `load` can only go on after multiples of.
        """
        self._load, self._group, self._identity, self._unit = load, group, identity, unit
        self._samples, self._batches = 0, None

    def __next__(self) -> Mapping[str, Any]:
        """The next microbatch.

        Raises:
            ValueError: a data set that ends.
        """
        if self._batches is None:
            self._batches = self._load(self._samples)
        try:
            batch = next(self._batches)
        except StopIteration:
            raise ValueError(
                f"the data ends after {self._samples} samples: expected as many as the run's steps take, or "
                "dataloader_type 'cyclic', which goes round"
            ) from None
        self._samples += self._group
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, the same on every rank."""
        return {"samples": self._samples, "data": self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another stream stood.

        Args:
            state: its `state_dict`.

        Raises:
            ValueError: it was of other data, of data in another order, or in the middle of a global batch that
                cannot be left there.
        """
        check_position(self._identity, state.get("data", {}))
        if state["samples"] % self._unit:
            raise ValueError(f"the position is after {state['samples']} samples, expected a multiple of {self._unit}")
        self._samples, self._batches = state["samples"], None


def _validation_samples(cfg: ConfigContainer) -> int:
    """Those of one evaluation: each sees the same ones."""
    return cfg.validation.eval_iters * cfg.validation.eval_global_batch_size if cfg.validation.eval_interval else 0


def _build(cfg: ConfigContainer, groups: ProcessGroupCollection, *, train: bool = True) -> tuple[Any, Any, Any]:
    build, context = get_dataset_provider(cfg.dataset), dict(pg_collection=groups)
    if not isinstance(cfg.dataset, EnergonDatasetConfig) and getattr(cfg.dataset, "hf_processor_path", None) is None:
        context["tokenizer"] = build_tokenizer(cfg.tokenizer)
    samples, _, _ = get_train_valid_test_num_samples(cfg)
    return build([samples if train else 0, _validation_samples(cfg), 0], cfg.dataset, **context)


def _loader(
    cfg: ConfigContainer, data: Any, consumed: int, *, dp_rank: int, dp_size: int, micro_batch_size: int
) -> Iterator[Mapping[str, Any]]:
    dataset = cfg.dataset
    sampler = build_pretraining_data_loader(
        data,
        consumed,
        dataset.dataloader_type,
        micro_batch_size,
        num_workers=0,
        data_sharding=dataset.data_sharding,
        pin_memory=False,
        data_parallel_rank=dp_rank,
        data_parallel_size=dp_size,
        global_batch_size=cfg.train.global_batch_size,
        drop_last=True,
        seed=_seed(cfg),
    ).batch_sampler
    return iter(
        DataLoader(
            data,
            batch_sampler=_microbatches(sampler, micro_batch_size, endless=dataset.dataloader_type != "single"),
            num_workers=dataset.num_workers,
            worker_init_fn=ignoring(ignored_signal(cfg)),
            collate_fn=getattr(data, "collate_fn", None),
            pin_memory=dataset.pin_memory and torch.cuda.is_available(),
            # Otherwise it draws from the global generator here, and a resumed run differs from an unbroken one.
            generator=torch.Generator(),
        )
    )


def _microbatches(sampler: Any, size: int, *, endless: bool) -> Iterator[list[int]]:
    """Sample numbers of each microbatch, epoch after epoch: the samplers count epochs themselves.

    The one of "batch" gives a whole global batch. It is cut here, before it is collated: Megatron-Bridge cuts it after,
    where each part gets the pictures of all.
    """
    while True:
        for numbers in sampler:
            yield from (numbers[first : first + size] for first in range(0, len(numbers), size))
        if not endless:
            return


def _seed(cfg: ConfigContainer) -> int:
    """Of the order of "batch", as Megatron-Bridge's own loop finds it."""
    given = (getattr(cfg.dataset, name, None) for name in ("seed", "random_seed"))
    return next((seed for seed in given if seed is not None), cfg.rng.seed)


def _identity(cfg: ConfigContainer, data: Any, share: dict[str, int]) -> dict[str, Any]:
    """What decides which sample comes when, as plain values."""
    fields = {f.name: repr(getattr(cfg.dataset, f.name)) for f in dataclasses.fields(cfg.dataset)}
    identity = {"type": type(cfg.dataset).__name__, **{k: v for k, v in fields.items() if k not in _ORDER_IS_THE_SAME}}
    if cfg.dataset.dataloader_type == "single":  # in order, so a run may be made longer
        return identity
    # These shuffle the numbers up to the samples that the whole run takes, in parts by rank or by global batch.
    more = dict(samples=len(data), global_batch_size=cfg.train.global_batch_size, seed=_seed(cfg))
    return identity | more | {name: share[name] for name in ("dp_size", "micro_batch_size")}
