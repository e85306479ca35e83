"""Weights come back bit for bit under tensor, pipeline, expert and expert-tensor parallelism."""

import json

from tests.expert_layouts import LAYOUTS
from tests.forked import run_ranks


def test_every_tensor_comes_back(untied_folder, tied_folder, moe_folders, tmp_path):
    tp, ep = dict(tensor_model_parallel_size=2, sequence_parallel=True), dict(expert_model_parallel_size=2)
    pp = dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3, pipeline_dtype=None)
    padded = dict(should_pad_vocab=True, make_vocab_size_divisible_by=100)
    cases = [(untied_folder, tp | padded), (tied_folder, tp | padded), (tied_folder, pp | padded)]
    cases += [(moe_folders[layout], ep) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp | ep | dict(expert_tensor_parallel_size=1)) for layout in LAYOUTS]
    settings = json.dumps([fields for _, fields in cases])
    run_ranks("tests.model.weights.weights_on_two_ranks", 2, settings, *(folder for folder, _ in cases))
