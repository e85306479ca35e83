"""Distillation by ModelOpt in Megatron-Bridge's loop: losses and the student's gradients are those computed by hand.

Full models with our forward step, from images; and the language model alone with Megatron-Bridge's own step, from
text, as ModelOpt's `distill.py` trains it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.config.model_validation import MODEL_CAN_TRAIN
from qwen3vl_bridge.training.step import forward_step

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.gpt_step import forward_step_modelopt
from megatron.core.utils import unwrap_model
from torch import Tensor

from tests.frameworks.modelopt.support import Recipe, distillation, distilled_by_hand, load_reference, make_larger
from tests.helpers.batches import Sample, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import allowed, check, relative, rounded
from tests.helpers.ranks import largest, of_all_ranks
from tests.helpers.steps import forward_backward, set_up
from tests.models.qwen3_5.tiny import make_checkpoint as make_qwen3_5
from tests.parity.conftest import converted_gradients, shifted_names
from tests.parity.on_ranks import layout_of
from tests.parity.topologies import TOPOLOGIES, Topology

MULTIPLE = 8
RECIPES = {
    "logits": Recipe(), "temperature": Recipe(temperature=2.5), "mse": Recipe(hidden="mse"),
    "cosine": Recipe(hidden="cosine"), "labels too": Recipe(hidden="mse", lm_scale=0.5),
}  # fmt: skip
SUBMODULE = "language_model"


@pytest.fixture(scope="module")
def models(untied_folder, moe_folder, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("distillation")
    return {
        "dense": untied_folder, "MoE": moe_folder, "larger": make_larger(root / "larger"),
        "Qwen3.5": make_qwen3_5(root / "qwen3_5"), "Qwen3.5 MoE": make_qwen3_5(root / "qwen3_5_moe", moe=True),
    }  # fmt: skip


def samples_of(folder: Path, content: str) -> list[Sample]:
    return make_samples(content, AutoBridge.from_hf_pretrained(str(folder)).hf_pretrained.config, seed=5)


class Distilled:
    """A student that is set up to be trained, and what one microbatch makes of it."""

    def __init__(self, student: Path, teacher: Path, topology: Topology, recipe: Recipe, submodule: str | None) -> None:
        kd = recipe.settings("" if submodule else f"{SUBMODULE}.")
        self.run = set_up(distillation(student, teacher, topology, kd, submodule), data=False)
        self.bridge = AutoBridge.from_hf_pretrained(str(student))
        (self.model,) = self.run.model
        self.student = unwrap_model(self.model)
        self.whole = getattr(self.run.cfg.model, "full_model", self.student)  # what is exported
        self.alone, self.tokens = submodule is not None, topology.tokens

    def fit(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of the layer from the student's width to the teacher's."""
        found = {name.rpartition(".")[2]: p.detach() for name, p in self.student.loss_modules.named_parameters()}
        return (found["weight"], found["bias"]) if found else None

    def step(self, samples: list[Sample], *, packed: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Sums of losses that are reported, and gradients of their sum under Hugging Face names."""
        self.model.zero_grad_buffer()
        layout = layout_of(samples, packed=packed, multiple=MULTIPLE, tokens=self.tokens)
        batch = make_batch(samples, self.bridge.hf_pretrained.config, layout=layout)
        reports: list[dict[str, Tensor]] = []
        own = forward_step_modelopt if self.alone else forward_step

        def noted(state: Any, batches: Iterator[Any], model: torch.nn.Module) -> tuple[Tensor, Callable]:
            output, count = own(state, batches, model)
            return output, lambda output: reports.append((counted := count(output))[2]) or counted

        self.run.forward_step = noted
        forward_backward(self.run, iter([as_text(batch) if self.alone else batch]), 1)
        with self.student.hide_teacher_model(), self.student.hide_loss_modules():  # which are not exported
            gradients = converted_gradients(self.bridge, [self.whole], lambda p: getattr(p, "main_grad", None))
        everyone = of_all_ranks(reports)  # collective
        (report,) = reports or next(found for found in everyone if found)  # of the last stage
        for sums in report.values():
            torch.distributed.all_reduce(sums, group=self.run.groups.cp)
        shifted = shifted_names(self.run.cfg.model)
        tokens = report["total loss"][1]
        gradients = {name: (x - int(name.endswith(shifted))) * tokens for name, x in gradients.items()}
        return {name: sums[0].item() for name, sums in report.items()}, gradients


def as_text(batch: Any) -> dict[str, Tensor]:
    """What Megatron-Bridge's data sets of text give: rows, or a packed row with its offsets."""
    layout = batch.layout
    given = dict(
        tokens=batch.input_ids, labels=batch.labels, loss_mask=batch.loss_mask, position_ids=batch.position_ids[0]
    )
    if not layout.packed:
        return given
    logical, physical = layout.cu_seqlens, layout.cu_seqlens_padded
    longest = torch.tensor(max(layout.padded_lengths))
    return given | dict(
        cu_seqlens_q=logical, cu_seqlens_kv=logical, cu_seqlens_q_padded=physical, cu_seqlens_kv_padded=physical,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def errors(found: tuple[dict[str, float], dict[str, Tensor]], expected: tuple[dict, dict]) -> dict[str, float]:
    (sums, gradients), (wanted, wanted_gradients) = found, expected
    of_sums = max(abs(sums[name] - value) / max(abs(value), 1.0) for name, value in wanted.items())
    return dict(loss=of_sums, gradient=max(relative(gradients, wanted_gradients).values()))


def compare(
    student: Path, teacher: Path, topology: Topology, recipe: Recipe, content: str, submodule: str | None = None
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Errors and their limits, of padded rows and of a packed row."""
    distilled, samples = Distilled(student, teacher, topology, recipe, submodule), samples_of(student, content)
    models = load_reference(student), load_reference(teacher)

    def by_hand() -> tuple[dict[str, float], dict[str, Tensor]]:
        sums, gradients = distilled_by_hand(*models, samples, recipe, distilled.fit())
        if submodule:  # the tower is not trained
            gradients = {name: x if ".visual." not in name else torch.zeros_like(x) for name, x in gradients.items()}
        return sums, gradients

    expected, noise = by_hand(), []
    for seed in (0, 1):
        with rounded(models[0], seed):
            noise.append(errors(by_hand(), expected))
    limits = allowed(noise)
    return {
        rows: (largest(errors(distilled.step(samples, packed=rows == "packed"), expected)), limits)
        for rows in (("padded", "packed") if topology.tokens is None else ("packed",))
    }


ONE = Topology(1)
CASES = [
    *[("dense", "larger", name) for name in RECIPES], ("dense", "MoE", "mse"), ("MoE", "larger", "logits"),
    ("Qwen3.5", "Qwen3.5 MoE", "mse"),
]  # fmt: skip


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize(("student", "teacher", "recipe"), CASES)
def test_distillation_losses_and_gradients_of_full_models_match_transformers(models, student, teacher, recipe):
    for found, limits in compare(models[student], models[teacher], ONE, RECIPES[recipe], "mixed").values():
        check(found, limits)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("student", "teacher"), [("dense", "larger"), ("dense", "MoE"), ("Qwen3.5", "Qwen3.5 MoE")])
def test_distillation_losses_and_gradients_of_language_model_match_transformers(models, student, teacher):
    found = compare(models[student], models[teacher], ONE, RECIPES["mse"], "text only", SUBMODULE)
    for errors, limits in found.values():
        check(errors, limits)


# Of the tiny models' first stage, whose layers add all DeepStack features, and rows of one length.
FIXED = {"PP2": Topology(2, dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3), tokens=512)}
# ModelOpt weights states by each context-parallel rank's own losses.
ON_RANKS = [
    ("TP2+SP", "dense", "larger", "mse", "mixed", None), ("TP2+SP", "MoE", "larger", "logits", "mixed", None),
    ("TP2+SP", "dense", "larger", "cosine", "text only", SUBMODULE),
    ("TP2+SP", "Qwen3.5", "Qwen3.5 MoE", "mse", "text only", SUBMODULE),
    ("CP2", "dense", "larger", "logits", "mixed", None), ("PP2", "dense", "MoE", "mse", "mixed", None),
]  # fmt: skip


def compare_each(cases: list[tuple], models: dict[str, Path]) -> list[dict]:
    found = []
    for topology, student, teacher, recipe, content, submodule in cases:
        folders = models[student], models[teacher]
        found.append(compare(*folders, (TOPOLOGIES | FIXED)[topology], RECIPES[recipe], content, submodule))
        print(topology, student, teacher, found[-1], flush=True)
    return found


@pytest.fixture(scope="module")
def on_ranks(models):
    return results_of_ranks(compare_each, 2, ON_RANKS, models, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ON_RANKS)), ids=[" ".join(map(str, case)) for case in ON_RANKS])
def test_distillation_on_two_ranks_matches_transformers(on_ranks, number):
    for found, limits in on_ranks[number].values():
        check(found, limits)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(should_pad_vocab=True, make_vocab_size_divisible_by=384), "pads the vocabulary of 512 to 768"),
        (dict(pipeline_model_parallel_size=2, variable_seq_lengths=True, pipeline_dtype=torch.float32), "to split it"),
    ],
    ids=["padded vocabulary", "stages of any length"],
)
def test_distillation_raises_if_setting_is_unsupported(models, settings, says):
    cfg = distillation(models["dense"], models["larger"], ONE, RECIPES["logits"].settings(f"{SUBMODULE}."))
    vars(cfg.model).update(settings)
    cfg.model.finalize()
    with pytest.raises(ValueError, match=says):
        run_checks(MODEL_CAN_TRAIN, cfg.model)
