"""Every attention behind one interface: METHODS is the one table, `build` makes a module from a name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skeinformer.attention.base import Attention
from skeinformer.attention.block_sparse import BigBird, BlockBert, Longformer, SparseTransformer
from skeinformer.attention.budget import choose_budget
from skeinformer.attention.cluster import Cluster, ClusterInfo, ClusterNoise, cluster_attention
from skeinformer.attention.exact import Softmax, VMean
from skeinformer.attention.informer import Informer
from skeinformer.attention.linear import LinearTransformer, Performer
from skeinformer.attention.linformer import Linformer
from skeinformer.attention.nystrom import Nystromformer
from skeinformer.attention.reformer import Reformer
from skeinformer.attention.skein import Skeinformer, SkeinInfo, SkeinNoise, skein_attention
from skeinformer.attention.sketched import Sketched
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.registry import check_options, lookup

PAPER = "Chen et al. 2022"
ONE_SEQUENCE = "one mask, padding anywhere"  # the row of a token that is padding as a key is 0


@dataclass(frozen=True)
class Method:
    """A row of the table: how to make the module, and what to know about it. Calling it makes the module."""

    make: Callable[..., Attention]
    summary: str
    paper: str
    cost: str  # time of a forward pass
    exact: str  # at full budget
    masks: str = "padding anywhere"
    cross_attention: bool = True
    random: bool = False
    options: Mapping[str, object] = field(default_factory=dict)  # what this row sets; a caller's options win

    def __call__(self, **options: object) -> Attention:
        return self.make(**{**self.options, **options})


def _skein(summary: str, **options: object) -> Method:
    exact, cost = ("no, unbiased", "O(n^2 p)") if options.get("row_norm") == "none" else ("d >= m", "O(n d p)")
    return Method(Skeinformer, summary, PAPER, cost, exact, random=True, options=options)


METHODS: dict[str, Method] = {
    "softmax": Method(Softmax, "exact attention on the fused kernel", "Vaswani et al. 2017", "O(n^2 p)", "always"),
    "softmax_dropout": Method(
        Softmax,
        "exact attention, dropout on its weights in training",
        "Vaswani et al. 2017",
        "O(n^2 p)",
        "in evaluation",
        random=True,
        options={"dropout": 0.1},
    ),
    "vmean": Method(VMean, "the mean of the values, a rank-one baseline", PAPER, "O(n p)", "no"),
    "performer": Method(
        Performer,
        "positive orthogonal random features of the softmax kernel (FAVOR+)",
        "Choromanski et al. 2021",
        "O(n d p)",
        "no",
        random=True,
    ),
    "linear_transformer": Method(
        LinearTransformer, "the kernel of features elu(x) + 1", "Katharopoulos et al. 2020", "O(n p^2)", "no"
    ),
    "nystromformer": Method(
        Nystromformer,
        "landmark means and an iterative pseudo-inverse; rows do not sum to one",
        "Xiong et al. 2021",
        "O(n d p + d^3)",
        "d >= m",
    ),
    "sketched": Method(
        Sketched,
        "D^-1 A S S^T V, or D^-1 S S^T A V, with any sketch S",
        PAPER,
        "O(n^2 p)",
        "no, unbiased",
        random=True,
    ),
    "linformer": Method(
        Linformer,
        "softmax(s Q (E K)^T) F V over learned combinations of the keys and values",
        "Wang et al. 2020",
        "O(n d p)",
        "no",
    ),
    "linformer_jlt": Method(
        Sketched,
        "D^-1 A S S^T V with Gaussian S, the unreduced form of Linformer",
        "Wang et al. 2020",
        "O(n^2 p)",
        "no, unbiased",
        random=True,
        options={"sketch": "gaussian"},
    ),
    "informer": Method(
        Informer,
        "exact rows for the d queries of least flat attention, the mean of V for the others",
        "Zhou et al. 2021",
        "O(n d p)",
        "d >= m",
        masks="padding anywhere (drawn keys may be padded)",
        random=True,
    ),
    "informer_mask": Method(
        Informer,
        "informer, its queries selected by real keys only",
        PAPER,
        "O(n d p)",
        "d >= m",
        random=True,
        options={"masked_selection": True},
    ),
    "bigbird": Method(
        BigBird,
        "blocks of d / 4 tokens: 3 in a window, 3 random, the first and the last",
        "Zaheer et al. 2020",
        "O(n d p)",
        "d >= m",
        masks=ONE_SEQUENCE,
        cross_attention=False,
        random=True,
    ),
    "longformer": Method(
        Longformer,
        "a window of d tokens and global tokens",
        "Beltagy et al. 2020",
        "O(n d p)",
        "d >= 2 m",
        masks=ONE_SEQUENCE,
        cross_attention=False,
    ),
    "sparse_transformer": Method(
        SparseTransformer,
        "a window of d tokens and every d/2-th token",
        "Child et al. 2019",
        "O(n (d + n / d) p)",
        "d >= 2 m",
        masks=ONE_SEQUENCE,
        cross_attention=False,
    ),
    "blockbert": Method(
        BlockBert,
        "one block of at most d tokens, by a permutation for each head",
        "Qiu et al. 2020",
        "O(n d p)",
        "d >= m",
        masks=ONE_SEQUENCE,
        cross_attention=False,
    ),
    "reformer": Method(
        Reformer,
        "locality-sensitive hashing with shared queries and keys: key is query",
        "Kitaev et al. 2020",
        "O(n d p)",
        "no",
        masks=ONE_SEQUENCE,
        cross_attention=False,
        random=True,
    ),
    "skeinformer": _skein("column sampling, adaptive row normalization, pilot reutilization"),
    "skeinformer_uniform": _skein("columns sampled uniformly, no pilots", columns="uniform", reuse_pilots=False),
    "skeinformer_no_norm": _skein("no row normalization", row_norm="none", reuse_pilots=False),
    "skeinformer_simple_norm": _skein("normalized over the selected columns", row_norm="simple", reuse_pilots=False),
    "skeinformer_no_reuse": _skein("pilot rows not written to the output", reuse_pilots=False),
    "cluster": Method(
        Cluster,
        "attention over weighted means of clusters of keys, and a linear term for what they miss",
        "this library",
        "O(n d p)",
        "d >= m",
        random=True,
    ),
}


def build(name: str, *, head_dim: int, max_len: int | None = None, budget: int = 256, **options: object) -> Attention:
    """The attention called `name`: every name takes head_dim, max_len, budget and seed, and options of its own."""
    return build_from(METHODS, name, head_dim=head_dim, max_len=max_len, budget=budget, **options)


def build_from(
    table: Mapping[str, Method],
    name: str,
    *,
    head_dim: int,
    max_len: int | None = None,
    budget: int = 256,
    **options: object,
) -> Attention:
    """`build` with the rows of another table."""
    method = lookup("attention", name, table)
    parameters = inspect.signature(method.make).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options(f"attention {name!r}", options, [parameter.name for parameter in parameters])
    return method(head_dim=head_dim, max_len=max_len, budget=budget, **options)


__all__ = [
    "METHODS",
    "Attention",
    "Cluster",
    "ClusterInfo",
    "ClusterNoise",
    "Method",
    "SkeinInfo",
    "SkeinNoise",
    "Skeinformer",
    "VirtualKeys",
    "build",
    "build_from",
    "choose_budget",
    "cluster_attention",
    "skein_attention",
]
