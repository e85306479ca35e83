"""Constants of the n-gram hashes: the primes, the multipliers, and the sizes of the n-gram tables.

The constants follow from a model's configuration. Checkpoints also store them, as the integer tensors
`ngram_heads_vocab_sizes`, `ngram_heads_offsets` and `layer_multipliers`.

Source: transformers 5.20.2, Qwen4ExpTextNGramEmbedding; Steele, Lea and Flood, Fast Splittable Pseudorandom Number
Generators (2014), for splitmix64.
"""

from __future__ import annotations

import functools
import itertools
import math

_LARGEST_INT64 = 2**63 - 1
_BITS = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # the step of splitmix64
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # its shifts and factors, applied in this order
_LAYER_STEP = 10_007  # distance between the seeds of consecutive layers


@functools.cache
def head_sizes(base: int, heads: int, layer_index: int) -> tuple[int, ...]:
    """Return the modulus of each hash head of a layer, which is the number of n-gram ids of the head.

    All moduli are consecutive primes, starting from `base`: the first layer has the first `heads` primes, the second
    layer the next `heads` primes.

    Args:
        base: a lower bound of the primes (`ngram_vocab_size_base`).
        heads: number of hash heads of a layer, (ngram_size - 1) * heads_per_ngram.
        layer_index: index of the layer among the layers with n-gram embeddings, from 0.
    """
    primes = (number for number in itertools.count(base) if _is_prime(number))
    return tuple(itertools.islice(primes, layer_index * heads, (layer_index + 1) * heads))


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))


@functools.cache
def table_rows(base: int, heads: int, layer_index: int, multiple: int) -> tuple[int, ...]:
    """Return the number of n-gram table rows of each head: `head_sizes`, where the last head also has the padding.

    Checkpoints concatenate the tables of all heads and pad the result to a multiple of `multiple`
    (`make_ngram_vocab_size_divisible_by`). Rows of the padding are never looked up.
    """
    *sizes, last = head_sizes(base, heads, layer_index)
    return *sizes, last + -(sum(sizes) + last) % multiple


@functools.cache
def multipliers(vocab_size: int, ngram_size: int, layer_index: int, seed: int) -> tuple[int, ...]:
    """Return the odd factors by which a hash multiplies a token, the token before it, and so on.

    Factor i is 2 * (splitmix64(seed + 10007 * layer_index + (i + 1) * gamma) mod bound) + 1. The bound is half of
    (2^63 - 1) / vocab_size, so that products with token ids stay below 2^63.

    Args:
        vocab_size: number of token ids.
        ngram_size: largest number of tokens of an n-gram.
        layer_index: index of the layer among the layers with n-gram embeddings, from 0.
        seed: the configuration's `seed`.
    """
    bound = max(1, _LARGEST_INT64 // max(vocab_size, 1) // 2)
    start = seed + _LAYER_STEP * layer_index
    return tuple(2 * (_splitmix64(start + _GAMMA * (index + 1)) % bound) + 1 for index in range(ngram_size))


def _splitmix64(state: int) -> int:
    """Return the output of the generator splitmix64 that follows the 64-bit `state`."""
    mixed = (state + _GAMMA) & _BITS
    for shift, factor in _MIXERS:
        mixed = (mixed ^ mixed >> shift) * factor & _BITS
    return mixed ^ mixed >> 31
