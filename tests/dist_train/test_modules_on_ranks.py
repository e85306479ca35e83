"""Runs with separate vision and language ranks in Megatron-Bridge's loop match runs of one model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import export_checkpoint
from qwen3vl_bridge.dist_train.joint_run import OneWayBridge

import pytest
import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.model_load_save import load_megatron_model
from safetensors.torch import load_file

from tests.helpers.forked import results_of_ranks
from tests.helpers.ranks import leave_groups, of_all_ranks
from tests.parity.topologies import MODULES, split_by
from tests.training.running import TIMED, Entries, configured, run_bridges_loop

STEPS = 4
HALF = STEPS // 2
SETTINGS = dict(
    dataset__pad_to_multiple_of=8, train__global_batch_size=4, train__train_iters=STEPS, validation__eval_interval=2,
    validation__eval_iters=1, optimizer__lr=1e-3, scheduler__lr_warmup_iters=2, checkpoint__save_interval=HALF,
    checkpoint__dist_ckpt_optim_fully_reshardable=True, logger__log_interval=1,
)  # fmt: skip
FROZEN = dict(model__freeze_vision_model=True, model__freeze_vision_projection=True)
LANGUAGE_FROZEN = dict(model__freeze_language_model=True)


@dataclass
class Job:
    name: str
    split: str | None = None
    opens: bool = False
    family: str = "dense"
    save: str | None = None
    load: str | None = None
    sharded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, hf: str, data: str) -> Any:
        cfg = configured(hf, data, hf, self.save, SETTINGS | self.settings, distributed=self.sharded)
        cfg.checkpoint.load, cfg.checkpoint.ckpt_step = self.load, None if self.load is None else HALF
        split_by(cfg, MODULES[self.split].fields if self.split else {})
        return cfg


class Follower(Callback):
    def __init__(self) -> None:
        self.log: list[tuple[str, float, float]] = []
        self.come_back: list[bool] = []

    def on_train_start(self, context: Any) -> None:
        communicator = getattr(context.state.cfg.model, "_p2p_communicator", None)
        self.come_back = [
            not isinstance(bridge, OneWayBridge)
            for info in getattr(communicator, "rank_module_map", {}).values()
            for bridge in (*info.bridge_comms_as_src_module, *info.bridge_comms_as_dest_module)
        ]

    def on_train_step_end(self, context: Any) -> None:
        if "lm loss" in context.loss_dict:
            self.log.append(("step", float(context.loss_dict["lm loss"]), float(context.grad_norm)))

    def on_eval_end(self, context: Any) -> None:
        self._add("valid", context)

    def on_test_end(self, context: Any) -> None:
        self._add("test", context)

    def _add(self, kind: str, context: Any) -> None:
        if "lm loss" in context.total_loss_dict:
            self.log.append((kind, float(context.total_loss_dict["lm loss"]), 0.0))


def run(job: Job, hf: str, data: str) -> dict[str, Any]:
    follower, entries = Follower(), Entries()
    run_bridges_loop(job.config(hf, data), follower, entries)
    return dict(told=follower.log, log=entries.entries, come_back=follower.come_back)


def opened(job: Job, *_: str) -> dict[str, float]:
    """Open a checkpoint with Megatron-Bridge's own tools, and return the norms of its parameters."""
    leave_groups()
    model = load_megatron_model(f"{job.load}/iter_{STEPS:07d}", use_cpu_init=True)
    return {name: p.float().norm().item() for chunk in model for name, p in chunk.named_parameters()}


