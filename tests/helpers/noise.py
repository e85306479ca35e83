"""Derive tolerances from the rounding noise of a comparison.

Two correct programs round differently, and so does one program on two processors. How far results move depends on the
computation: linear attention multiplies a rounding error a hundredfold. So a tolerance is a multiple of the noise,
measured beside the comparison: the reference computes again with each weight moved by one unit in the last place.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# In float32 errors were up to 3.8 times the noise, over all models, contents and emulated processors. In bfloat16 they
# were up to 0.4 times: neighbors are far apart, and two ways to compute a step have the same weights.
ALLOWED = {torch.float32: 8, torch.bfloat16: 2}
SEEDS = (0, 1, 2, 3)  # a single number, such as a loss, may have little noise by chance


def neighbours(x: Tensor, seed: int) -> Tensor:
    """Return the next larger or smaller number of the dtype for each element, at random."""
    random = torch.Generator().manual_seed(seed)
    up = torch.randint(2, x.shape, generator=random).bool().to(x.device)
    return torch.nextafter(x.detach(), torch.where(up, torch.inf, -torch.inf).to(x))


@contextmanager
def rounded(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Move every weight of a model by one unit in the last place within the body; None changes nothing."""
    own = [(p, p.data) for p in model.parameters()]
    if seed is not None:
        for number, (p, weight) in enumerate(own):
            p.data = neighbours(weight, 1000 * seed + number)
    try:
        yield
    finally:
        for p, weight in own:
            p.data = weight


def rounded_folder(folder: Path, to: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Copy a Hugging Face folder with every weight moved by one unit in the last place of `dtype`."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for number, (name, x) in enumerate(tensors.items()):
            if x.is_floating_point():
                tensors[name] = neighbours(x.to(dtype), 1000 * seed + number).to(x.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return to


def limits[T](
    compute: Callable[[], T],
    errors: Callable[[T, T], Mapping[str, float]],
    model: nn.Module,
    *,
    expected: T | None = None,
    seeds: Iterable[int] = SEEDS[:3],
) -> dict[str, float]:
    """Return the tolerance of each named error."""
    expected = compute() if expected is None else expected
    found = []
    for seed in seeds:
        with rounded(model, seed):
            found.append(errors(compute(), expected))
    return allowed(found)


def limit[T](compute: Callable[[], T], error: Callable[[T, T], float], model: nn.Module) -> float:
    """Return the tolerance of a single error."""
    return limits(compute, lambda one, other: {"": error(one, other)}, model)[""]


def allowed(noises: Iterable[Mapping[str, float]], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Return tolerances for measured noises."""
    largest: dict[str, float] = {}
    for noise in noises:
        for name, error in noise.items():
            largest[name] = max(largest.get(name, torch.finfo(torch.float32).eps), error)
    return {name: ALLOWED[dtype] * error for name, error in largest.items()}


def check(errors: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Assert that each error is within its tolerance; NaN is not."""
    print({name: f"{error:.1e} of {limits[name]:.1e}" for name, error in errors.items()})
    over = {name: (error, limits[name]) for name, error in errors.items() if not error <= limits[name]}
    assert not over, f"errors and limits: {over}"


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor relative to the largest expected element."""
    return {
        name: float((one - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6))
        for name, one in found.items()
    }
