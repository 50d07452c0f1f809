"""The options of `skein train` and `skein lra`, apart from what they run: reading them needs no training library."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skeinformer.attention import METHODS
from skeinformer.lab.lra.store import TASKS


def table_1_methods() -> tuple[str, ...]:
    """The 16 rows of the paper's Table 1 and the cluster sketch: methods first, their variants after them."""
    rows = {name: bool(row.options) for name, row in METHODS.items() if row.in_table_1}
    methods, variants = ([name for name, is_variant in rows.items() if is_variant is kind] for kind in (False, True))
    return (*methods, "cluster", *variants)


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What replaces a number of the recipe; None leaves it."""

    max_len: int | None = None
    """Tokens that are read."""
    budget: int | None = None
    """The sketch size d."""
    batch: int | None = None
    """Examples in an optimizer step."""
    learning_rate: float | None = None
    """The highest learning rate."""
    warmup: int | None = None
    """Steps in which it rises."""
    steps: int | None = None
    """The most steps."""
    check_every: int | None = None
    """Steps between two looks at the validation set."""
    patience: int | None = None
    """Checks without a better validation after which training ends."""
    valid_examples: int | None = None
    """Of the validation set."""
    test_examples: int | None = None
    """Of the test set."""
    num_layers: int | None = None
    """Of the model."""
    dim: int | None = None
    """Width of the model."""
    num_heads: int | None = None
    """Attention heads."""
    feedforward_dim: int | None = None
    """Width of the feed-forward layers."""
    classifier_dim: int | None = None
    """Width of the classifier's hidden layer."""
    dropout: float | None = None
    """Share of numbers that dropout zeroes."""
    weight_decay: float | None = None
    """Of AdamW; 0 is Adam."""
    bucket: bool | None = None
    """Put examples of similar length into a batch."""


@dataclass(frozen=True, kw_only=True)
class Train(Overrides):
    """Train one model on one task of the Long Range Arena, test it, and save it."""

    task: str
    """listops, text, retrieval, pathfinder or image."""
    method: str = "skeinformer"
    """A method, with options as in skeinformer:num_pilots=32; or bag_of_tokens, a model without attention."""
    recipe: str = "cpu"
    """cpu (minutes on two cores) or paper (the paper's protocol)."""
    data: Path = Path("lra-data")
    """The store that `skein data` wrote, or a folder with one for each task."""
    out: Path | None = None
    """A folder for the run. Default: runs/<task>-<method>-<seed>."""
    seed: int = 0
    """Of the initial weights, the order of examples and all draws."""
    verify: bool = False
    """Compare the store with its checksums before training."""
    resume: bool = False
    """Go on from the last checkpoint in the folder; start, if there is none."""
    memory_budget: str | None = None
    """Find the largest micro-batch that fits, such as 16GiB, and add up gradients to the recipe's batch."""
    micro_batch: int | None = None
    """Examples at a time, in place of a memory budget."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the model in mixed precision."""
    compile: bool = False
    """Use torch.compile."""
    sequence_parallel: int = 1
    """Processes of torchrun among which each sequence is divided; the others divide the batch."""
    threads: int | None = None
    """Of torch, on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Lra(Overrides):
    """Train a matrix of tasks, methods and seeds of the Long Range Arena; call it again to go on."""

    tasks: tuple[str, ...] = TASKS
    """listops, text, retrieval, pathfinder, image."""
    methods: tuple[str, ...] = field(default_factory=table_1_methods)
    """Methods, with options as in skeinformer:num_pilots=32. Default: the 16 rows of Table 1 and the cluster sketch."""
    seeds: tuple[int, ...] = (0,)
    """One run for each."""
    batches: tuple[int, ...] = ()
    """Batch sizes of a study: one run for each."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of a study: one run for each."""
    study: bool = False
    """The study of batch size and learning rate: Skeinformer on Text with half, once and twice the recipe's batch,
    each at a quarter of, once and four times its learning rate. --batches and --learning-rates replace these."""
    baseline: bool = True
    """Leave out the model that sees only how often each token occurs, which is trained beside the others."""
    recipe: str = "cpu"
    """cpu (minutes on two cores) or paper (the paper's protocol)."""
    data: Path = Path("lra-data")
    """A folder with a store of `skein data` for each task; ListOps and Pathfinder are generated where missing."""
    out: Path = Path("lra")
    """A folder for the runs; all records in it are gathered in records.jsonl."""
    known: tuple[Path, ...] = ()
    """Records of other folders or machines: a run that has its result there is not run again, and they are gathered
    too."""
    jobs: int = 1
    """Runs at a time."""
    threads: int | None = None
    """Of torch, in each run on a CPU."""
    memory_budget: str | None = None
    """Find the largest micro-batch that fits, such as 16GiB."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the models in mixed precision."""
