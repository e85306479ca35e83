"""Tiny checkpoints, processors and data sets for tests, benchmarks and examples, made on the spot without a network.

```python
from qwen3vl_bridge.testing.digits import make_dataset  # needs scikit-learn
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint

folder = make_checkpoint("tiny", moe=True)  # or family="qwen3_5"
train, test = make_dataset("digits")
```
"""
