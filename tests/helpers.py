"""Inputs, masks, noise and the variants that the property tests of attention run over."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skeinformer.attention import METHODS, Attention, build
from skeinformer.noise import from_generator
from skeinformer.sketch import SKETCHES

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEAD_DIM = 4
MAX_LEN = 128  # above every length of a test of methods with parameters for each position


class Variant(NamedTuple):
    """A row of METHODS with options of its own."""

    method: str
    options: dict[str, Any]

    def build(self, budget: int = 5, head_dim: int = HEAD_DIM, max_len: int = MAX_LEN, **options: Any) -> Attention:
        """Build the module, with the same parameters every time; torch's global state stays as it was."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(0)
            options = {**self.options, **options}
            return build(self.method, head_dim=head_dim, max_len=max_len, budget=budget, **options)


# every row of the table as it is, and the options that no row sets
VARIANTS: dict[str, Variant] = {
    **{name: Variant(name, {}) for name in METHODS},
    **{
        f"sketched-{sketch}-{side}": Variant("sketched", {"sketch": sketch, "side": side})
        for sketch in SKETCHES
        for side in ("columns", "rows")
    },
    "linformer-two_projections": Variant("linformer", {"share_kv": False}),
    "informer_mask-paper": Variant("informer_mask", {"sparsity": "paper"}),
    "longformer-two_globals": Variant("longformer", {"global_tokens": (0, 6)}),
    "reformer-across_buckets": Variant("reformer", {"across_buckets": True, "count_duplicates": True}),
    "cluster-two_steps": Variant("cluster", {"num_steps": 2, "num_pilots": 3}),
    "cluster-no_steps": Variant("cluster", {"num_steps": 0, "num_pilots": 3, "first_order": False}),
    "cluster_window-small": Variant("cluster_window", {"window": 2, "num_pilots": 3}),
    "adaptive-always": Variant("adaptive", {"only_faster": False, "tolerance": 1.0, "num_checks": 4}),
    "skeinformer-few_pilots": Variant("skeinformer", {"num_pilots": 2}),
    "skeinformer-uniform-reuse": Variant("skeinformer", {"columns": "uniform"}),
    "skeinformer-simple-reuse": Variant("skeinformer", {"row_norm": "simple"}),
    "skeinformer-none-reuse": Variant("skeinformer", {"row_norm": "none"}),
    "skeinformer-none-uniform": Variant("skeinformer", {"row_norm": "none", "columns": "uniform"}),
}


def variants_of(*methods: str) -> set[str]:
    """The names in VARIANTS of these rows, whatever their options."""
    return {name for name, variant in VARIANTS.items() if variant.method in methods}


SKETCHED = variants_of("sketched", "linformer_jlt")
WITHOUT_NORM = {"skeinformer_no_norm", "skeinformer-none-reuse", "skeinformer-none-uniform"}
# D^-1 A S S^T V and D^-1 S S^T A V are unbiased and do not normalize; dropout is so on average
ROWS_SUM_TO_ONE_ON_AVERAGE = SKETCHED | WITHOUT_NORM | {"softmax_dropout"}
# what a learned combination gives to the values sums to anything
ROWS_ARE_LEARNED = variants_of("linformer")
# with more keys than landmarks rows sum to one as far as the iterated inverse is one: see test_nystrom.py
ROWS_ARE_INVERTED = variants_of("nystromformer")
# the numbers of which these sketches consist belong to rows of a longer matrix, not to tokens: moving a token changes S
LONGER_SKETCHES = {f"sketched-{sketch}-{side}" for sketch in ("srht", "very_sparse") for side in ("columns", "rows")}
# as published the selection ignores the mask: padding is among the keys that queries are measured by
PADDING_IS_DRAWN = variants_of("informer")
# a projection has a row for each position, a window sees what is near: a token that is moved meets another one
BOUND_TO_POSITIONS = LONGER_SKETCHES | PADDING_IS_DRAWN | variants_of("linformer", "cluster_window")
# a sketch that mixes rows of A on the left has entries of size D_j / D_i: that is the method, and no half precision
MIXES_ROWS = {
    name
    for name in SKETCHED
    if name.endswith("-rows") and name not in ("sketched-subsampling-rows", "sketched-subsampling_without-rows")
}
# so few tokens are in the window of this row that all of them are near
ALL_NEAR = {"cluster_window"}
# patterns over the positions of one sequence: as many keys as queries, and the row of a token that is no key is 0
SELF_ATTENTION = {name for name, variant in VARIANTS.items() if not METHODS[variant.method].cross_attention}
# keys are queries of unit length: the key must be the query itself, and what is padding as one is padding as the other
SHARED_QK = {name for name, variant in VARIANTS.items() if METHODS[variant.method].shares_keys}
# the permutation of blocks is that of the head's number, modulo 2
PATTERN_OF_THE_HEAD = variants_of("blockbert")
# decides by numbers that it reads, and is exact on so few tokens
READS_NUMBERS = variants_of("adaptive")
RANDOM = [name for name, variant in VARIANTS.items() if METHODS[variant.method].random and name not in READS_NUMBERS]
DETERMINISTIC = [name for name, variant in VARIANTS.items() if not METHODS[variant.method].random]


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """For parametrize: all values, those that are not among the quick ones in the slow group."""
    return [pytest.param(x, marks=[] if x in quick else [pytest.mark.slow]) for x in values]


