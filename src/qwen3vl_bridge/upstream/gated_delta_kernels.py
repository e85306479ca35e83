"""Functions that megatron-core's Gated DeltaNet calls by their names in its modules.

Set while one of our layers is built: `HAVE_FLA` of `megatron.core.ssm.gated_delta_net.common`, without which
megatron-core builds no layer. Replaced once our first layer is built: `causal_conv1d` of
`megatron.core.ssm.gated_delta_net.gdn` and, if flash-linear-attention or a GPU is missing, `l2norm` of `common`.
Neither function has an extension point. The delta rule is an attribute of the layer and is not replaced
(`upstream/gated_delta_net.py`). With the package and a GPU only the convolution is replaced: megatron-core does not
pass `chunk_indices`, and without them the package reads the offsets on the host in every layer. Delete the first two
functions when megatron-core builds the layer without the package, the last when its layers pass `chunk_indices`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from qwen3vl_bridge.upstream.replacements import When, replace

from megatron.core.ssm.gated_delta_net import common, gdn


@contextlib.contextmanager
def without_package_check() -> Iterator[None]:
    """Let megatron-core build Gated DeltaNet layers without flash-linear-attention inside the `with` block."""
    found = common.HAVE_FLA
    common.HAVE_FLA = True
    try:
        yield
    finally:
        common.HAVE_FLA = found


def use_functions(l2norm: Callable, convolution: Callable) -> None:
    """Make Gated DeltaNet layers call these functions instead of flash-linear-attention's norm and convolution."""
    replace(common, "l2norm", l2norm, When.NO_FLA)
    replace(gdn, "causal_conv1d", convolution, When.NO_FLA)


def wrap_convolution(wrap: Callable[[Callable], Callable]) -> None:
    """Make Gated DeltaNet layers call `wrap(convolution)` instead of flash-linear-attention's causal convolution."""
    replace(gdn, "causal_conv1d", wrap(gdn.causal_conv1d), When.LINEAR_ATTENTION)
