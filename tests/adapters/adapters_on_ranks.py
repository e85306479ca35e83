"""Run on ranks: models that are split get adapters, compute losses, and are saved whole and as adapters alone.

torchrun --nproc_per_node 2 -m tests.adapters.adapters_on_ranks JOBS OUT
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from qwen3vl_bridge.peft.lora import Qwen3VLLoRA
from qwen3vl_bridge.training.process_groups import initialize

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.peft.utils import create_peft, create_peft_hook

from tests.parity.batches import make_samples
from tests.ranks import begin, leave

SETTINGS = dict(dim=4, alpha=8, lora_B_init_method="normal")  # B is not zero, so that there is something to see
PATTERN = "*.layers.3.*.linear_qkv"  # of the whole model


@dataclass(frozen=True)
class Job:
    name: str
    folder: str
    kind: str
    fields: dict[str, int | bool] = field(default_factory=dict)
    peft: dict[str, object] = field(default_factory=dict)

    def adapters(self) -> object:
        settings = SETTINGS | self.peft
        return Qwen3VLLoRA(**settings) if self.kind == "ours" else create_peft({"type": self.kind, **settings})


def main(jobs: list[dict], out: Path) -> None:
    """Each job; rank 0 writes the names that have adapters, and losses where a rank has all stages."""
    for job in (Job(**one) for one in jobs):
        bridge, peft = AutoBridge.from_hf_pretrained(job.folder), job.adapters()
        provider = bridge.to_megatron_provider(load_weights=True)
        for name, value in job.fields.items():
            setattr(provider, name, value)
        provider.register_pre_wrap_hook(create_peft_hook(peft))
        provider.finalize()
        groups = initialize(provider, seed=0)
        model = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
        )
        found = {"adapters": sorted(name for name, _ in bridge.export_adapter_weights(model, show_progress=False))}
        if groups.pp.size() == 1:
            sample = make_samples("mixed", bridge.hf_pretrained.config, seed=9)[0]
            # A token more behind an odd number, which sequence parallelism cannot divide; nothing sees it.
            ids, labels = (F.pad(row, (0, len(row) % 2))[None] for row in (sample.ids, sample.labels))
            with torch.no_grad():
                losses = model[0](ids, labels=labels, **sample.pixels)
            found["losses"] = losses[0, : len(sample.ids)].tolist()
        bridge.save_hf_pretrained(model, out / job.name / "merged", show_progress=False)
        bridge.save_hf_adapter(model, out / job.name / "adapter", peft)
        if torch.distributed.get_rank() == 0:
            (out / f"{job.name}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    begin()
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
