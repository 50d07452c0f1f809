"""METHODS: one row for each attention, with all that code has to know of it; `build` makes a module from a name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skeinformer.attention.base import Attention
from skeinformer.attention.bigbird import BigBird
from skeinformer.attention.blockbert import BlockBert
from skeinformer.attention.cluster import Cluster
from skeinformer.attention.costs import INFORMER, SKEINFORMER, Cost, Costs
from skeinformer.attention.exact import Softmax, VMean
from skeinformer.attention.informer import Informer
from skeinformer.attention.linear import LinearTransformer, Performer
from skeinformer.attention.linformer import Linformer
from skeinformer.attention.longformer import Longformer
from skeinformer.attention.nystrom import Nystromformer
from skeinformer.attention.reformer import Reformer
from skeinformer.attention.skein import Skeinformer
from skeinformer.attention.sketched import Sketched
from skeinformer.attention.sparse_transformer import SparseTransformer
from skeinformer.registry import check_options, lookup

PAPER = "Chen et al. 2022"
DEFAULT = "cluster"  # the method of layers, models and calls that are told none


@dataclass(frozen=True)
class Method:
    """A row of the table: how to make the module, and what to know about it. Calling it makes the module."""

    make: type[Attention]
    label: str
    """What a reader calls it."""
    summary: str
    paper: str
    cost: str
    """Time of a forward pass, as a reader sees it; `quadratic` is what code asks."""
    quadratic: bool = False
    """Takes as long as exact attention, up to a constant: nothing is gained where the sequence is long."""
    exact_from: float | None = None
    """Exact where the budget is at least this many times the number of real keys; 0 is always, None is never."""
    unbiased: bool = False
    """The mean over draws is exact attention."""
    random: bool = False
    """Draws random numbers."""
    has_budget: bool = True
    """The budget d changes what is computed."""
    reads_queries: bool = True
    """The output depends on queries and keys, and not on values alone."""
    row_by_row: bool = False
    """A row of the output depends on no query but its own; elsewhere pilots, landmarks or patterns come from all."""
    cross_attention: bool = True
    """Takes keys of another sequence than the queries'. Else there is one mask: a token is padding in both roles."""
    shares_keys: bool = False
    """Must be given its queries as keys."""
    sequence_parallel: bool = False
    """Takes a `group`: the tokens of a sequence may be divided among processes."""
    padded_draws: bool = False
    """Selects by draws among which padding may be; what is padding never enters the output."""
    same_as: str | None = None
    """The row that computes the same without padding, options and training."""
    costs: Costs | None = None
    """What a head takes beside exact attention; None, of what is not measured, counts as Skeinformer's."""
    varied_pilots: bool = False
    """Measured with several numbers of pilots, on which its time depends most."""
    in_table_1: bool = True
    """A row of the paper's Table 1."""
    page: str | None = None
    """The file in docs/ that is about it alone."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What this row sets; a caller's options win."""

    def __call__(self, **options: Any) -> Attention:
        return self.make(**{**self.options, **options})

    def option_names(self, **options: object) -> tuple[str, ...]:
        """The options that it takes beside head_dim, max_len and seed, where those given may decide about others."""
        return self.make.option_names(**{**self.options, **options})

    @property
    def exact(self) -> str:
        """When it is exact, in words."""
        if self.exact_from is None:
            return "no, unbiased" if self.unbiased else "no"
        if self.exact_from == 0:
            return "in evaluation" if self.random else "always"
        return "d >= m" if self.exact_from == 1 else f"d >= {self.exact_from:g} m"

    @property
    def masks(self) -> str:
        """Which masks it takes, in words."""
        if not self.cross_attention:
            return "one mask, padding anywhere"  # the row of a token that is padding as a key is 0
        return "padding anywhere" + (" (drawn keys may be padded)" if self.padded_draws else "")


