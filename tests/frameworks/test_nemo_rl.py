"""NeMo-RL's Megatron worker: settings on a converted checkpoint's configuration, rows with and without packing, refit.

Sources: nemo_rl/models/megatron/{community_import,setup,data,train}.py and
nemo_rl/models/policy/workers/megatron_policy_worker.py; settings are those of examples/configs/grpo_math_1B.yaml, which
its configurations of vision-language models begin with.
"""

from typing import Any

import qwen3vl_bridge
from qwen3vl_bridge import import_checkpoint

import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.model_provider import get_model
from megatron.bridge.training import config
from megatron.bridge.training.model_load_save import load_model_config
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from megatron.training.utils import get_ltor_masks_and_position_ids

from tests.frameworks import support
from tests.frameworks.support import Built, Truth
from tests.frameworks.test_freezing import nemo_rls_freeze_moe_router
from tests.models.inputs.support import offsets

MEGATRON_CFG = support.NEMO_RL | dict(bf16=False, params_dtype=torch.float32, pipeline_dtype=torch.float32)


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    """The checkpoint that the worker starts from (policy.pretrained_checkpoint), with its run_config.yaml."""
    path = tmp_path_factory.mktemp("converted")
    import_checkpoint(folder, path / "megatron", ckpt_format="torch_dist", progress=False)
    (run_config,) = path.glob("megatron/iter_*/run_config.yaml")
    return run_config.parent


def make_config(converted, folder) -> config.ConfigContainer:
    model_cfg, _ = load_model_config(str(converted))
    for name, value in MEGATRON_CFG.items():
        assert hasattr(model_cfg, name), name
        setattr(model_cfg, name, value)
    model_cfg.__post_init__()
    ddp = dict.fromkeys(
        ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective"), False
    )
    return config.ConfigContainer(
        model=model_cfg,
        checkpoint=config.CheckpointConfig(pretrained_checkpoint=str(converted), save=None, load=None, load_rng=False),
        logger=config.LoggerConfig(logging_level=0), dist=config.DistributedInitConfig(),
        train=config.TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=10),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-5, use_distributed_optimizer=False, bf16=False),
        ddp=config.DistributedDataParallelConfig(check_for_nan_in_grad=True, use_distributed_optimizer=False, **ddp),
        scheduler=config.SchedulerConfig(lr_decay_style="constant"), dataset=None,
        tokenizer=config.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)),
    )  # fmt: skip


def make_worker(converted, folder, *, hooks=(), ddp=True) -> Built:
    """As setup_model_and_optimizer; weights come from the Hugging Face folder, as they do into its checkpoint."""
    cfg = make_config(converted, folder)
    cfg.validate()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    cfg.model._pg_collection = groups
    (model,) = get_model(
        cfg.model, cfg.ddp, pre_wrap_hook=list(hooks), mixed_precision_wrapper=Float16Module, pg_collection=groups,
        wrap_with_ddp=ddp,
    )  # fmt: skip
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    bridge.load_hf_weights([model])
    return Built(bridge, cfg.model, [model])


@pytest.fixture(scope="module")
def worker(converted, folder) -> Built:
    return make_worker(converted, folder, ddp=False)


def model_forward(worker: Built, **call: Any) -> torch.Tensor:
    """As nemo_rl.models.megatron.train.model_forward: a tuple's first entry is the output."""
    with torch.no_grad():
        output = worker.model(**call)
    return output[0] if isinstance(output, tuple) else output


def test_nemo_rl_log_probs_of_padded_rows_match_transformers(worker, truth):
    """sequence_packing.enabled=false: a causal [1, 1, S, S] mask, which says nothing of padding; positions of text, or
    none with images.
    """
    texts = Truth(truth.reference, [sample for sample in truth.samples if not sample.pixels])
    for some in (truth, texts):
        ids = support.padded_rows([sample.ids for sample in some.samples])
        mask, _, positions = get_ltor_masks_and_position_ids(ids, 0, 0, False, False, False, False)
        assert mask.dtype == torch.bool and mask.shape == (1, 1, ids.shape[1], ids.shape[1])
        for given in (None, positions):
            call = dict(input_ids=ids, position_ids=given, attention_mask=mask)
            support.check_rows(model_forward(worker, **call, **some.pictures), some)


def test_model_owns_packing_attribute_is_true_for_nemo_rl(worker):
    """_model_self_packs_for_cp: one that does not is given packed rows that are cut already, which is right as well."""
    model = unwrap_model(worker.model)
    assert model.model_owns_packing
    assert not getattr(model, "model_slices_context_parallel_inputs", False)
    assert not getattr(model, "model_owns_mtp_loss_mask_packing", False)


