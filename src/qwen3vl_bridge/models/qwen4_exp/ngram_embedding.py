"""The n-gram embedding of a layer: n-gram tables divided over ranks, and the injection into the residual streams.

Source: transformers 5.20.2, Qwen4ExpTextNGramEmbedding and Qwen4ExpTextPLELayer.

Legend of shapes: s tokens per row of a context-parallel rank, sp the size of sequence parallelism, b rows,
n = s / sp * b tokens of a rank, T tokens of the flat batch on all ranks, h hidden size, m residual streams,
k taps of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from qwen3vl_bridge.core.collectives import (
    broadcast_from_rank,
    channels_to_tokens,
    device_of_collectives,
    exchange_parts,
    max_in_group,
    tokens_to_channels,
)
from qwen3vl_bridge.core.layout import SequenceLayout, segment_offsets, token_index
from qwen3vl_bridge.upstream.dynamic_shapes import call_compiled
from qwen3vl_bridge.weights import fp8

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Number of elements of an n-gram table that are dequantized at a time.
_BLOCK = 1 << 24


class NgramEmbedding(MegatronModule):
    """Embedding of hashed n-grams. The tables of the hash heads are divided over expert- and tensor-parallel ranks.

    The parameters are `weight{head}` [rows, columns], named by the index of the head in the layer. A group of G ranks,
    `pg_collection.tp_ep`, shares the tables of its pipeline stage. If there are at most as many ranks as heads, each
    rank holds the complete tables of heads / G consecutive heads. If there are c ranks per head, each rank holds 1 / c
    of the columns of one head. Every token looks up exactly one row of the table of every head. So the ranks exchange
    equal numbers of ids and rows, and need not tell each other how many.

    The ranks of the group have different tokens, as for experts, so without sequence parallelism a model with several
    tensor-parallel ranks cannot be trained; megatron-core's MoE layer raises an error then.

    Weights are initialized by `config.init_method` with the random generator of experts. The values depend on the
    number of ranks.

    If `config.ngram_table_dtype` is "float8_e4m3fn", the tables are e4m3 bytes, and `weight_scale` has the bytes of a
    float32 scale for each head of the layer. They are buffers, so that nothing trains, reduces or shards them. A new
    model has zeros. Ranks exchange bytes, and multiply the received rows by the scales.

    Args:
        config: the configuration of the text model.
        rows: number of rows of the table of each head.
        dim: number of columns of each table, the size of a head's embedding.
        pg_collection: the process groups of the model.

    Raises:
        ValueError: the tables cannot be divided over this number of ranks.
    """

    def __init__(
        self, config: TransformerConfig, rows: Sequence[int], dim: int, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.groups, self.group = pg_collection, pg_collection.tp_ep
        ranks, rank, heads = self.group.size(), self.group.rank(), len(rows)
        per_rank, self.column_parts = max(1, heads // ranks), max(1, ranks // heads)
        if per_rank * ranks != heads * self.column_parts or dim % self.column_parts:
            sizes = [size for size in range(1, heads) if heads % size == 0]
            sizes += [heads * parts for parts in range(1, dim + 1) if dim % parts == 0]
            raise ValueError(
                f"expert_model_parallel_size * expert_tensor_parallel_size is {ranks}, expected one of {sizes}: the "
                f"n-gram embedding divides {heads} hash heads, or the {dim} columns of each head, over these ranks"
            )
        self.columns_per_rank = dim // self.column_parts
        first_head, self.column_part = rank * per_rank // self.column_parts, rank % self.column_parts
        self.rows = tuple(rows)
        self.heads = range(first_head, first_head + per_rank)  # of this rank
        # The part of the columns of these heads that this rank holds.
        self.columns = slice(self.column_part * self.columns_per_rank, (self.column_part + 1) * self.columns_per_rank)
        in_fp8 = getattr(config, "ngram_table_dtype", None) == fp8.E4M3
        # As bytes, because a cast of the model to 16 bits would round them.
        scales = torch.ones(len(rows), device=_device(config), dtype=torch.float32).view(torch.uint8)
        self.weight_scale: Tensor | None
        self.register_buffer("weight_scale", scales if in_fp8 else None)
        for head in self.heads:
            shape = rows[head], self.columns_per_rank
            if in_fp8:
                self.register_buffer(f"weight{head}", torch.zeros(shape, dtype=torch.uint8, device=_device(config)))
                continue
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=_device(config)))
            self._set_attributes(weight)
            weight.requires_grad_(not getattr(config, "freeze_ngram_table", False))
            self.register_parameter(f"weight{head}", weight)
        if config.perform_initialization:
            self.reset_parameters()

    def _set_attributes(self, weight: nn.Parameter) -> None:
        """Set the attributes by which megatron-core reduces gradients, computes their norm and chooses an optimizer."""
        weight.is_embedding_or_output_parameter = True  # Muon is not for embedding tables
        if self.group.size() == 1:
            weight.sequence_parallel = self.config.sequence_parallel
            return
        # Treated like the weight of an expert. A rank's gradient already includes the tokens of all ranks of the group,
        # so it is summed over the expert-data-parallel group only. Both groups together have all tokens of a step once.
        # megatron-core scales the gradient by 1 / (data- and context-parallel size), as for other weights.
        weight.allreduce = False
        # Otherwise the norm of gradients would include the first expert-tensor-parallel rank only.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1, stride=1)

    def reset_parameters(self) -> None:
        """Initialize the tables of this rank at random. Tables in FP8 are not changed."""
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for weight in self._weights() if self.weight_scale is None else ():
                self.config.init_method(weight)

    def _weights(self) -> list[Tensor]:
        return [getattr(self, f"weight{head}") for head in self.heads]

    @property
    def scales(self) -> Tensor | None:
        """Return the scale of each head in float32, which can be written to; None if the tables are not in FP8."""
        return None if self.weight_scale is None else self.weight_scale.view(torch.float32)

    @torch.no_grad()
    def encode(
        self, head: int, read_blocks: Callable[[], Iterable[Tensor]], scale: float | None = None
    ) -> Iterator[Tensor]:
        """Yield this rank's columns of a hash head's table as e4m3 bytes, block by block. Set the scale of the head.

        After all heads are encoded, call `share_scales`.

        Args:
            head: index of the head, which this rank holds.
            read_blocks: returns blocks of consecutive rows with all columns. It is called twice to find a scale.
            scale: the scale; None for the scale that maps the largest element to the largest e4m3 number.

        Raises:
            ValueError: a value is too large for `scale`.
        """
        if scale is None:
            largest = max(block.abs().max().item() for block in read_blocks())
            scale = largest / fp8.LARGEST or 1.0
        self.scales[head] = scale
        for block in read_blocks():
            yield fp8.quantize_with_scale(block[:, self.columns].float(), scale)

    def share_scales(self) -> None:
        """Send the scale of each head to all ranks of the group. Every rank must call this at the same time."""
        if (scales := self.scales) is not None:
            own, held = torch.zeros_like(scales), slice(self.heads.start, self.heads.stop)
            own[held] = scales[held]
            scales.copy_(max_in_group(own.to(device_of_collectives()), self.group))

    def _dequantize(self, table: Tensor, scales: Tensor) -> Tensor:
        return (table.view(torch.float8_e4m3fn).float() * scales).to(self.config.params_dtype)

    def forward(self, ngram_ids: Tensor) -> Tensor:
        """Return embeddings [s / sp, b, heads * dim] for ids [s / sp, b, heads], rows in the table of each hash head.

        Every rank of the group must call this at the same time.
        """
        ids = ngram_ids.flatten(0, 1)
        tokens, ranks = len(ids), self.group.size()
        if ranks > 1:
            if any(isinstance(weight, DTensor) or hasattr(weight, "get_main_grad") for weight in self._weights()):
                raise ValueError(
                    f"n-gram tables are divided over {ranks} ranks, which Megatron-FSDP does not support: set "
                    "expert_model_parallel_size=1 and expert_tensor_parallel_size=1"
                )
            ids = F.pad(ids, (0, 0, 0, self.exchanged_tokens(ngram_ids) - tokens))
        # [ranks, n, heads per rank]: `sent` has the ids for each rank that holds tables, `received` those of each rank.
        sent = ids.unflatten(1, (-1, len(self.heads))).repeat_interleave(self.column_parts, 1).transpose(0, 1)
        received = exchange_parts(sent, self.group)
        found = [
            F.embedding(head_ids, weight, sparse=_has_gradient_buffer(weight))
            for head_ids, weight in zip(received.unbind(-1), self._weights(), strict=True)
        ]
        # [ranks, n, columns] from each rank that holds tables, in the order of heads and of their columns.
        embeddings = exchange_parts(torch.cat(found, -1), self.group)
        embeddings = embeddings[:, :tokens].transpose(0, 1).reshape(*ngram_ids.shape[:2], -1)
        if (scales := self.scales) is None:
            return embeddings
        return self._dequantize(embeddings, scales.repeat_interleave(embeddings.shape[-1] // len(self.rows)))

    @torch.no_grad()
    def gather_table(self, head: int) -> Tensor:
        """Return the complete table [rows, dim] of a hash head, gathered from the ranks that hold it.

        Every rank of the group must call this at the same time.
        """
        held = getattr(self, f"weight{head}").detach() if head in self.heads else None
        if isinstance(held, DTensor):
            held = uneven_dtensor_to_full_tensor(held)
        table = held if self.group.size() == 1 else self._gather_columns(head, held)
        if (scales := self.scales) is None:
            return table
        blocks = table.split(max(1, _BLOCK // table.shape[1]))
        return torch.cat([self._dequantize(block, scales[head]) for block in blocks])

    def _gather_columns(self, head: int, held: Tensor | None) -> Tensor:
        """Return the complete table of a hash head; `held` is this rank's part, or None."""
        first = head // len(self.heads) * self.column_parts
        parts = []
        for rank in range(first, first + self.column_parts):
            if rank == self.group.rank():
                part = held.contiguous()
            else:
                shape = self.rows[head], self.columns_per_rank
                part = torch.empty(shape, dtype=self._weights()[0].dtype, device=self._weights()[0].device)
            parts.append(broadcast_from_rank(part, rank, self.group))
        return torch.cat(parts, 1)

    def exchanged_tokens(self, ngram_ids: Tensor) -> int:
        """Return for how many tokens each rank exchanges ids: at least as many as in `ngram_ids` [s / sp, b, heads].

        In training without `variable_seq_lengths`, all ranks must have the same number of rows.

        Raises:
            ValueError: rows are longer than `seq_length` without `variable_seq_lengths`.
        """
        config, (length, rows, _) = self.config, ngram_ids.shape
        if config.variable_seq_lengths or not self.training:  # then the host has to wait for the lengths of all ranks
            return int(max_in_group(torch.full((), length * rows, device=ngram_ids.device), self.group))
        # Ranks may have rows of other lengths, and must not wait for each other. All pad their rows to this length.
        sp_size = self.groups.tp.size() if config.sequence_parallel else 1
        longest = config.seq_length // (self.groups.cp.size() * sp_size)
        if length > longest:
            raise ValueError(
                f"rows have {length} tokens on each rank, more than the {longest} of seq_length={config.seq_length}: "
                "raise seq_length, or set variable_seq_lengths=True"
            )
        return longest * rows

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        """Return a sharded tensor for each head of this rank. It can be loaded with another number of ranks."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        complete = (0, self.groups.tp.rank(), metadata["dp_cp_group"].rank())  # of what each rank of the stage has
        replica = complete if self.group.size() == 1 else (0, 0, self.groups.expt_dp.rank())
        column_axis = len(sharded_offsets) + 1

        def shard(name: str, tensor: Tensor, replica_id: tuple[int, int, int], *offsets: tuple) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                tensor,
                *sharded_offsets,
                *offsets,
                replica_id=replica_id,
                prepend_axis_num=len(sharded_offsets),
            )

        divided = (column_axis, self.column_part, self.column_parts)
        names = [f"weight{head}" for head in self.heads]
        sharded = {f"{prefix}{name}": shard(name, getattr(self, name), replica, divided) for name in names}
        if self.weight_scale is not None:
            sharded[f"{prefix}weight_scale"] = shard("weight_scale", self.weight_scale, complete)
        return sharded


def share_scales(chunks: Sequence[nn.Module]) -> None:
    """Let the ranks that share n-gram tables in FP8 tell each other their scales. All ranks must call this together."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, NgramEmbedding):
            module.share_scales()


