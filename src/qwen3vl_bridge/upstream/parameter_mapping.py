"""The configuration that Megatron-Bridge's parameter mappings find for a module.

Called: `MegatronParamMapping._get_config`, which searches a module and its parents for a configuration. Delete this
module when the method has a public name.
"""

from __future__ import annotations

from typing import Any

from megatron.bridge.models.conversion.param_mapping import AutoMapping
from torch import nn


class ConfigMapping(AutoMapping):
    """AutoMapping with a public method that returns the configuration of a module."""

    def config_of(self, module: nn.Module) -> Any:
        """Return the configuration of the model that a module is part of."""
        return self._get_config(module)
