"""The parallel layouts that tests of layouts use."""

from dataclasses import dataclass, field
from typing import Any

from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig

_TP2 = dict(tensor_model_parallel_size=2)
_SP = dict(_TP2, sequence_parallel=True)
_CP2 = dict(context_parallel_size=2)
_EP2 = dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
_PP2 = dict(pipeline_model_parallel_size=2, variable_seq_lengths=True)
_PP4 = dict(pipeline_model_parallel_size=4, variable_seq_lengths=True)
# At two stages the default way of sending mixes up what comes from before and from behind.
_VPP2 = dict(_PP2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=True, batch_p2p_comm=False)
_ALLGATHER = dict(moe_token_dispatcher_type="allgather")  # which gathers as many tokens of each rank
# By `deep_ep_on_gloo`.
_DEEPEP = dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
_HYBRIDEP = _DEEPEP | dict(moe_flex_dispatcher_backend="hybridep")


@dataclass(frozen=True)
class Topology:
    """A parallel layout."""

    ranks: int
    fields: dict[str, Any] = field(default_factory=dict)  # of the provider
    families: tuple[str, ...] = ("dense", "MoE")
    distributed_optimizer: bool = False
    tokens: int | None = None  # of every microbatch, with its padding, where they have to be as many

    @property
    def rows(self) -> tuple[str, ...]:
        shared = self.fields.get("context_parallel_size", 1) > 1
        return ("padded", "packed", "presharded") if shared else ("padded", "packed")


_MOE = ("MoE",)
TOPOLOGIES = {
    "TP2": Topology(2, _TP2, families=("dense",)),  # megatron-core trains experts under TP with SP alone
    "TP2+SP": Topology(2, _SP), "CP2": Topology(2, _CP2), "DP2": Topology(2),
    "DP2, distributed optimizer": Topology(2, distributed_optimizer=True), "PP2": Topology(2, _PP2),
    "PP2, first stage of 1": Topology(2, dict(_PP2, num_layers_in_first_pipeline_stage=1)),
    "PP2, first stage of 3": Topology(2, dict(_PP2, num_layers_in_first_pipeline_stage=3)),
    "PP2+VPP2": Topology(2, _VPP2), "EP2": Topology(2, _EP2, families=_MOE),
    "EP2, allgather": Topology(2, _EP2 | _ALLGATHER, families=_MOE, tokens=384),
    "EP2, DeepEP": Topology(2, _EP2 | _DEEPEP, families=_MOE),
    "EP2, HybridEP": Topology(2, _EP2 | _HYBRIDEP, families=_MOE, tokens=384),
    "TP2+SP+ETP2": Topology(2, dict(_SP, expert_tensor_parallel_size=2), families=_MOE),
    "TP2+SP+EP2": Topology(2, _SP | _EP2, families=_MOE), "CP2+EP2": Topology(2, _CP2 | _EP2, families=_MOE),
    "CP4": Topology(4, dict(context_parallel_size=4)), "PP4": Topology(4, _PP4), "TP2+SP+CP2": Topology(4, _SP | _CP2),
    "DP2+CP2": Topology(4, _CP2), "PP2+CP2": Topology(4, _PP2 | _CP2), "PP2+VPP2+CP2": Topology(4, _VPP2 | _CP2),
    "PP2+TP2+SP": Topology(4, _PP2 | _SP), "PP2+DP2": Topology(4, _PP2),
    "PP2+DP2+EP2": Topology(4, _PP2 | _EP2, families=_MOE),
    "TP2+SP+CP2+EP2": Topology(4, _SP | _CP2 | _EP2, families=_MOE),
    "DP2+CP2+EP2": Topology(4, _CP2 | _EP2, families=_MOE),
    "PP2+TP2+SP+EP2": Topology(4, _PP2 | _SP | _EP2, families=_MOE),
    "TP4+SP": Topology(4, dict(_SP, tensor_model_parallel_size=4)),  # of models with two query groups
    "TP2+SP+CP2+EP2, DeepEP": Topology(4, _SP | _CP2 | _EP2 | _DEEPEP, families=_MOE),
}  # fmt: skip


# Linear attention whose heads are too few for tensor and context parallelism (two key heads), so that ranks exchange
# states; on two ranks, where they are enough, by the setting.
_CP4, _CP8 = dict(context_parallel_size=4), dict(context_parallel_size=8)
_RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CHUNKWISE = {
    "CP2, chunkwise": Topology(2, _CP2 | dict(linear_cp_mode="chunkwise")),
    "CP2+EP2, chunkwise": Topology(2, _CP2 | _EP2 | dict(linear_cp_mode="chunkwise"), families=_MOE),
    "CP4, chunkwise": Topology(4, _CP4), "CP4, chunkwise, recomputed": Topology(4, _CP4 | _RECOMPUTED),
    "TP2+SP+CP2, chunkwise": Topology(4, _SP | _CP2), "PP2+CP2, chunkwise": Topology(
        4, _PP2 | _CP2 | dict(linear_cp_mode="chunkwise")
    ),
    "CP8, chunkwise": Topology(8, _CP8), "TP2+SP+CP4, chunkwise": Topology(8, _SP | _CP4),
    "CP4+DP2+EP2, chunkwise": Topology(8, _CP4 | _EP2, families=_MOE),
}  # fmt: skip


def modules(vision: int, language: int, vision_tensor: int = 1, **fields: Any) -> dict[str, Any]:
    """Return fields of separate vision and language ranks."""
    split = DistTrainConfig(
        use_dist_train=True, vision_world_size=vision, language_world_size=language,
        vision_tensor_model_parallel_size=vision_tensor,
    )  # fmt: skip
    return dict(dist_train=split, variable_seq_lengths=True, **fields)


# Vision ranks + language ranks.
MODULES = {
    "1 + 1": Topology(2, modules(1, 1)), "2 + 1": Topology(3, modules(2, 1)), "1 + DP2": Topology(3, modules(1, 2)),
    "1 + TP2+SP": Topology(3, modules(1, 2, **_SP)),
    "1 + PP2": Topology(3, modules(1, 2, pipeline_model_parallel_size=2)),
    "1 + EP2": Topology(3, modules(1, 2, **_EP2), families=_MOE), "TP2 + 1": Topology(3, modules(2, 1, 2)),
    "2 + DP2": Topology(4, modules(2, 2)), "2 + EP2": Topology(4, modules(2, 2, **_EP2), families=_MOE),
    "2 + PP2": Topology(4, modules(2, 2, pipeline_model_parallel_size=2)),
    "2 + TP2+SP": Topology(4, modules(2, 2, **_SP)), "TP2 + DP2": Topology(4, modules(2, 2, 2)),
    "TP2 + TP2+SP+EP2": Topology(4, modules(2, 2, 2, **_SP, **_EP2), families=_MOE),
}  # fmt: skip


def split_by(cfg: Any, fields: dict[str, Any]) -> None:
    """Set the parallel layout of a run's model, with the groups that its modules need."""
    for name, value in fields.items():
        assert hasattr(cfg.model, name), name
        setattr(cfg.model, name, value)
    cfg.dist.use_decentralized_pg = cfg.model.dist_train.use_dist_train
    cfg.dist.use_gloo_process_groups = not cfg.dist.use_decentralized_pg
