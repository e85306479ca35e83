"""On several ranks, stock megatron-core loads torch_dist checkpoints of ours, strictly.

    python torch_dist_main.py [[HF_FOLDER, MEGATRON_FOLDER, {SETTING: VALUE, ...}, FOLDER_TO_SAVE_TO or null], ...]

Every parameter and buffer is then compared, bit for bit, with a model that Megatron-Bridge has filled from the Hugging
Face folder itself. Where there is a folder to save to, all weights are doubled and saved by megatron-core, together
with the state of its optimizer; and a single process has Megatron-Bridge build and fill a model from the checkpoint.
"""

import json
import sys

if __name__ == "__main__":
    from torch_dist_load import run

    run(json.loads(sys.argv[1]))