METHODS: dict[str, Method] = {
    "softmax": Method(
        Softmax,
        "Standard",
        "exact attention on the fused kernel",
        "Vaswani et al. 2017",
        "O(n^2 p)",
        quadratic=True,
        exact_from=0,
        has_budget=False,
        row_by_row=True,
    ),
    "softmax_dropout": Method(
        Softmax,
        "Standard, dropout",
        "exact attention, dropout on its weights in training",
        "Vaswani et al. 2017",
        "O(n^2 p)",
        quadratic=True,
        exact_from=0,
        random=True,
        has_budget=False,
        row_by_row=True,
        same_as="softmax",
        options={"dropout": 0.1},
    ),
    "vmean": Method(
        VMean,
        "V-mean",
        "the mean of the values, a rank-one baseline",
        PAPER,
        "O(n p)",
        has_budget=False,
        reads_queries=False,
        row_by_row=True,
        sequence_parallel=True,
        costs=Costs(Cost(0, 20, 0, 0), Cost(0, 15, 0, 0)),
    ),
    "performer": Method(
        Performer,
        "Performer",
        "positive orthogonal random features of the softmax kernel (FAVOR+)",
        "Choromanski et al. 2021",
        "O(n d p)",
        random=True,
        row_by_row=True,
        sequence_parallel=True,
        costs=Costs(Cost(0, 0, 5.3, 0), Cost(0, 0, 5.1, 0)),
    ),
    "linear_transformer": Method(
        LinearTransformer,
        "Linear Transformer",
        "the kernel of features elu(x) + 1",
        "Katharopoulos et al. 2020",
        "O(n p^2)",
        has_budget=False,
        row_by_row=True,
        sequence_parallel=True,
        in_table_1=False,
        costs=Costs(Cost(0, 620, 0, 0), Cost(0, 650, 0, 0)),
    ),
    "nystromformer": Method(
        Nystromformer,
        "Nystromformer",
        "landmark means and an iterative pseudo-inverse; rows do not sum to one",
        "Xiong et al. 2021",
        "O(n d p + d^3)",
        exact_from=1,
        costs=Costs(Cost(0, 0, 11, 0), Cost(0, 0, 11.6, 0)),
    ),
    "sketched": Method(
        Sketched,
        "Sketched",
        "D^-1 A S S^T V, or D^-1 S S^T A V, with any sketch S",
        PAPER,
        "O(n^2 p)",
        quadratic=True,
        unbiased=True,
        random=True,
        same_as="linformer_jlt",
        in_table_1=False,
        page="sketches.md",
    ),
    "linformer": Method(
        Linformer,
        "Linformer",
        "softmax(s Q (E K)^T) F V over learned combinations of the keys and values",
        "Wang et al. 2020",
        "O(n d p)",
        row_by_row=True,
        costs=Costs(Cost(0, 0, 2.5, 0), Cost(0, 0, 2.4, 0)),
    ),
    "linformer_jlt": Method(
        Sketched,
        "Linformer, unreduced JLT",
        "D^-1 A S S^T V with Gaussian S, the unreduced form of Linformer",
        "Wang et al. 2020",
        "O(n^2 p)",
        quadratic=True,
        unbiased=True,
        random=True,
        row_by_row=True,
        options={"sketch": "gaussian"},
    ),
    "informer": Method(
        Informer,
        "Informer",
        "exact rows for the d queries of least flat attention, the mean of V for the others",
        "Zhou et al. 2021",
        "O(n d p)",
        exact_from=1,
        random=True,
        padded_draws=True,
        costs=INFORMER,
    ),
    "informer_mask": Method(
        Informer,
        "Informer, padding mask",
        "informer, its queries selected by real keys only",
        PAPER,
        "O(n d p)",
        exact_from=1,
        random=True,
        same_as="informer",
        options={"masked_selection": True},
        costs=INFORMER,
    ),
    "bigbird": Method(
        BigBird,
        "Big Bird",
        "blocks of d / 4 tokens: 3 in a window, 3 random, the first and the last",
        "Zaheer et al. 2020",
        "O(n d p)",
        exact_from=1,
        random=True,
        cross_attention=False,
        costs=Costs(Cost(0, 0, 7.8, 0), Cost(0, 0, 6.4, 0)),
    ),
    "longformer": Method(
        Longformer,
        "Longformer",
        "a window of d tokens and global tokens",
        "Beltagy et al. 2020",
        "O(n d p)",
        exact_from=2,
        cross_attention=False,
        in_table_1=False,
        costs=Costs(Cost(0, 0, 5, 0), Cost(0, 0, 4, 0)),
    ),
    "sparse_transformer": Method(
        SparseTransformer,
        "Sparse Transformer",
        "a window of d tokens and every d/2-th token",
        "Child et al. 2019",
        "O(n (d + n / d) p)",
        exact_from=2,
        cross_attention=False,
        in_table_1=False,
        costs=Costs(Cost(0, 0, 15, 0), Cost(0, 0, 17, 0)),
    ),
    "blockbert": Method(
        BlockBert,
        "BlockBERT",
        "one block of at most d tokens, by a permutation for each head",
        "Qiu et al. 2020",
        "O(n d p)",
        exact_from=1,
        cross_attention=False,
        in_table_1=False,
        costs=Costs(Cost(0, 0, 2.5, 0), Cost(0, 0, 2.1, 0)),
    ),
    "reformer": Method(
        Reformer,
        "Reformer",
        "locality-sensitive hashing with shared queries and keys: key is query",
        "Kitaev et al. 2020",
        "O(n d p)",
        random=True,
        cross_attention=False,
        shares_keys=True,
        costs=Costs(Cost(0, 0, 11.6, 0), Cost(0, 0, 6, 0)),
    ),
    "skeinformer": Method(
        Skeinformer,
        "Skeinformer",
        "column sampling, adaptive row normalization, pilot reutilization",
        PAPER,
        "O(n d p)",
        exact_from=1,
        random=True,
        sequence_parallel=True,
        page="skeinformer.md",
        costs=SKEINFORMER,
        varied_pilots=True,
    ),
    "skeinformer_uniform": Method(
        Skeinformer,
        "Skeinformer, uniform sampling",
        "columns sampled uniformly, no pilots",
        PAPER,
        "O(n d p)",
        exact_from=1,
        random=True,
        row_by_row=True,
        sequence_parallel=True,
        options={"columns": "uniform", "reuse_pilots": False},
        costs=Costs(Cost(220_000, 100, 1, 0), Cost(60_000, 120, 1, 0), SKEINFORMER.queries),  # which needs pilots
    ),
    "skeinformer_no_norm": Method(
        Skeinformer,
        "Skeinformer, no row normalization",
        "no row normalization",
        PAPER,
        "O(n^2 p)",
        quadratic=True,
        unbiased=True,
        random=True,
        options={"row_norm": "none", "reuse_pilots": False},
    ),
    "skeinformer_simple_norm": Method(
        Skeinformer,
        "Skeinformer, simple row normalization",
        "normalized over the selected columns",
        PAPER,
        "O(n d p)",
        exact_from=1,
        random=True,
        sequence_parallel=True,
        options={"row_norm": "simple", "reuse_pilots": False},
    ),
    "skeinformer_no_reuse": Method(
        Skeinformer,
        "Skeinformer, no pilot reutilization",
        "pilot rows not written to the output",
        PAPER,
        "O(n d p)",
        exact_from=1,
        random=True,
        sequence_parallel=True,
        options={"reuse_pilots": False},
    ),
    "cluster": Method(
        Cluster,
        "Cluster sketch",
        "attention over weighted means of clusters of keys, and a linear term for what they miss",
        "this library",
        "O(n d p)",
        exact_from=1,
        random=True,
        sequence_parallel=True,
        in_table_1=False,
        page="cluster.md",
        costs=Costs(Cost(600_000, 156, 6, 3), Cost(300_000, 340, 3, 1), Cost(450_000, 510, 4.5, 1.5)),
    ),
}


