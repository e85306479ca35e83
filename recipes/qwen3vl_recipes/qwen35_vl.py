"""Recipes of Qwen3.5-VL, small models first.

TP * CP is at most sixteen, the number of key heads of linear attention.
"""

from functools import partial

from qwen3vl_recipes import base
from qwen3vl_recipes.base import K, fsdp, recompute_all, recompute_layers, split
from qwen3vl_recipes.registry import recipe

sft, peft, pretrain = (partial(kind, family="qwen3_5") for kind in (base.sft, base.peft, base.pretrain))


@recipe(gpus=8)
def qwen35_vl_800m_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: a complete model on each GPU."""
    return sft("0.8B")


@recipe(gpus=8)
def qwen35_vl_800m_sft_fsdp_config():
    """As qwen35_vl_800m_sft_config, sharded by Megatron-FSDP."""
    return fsdp(qwen35_vl_800m_sft_config())


@recipe(gpus=8)
def qwen35_vl_800m_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: CP 4."""
    return split(sft("0.8B", seq_length=32 * K, global_batch_size=16), cp=4)


@recipe(gpus=8)
def qwen35_vl_800m_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: CP 4, activations recomputed."""
    return recompute_all(split(sft("0.8B", seq_length=128 * K, global_batch_size=8), cp=4))


@recipe(gpus=8)
def qwen35_vl_800m_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 8 H100: CP 8, activations recomputed."""
    return recompute_all(split(sft("0.8B", seq_length=256 * K, global_batch_size=4), cp=8))


@recipe(gpus=1)
def qwen35_vl_800m_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("0.8B")


@recipe(gpus=64)
def qwen35_vl_800m_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: a complete model on each GPU."""
    return pretrain("0.8B")


@recipe(gpus=8)
def qwen35_vl_2b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: a complete model on each GPU."""
    return sft("2B")


@recipe(gpus=8)
def qwen35_vl_2b_sft_fsdp_config():
    """As qwen35_vl_2b_sft_config, sharded by Megatron-FSDP."""
    return fsdp(qwen35_vl_2b_sft_config())


@recipe(gpus=8)
def qwen35_vl_2b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: CP 4."""
    return split(sft("2B", seq_length=32 * K, global_batch_size=16), cp=4)


@recipe(gpus=8)
def qwen35_vl_2b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: CP 8, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=128 * K, global_batch_size=8), cp=8))


@recipe(gpus=16)
def qwen35_vl_2b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 2, CP 8, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8))


@recipe(gpus=1)
def qwen35_vl_2b_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("2B")


@recipe(gpus=64)
def qwen35_vl_2b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: a complete model on each GPU."""
    return pretrain("2B")


@recipe(gpus=8)
def qwen35_vl_4b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: TP 2."""
    return split(sft("4B"), tp=2)


@recipe(gpus=8)
def qwen35_vl_4b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("4B")))


@recipe(gpus=8)
def qwen35_vl_4b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: TP 2, CP 4."""
    return split(sft("4B", seq_length=32 * K, global_batch_size=16), tp=2, cp=4)


@recipe(gpus=8)
def qwen35_vl_4b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: TP 2, CP 4, activations recomputed."""
    return recompute_all(split(sft("4B", seq_length=128 * K, global_batch_size=8), tp=2, cp=4))


@recipe(gpus=16)
def qwen35_vl_4b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 2, CP 8, activations recomputed."""
    return recompute_all(split(sft("4B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8))


@recipe(gpus=1)
def qwen35_vl_4b_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("4B")


@recipe(gpus=64)
def qwen35_vl_4b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: TP 2."""
    return split(pretrain("4B"), tp=2)


@recipe(gpus=8)
def qwen35_vl_9b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: TP 4."""
    return split(sft("9B"), tp=4)


@recipe(gpus=8)
def qwen35_vl_9b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("9B")))


@recipe(gpus=8)
def qwen35_vl_9b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: TP 4, CP 2."""
    return split(sft("9B", seq_length=32 * K, global_batch_size=16), tp=4, cp=2)


@recipe(gpus=16)
def qwen35_vl_9b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 16 H100: TP 4, CP 4, activations recomputed."""
    return recompute_all(split(sft("9B", seq_length=128 * K, global_batch_size=8), tp=4, cp=4))


@recipe(gpus=16)
def qwen35_vl_9b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 4, CP 4, activations recomputed."""
    return recompute_all(split(sft("9B", seq_length=256 * K, global_batch_size=4), tp=4, cp=4))


@recipe(gpus=1)
def qwen35_vl_9b_peft_config():
    """LoRA, rows of 8K tokens, one H100, activations recomputed."""
    return recompute_all(peft("9B"))


@recipe(gpus=64)
def qwen35_vl_9b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: TP 4."""
    return split(pretrain("9B"), tp=4)


@recipe(gpus=16)
def qwen35_vl_27b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: TP 4, PP 4, half of the layers recomputed."""
    return recompute_layers(split(sft("27B"), tp=4, pp=4), 8)


@recipe(gpus=32)
def qwen35_vl_27b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 32 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("27B")))


@recipe(gpus=32)
def qwen35_vl_27b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 32 H100: TP 4, PP 4, CP 2."""
    return recompute_all(split(sft("27B", seq_length=32 * K, global_batch_size=16), tp=4, pp=4, cp=2))


@recipe(gpus=64)
def qwen35_vl_27b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 64 H100: TP 4, PP 4, CP 4."""
    return recompute_all(split(sft("27B", seq_length=128 * K, global_batch_size=8), tp=4, pp=4, cp=4))


@recipe(gpus=8)
def qwen35_vl_27b_peft_config():
    """LoRA, rows of 8K tokens, 8 H100: TP 2, activations recomputed."""
    return recompute_all(split(peft("27B"), tp=2))


@recipe(gpus=128)
def qwen35_vl_27b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: TP 4, PP 4."""
    return split(pretrain("27B"), tp=4, pp=4)


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: TP 2, EP 16."""
    return recompute_all(split(sft("35B-A3B"), tp=2, ep=16))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: Megatron-FSDP, EP 8."""
    return recompute_all(fsdp(split(sft("35B-A3B"), ep=8)))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 16 H100: TP 2, CP 4, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=32 * K, global_batch_size=16), tp=2, cp=4, ep=16))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 16 H100: TP 2, CP 8, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=128 * K, global_batch_size=8), tp=2, cp=8, ep=16))


