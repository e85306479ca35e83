"""Access to the model bridge of an `AutoBridge`.

Read: the private property `AutoBridge._model_bridge`. Delete this module when the property is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge


def model_bridge(auto_bridge: AutoBridge) -> Any:
    """Return the bridge that converts the model of an `AutoBridge`."""
    return auto_bridge._model_bridge