def thinned(*values: Sequence[Any], of: int) -> list[Any]:
    """For parametrize: all combinations, all but one in `of` in the slow group. Those that stay have every value."""
    places = itertools.product(*(range(len(x)) for x in values))
    return [
        pytest.param(
            *(x[i] for x, i in zip(values, place, strict=True)), marks=[pytest.mark.slow] if sum(place) % of else []
        )
        for place in places
    ]


# the budget at which a method is exact, in multiples of the number of real keys
EXACT = {
    name: max(1, int(METHODS[variant.method].exact_from))
    for name, variant in VARIANTS.items()
    if METHODS[variant.method].exact_from is not None and name not in WITHOUT_NORM
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(
    b: int = 2,
    h: int = 2,
    n: int = 11,
    n_k: int | None = None,
    *,
    p: int = HEAD_DIM,
    p_v: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    peak: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v that require gradients, the same numbers in every dtype; peak multiplies the logits."""
    source = generator(seed)
    n_k = n if n_k is None else n_k
    shapes = ((b, h, n, p), (b, h, n_k, p), (b, h, n_k, p if p_v is None else p_v))
    q, k, v = (torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes)
    return (
        (q * math.sqrt(peak)).to(dtype).requires_grad_(),
        (k * math.sqrt(peak)).to(dtype).requires_grad_(),
        v.to(dtype).requires_grad_(),
    )


def inputs_for(
    name: str, b: int = 2, h: int = 2, n: int = 11, n_k: int | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`tensors` that the variant takes: as many keys as queries, or the query as key, where it can take no other."""
    q, k, v = tensors(b, h, n, n if name in SELF_ATTENTION else n_k, **options)
    return (q, q, v) if name in SHARED_QK else (q, k, v)


def map_inputs(change: Callable[[Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The same change of q, k and v; a key that is the query stays the query."""
    q, k, v = inputs
    query = change(q)
    return query, query if k is q else change(k), change(v)


def masks_for(name: str, key_mask: Tensor, query_mask: Tensor | None = None) -> dict[str, Tensor | None]:
    """These masks; that of the keys for both where the variant needs a key for every query."""
    return {"key_mask": key_mask, "query_mask": key_mask if name in SELF_ATTENTION else query_mask}


def clear(output: Tensor, query_mask: Tensor | None) -> Tensor:
    """The output with zeros in the rows of padded queries."""
    return output if query_mask is None else output * query_mask[:, None, :, None]


def copies(x: Tensor, count: int) -> Tensor:
    """The first example `count` times, without gradient: the batch dimension as independent draws."""
    return x.detach()[:1].expand(count, *x.shape[1:])


def random_mask(b: int, n: int, seed: int = 0, share: float = 0.6) -> Tensor:
    """Padding anywhere, at least one real token in each example."""
    source = generator(seed)
    mask = torch.rand(b, n, generator=source) < share
    return mask.scatter(1, torch.randint(n, (b, 1), generator=source), True)


def lengths_mask(lengths: list[int], n: int) -> Tensor:
    """Right padding."""
    return torch.arange(n) < torch.tensor(lengths)[:, None]


def draw(module: Attention, query: Tensor, key: Tensor, seed: int = 0) -> Any:
    """Noise for a module."""
    return module.draw_noise(query, key, from_generator(tuple(query.shape[:2]), generator=generator(seed)))


def map_noise(noise: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same kind of noise with every tensor changed."""
    return tuple(change(x) for x in noise)


def gradients(output: Tensor, inputs: tuple[Tensor, ...], seed: int = 0) -> tuple[Tensor, ...]:
    """Of a random linear function of the output; zeros where it does not depend on an input."""
    weight = torch.randn(output.shape, generator=generator(seed), dtype=torch.float64).to(output.dtype)
    if not output.requires_grad:
        return tuple(torch.zeros_like(x) for x in inputs)
    return torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements for which an operation takes memory: views of its arguments take none."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return result


def over_heads(
    one_head: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """Stack one_head(Q, K, V, key_mask, query_mask, (example, head)) over examples and heads."""
    b, h = q.shape[:2]
    keys, queries = (
        [[True] * x.shape[2]] * b if mask is None else mask.tolist() for x, mask in ((k, key_mask), (q, query_mask))
    )
    heads = [one_head(q[i, j], k[i, j], v[i, j], keys[i], queries[i], (i, j)) for i in range(b) for j in range(h)]
    return torch.stack(heads).unflatten(0, (b, h))


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Exact attention by plain matrix products; test_exact compares it with the loops of the transcription."""
    scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
        some = key_mask.any(-1)[:, None, None, None]  # no real key gives zeros
        scores = scores.where(some, 0)
        v = v.where(some, 0)
    output = scores.softmax(-1) @ v
    return output if query_mask is None else output.where(query_mask[:, None, :, None], 0)


def dense_exact(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Exact attention in float64."""
    return exact(q.double(), k.double(), v.double(), key_mask)


def dense_shared(q: Tensor, v: Tensor) -> Tensor:
    """Attention of q to the other tokens with keys q / |q|, what Reformer approximates; n > 1."""
    q = q.double()
    scores = q @ torch.nn.functional.normalize(q, dim=-1).mT / math.sqrt(q.shape[-1])
    itself = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
    return scores.masked_fill(itself, -torch.inf).softmax(-1) @ v.double()


def relative_error(output: Tensor, truth: Tensor) -> Tensor:
    """|R - BV|_F / |BV|_F for every example and head."""
    return (output.double() - truth.double()).norm(dim=(-2, -1)) / truth.double().norm(dim=(-2, -1))