@recipe(gpus=32)
def qwen35_vl_35b_a3b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 32 H100: TP 2, CP 8, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8, ep=16))


@recipe(gpus=8)
def qwen35_vl_35b_a3b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 8 H100: TP 2, EP 4."""
    return recompute_all(split(peft("35B-A3B"), tp=2, ep=4))


@recipe(gpus=128)
def qwen35_vl_35b_a3b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: TP 2, EP 16."""
    return recompute_all(split(pretrain("35B-A3B"), tp=2, ep=16))


@recipe(gpus=48)
def qwen35_vl_122b_a10b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 48 H100: TP 2, PP 6, EP 8."""
    return recompute_all(split(sft("122B-A10B", global_batch_size=48), tp=2, pp=6, ep=8))


@recipe(gpus=64)
def qwen35_vl_122b_a10b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 64 H100: Megatron-FSDP, EP 16."""
    return recompute_all(fsdp(split(sft("122B-A10B", global_batch_size=64), ep=16)))


@recipe(gpus=96)
def qwen35_vl_122b_a10b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 96 H100: TP 2, PP 6, CP 4, EP 8."""
    return recompute_all(split(sft("122B-A10B", seq_length=32 * K, global_batch_size=48), tp=2, pp=6, cp=4, ep=8))


@recipe(gpus=192)
def qwen35_vl_122b_a10b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 192 H100: TP 2, PP 6, CP 8, EP 8."""
    return recompute_all(split(sft("122B-A10B", seq_length=128 * K, global_batch_size=32), tp=2, pp=6, cp=8, ep=8))


@recipe(gpus=8)
def qwen35_vl_122b_a10b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 8 H100: TP 2, EP 8."""
    return recompute_all(split(peft("122B-A10B"), tp=2, ep=8))


@recipe(gpus=192)
def qwen35_vl_122b_a10b_pretrain_config():
    """Pretraining, rows of 8K tokens, 192 H100: TP 2, PP 6, EP 8."""
    return recompute_all(split(pretrain("122B-A10B", global_batch_size=1024), tp=2, pp=6, ep=8))


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 256 H100: TP 2, PP 4, EP 32."""
    return recompute_all(split(sft("397B-A17B", global_batch_size=128), tp=2, pp=4, ep=32))


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 256 H100: Megatron-FSDP, EP 32."""
    return recompute_all(fsdp(split(sft("397B-A17B", global_batch_size=256), ep=32)))


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 256 H100: TP 2, PP 4, CP 4, EP 32."""
    return recompute_all(split(sft("397B-A17B", seq_length=32 * K, global_batch_size=64), tp=2, pp=4, cp=4, ep=32))


@recipe(gpus=512)
def qwen35_vl_397b_a17b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 512 H100: TP 2, PP 4, CP 8, EP 64."""
    return recompute_all(split(sft("397B-A17B", seq_length=128 * K, global_batch_size=32), tp=2, pp=4, cp=8, ep=64))


@recipe(gpus=32)
def qwen35_vl_397b_a17b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 32 H100: TP 2, EP 32."""
    return recompute_all(split(peft("397B-A17B"), tp=2, ep=32))


@recipe(gpus=512)
def qwen35_vl_397b_a17b_pretrain_config():
    """Pretraining, rows of 8K tokens, 512 H100: TP 2, PP 4, EP 32."""
    return recompute_all(split(pretrain("397B-A17B", global_batch_size=1024), tp=2, pp=4, ep=32))


@recipe(gpus=8)
def qwen35_vl_proxy_sft_config():
    """Full fine-tuning, rows of 8K tokens of the 397B-A17B's proxy, 8 H100: TP 2, EP 4."""
    return split(sft("proxy"), tp=2, ep=4)


@recipe(gpus=8)
def qwen35_vl_proxy_sft_fsdp_config():
    """As qwen35_vl_proxy_sft_config, with Megatron-FSDP instead of tensor parallelism."""
    return fsdp(split(sft("proxy"), ep=4))