def run_all(hf: dict[str, str], data: str, jobs: list[Job]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")  # or Megatron-Bridge's loop would, and take it down at its end
    return of_all_ranks({job.name: (opened if job.opens else run)(job, hf[job.family], data) for job in jobs})


pytestmark = pytest.mark.slow

# Relative, beside one process in float32.
LIMITS = {"loss": 1e-6, "valid_loss": 1e-6, "grad_norm": 5e-6}
# The first so many ranks have the tower, or a stage of the language model that is not the last.
WITHOUT_LOSSES = {"2 + 1": 2, "1 + DP2 goes on from whole": 1, "1 + PP2 goes on from 2 + 1": 2, "1 + EP2": 1}
KINDS = ["step", "step", "valid", "step", "step", "valid", "test"]  # what Megatron-Bridge's loop does
SAVED = ("whole", "whole, MoE", "two", "split", "MoE", "sharded", "sharded, MoE", "frozen", "language")
SECONDS = 1800


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def found(inputs, moe_folder, scratch) -> list[dict[str, Any]]:
    """Return the results of each rank: full models, separate modules, and full models that resume from modules."""
    folders = {"dense": str(inputs.hf), "MoE": str(moe_folder)}
    place = {name: str(scratch / name) for name in SAVED}
    whole = [Job("whole", save=place["whole"]), Job("whole, MoE", family="MoE", save=place["whole, MoE"])]
    whole += [Job("whole, frozen", settings=FROZEN), Job("whole, language frozen", settings=LANGUAGE_FROZEN)]
    modules = [
        Job("2 + 1", "2 + 1", save=place["two"]),
        Job("1 + DP2 goes on from whole", "1 + DP2", load=place["whole"], save=place["split"]),
        Job("1 + PP2 goes on from 2 + 1", "1 + PP2", load=place["two"]),
        Job("1 + EP2", "1 + EP2", family="MoE", save=place["MoE"]),
        Job("1 + EP2 goes on", "1 + EP2", family="MoE", load=place["MoE"]),
        Job("1 + EP2 goes on from whole", "1 + EP2", family="MoE", load=place["whole, MoE"]),
        Job("1 + DP2, sharded", "1 + DP2", save=place["sharded"], sharded=True),
        Job("1 + EP2, sharded", "1 + EP2", family="MoE", save=place["sharded, MoE"], sharded=True),
        Job("frozen, sharded", "2 + 1", sharded=True, settings=FROZEN),
        Job("frozen", "1 + DP2", save=place["frozen"], settings=FROZEN),
        Job("frozen goes on", "1 + DP2", load=place["frozen"], settings=FROZEN),
        Job("language frozen", "1 + DP2", save=place["language"], settings=LANGUAGE_FROZEN),
        Job("language frozen goes on", "1 + DP2", load=place["language"], settings=LANGUAGE_FROZEN),
    ]
    after = [Job("whole goes on from 2 + 1", load=place["two"])]
    after += [Job("whole goes on from 1 + EP2", family="MoE", load=place["MoE"])]
    after += [Job(f"{name} opened", opens=True, load=place[name]) for name in ("whole", "two")]
    seen: list[dict[str, Any]] = [{}, {}, {}]
    for ranks, jobs in ((1, whole), (3, modules), (1, after)):
        found = results_of_ranks(run_all, ranks, folders, str(inputs.data), jobs, timeout=SECONDS)
        for everything, rank in zip(seen, found, strict=False):
            everything |= rank
    return seen


def worst(log: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    errors = dict.fromkeys(LIMITS, 0.0)
    for one, two in zip(log, other, strict=True):
        assert one.keys() - set(TIMED) == two.keys() - set(TIMED)
        for name in one.keys() - set(TIMED):
            kind = "grad_norm" if name.startswith("grad_norm") else name
            if kind in LIMITS and two[name]:
                errors[kind] = max(errors[kind], abs(one[name] / two[name] - 1))
            else:
                rel = 1e-6 if name.endswith("balancing_loss") else 1e-12  # measured 6.1e-8
                assert one[name] == pytest.approx(two[name], rel=rel), name
    return errors


def weights(run: Path, to: Path, hf: Path) -> dict[str, torch.Tensor]:
    export_checkpoint(run, to, hf_model=hf, progress=False)
    return {name: tensor for path in to.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "other"),
    [("2 + 1", "whole"), ("1 + DP2, sharded", "whole"), ("1 + EP2", "whole, MoE"), ("frozen", "whole, frozen")],
)
def test_dist_train_metrics_log_matches_one_process(found, name, other):
    """Also, no rank computes gradients for a frozen tower."""
    assert {one for rank in found for one in rank[name]["come_back"]} == {name != "frozen"}
    for rank in found:
        errors = worst(rank[name]["log"], found[0][other]["log"])
        assert all(errors[kind] <= limit for kind, limit in LIMITS.items()), errors
    print(name, errors)


@pytest.mark.parametrize(("name", "other"), [
    ("2 + 1", "whole"), ("1 + EP2", "whole, MoE"), ("1 + DP2, sharded", "whole"), ("1 + EP2, sharded", "whole, MoE"),
    ("frozen, sharded", "whole, frozen"), ("frozen", "whole, frozen"), ("language frozen", "whole, language frozen"),
    ("language frozen goes on", "whole, language frozen"), ("1 + DP2 goes on from whole", "whole"),
    ("1 + PP2 goes on from 2 + 1", "whole"), ("whole goes on from 2 + 1", "whole"), ("1 + EP2 goes on", "1 + EP2"),
    ("1 + EP2 goes on from whole", "whole, MoE"), ("whole goes on from 1 + EP2", "whole, MoE"),
    ("frozen goes on", "whole, frozen"),
])  # fmt: skip
def test_dist_train_losses_and_norms_match_one_process(found, name, other):
    """Compare losses of training, validation and test data, and norms. A resumed run computes the second half."""
    last = len(KINDS) - (HALF + 1 if "goes on" in name else 0)
    (whole,) = {tuple(rank[other]["told"]) for rank in found if other in rank and rank[other]["told"]}
    assert [one[0] for one in whole] == KINDS
    errors = {"loss": 0.0, "grad_norm": 0.0}
    logs = [rank[name]["told"] for rank in found if name in rank and rank[name]["told"]]
    assert logs
    for log in logs:
        assert len(log) == last
        for mine, its in zip(log, whole[-last:], strict=True):
            assert mine[0] == its[0]
            errors["loss"] = max(errors["loss"], abs(mine[1] / its[1] - 1))
            errors["grad_norm"] = max(errors["grad_norm"], abs(mine[2] / its[2] - 1) if its[2] else 0.0)
    print(name, errors)
    assert all(error <= LIMITS[kind] for kind, error in errors.items())


def test_only_last_language_stages_of_dist_train_have_losses(found):
    for name, ranks in WITHOUT_LOSSES.items():
        for rank, seen in enumerate(found):
            assert (seen[name]["told"] == []) == (rank < ranks), (name, rank)


def test_load_megatron_model_opens_dist_train_checkpoint(found):
    whole, mine = found[0]["whole opened"], found[0]["two opened"]
    assert len(whole) > 100 and mine == pytest.approx(whole, rel=1e-5)


def test_dist_train_counts_each_packed_row_once_in_consumed_samples(found, scratch):
    for run in ("whole", "two", "split", "MoE"):
        state = torch.load(scratch / run / f"iter_{STEPS:07d}" / "train_state.pt", weights_only=True)
        assert int(state["step"]) == STEPS and int(state["consumed_train_samples"]) == 4 * STEPS, run


@pytest.mark.parametrize(
    ("run", "one"), [("two", "whole"), ("sharded", "whole"), ("MoE", "whole, MoE"), ("sharded, MoE", "whole, MoE")]
)
def test_dist_train_exported_weights_match_one_process_run(found, inputs, moe_folder, scratch, run, one):
    hf = moe_folder if "MoE" in run else inputs.hf
    whole, mine = (weights(scratch / name, scratch / f"hf_{name}_{run}", hf) for name in (one, run))
    assert mine.keys() == whole.keys()
    error = max((mine[name] - whole[name]).abs().max().item() for name in whole) / 1e-3
    print("weights, in learning rates", error)
    assert error <= 1e-2
