"""METHODS: one row for each attention, with all that code has to know about it; `build` makes a module by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skeinformer.attention.adaptive import Adaptive
from skeinformer.attention.base import Attention, Method
from skeinformer.attention.cluster import Cluster
from skeinformer.attention.costs import CLUSTER_COSTS, Cost
from skeinformer.attention.exact import Softmax, VMean
from skeinformer.attention.informer import Informer
from skeinformer.attention.linear import LinearTransformer, Performer
from skeinformer.attention.linformer import Linformer
from skeinformer.attention.nystrom import Nystromformer
from skeinformer.attention.patterns import BigBird, BlockBert, Longformer, SparseTransformer
from skeinformer.attention.reformer import Reformer
from skeinformer.attention.skein import Skeinformer
from skeinformer.attention.sketched import Sketched
from skeinformer.checks import check_options, lookup

__all__ = ["ADAPTIVE", "DEFAULT", "METHODS", "Cost", "Entry", "build", "no_group"]

PAPER = "Chen et al. 2022"
DEFAULT = "cluster"  # the method of layers, models and calls that name none
ADAPTIVE = "adaptive"  # the method of those that state a tolerance


SKEINFORMER_COSTS = Cost(170, 1, 2, call=220_000), Cost(187, 1, 1.4, call=60_000)


@dataclass(frozen=True)
class Entry:
    """A row of the table: a method, options that the row sets, and what to know about them."""

    method: type[Method]
    label: str  # the name for readers
    summary: str
    paper: str
    cost: str  # time of a forward pass, for readers; code asks for `quadratic`
    quadratic: bool = False  # takes as long as exact attention, up to a constant: nothing is gained at any length
    exact_from: float | None = None  # exact where d is at least this many times the real keys; 0 always, None never
    unbiased: bool = False  # the mean over draws is exact attention
    random: bool = False  # draws random numbers
    has_budget: bool = True  # the budget d changes what is computed
    reads_queries: bool = True  # the output depends on queries and keys too, not only on values
    row_by_row: bool = False  # a row depends on no query but its own; pilots, landmarks and patterns depend on all
    cross_attention: bool = True  # takes keys of another sequence; else one mask: a token is padding in both roles
    shares_keys: bool = False  # must get its queries as keys
    sequence_parallel: bool = False  # takes a `group`: the tokens of a sequence may be divided among processes
    padded_draws: bool = False  # selects by draws among which padding may be; padding never enters the output
    same_as: str | None = None  # the row that computes the same without padding, options and training
    costs: tuple[Cost, Cost] = SKEINFORMER_COSTS  # forward; and forward with backward, in pairs of exact attention's
    varied_pilots: bool = False  # measured with several numbers of pilots, on which its time depends most
    in_table_1: bool = True  # a row of the paper's Table 1
    page: str | None = None  # the file in docs/ about this row
    options: Mapping[str, object] = field(default_factory=dict)  # that this row sets; a caller's options win

    def option_names(self, **options: object) -> tuple[str, ...]:
        """Return the names of the options of the method; a few of `options` may decide about others."""
        return self.method.option_names(**{**self.options, **options})


# a line for each argument would make the table three times as long
# fmt: off
METHODS: dict[str, Entry] = {
    "softmax": Entry(Softmax, "Standard", "exact attention on the fused kernel", "Vaswani et al. 2017", "O(n^2 p)",
        quadratic=True, exact_from=0, has_budget=False, row_by_row=True),
    "softmax_dropout": Entry(Softmax, "Standard, dropout", "exact attention, dropout on its weights in training",
        "Vaswani et al. 2017", "O(n^2 p)", quadratic=True, exact_from=0, random=True, has_budget=False, row_by_row=True,
        same_as="softmax", options={"dropout": 0.1}),
    "vmean": Entry(VMean, "V-mean", "the mean of the values, a rank-one baseline", PAPER, "O(n p)", has_budget=False,
        reads_queries=False, row_by_row=True, sequence_parallel=True, costs=(Cost(token=20), Cost(token=15))),
    "performer": Entry(Performer, "Performer", "positive orthogonal random features of the softmax kernel (FAVOR+)",
        "Choromanski et al. 2021", "O(n d p)", random=True, row_by_row=True, sequence_parallel=True,
        costs=(Cost(column=5.3), Cost(column=5.1))),
    "linear_transformer": Entry(LinearTransformer, "Linear Transformer", "the kernel of features elu(x) + 1",
        "Katharopoulos et al. 2020", "O(n p^2)", has_budget=False, row_by_row=True, sequence_parallel=True,
        in_table_1=False, costs=(Cost(token=620), Cost(token=650))),
    "nystromformer": Entry(Nystromformer, "Nystromformer",
        "landmark means and an iterative pseudo-inverse; rows do not sum to one", "Xiong et al. 2021", "O(n d p + d^3)",
        exact_from=1, costs=(Cost(column=11), Cost(column=11.6))),
    "sketched": Entry(Sketched, "Sketched", "D^-1 A S S^T V, or D^-1 S S^T A V, with any sketch S", PAPER, "O(n^2 p)",
        quadratic=True, unbiased=True, random=True, same_as="linformer_jlt", in_table_1=False, page="sketches.md"),
    "linformer": Entry(Linformer, "Linformer",
        "softmax(s Q (E K)^T) F V over learned combinations of the keys and values", "Wang et al. 2020", "O(n d p)",
        row_by_row=True, costs=(Cost(column=2.5), Cost(column=2.4))),
    "linformer_jlt": Entry(Sketched, "Linformer, unreduced JLT",
        "D^-1 A S S^T V with Gaussian S, the unreduced form of Linformer", "Wang et al. 2020", "O(n^2 p)",
        quadratic=True, unbiased=True, random=True, row_by_row=True, options={"sketch": "gaussian"}),
    "informer": Entry(Informer, "Informer",
        "exact rows for the d queries of least flat attention, the mean of V for the others", "Zhou et al. 2021",
        "O(n d p)", exact_from=1, random=True, padded_draws=True, costs=(Cost(column=15.5), Cost(column=5.4))),
    "informer_mask": Entry(Informer, "Informer, padding mask", "informer, its queries selected by real keys only",
        PAPER, "O(n d p)", exact_from=1, random=True, same_as="informer", options={"masked_selection": True},
        costs=(Cost(column=15.5), Cost(column=5.4))),
    "bigbird": Entry(BigBird, "Big Bird", "blocks of d / 4 tokens: 3 in a window, 3 random, the first and the last",
        "Zaheer et al. 2020", "O(n d p)", exact_from=1, random=True, cross_attention=False,
        costs=(Cost(column=7.8), Cost(column=6.4))),
    "longformer": Entry(Longformer, "Longformer", "a window of d tokens and global tokens", "Beltagy et al. 2020",
        "O(n d p)", exact_from=2, cross_attention=False, in_table_1=False, costs=(Cost(column=5), Cost(column=4))),
    "sparse_transformer": Entry(SparseTransformer, "Sparse Transformer", "a window of d tokens and every d/2-th token",
        "Child et al. 2019", "O(n (d + n / d) p)", exact_from=2, cross_attention=False, in_table_1=False,
        costs=(Cost(column=15), Cost(column=17))),
    "blockbert": Entry(BlockBert, "BlockBERT", "one block of at most d tokens, by a permutation for each head",
        "Qiu et al. 2020", "O(n d p)", exact_from=1, cross_attention=False, in_table_1=False,
        costs=(Cost(column=2.5), Cost(column=2.1))),
    "reformer": Entry(Reformer, "Reformer", "locality-sensitive hashing with shared queries and keys: key is query",
        "Kitaev et al. 2020", "O(n d p)", random=True, cross_attention=False, shares_keys=True,
        costs=(Cost(column=11.6), Cost(column=6))),
    "skeinformer": Entry(Skeinformer, "Skeinformer", "column sampling, adaptive row normalization, pilot reutilization",
        PAPER, "O(n d p)", exact_from=1, random=True, sequence_parallel=True, page="skeinformer.md",
        varied_pilots=True),
    "skeinformer_uniform": Entry(Skeinformer, "Skeinformer, uniform sampling", "columns sampled uniformly, no pilots",
        PAPER, "O(n d p)", exact_from=1, random=True, row_by_row=True, sequence_parallel=True,
        options={"columns": "uniform", "reuse_pilots": False},
        costs=(Cost(100, 1, call=220_000), Cost(120, 1, call=60_000))),
    "skeinformer_no_norm": Entry(Skeinformer, "Skeinformer, no row normalization", "no row normalization", PAPER,
        "O(n^2 p)", quadratic=True, unbiased=True, random=True, options={"row_norm": "none", "reuse_pilots": False}),
    "skeinformer_simple_norm": Entry(Skeinformer, "Skeinformer, simple row normalization",
        "normalized over the selected columns", PAPER, "O(n d p)", exact_from=1, random=True, sequence_parallel=True,
        options={"row_norm": "simple", "reuse_pilots": False}),
    "skeinformer_no_reuse": Entry(Skeinformer, "Skeinformer, no pilot reutilization",
        "pilot rows not written to the output", PAPER, "O(n d p)", exact_from=1, random=True, sequence_parallel=True,
        options={"reuse_pilots": False}),
    "cluster": Entry(Cluster, "Cluster sketch",
        "attention over weighted means of clusters of keys, and a linear term for what they miss", "this library",
        "O(n d p)", exact_from=1, random=True, sequence_parallel=True, in_table_1=False, page="cluster.md",
        costs=CLUSTER_COSTS),
    "cluster_window": Entry(Cluster, "Cluster sketch, near keys exact",
        "exact attention to the tokens nearby, the cluster sketch of all others", "this library", "O(n (d + w) p)",
        exact_from=1, random=True, cross_attention=False, sequence_parallel=True, in_table_1=False, page="cluster.md",
        costs=CLUSTER_COSTS, options={"window": 64}),
    "adaptive": Entry(Adaptive, "Chosen for each head",
        "for each head the cheapest cluster sketch whose error is within a tolerance, else exact attention",
        "this library", "O(n d p) to O(n^2 p)", random=True, has_budget=False, in_table_1=False, page="cluster.md",
        costs=CLUSTER_COSTS),
}
# fmt: on


def no_group(name: str, table: Mapping[str, Entry] = METHODS) -> str:
    """Return the error message for a method whose tokens cannot be divided among ranks."""
    takes = ", ".join(other for other, entry in table.items() if entry.sequence_parallel)
    return f"attention {name!r} takes no group: its tokens cannot be divided among ranks. {takes} take one"


def build(
    name: str,
    *,
    head_dim: int,
    max_len: int | None = None,
    budget: int | None = None,
    seed: int | None = None,
    scale: float | None = None,
    group: Any = None,
    table: Mapping[str, Entry] | None = None,
    **options: object,
) -> Attention:
    """Build an attention module by the name of its method.

    Args:
        name: A name of METHODS, such as "cluster".
        head_dim: p, the width of queries and keys.
        max_len: The longest sequence, for methods with parameters for each position.
        budget: d, the sketch size; None is the method's default.
        seed: Makes evaluation deterministic; without a seed, and in training, every call draws other numbers.
        scale: The factor of the scores; 1/sqrt(p) by default.
        group: A ProcessGroup or a one-dimensional DeviceMesh over whose ranks the tokens of a sequence are divided;
            see docs/distributed.md.
        table: The rows in which the name is looked up; METHODS by default.
        **options: Options of the method; `METHODS[name].option_names()` are their names.

    Returns:
        The module.

    Raises:
        ValueError: No method has this name, an option is out of range, two options set the size, or the method takes
            no group.
        TypeError: The method has no such option, or an argument has the wrong type.

    Example:
        >>> attention = build("cluster", head_dim=32, budget=64, seed=0)
        >>> output = attention(q, k, v, key_mask=mask)
    """
    table = METHODS if table is None else table
    entry = lookup("attention", name, table)
    if group is not None and not entry.sequence_parallel:
        raise ValueError(no_group(name, table))
    names = entry.option_names(**options)
    # options of a sketch are options of "sketched" too, others for each sketch
    sketch = f" with sketch={options['sketch']!r}" if "sketch" in options and "sketch" in names else ""
    check_options(f"attention {name!r}{sketch}", options, names)
    if budget is not None:
        for size in entry.method.size_options:
            if options.get(size) is not None:
                raise ValueError(f"budget={budget} and {size}={options[size]} both set the size of {name!r}; give one")
        options["budget"] = budget
    method = entry.method.create(**{**entry.options, **options})
    module = entry.method.module or Attention
    return module(method, head_dim=head_dim, max_len=max_len, seed=seed, scale=scale, group=group)