def no_group(name: str, table: Mapping[str, Method] = METHODS) -> str:
    """What is said where a method cannot have its tokens divided among ranks."""
    takes = ", ".join(other for other, row in table.items() if row.sequence_parallel)
    return f"attention {name!r} takes no group: its tokens cannot be divided among ranks. {takes} take one"


def build(
    name: str,
    *,
    head_dim: int,
    max_len: int | None = None,
    budget: int | None = None,
    seed: int | None = None,
    group: Any = None,
    table: Mapping[str, Method] = METHODS,
    **options: object,
) -> Attention:
    """The attention called `name`: every name takes head_dim, max_len, budget and seed, and options of its own.

    budget: d, the sketch size; None is the method's own default. group: a ProcessGroup or a one-dimensional DeviceMesh,
    where the tokens of a sequence are divided among its ranks; see docs/distributed.md. table: the rows to look in.
    """
    method = lookup("attention", name, table)
    if group is not None and not method.sequence_parallel:
        raise ValueError(no_group(name, table))
    given = ", ".join(f"{option}={options[option]!r}" for option in method.make.deciding if option in options)
    owner = f"attention {name!r}" + (f" with {given}" if given else "")
    check_options(owner, options, method.option_names(**options))
    shared = {} if group is None else {"group": group}
    return method(head_dim=head_dim, max_len=max_len, seed=seed, budget=budget, **shared, **options)
