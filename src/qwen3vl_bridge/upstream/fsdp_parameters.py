"""Parameters of Megatron-FSDP between two steps.

Called: `MegatronFSDP._replace_param_with_raw_if_needed` and `_replace_param_with_distributed_if_needed`. Between steps
the modules hold the optimizer's distributed parameters instead of their own. Only a call of the full model puts their
own parameters back. Delete this module when Megatron-FSDP has a public context for calls of single modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP


@contextlib.contextmanager
def module_parameters(model: MegatronFSDP) -> Iterator[None]:
    """Give modules their own parameters inside the `with` block, instead of the optimizer's distributed parameters.

    Nothing changes if the modules have their own parameters already.
    """
    if not model.is_param_fsdp_distributed:
        yield
        return
    model._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        model._replace_param_with_distributed_if_needed()
