"""Compare generation with a cache, without one, and by transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.generation

Small models in float32 on one core: four prompts of 64 tokens with an image each, and 256 new tokens. Without a cache
the full rows are computed for every new token. Prints seconds and their ratio to generation with a cache.
"""

from __future__ import annotations

from typing import Any

import qwen3vl_bridge  # noqa: F401  (registers our model)
from qwen3vl_bridge.inference.generation import generate
from qwen3vl_bridge.models.qwen3_5.presets import config_dict
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.training.process_groups import shutdown

import torch
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from benchmarks import growth, measurement

PROMPTS, TOKENS, NEW = 4, 64, 256
_GRID = [1, 8, 8]  # patches; 16 tokens


def hybrid_configuration() -> Any:
    """Return a configuration of Qwen3.5-VL with three layers of linear attention and one of full attention."""
    config = config_dict("0.8B")
    text, vision = config["text_config"], config["vision_config"]
    text |= dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=4096, dtype="float32")
    text |= dict(num_attention_heads=4, num_key_value_heads=2, layer_types=text["layer_types"][:4])
    text |= dict(linear_num_key_heads=4, linear_num_value_heads=4, mtp_num_hidden_layers=0)
    vision |= dict(hidden_size=128, intermediate_size=512, depth=3, num_heads=4, out_hidden_size=256)
    names = dict(image_token_id=4001, video_token_id=4002, vision_start_token_id=4003, vision_end_token_id=4004)
    return Qwen3_5Config.from_dict(config | names)


def seconds(config: Any, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = measurement.build_model(config, TOKENS + NEW)
    reference = AutoModelForImageTextToText.from_config(config).eval()  # other weights: only its time counts
    ids = torch.randint(0, 4000, (PROMPTS, TOKENS))
    ids[:, 1:17] = config.image_token_id
    ids[:, 0], ids[:, 17] = config.vision_start_token_id, config.vision_end_token_id
    patches = _GRID[1] * _GRID[2]
    pixels = torch.randn(PROMPTS * patches, 3 * 2 * config.vision_config.patch_size**2)
    batch = dict(input_ids=ids, pixel_values=pixels, image_grid_thw=torch.tensor([_GRID] * PROMPTS))
    kinds = (ids == config.image_token_id).int()

    def run(keeps_states: bool) -> None:
        kind = type(model.language_model)
        before, kind.keeps_states = kind.keeps_states, keeps_states
        try:
            generate(model, **batch, max_new_tokens=NEW, eos_token_id=[])
        finally:
            kind.keeps_states = before

    def run_reference() -> None:
        reference.generate(**batch, mm_token_type_ids=kinds, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

    ways = {"cache": lambda: run(True), "no cache": lambda: run(False), "transformers": run_reference}
    found = measurement.median_seconds(ways, rounds)
    shutdown()
    return found


def main() -> None:
    """Measure both families, print the results and append them to the CSV file."""
    options = measurement.parser(__doc__, "generation.csv", rounds=3).parse_args()
    lines = []
    for name, config in (("qwen3_vl", growth.configuration()), ("qwen3_5", hybrid_configuration())):
        found = growth.in_process(seconds, config, options.rounds)
        for way, taken in found.items():
            ratio = taken / found["cache"]
            print(f"{family(name).title or name:12} {way:12} {taken:7.2f} s  {ratio:5.1f} times", flush=True)
            line = {"family": name, "way": way, "seconds": f"{taken:.3f}", "times": f"{ratio:.2f}"}
            lines.append(line | {"load": measurement.load()})
    measurement.append(options.csv, lines)


if __name__ == "__main__":
    main()
