"""On several ranks, megatron-core's own MegatronFSDP loads a checkpoint through Megatron-Bridge's own function.

    python megatron_fsdp_load.py [[HF_FOLDER, MEGATRON_FOLDER, WORLD, TP, EP, FOLDER_TO_SAVE_TO or null, KIND], ...]

Every local shard is compared with the checkpoint, bit for bit. On a CPU the model has the local layer spec's names.
KIND says how it is loaded: "strict" where the checkpoint has the same names; "lax", as Megatron-Bridge does by default,
where it may have Transformer Engine's; "refused" where it is of another model, which every rank has to say; "counted"
as "strict", and every rank says how many bytes it read of how many files, and how many elements it holds. Where there
is a folder to save to, all weights are doubled and saved by Megatron-Bridge's own function, together with the state of
megatron-core's optimizer.
"""

import json
import re
import sys
import tempfile
import types

import qwen3vl_bridge  # noqa: F401
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import local_name

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training import checkpointing
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys


def without_cuda() -> None:
    """Megatron-FSDP asks for two things by their CUDA names that the package has no need to redirect."""
    mesh, found = mcore_fsdp_adapter.DeviceMesh, megatron_fsdp.torch

    class CpuMesh:
        @staticmethod
        def from_group(groups, device_type=None, **kwargs):
            return mesh.from_group(groups, device_type="cpu", **kwargs)

    class Cuda:
        current_device = staticmethod(lambda: 0)

        def __getattr__(self, name):
            return getattr(found.cuda, name)

    class Torch:
        cuda, device = Cuda(), torch.device

        def __getattr__(self, name):
            return getattr(found, name)

    mcore_fsdp_adapter.DeviceMesh, megatron_fsdp.torch = CpuMesh, Torch()


def wrapped_model(hf_folder: str, tp: int, ep: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(0)
    provider = AutoBridge.from_hf_pretrained(hf_folder).to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size, provider.bf16, provider.params_dtype = tp, True, torch.bfloat16
    if ep > 1:
        provider.expert_model_parallel_size = ep
    if tp > 1 and getattr(provider, "num_moe_experts", None):
        provider.expert_tensor_parallel_size, provider.sequence_parallel = 1, True
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    inner = Float16Module(provider, provider.provide())
    wrapper = mcore_fsdp_adapter.FullyShardedDataParallel(provider, ddp, inner, device=torch.device("cpu"))
    model = unwrap_model([wrapper])[0]
    for parameter in model.parameters():
        parameter.data.fill_(7)
    return wrapper, model


def load(model: torch.nn.Module, folder: str, strict: bool) -> None:
    state = {"checkpoint_version": 3.0, "iteration": 1, "model": model.state_dict_for_save_checkpoint()}
    settings = types.SimpleNamespace(strict_fsdp_dtensor_load=strict)
    state, *_ = checkpointing.load_fsdp_dtensor_checkpoint(
        folder, settings, rank0=False, sharded_state_dict=state | {"_model": [model]}, iteration=0
    )
    checkpointing._load_model_state_dict(model, state["model"], True)


class CountingReader(FileSystemReader):
    def read_data(self, plan, planner):
        places = [self.storage_data[item.storage_index] for item in plan.items]
        type(self).counted = [sum(place.length for place in places), len({place.relative_path for place in places})]
        return super().read_data(plan, planner)


def counted(model: torch.nn.Module, folder: str) -> list[int]:
    checkpointing._get_filesystem_reader = CountingReader
    load(model, folder, strict=True)
    held = sum(tensor.to_local().numel() for tensor in model.state_dict().values() if hasattr(tensor, "to_local"))
    return [*CountingReader.counted, held]


def refusal(model: torch.nn.Module, folder: str) -> str:
    try:
        load(model, folder, strict=False)
    except CheckpointError as error:
        assert all((parameter == 7).all() for parameter in model.parameters())
        return str(error).splitlines()[-1].strip()
    return "nothing"


def save_doubled(wrapper: torch.nn.Module, model: torch.nn.Module, folder: str) -> None:
    """Save twice the weights; where there is one rank, with the optimizer's state.

    On several, megatron-core 0.19 waits forever here: a rank has no state of a parameter it has no element of, which in
    a tiny model is so of many, and the ranks then split different states.
    """
    state = {"checkpoint_version": 3.0, "iteration": 1, "model": model.state_dict_for_save_checkpoint()}
    for tensor in state["model"].values():
        if hasattr(tensor, "to_local"):
            tensor.to_local().mul_(2)
    if dist.get_world_size() == 1:
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.0, bf16=True, use_distributed_optimizer=True
        )
        optimizer = get_megatron_optimizer(settings, [wrapper], use_gloo_process_groups=False)
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one._init_optimizer_states_with_dummy_values()
        kind = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=False, metadata=kind)
    checkpointing.save_fsdp_dtensor_checkpoint(folder, state, cfg=None, model=model)


def compare(model: torch.nn.Module, stored: dict[str, torch.Tensor], tp: int) -> set[str]:
    compared = set()
    groups, experts = parallel_state, getattr(unwrap_model([model])[0].config, "num_moe_experts", None) or 0
    first = groups.get_expert_model_parallel_rank() * (experts // groups.get_expert_model_parallel_world_size())
    for name, parameter in model.state_dict().items():
        if not hasattr(parameter, "to_local"):
            continue
        # A rank counts its experts from 0.
        name = re.sub(r"(local_experts\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + first}", name)
        parts = 1 if "local_experts" in name else tp
        if name in stored:
            whole, names = stored[name], [name]
        else:  # each tensor-parallel rank has its part of the gate above its part of the up projection
            names = [name + suffix for suffix in ("_w", "_v")]
            halves = (stored[half].chunk(parts) for half in names)
            whole = torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
        box = gather_and_compute_chunk_metadata(parameter)
        part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        if parameter.shape != whole.shape or not torch.equal(parameter.to_local(), part):
            raise AssertionError(f"{name}: {parameter} is not {part}")
        compared.update(names)
    return compared


def rank_main(
    rank: int, store: str, hf_folder: str, folder: str, world: int, tp: int, ep: int, save_to: str | None, kind: str
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    without_cuda()
    stored = _load_state_dict_from_keys(None, checkpoint_id=f"{folder}/iter_0000000")["model"]
    stored = {local_name(name): tensor for name, tensor in stored.items()}
    wrapper, model = wrapped_model(hf_folder, tp, ep)
    everyone: list = [None] * world
    if kind == "refused":
        dist.all_gather_object(everyone, refusal(model, folder))
        said = f"refused: {everyone[0]}" if len(set(everyone)) == 1 else f"not alike: {everyone}"
    else:
        if kind == "counted":
            reads = [None] * world
            dist.all_gather_object(reads, counted(model, folder))
            # One write with its newline in it, so that it stays one line.
            sys.stdout.write(f"read: {json.dumps(reads)}\n" if rank == 0 else "")
        else:
            load(model, folder, strict=kind == "strict")
        dist.all_gather_object(everyone, compare(model, stored, tp))
        assert set().union(*everyone) == stored.keys(), stored.keys() - set().union(*everyone)
        said = f"same: {len(stored)} at world {world}, tp {tp}, ep {ep}, {kind}"
    if rank == 0:
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()
    if save_to is not None:
        save_doubled(wrapper, model, save_to)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that Megatron, which takes long to import, is imported once.
    for load_from in json.loads(sys.argv[1]):
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (f"{scratch}/store", *load_from)
            torch.multiprocessing.start_processes(rank_main, arguments, nprocs=load_from[2], start_method="fork")
