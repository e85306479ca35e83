"""Measure how fast the host prepares a batch: positions, interpolation indices and collation.

    OMP_NUM_THREADS=1 python -m benchmarks.host
    OMP_NUM_THREADS=1 python -m benchmarks.host --rounds 5 --csv /tmp/host.csv

One core, 64 samples of up to 4,096 tokens with up to 16 images each. Nearly all image sizes differ. transformers and
Megatron-Bridge get the same padded rows. Results are compared once, then times are measured in interleaved rounds.
Prints medians and ratios and appends rows to a CSV file.

- positions: transformers' and Megatron-Bridge's `get_rope_index`.
- interpolation: transformers' `get_vision_bilinear_indices_and_weights`, and Megatron-Bridge's
  `fast_pos_embed_interpolate` with an embedding of width one, because it does not return the indices. "cold" is our
  function with image sizes that are not in its cache.
- patch positions: transformers' `get_vision_position_ids`.
- collate: `Collator.collate_packed` of the first 16 samples, in rows of 16,384 tokens, with pixels (converted from
  float32 to bfloat16) and without images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from qwen3vl_bridge.core import vision_inputs
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings, interpolation, mrope_positions, patch_positions
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.encoding import EncodedSample

import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import rope as bridge_rope
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_bilinear_indices_and_weights, get_vision_position_ids

from benchmarks import measurement

_IMAGE, _VIDEO, _START, _END, _PAD = 151655, 151656, 151652, 151653, 151643
_SIDE, _MERGE, _LONGEST, _MOST_IMAGES, _ROW = 48, 2, 4096, 16, 16384

Sample = tuple[Tensor, Tensor]


def make_samples(count: int) -> list[Sample]:
    """Return (token ids, image grids [images, 3]) of samples with up to 16 images of 64 to 896 pixels a side."""
    torch.manual_seed(0)
    samples = []
    for _ in range(count):
        pieces, grids = [_text(20, 200)], []
        for _ in range(int(torch.randint(_MOST_IMAGES + 1, ()))):
            height, width = torch.randint(2, 29, (2,)).tolist()
            picture = torch.tensor([_START, *[_IMAGE] * (height * width), _END])
            text = _text(5, 150)
            if sum(map(len, pieces)) + len(picture) + len(text) > _LONGEST:
                break
            pieces += [picture, text]
            grids.append([1, _MERGE * height, _MERGE * width])
        samples.append((torch.cat(pieces), torch.tensor(grids, dtype=torch.int64).view(-1, 3)))
    return samples


def _text(least: int, most: int) -> Tensor:
    return torch.randint(0, 150_000, (int(torch.randint(least, most, ())),))


def positions(samples: list[Sample]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute mRoPE positions [3, rows, tokens] of padded rows, by implementation."""
    layout = SequenceLayout.padded_rows([len(ids) for ids, _ in samples], _LONGEST)
    rows = torch.full((len(samples), _LONGEST), _PAD)
    for row, (ids, _) in zip(rows, samples, strict=True):
        row[: len(ids)] = ids
    grids, mask = torch.cat([grids for _, grids in samples]), (~layout.padding_mask()).long().view(rows.shape)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=_MERGE)),
        get_vision_position_ids=partial(Qwen3VLModel.get_vision_position_ids, None),
    )
    kinds = (rows == _IMAGE).int()

    def ours() -> Tensor:
        return mrope_positions(rows, layout, grids, None, VisionSettings(_IMAGE, _VIDEO, _MERGE, _SIDE**2))

    def of_transformers() -> Tensor:
        return Qwen3VLModel.get_rope_index(model, rows, kinds, grids, attention_mask=mask)[0]

    def of_bridge() -> Tensor:
        ids = (_MERGE, _IMAGE, _VIDEO, _START)
        return bridge_rope.get_rope_index(*ids, rows, image_grid_thw=grids, attention_mask=mask)[0]

    expected = of_transformers()
    assert torch.equal(ours(), expected)
    assert torch.equal(of_bridge() * mask, expected)  # Megatron-Bridge gives padding position 1
    return {"ours": ours, "transformers": of_transformers, "Megatron-Bridge": of_bridge}