def _has_gradient_buffer(weight: nn.Parameter) -> bool:
    """Return True if megatron-core's DDP adds the gradient of `weight` to a buffer. The gradient may then be sparse.

    A dense gradient would be as large as the n-gram table. Megatron-FSDP, which sets `get_main_grad`, copies dense
    gradients.
    """
    return hasattr(weight, "main_grad") and not hasattr(weight, "get_main_grad")


def _device(config: TransformerConfig) -> torch.device | None:
    """Return the device of new parameters; None for torch's default device."""
    by_default = config.use_cpu_initialization or config.init_model_with_meta_device
    return None if by_default else device_of_collectives()


class GroupedRMSNorm(nn.Module):
    """RMS norm of each residual stream, with the factor 1 + weight, in float32.

    Source: transformers 5.20.2, Qwen4ExpTextRMSNorm with `group_size`.

    Args:
        config: the configuration of the text model, with `hc_count` residual streams.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.streams, self.eps = config.hc_count, config.layernorm_epsilon
        channels = config.hc_count * config.hidden_size
        self.weight = nn.Parameter(torch.zeros(channels, dtype=config.params_dtype, device=_device(config)))
        self.weight.sequence_parallel = config.sequence_parallel

    def reset_parameters(self) -> None:
        """Set the weight to zeros, so that the factor 1 + weight is 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each of the m streams of x [..., m * h]."""
        others = (self.weight, self.streams, self.eps)
        return call_compiled(_normalize_streams, x.flatten(0, -2), others=others).view(x.shape)


def _normalize_streams(x: Tensor, weight: Tensor, streams: int, eps: float) -> Tensor:
    by_stream = x.float().unflatten(-1, (streams, -1))
    normed = F.rms_norm(by_stream, by_stream.shape[-1:], eps=eps).flatten(-2)
    return (normed * (1 + weight.float())).to(x.dtype)


class SegmentConvolution(nn.Conv1d):
    """Causal depthwise convolution of the residual streams' channels within segments, followed by silu.

    It has `ple_conv_kernel_size` taps, which are `ngram_size` tokens apart.

    A rank needs tokens of other ranks. So ranks that divide the tokens of a batch exchange tokens for channels, and
    each rank convolves all tokens for a part of the channels.

    Raises:
        ValueError: the channels cannot be divided over these ranks.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        channels = config.hc_count * config.hidden_size
        # Context-parallel ranks divide the tokens of a row. Each divides its tokens over sequence-parallel ranks, which
        # are consecutive in the group.
        group = pg_collection.tp_cp if config.sequence_parallel else pg_collection.cp
        if channels % group.size():
            raise ValueError(
                f"hc_count * hidden_size is {channels}, expected a multiple of {group.size()}, the number of "
                "context-parallel times sequence-parallel ranks, over which the n-gram convolution divides channels"
            )
        super().__init__(
            channels,
            channels,
            config.ple_conv_kernel_size,
            groups=channels,
            dilation=config.ngram_size,
            bias=False,
            dtype=config.params_dtype,
            device=_device(config),
        )
        self.weight.sequence_parallel = config.sequence_parallel
        self.group, self.cp_size = group, pg_collection.cp.size()

    def reset_parameters(self) -> None:
        """Set the weight to zeros, as transformers does: a new model begins without the convolution."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the convolution of x [s / sp, b, m * h], in its dtype; `layout` is the layout of the full batch."""
        # `tokens` has the token at each place of an exchanged tensor, `places` the place of each token.
        tokens = torch.cat([token_index(layout, self.cp_size, rank).flatten() for rank in range(self.cp_size)])
        places = torch.empty_like(tokens).scatter_(0, tokens, torch.arange(len(tokens), device=tokens.device))
        channels = tokens_to_channels(x.flatten(0, 1), self.group).index_select(0, places)
        positions = segment_offsets(layout.cu_seqlens_padded.diff(), layout.total)
        weight = self.weight.squeeze(1).chunk(self.group.size())[self.group.rank()]
        others = (weight, self.dilation[0])
        convolved = call_compiled(_convolve_segments, channels, positions, others=others)
        return channels_to_tokens(convolved.index_select(0, tokens), self.group).view(x.shape)


