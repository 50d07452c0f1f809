"""The options of `skein train` and `skein lra`, apart from what they run: reading them needs no training library."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skeinformer.attention import DEFAULT, METHODS
from skeinformer.lab.lra.store import TASKS


def table_1_methods() -> tuple[str, ...]:
    """The 16 rows of the paper's Table 1 and the cluster sketch: methods first, their variants after them."""
    rows = {name: bool(row.options) for name, row in METHODS.items() if row.in_table_1}
    methods, variants = ([name for name, is_variant in rows.items() if is_variant is kind] for kind in (False, True))
    return (*methods, "cluster", *variants)


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Numbers in place of those of the recipe; None leaves a number as it is."""

    max_len: int | None = None
    """The most tokens to read of an example. Default: the recipe's."""
    budget: int | None = None
    """The sketch size d. Default: the recipe's."""
    batch: int | None = None
    """Examples in an optimizer step. Default: the recipe's."""
    learning_rate: float | None = None
    """The highest learning rate. Default: the recipe's."""
    warmup: int | None = None
    """Steps over which the learning rate rises to its highest value. Default: the recipe's."""
    steps: int | None = None
    """The most training steps. Default: the recipe's."""
    check_every: int | None = None
    """Steps between two checks on the validation set. Default: the recipe's."""
    patience: int | None = None
    """End training after so many checks without a better validation accuracy. Default: the recipe's."""
    valid_examples: int | None = None
    """Examples of the validation set to use. Default: the recipe's."""
    test_examples: int | None = None
    """Examples of the test set to use. Default: the recipe's."""
    num_layers: int | None = None
    """Layers of the model. Default: the recipe's."""
    dim: int | None = None
    """Width of the model. Default: the recipe's."""
    num_heads: int | None = None
    """Attention heads. Default: the recipe's."""
    feedforward_dim: int | None = None
    """Width of the feed-forward layers. Default: the recipe's."""
    classifier_dim: int | None = None
    """Width of the classifier's hidden layer. Default: the recipe's."""
    dropout: float | None = None
    """Share of numbers that dropout sets to zero. Default: the recipe's."""
    weight_decay: float | None = None
    """Weight decay of AdamW; 0 is Adam. Default: the recipe's."""
    bucket: bool | None = None
    """Put examples of similar length into a batch. Default: the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Train(Overrides):
    """Train one model on one task of the Long Range Arena, test it, and save it."""

    task: str
    """Task: listops, text, retrieval, pathfinder or image."""
    method: str = DEFAULT
    """A method, with options as in cluster:quality=accurate; or bag_of_tokens, a model without attention."""
    recipe: str = "cpu"
    """Recipe: cpu (minutes on two cores) or paper (the paper's protocol)."""
    data: Path = Path("lra-data")
    """The store that `skein data` wrote, or a folder with one for each task."""
    out: Path | None = None
    """A folder for the run. Default: runs/<task>-<method>-<seed>."""
    seed: int = 0
    """Seed of the initial weights, the order of examples and all draws."""
    verify: bool = False
    """Compare the store with its checksums before training."""
    resume: bool = False
    """Continue from the last checkpoint in the folder, or start if there is none."""
    memory_budget: str | None = None
    """Memory for a micro-batch, such as 16GiB: the largest that fits is found, and gradients add up to a batch."""
    micro_batch: int | None = None
    """Examples in a micro-batch, in place of a memory budget. Default: the whole batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision: bfloat16 runs the model in mixed precision."""
    compile: bool = False
    """Compile the model with torch.compile."""
    sequence_parallel: int = 1
    """Processes of torchrun among which each sequence is divided; the others divide the batch."""
    threads: int | None = None
    """Threads of torch on a CPU. Default: torch's own choice."""


@dataclass(frozen=True, kw_only=True)
class Lra(Overrides):
    """Train a matrix of tasks, methods and seeds of the Long Range Arena; call it again to go on."""

    tasks: tuple[str, ...] = TASKS
    """Tasks: listops, text, retrieval, pathfinder, image."""
    methods: tuple[str, ...] = field(default_factory=table_1_methods)
    """Methods, with options as in skeinformer:num_pilots=32. Default: the 16 rows of Table 1 and the cluster sketch."""
    seeds: tuple[int, ...] = (0,)
    """Seeds: one run for each."""
    batches: tuple[int, ...] = ()
    """Batch sizes of a study: one run for each. Default: the recipe's."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of a study: one run for each. Default: the recipe's."""
    study: bool = False
    """Study batch size and learning rate: Skeinformer on Text, with half, once and twice the recipe's batch, each at a
    quarter of, once and four times its learning rate. --batches and --learning-rates replace these."""
    baseline: bool = True
    """Leave out the model that sees only how often each token occurs, which is trained beside the others."""
    recipe: str = "cpu"
    """Recipe: cpu (minutes on two cores) or paper (the paper's protocol)."""
    data: Path = Path("lra-data")
    """A folder with a store of `skein data` for each task; ListOps and Pathfinder are generated where missing."""
    out: Path = Path("lra")
    """A folder for the runs; all records in it are gathered in records.jsonl."""
    known: tuple[Path, ...] = ()
    """Records of other folders or machines. They are gathered too, and a run that has its result there is not run
    again."""
    jobs: int = 1
    """Runs at the same time."""
    threads: int | None = None
    """Threads of torch in each run on a CPU. Default: torch's own choice."""
    memory_budget: str | None = None
    """Memory for a micro-batch, such as 16GiB: the largest that fits is found."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision: bfloat16 runs the models in mixed precision."""