def interpolations(grids: Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that compute interpolation indices and weights of position embeddings, by implementation."""
    embedding = torch.nn.Embedding(_SIDE**2, 1).requires_grad_(False)
    tower: Any = SimpleNamespace(
        num_grid_per_side=_SIDE, pos_embed=embedding, config=SimpleNamespace(spatial_merge_size=_MERGE)
    )

    def ours() -> tuple[Tensor, Tensor]:
        return interpolation(grids, _SIDE, _MERGE)

    def cold() -> tuple[Tensor, Tensor]:
        vision_inputs._frame_interpolation.cache_clear()
        vision_inputs._axis_interpolation.cache_clear()
        return ours()

    def of_transformers() -> tuple[Tensor, Tensor]:
        return get_vision_bilinear_indices_and_weights(grids, _SIDE, _MERGE)

    for way in (cold, ours):
        assert all(torch.equal(a, b.to(a)) for a, b in zip(way(), of_transformers(), strict=True))
    return {
        "ours": ours,
        "ours, cold": cold,
        "transformers": of_transformers,
        "Megatron-Bridge": partial(Qwen3VLVisionModel.fast_pos_embed_interpolate, tower, grids),
    }


def patches(grids: Tensor) -> dict[str, Callable[[], object]]:
    """Return functions that compute the rows and columns of all patches, by implementation."""
    ours, others = partial(patch_positions, grids, _MERGE), partial(get_vision_position_ids, grids, _MERGE)
    assert torch.equal(ours(), others())
    return {"ours": ours, "transformers": others}


def collator_of(row: int, pixel_dtype: torch.dtype) -> Collator:
    """Return a collator for rows of `row` tokens."""
    return Collator(VisionSettings(_IMAGE, _VIDEO, _MERGE, _SIDE**2), _PAD, row, multiple=8, pixel_dtype=pixel_dtype)


def encoded_rows(samples: list[Sample], row: int, *, pictures: bool = True) -> list[list[EncodedSample]]:
    """Return encoded samples, grouped into rows of at most `row` tokens in order."""
    rows: list[list[EncodedSample]] = [[]]
    for ids, grids in samples:
        if not pictures:
            ids = torch.randint(0, 150_000, (len(ids),))
        if sum(len(sample) + 8 for sample in rows[-1]) + len(ids) + 8 > row:
            rows.append([])
        pixels = torch.randn(int(grids.prod(-1).sum()), 1536) if pictures and len(grids) else None
        kept = grids if pixels is not None else None
        rows[-1].append(EncodedSample(ids, ids.roll(-1), torch.ones(len(ids)), pixels, kept, "a sample"))
    return rows


def collation(samples: list[Sample], *, pictures: bool) -> tuple[Callable[[], object], int]:
    """Return a function that collates packed rows, and the number of tokens in them without padding."""
    collator, rows = collator_of(_ROW, torch.bfloat16), encoded_rows(samples, _ROW, pictures=pictures)

    def collate() -> None:
        for row in rows:
            collator.collate_packed(row)

    return collate, sum(len(ids) for ids, _ in samples)


def main() -> None:
    """Measure all implementations, print the results and append them to the CSV file."""
    parser = measurement.parser(__doc__, "host.csv", rounds=15)
    parser.add_argument("--samples", type=int, default=64, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = make_samples(options.samples)
    grids = torch.cat([grids for _, grids in samples])
    few = grids[torch.arange(len(grids)) % 8]
    tokens, sizes = sum(len(ids) for ids, _ in samples), len(grids.unique(dim=0))
    print(f"{len(samples)} samples, {tokens} tokens, {len(grids)} images of {sizes} sizes")
    subjects: dict[str, tuple[dict[str, Callable[[], Any]], int]] = {
        "positions": (positions(samples), tokens),
        f"interpolation, {sizes} sizes": (interpolations(grids), 0),
        "interpolation, 8 sizes": (interpolations(few), 0),
        f"patch positions, {sizes} sizes": (patches(grids), 0),
    }
    for pictures in (True, False):
        way, tokens = collation(samples[:16], pictures=pictures)
        subjects[f"collate {'with pictures' if pictures else 'text'}"] = {"ours": way}, tokens
    rows = []
    for subject, (ways, tokens) in subjects.items():
        seconds = measurement.median_seconds(ways, options.rounds, least=0.03)
        for way, took in seconds.items():
            pace = f"{tokens / took:.0f}" if tokens else ""
            ratio = f"{took / seconds['ours']:.2f}"
            print(f"{subject:28} {way:16} {took * 1e3:9.3f} ms  {ratio:>8} x ours  {pace} {'tokens/s' * bool(pace)}")
            rows.append(
                {
                    "samples": len(samples),
                    "images": len(grids),
                    "rounds": options.rounds,
                    "subject": subject,
                    "way": way,
                    "ms": f"{took * 1e3:.3f}",
                    "of ours": ratio,
                    "tokens/s": pace,
                }
            )
    measurement.append(options.csv, rows)


if __name__ == "__main__":
    main()
