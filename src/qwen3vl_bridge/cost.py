"""What a sample costs each of the two towers, in floating-point operations.

What lives here: the formula, from a Hugging Face configuration. Standard library only. What may not: measured times,
who does the work (`data/balance.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen3vl_bridge.dimensions import dimensions_of


@dataclass(frozen=True)
class TowerCosts:
    """Multiplications and additions of a forward pass; a backward pass is twice as much in every part.

    Matrix products alone are counted, as in PaLM (arXiv 2204.02311, appendix B), and half of the causal attention,
    which is all that its kernels compute.

    Attributes:
        token: of the language model, for each token.
        token_pair: of its attention, for the square of a sample's tokens.
        patch: of the vision tower and its mergers, for each patch.
        patch_pair: of its attention, for the square of a frame's patches.
    """

    token: float
    token_pair: float
    patch: float
    patch_pair: float

    def of(self, *, tokens: int, patches: int, patch_pairs: int) -> float:
        """The cost of one sample.

        Args:
            tokens: of the language model.
            patches: of all its pictures.
            patch_pairs: the squares of the patches of each frame, added up.
        """
        language = self.token * tokens + self.token_pair * tokens**2
        return language + self.patch * patches + self.patch_pair * patch_pairs


def tower_costs(config: Mapping) -> TowerCosts:
    """The costs of a model.

    Args:
        config: a Qwen3-VL `config.json` as a mapping.

    Raises:
        KeyError: the mapping lacks a field; the message names it.
    """
    n, text = dimensions_of(config), config["text_config"]
    layers = {name: len(numbers) for name, numbers in n.indices.items()}
    chosen = text["num_experts_per_tok"] if layers["moe_layers"] else 0
    attention = n["hidden"] * (2 * n["q"] + 2 * n["kv"])
    experts = n["hidden"] * n["experts"] + chosen * 3 * n["hidden"] * n["moe_ffn"]
    token = (
        layers["text_layers"] * attention
        + layers["dense_layers"] * 3 * n["hidden"] * n["ffn"]
        + layers["moe_layers"] * experts
        + n["hidden"] * n["vocab"]
    )
    patch, patch_pair = vision_costs(n.sizes, layers["vision_layers"], layers["deepstack_taps"])
    return TowerCosts(
        token=2 * token, token_pair=2 * layers["text_layers"] * n["q"], patch=patch, patch_pair=patch_pair
    )


def vision_costs(n: Mapping[str, int], layers: int, taps: int) -> tuple[float, float]:
    """`TowerCosts.patch` and `patch_pair` of a vision tower.

    Args:
        n: `dimensions.vision_sizes`, and `hidden`, the text model's width.
        layers: of the tower.
        taps: DeepStack mergers.
    """
    merged = n["v_merged"] // n["v_hidden"]  # patches that become one token
    merger = n["v_merged"] * (n["v_merged"] + n["hidden"]) / merged
    pixels = n["v_channels"] * n["v_temporal_patch"] * n["v_patch"] ** 2
    patch = n["v_hidden"] * pixels + layers * n["v_hidden"] * (4 * n["v_hidden"] + 2 * n["v_ffn"]) + (1 + taps) * merger
    return 2 * patch, 4 * layers * n["v_hidden"]
