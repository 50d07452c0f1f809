"""Slow, literal transcriptions of the sparse patterns: one head, Python sets, float64, differentiable.

Written from the papers, never from the package. A pattern is a function from the position of a query, the number m of
real tokens and what else it needs, to the set of positions that the query sees. Position i is the i-th real token;
queries that are no keys stand after the last one, at m, m + 1, ...
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference import Mask, dot, zero_padded

Sees = Callable[[int, int], set[int]]  # (position of the query, number of real tokens) -> positions of keys


def sparse_attention(
    Q: Tensor, K: Tensor, V: Tensor, scale: float, key_mask: Mask, query_mask: Mask, sees: Sees
) -> Tensor:
    """For each query the softmax over the keys that it sees, and nothing else; 0 where it sees none."""
    keys = [j for j in range(len(K)) if key_mask[j]]
    queries = keys + [i for i in range(len(Q)) if query_mask[i] and not key_mask[i]]
    rows = [torch.zeros_like(V[0])] * len(Q)
    for position, i in enumerate(queries):
        seen = [keys[j] for j in sorted(sees(position, len(keys))) if 0 <= j < len(keys)]
        if not seen:
            continue
        scores = [scale * dot(Q[i], K[j]) for j in seen]
        largest = max(float(score.detach()) for score in scores)
        a = [torch.exp(score - largest) for score in scores]
        total = sum(a[1:], a[0])
        row = torch.zeros_like(V[0])
        for weight, j in zip(a, seen, strict=True):
            row = row + weight / total * V[j]
        rows[i] = row
    return zero_padded(rows, query_mask)


def bigbird(size: int, random: Callable[[int, int], set[int]]) -> Sees:
    """Zaheer et al. (2020), section 2 and appendix D: window, random and global blocks; global rows see all.

    random: (block of the query, number of blocks) -> its random blocks.
    """

    def sees(i: int, m: int) -> set[int]:
        count = -(-m // size)
        block = i // size
        if i < m and block in (0, count - 1):
            return set(range(m))
        blocks = {block - 1, block, block + 1} | {0, count - 1} | random(block, count)
        return {j for j in range(m) if j // size in blocks}

    return sees


def draw_random_blocks(u: list[float], block: int, count: int) -> set[int]:
    """len(u) blocks, one after the other and without replacement, from those that are neither window nor global."""
    candidates = [c for c in range(count) if c not in {block - 1, block, block + 1, 0, count - 1}]
    drawn = set()
    for number in u:
        if candidates:
            drawn.add(candidates.pop(min(int(number * len(candidates)), len(candidates) - 1)))
    return drawn


def longformer(window: int, global_tokens: tuple[int, ...]) -> Sees:
    """Beltagy et al. (2020), section 3.1: a sliding window, and symmetric global attention."""

    def sees(i: int, m: int) -> set[int]:
        if i < m and i in global_tokens:
            return set(range(m))
        return set(range(i - window, i + window + 1)) | set(global_tokens)

    return sees


def sparse_transformer(stride: int) -> Sees:
    """Child et al. (2019), section 4.3: A1 = {t, ..., i} with t = max(0, i - l), A2 = {j : (i - j) mod l = 0}.

    Both for j <= i in the paper; here also their mirror image, j >= i.
    """

    def sees(i: int, m: int) -> set[int]:
        causal = {j for j in range(i + 1) if i - j <= stride or (i - j) % stride == 0}
        mirrored = {j for j in range(i, m) if j - i <= stride or (j - i) % stride == 0}
        return causal | mirrored

    return sees


def blockbert(length: int, shift: int) -> Sees:
    """Qiu et al. (2020), section 3: M_ij = 0 exactly where the permutation takes the block of i to the block of j."""

    def sees(i: int, m: int) -> set[int]:
        permutation = [(c + shift) % -(-m // length) for c in range(i // length + 1)] if m else []
        return {j for j in range(m) if j // length == permutation[i // length]}

    return sees
