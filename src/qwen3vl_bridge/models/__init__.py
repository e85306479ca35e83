"""Model families, each in a package of its own, and the modules that they share.

- `common/`: provider, bridge, model, vision tower, attention, rotary embeddings, experts, loss, layer specs, schedule.
- `inputs/`: conversion of batches in the formats of callers to this package's batch.
- `qwen3_vl/`, `qwen3_5/`, `qwen4_exp/`: a family's weight table,
  `config.json`, provider, bridge, model and released sizes.

`docs/architecture.md` lists the files that answer common questions.
"""