@pytest.mark.parametrize(("multiple", "total"), [(1, None), (8, None), (8, 160)])
def test_nemo_rl_log_probs_match_transformers_if_model_packs_rows(worker, truth, multiple, total):
    """_prepare_vlm_batch_for_megatron: rows, and a mask and offsets that count each row's padding as tokens.

    `total` is pad_full_seq_to, of pipeline stages: the last row's length in the packed row takes what is missing.
    """
    lengths = support.padded_lengths(truth.lengths, multiple)
    if total is not None:
        lengths[-1] += total - sum(lengths)
    longest = max(lengths)
    ids = support.padded_rows([sample.ids for sample in truth.samples], longest)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    kinds = (ids == truth.config.image_token_id).int() + 2 * (ids == truth.config.video_token_id).int()
    call = dict(input_ids=ids, position_ids=None, attention_mask=mask, packed_seq_params=support.thd(lengths))
    call["mm_token_type_ids"] = kinds[:, : max(truth.lengths) // 2]  # of the question alone, as it comes there
    support.check_packed(model_forward(worker, **call, **truth.pictures), truth, lengths)


@pytest.mark.parametrize("multiple", [1, 8])
def test_nemo_rl_log_probs_match_transformers_if_worker_packs_rows(worker, truth, multiple):
    """_pack_sequences_for_megatron, which a model without packing of its own gets: one flat row, no mask."""
    lengths = support.padded_lengths(truth.lengths, multiple)
    params = support.thd(lengths)
    if multiple > 1:
        logical = torch.tensor(offsets(truth.lengths), dtype=torch.int32)
        params.cu_seqlens_q = params.cu_seqlens_kv = logical
    row = support.packed_row([sample.ids for sample in truth.samples], lengths)
    call = dict(input_ids=row, position_ids=None, attention_mask=None, packed_seq_params=params)
    support.check_packed(model_forward(worker, **call, **truth.pictures), truth, lengths)


@pytest.mark.parametrize(("freeze", "trained"), [
    (dict(freeze_vision_model=True, freeze_vision_projection=True, freeze_language_model=False), "language_model."),
    (dict(freeze_vision_model=False, freeze_vision_projection=False, freeze_language_model=True), "vision_model."),
])  # fmt: skip
def test_nemo_rl_freeze_config_freezes_named_components_and_routers(converted, folder, freeze, trained):
    """freeze_config goes to the model's own freeze(), before DDP, and freeze_moe_router beside it."""

    def apply_freeze(chunks):
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            chunk.freeze(**freeze)
        return chunks

    worker = make_worker(converted, folder, hooks=[nemo_rls_freeze_moe_router, apply_freeze])
    names = {name for name, p in unwrap_model(worker.model).named_parameters() if p.requires_grad}
    assert names and all(name.startswith(trained) for name in names)
    assert not any(".router." in name for name in names)


def test_nemo_rl_refit_exports_every_weight_unchanged(worker, folder):
    """prepare_refit_info and the export that follows it: tasks, their sizes, and every weight under its name."""
    tasks = [task for task in worker.bridge.get_conversion_tasks([worker.model]) if task is not None]
    sizes = [(task.param_name, task.param_weight.numel(), task.mapping.tp_size) for task in tasks]
    assert len(sizes) == len(tasks) and all(size > 0 for _, size, _ in sizes)
    assert all(task.mapping.ep_size == 1 for task in tasks if task.mapping.is_expert)
    assert worker.bridge.transformer_config.num_layers == worker.provider.num_layers
    exported = worker.bridge.export_hf_weights([worker.model], show_progress=False, conversion_tasks=tasks)
    support.check_exported(dict(exported), folder)


def test_nemo_rl_import_builds_model_with_our_provider_as_config(folder):
    """community_import.import_model_from_hf_name, up to the save."""
    bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=True)
    provider = bridge.to_megatron_provider(load_weights=True)
    for key in ("freeze_vision_model", "freeze_vision_projection"):
        assert hasattr(provider, key)
    before = (provider.tensor_model_parallel_size, provider.expert_tensor_parallel_size, provider.pipeline_dtype)
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size", "pipeline_dtype"):
        setattr(provider, name, MEGATRON_CFG[name])
    provider.gradient_accumulation_fusion = False
    provider.finalize()
    assert parallel_state.model_parallel_is_initialized()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, post_wrap_hook=None)
    made = unwrap_model(model).config
    made.tensor_model_parallel_size, made.expert_tensor_parallel_size, made.pipeline_dtype = before
    assert type(made) in (qwen3vl_bridge.Qwen3VLModelProvider, qwen3vl_bridge.Qwen3VLMoEModelProvider)
