"""The options of `python -m lra train` and `python -m lra run`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lra.data.store import TASKS
from skeinformer.attention import DEFAULT, METHODS


def default_methods() -> tuple[str, ...]:
    """Return the rows of the paper's Table 1 and this library's own methods: methods first, their variants last."""
    rows = {name: row for name, row in METHODS.items() if row.in_table_1}
    own = [name for name, row in METHODS.items() if row.paper == "this library" and row.has_budget]
    return (
        *(name for name, row in rows.items() if not row.options),
        *own,
        *(name for name, row in rows.items() if row.options),
    )


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Numbers in place of those of the recipe; None leaves a number as it is."""

    max_len: int | None = None
    """The most tokens to read of an example. Default: the recipe's, as of all options here."""
    budget: int | None = None
    """The sketch size d."""
    batch: int | None = None
    """Examples in an optimizer step."""
    learning_rate: float | None = None
    """The highest learning rate."""
    warmup: int | None = None
    """Steps over which the learning rate rises to its highest value."""
    steps: int | None = None
    """The most training steps."""
    check_every: int | None = None
    """Steps between two checks on the validation set."""
    patience: int | None = None
    """End training after so many checks without a better validation accuracy."""
    valid_examples: int | None = None
    """Examples of the validation set to use."""
    test_examples: int | None = None
    """Examples of the test set to use."""
    num_layers: int | None = None
    """Layers of the model."""
    dim: int | None = None
    """Width of the model."""
    num_heads: int | None = None
    """Attention heads."""
    feedforward_dim: int | None = None
    """Width of the feed-forward layers."""
    classifier_dim: int | None = None
    """Width of the classifier's hidden layer."""
    dropout: float | None = None
    """Share of numbers that dropout sets to zero."""
    weight_decay: float | None = None
    """Weight decay of AdamW; 0 is Adam."""
    bucket: bool | None = None
    """Put examples of similar length into a batch."""


@dataclass(frozen=True, kw_only=True)
class Common(Overrides):
    """Options of one run and of many."""

    recipe: str = "cpu"
    """Recipe: cpu (minutes on two cores) or paper (the paper's protocol)."""
    data: Path = Path("lra-data")
    """A folder with a store of `python -m lra data` for each task, or one such store."""
    threads: int | None = None
    """Threads of torch on a CPU. Default: torch's own choice."""
    memory_budget: str | None = None
    """Memory for a micro-batch, such as 16GiB: the largest that fits is used, and gradients add up to a batch."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision: bfloat16 runs the model in mixed precision."""


@dataclass(frozen=True, kw_only=True)
class Train(Common):
    """Train one model on one task of the Long Range Arena, test it, and save it."""

    task: str
    """Task: listops, text, retrieval, pathfinder or image."""
    method: str = DEFAULT
    """A method, with options as in cluster:quality=accurate; or bag_of_tokens, a model without attention."""
    out: Path | None = None
    """A folder for the run. Default: runs/<task>-<method>-<seed>."""
    seed: int = 0
    """Seed of the initial weights, the order of examples and all draws."""
    verify: bool = False
    """Compare the store with its checksums before training."""
    resume: bool = False
    """Continue from the last checkpoint in the folder, or start if there is none."""
    micro_batch: int | None = None
    """Examples in a micro-batch, in place of a memory budget. Default: the complete batch."""
    compile: bool = False
    """Compile the model with torch.compile."""
    sequence_parallel: int = 1
    """Processes of torchrun among which each sequence is divided; the others divide the batch."""


@dataclass(frozen=True, kw_only=True)
class Run(Common):
    """Train all pairs of tasks and methods with some seeds; call it again to continue."""

    tasks: tuple[str, ...] = TASKS
    """Tasks: listops, text, retrieval, pathfinder, image."""
    methods: tuple[str, ...] = field(default_factory=default_methods)
    """Methods, with options as in skeinformer:num_pilots=32. Default: the paper's Table 1 and the cluster sketches."""
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
    """Leave out the model that sees only how often each token occurs, which is trained like the others."""
    out: Path = Path("lra-runs")
    """A folder for the runs; all records in it are gathered in records.jsonl."""
    known: tuple[Path, ...] = ()
    """Records of other folders or machines. They are gathered too, and a run with a result in them is skipped."""
    jobs: int = 1
    """Runs at the same time."""
