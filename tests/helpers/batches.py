"""Random batches with different contents, and the reference's results for each sample alone."""

from dataclasses import dataclass

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.core.vision_inputs import VisionSettings

import torch
import torch.nn.functional as F

# Grids (frames, rows, columns in patches) of the pictures of each sample.
CONTENTS: dict[str, list[list[tuple[int, int, int]]]] = {
    "one image": [[(1, 4, 6)]],
    "many images": [[(1, 4, 6), (1, 8, 2), (1, 2, 2)], [(1, 6, 10)], [(1, 4, 4), (1, 4, 4)]],
    "video": [[(3, 4, 4)], [(2, 6, 2)]], "image and video": [[(1, 4, 6), (2, 4, 4)], [(3, 2, 4), (1, 6, 6), (1, 2, 2)]],
    "text only": [[], []], "mixed": [[(1, 4, 6)], [], [(2, 4, 4), (1, 6, 6)], []],
}  # fmt: skip


@dataclass
class Sample:
    ids: torch.Tensor
    loss_mask: torch.Tensor
    pixels: dict[str, torch.Tensor]

    @property
    def labels(self) -> torch.Tensor:
        """Return the next token of each token, and an arbitrary label for the last one."""
        return self.ids.roll(-1)


def make_samples(content: str, config, seed: int) -> list[Sample]:
    """Return samples of `CONTENTS[content]` with random text and images; each frame of a video has its own span."""
    rng = torch.Generator().manual_seed(seed)

    def text(low: int, high: int) -> list[int]:
        n = int(torch.randint(low, high, (), generator=rng))
        return torch.randint(0, config.image_token_id - 16, (n,), generator=rng).tolist()

    samples = []
    for grids in CONTENTS[content]:
        ids, images, videos = text(2, 9), [], []
        for t, h, w in grids:
            token, kind = (config.video_token_id, videos) if t > 1 else (config.image_token_id, images)
            for _ in range(t):
                ids += [config.vision_start_token_id, *[token] * (h * w // 4), config.vision_end_token_id, *text(1, 4)]
            kind.append((t, h, w))
        ids = torch.tensor(ids + text(3, 12))
        pixels = {}
        names = (images, "pixel_values", "image_grid_thw"), (videos, "pixel_values_videos", "video_grid_thw")
        for kind, values, grid_name in names:
            if kind:
                patches = sum(t * h * w for t, h, w in kind)
                pixels[values] = torch.randn(patches, 3 * 2 * 16 * 16, generator=rng)
                pixels[grid_name] = torch.tensor(kind)
        samples.append(Sample(ids, (torch.rand(len(ids), generator=rng) < 0.7).float(), pixels))
    return samples


def pictures(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Return pixels and grids of all samples as arguments of a model."""
    names = sorted({name for sample in samples for name in sample.pixels})
    return {name: torch.cat([s.pixels[name] for s in samples if name in s.pixels]) for name in names}


def run_reference(model, samples: list[Sample]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the logits of each sample and the sum of all trained losses, on the model's device and in its dtype."""
    logits, total, weight = [], torch.zeros(()), next(model.parameters())
    for sample in samples:
        ids, labels, loss_mask = (x.to(weight.device) for x in (sample.ids[None], sample.labels, sample.loss_mask))
        pixels = {
            name: x.to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)
            for name, x in sample.pixels.items()
        }
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        one = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0]
        total = total + (F.cross_entropy(one, labels, reduction="none") * loss_mask).sum()
        logits.append(one)
    return logits, total


def make_batch(
    samples: list[Sample], config, *, packed: bool = False, layout: SequenceLayout | None = None
) -> TokenBatch:
    """Return the samples as a packed row with padding after each document, or as rows with padding on the right."""
    lengths = [len(s.ids) for s in samples]
    if layout is None and packed:
        layout = SequenceLayout.packed_row(lengths, multiple=4)
    elif layout is None:
        layout = SequenceLayout.padded_rows(lengths, max(lengths) + 3)
    pad_id = config.eos_token_id if hasattr(config, "eos_token_id") else 0
    return TokenBatch.build(
        layout.place_tokens([sample.ids for sample in samples], pad_id),
        layout.place_tokens([sample.labels for sample in samples], 0),
        layout.place_tokens([sample.loss_mask for sample in samples], 0.0),
        layout,
        VisionSettings.from_config(config),
        **pictures(samples),
    )


def per_sample(whole: torch.Tensor, layout: SequenceLayout) -> list[torch.Tensor]:
    """Return the real tokens of each document or row, [tokens, ...] each."""
    flat, starts = whole.flatten(0, 1), layout.cu_seqlens_padded[:-1].tolist()
    return [flat[a : a + n] for a, n in zip(starts, layout.lengths, strict=True) if n]