class NgramInjection(MegatronModule):
    """The injection of n-gram embeddings into the residual streams of a layer (the checkpoint's `ple`).

    Each token's n-gram embeddings give a value, and a key for each stream. The value is added to each stream, times a
    gate that is larger the better the key matches the stream. A causal convolution of the gated values over the tokens
    of a segment is added too.

    All parameters except the n-gram tables are the same on all ranks. Padding needs no mask, because it is at the end
    of a segment and nothing here looks ahead.

    Args:
        config: the configuration of the text model, with `hc_count`, `ple_embed_dim`, `ple_conv_kernel_size` and
            `ngram_size`.
        rows: number of rows of the table of each hash head, from `hash_constants.table_rows`.
        pg_collection: the process groups of the model.

    Raises:
        ValueError: the channels, or the tables, cannot be divided over the ranks.
    """

    def __init__(self, config: TransformerConfig, rows: Sequence[int], pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp  # read by sharded_state_dict
        hidden, channels, ngrams = config.hidden_size, config.hc_count * config.hidden_size, config.ple_embed_dim
        kind = dict(bias=False, dtype=config.params_dtype, device=_device(config))
        self.ngram_embedding = NgramEmbedding(config, rows, ngrams // len(rows), pg_collection)
        self.key_proj = nn.Linear(ngrams, channels, **kind)
        self.value_proj = nn.Linear(ngrams, hidden, **kind)
        self.norm_key, self.norm_query, self.norm_conv = (GroupedRMSNorm(config) for _ in range(3))
        self.conv1d = SegmentConvolution(config, pg_collection)
        for layer in (self.key_proj, self.value_proj):
            layer.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            config.init_method(self.key_proj.weight)
            config.init_method(self.value_proj.weight)

    def forward(self, streams: Tensor, ngram_ids: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the tensor that is to be added to the residual streams.

        Args:
            streams: [s / sp, b, m * h].
            ngram_ids: [s / sp, b, heads] int64, from `core.ngrams` for the same tokens.
            layout: the segments of the batch, on the device of the streams.

        Returns:
            [s / sp, b, m * h] in the dtype of the streams.
        """
        embeddings = self.ngram_embedding(ngram_ids)
        keys, queries = self.norm_key(self.key_proj(embeddings)), self.norm_query(streams)
        values = _gate_values(keys, queries, self.value_proj(embeddings))
        return values + self.conv1d(self.norm_conv(values), layout)


def _gate_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """Return values [..., h] for each stream [..., m * h], gated by keys and queries [..., m * h].

    The function is not compiled: in 16 bits a compiled function would round scores less often than transformers, and
    the square root enlarges the difference where a score is near zero.
    """
    products = (keys * queries).unflatten(-1, (-1, values.shape[-1]))
    scores = products.sum(-1, keepdim=True) / math.sqrt(values.shape[-1])
    # The sign times the square root of the magnitude, which is at least 1e-6: at zero the gradient would be infinite.
    gates = (scores.abs().clamp_min(1e-6).sqrt() * scores.sign()).sigmoid()
    return (gates * values.unsqueeze(-2)).flatten(-2)


def _convolve_segments(x: Tensor, positions: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Return silu of the causal depthwise convolution of x [T, d], which restarts at each segment.

    The products are summed in float32, as by torch's convolution kernels.

    Args:
        x: [T, d].
        positions: [T], the index of each token in its segment.
        weight: [d, k]; the last weight belongs to the token itself, the one before it to the token `dilation` earlier.
        dilation: distance of the tokens that are multiplied by consecutive weights.
    """
    wide, weight, taps = x.float(), weight.float(), weight.shape[-1]
    y = wide * weight[:, -1]
    for back in range(1, taps):
        distance = back * dilation
        before = F.pad(wide, (0, 0, distance, 0))[: len(x)]
        y = y + before * weight[:, -1 - back] * (positions >= distance)[:, None]
    return F.silu(y.to(x.dtype))
