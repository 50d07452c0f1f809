"""Slow, literal transcription of LSH attention (Kitaev et al. 2020): one head, loops, float64, differentiable.

Written from the paper, never from the package. What a query sees is a list of keys, in which a key stands once for
every round that finds it.
"""

import torch
from torch import Tensor

from tests.reference import Mask, dot, zero_padded


def unit_keys(Q: Tensor) -> list[Tensor]:
    """k_j = q_j / |q_j|."""
    return [q / torch.sqrt(dot(q, q)) for q in Q]


def shared_attention(
    Q: Tensor, V: Tensor, scale: float, key_mask: Mask, query_mask: Mask, found: list[list[int]] | None = None
) -> Tensor:
    """softmax of s q_i . k_j over the keys found for i, by default all; itself only where it finds no other key."""
    keys = unit_keys(Q)
    real = [j for j in range(len(Q)) if key_mask[j]]
    rows = []
    for i in range(len(Q)):
        seen = real if found is None else found[i]
        seen = [j for j in seen if j != i] or seen
        row = torch.zeros_like(V[0])
        if seen:
            scores = [scale * dot(Q[i], keys[j]) for j in seen]
            largest = max(float(score.detach()) for score in scores)
            a = [torch.exp(score - largest) for score in scores]
            total = sum(a[1:], a[0])
            for weight, j in zip(a, seen, strict=True):
                row = row + weight / total * V[j]
        rows.append(row)
    return zero_padded(rows, query_mask)


def lsh_hash(x: Tensor, R: Tensor) -> int:
    """h(x) = argmax([xR; -xR]) for R of size (p, buckets / 2)."""
    rotated = [float(dot(x, R[:, c])) for c in range(R.shape[1])]
    rotated = rotated + [-number for number in rotated]
    return rotated.index(max(rotated))


def find(
    buckets: list[list[int]],
    key_mask: Mask,
    query_mask: Mask,
    chunk_size: int,
    across_buckets: bool = False,
    duplicates: bool = False,
) -> list[list[int]]:
    """The keys that every token finds in all rounds together.

    Real tokens are sorted by bucket and then by position; a token finds those in its chunk and in the chunk before it,
    which for the first chunk is the last, if they are in its bucket. Tokens that are only queries come after the keys.
    """
    n = len(key_mask)
    found: list[list[int]] = [[] for _ in range(n)]
    for bucket in buckets:
        kind = [0 if key_mask[t] else 1 if query_mask[t] else 2 for t in range(n)]
        order = sorted(range(n), key=lambda t: (kind[t], bucket[t], t))
        chunk = {t: place // chunk_size for place, t in enumerate(order)}
        last = max((chunk[t] for t in range(n) if key_mask[t]), default=0)
        for i in range(n):
            visible = {chunk[i], chunk[i] - 1 if chunk[i] > 0 else last}
            for j in range(n):
                same = across_buckets or bucket[i] == bucket[j]
                if key_mask[j] and chunk[j] in visible and same and (duplicates or j not in found[i]):
                    found[i].append(j)
    return found
