"""What the benchmarks share: their start, pages with tables between marks, passes of a method, whole models."""

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from torch import Tensor

from skeinformer import huggingface
from skeinformer.checks import check_count
from skeinformer.cli.app import guard, read_options
from skeinformer.cli.bench_runs import call_of
from skeinformer.cli.measure import QKV, Action
from skeinformer.cli.pretrained import Pretrained, first_tokens, hidden_states, project_qkv, self_attention
from skeinformer.cli.records import write_file
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.models.policy import Policy

EXACT = MethodSpec("softmax")  # of a whole model: torch's fused kernel
END = "<!-- end -->"
STREAMS = ("weights", "draws", "upstream")  # random numbers of a trial that must not depend on each other


def start(kind: Any, arguments: Sequence[str] | None = None) -> int:
    """Read the options of a benchmark from the command line, call its `run`, and return the exit status."""
    spec = getattr(sys.modules[kind.__module__], "__spec__", None)
    name = kind.__module__ if spec is None else str(spec.name)
    return guard(lambda: read_options(kind, f"python -m {name}", arguments).run(), name)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows))


def write_tables(path: Path, texts: Mapping[str, str]) -> None:
    """Write each text into a page, between its marks `<!-- name -->` and `<!-- end -->`."""
    page = path.read_text(encoding="utf-8")
    for name, text in texts.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if not mark or END not in rest:
            raise ValueError(f"{path} has no <!-- {name} --> that an {END} follows")
        page = f"{before}{mark}{text}\n{END}{rest.partition(END)[2]}"
    write_file(path, page)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two values, by Student's t."""
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def stream_seed(seed: int, trial: int, stream: str) -> int:
    """Return a seed for one use of random numbers in one trial."""
    return int(np.random.SeedSequence((seed, trial, STREAMS.index(stream))).generate_state(1)[0])


def check_options(options: Any, counts: Mapping[str, int], filled: Sequence[str] = ()) -> None:
    """Raise a ValueError where a tuple is empty, or a count (or one of several) is below its least value."""
    for name in filled:
        if not getattr(options, name):
            raise ValueError(f"{name} is empty; give at least one")
    for name, least in counts.items():
        value = getattr(options, name)
        for each in value if isinstance(value, tuple) else (value,):
            check_count(name, each, least)


class TextSource(NamedTuple):
    """A model and the tokens of a text: trial t has tokens [t n, (t + 1) n)."""

    pretrained: Pretrained
    tokens: Tensor

    @classmethod
    def create(cls, pretrained: Pretrained, text: str, trials: int, n: int) -> "TextSource":
        """Tokenize as much of a text as is needed; a ValueError if it is too short."""
        tokens = first_tokens(text, trials * n, pretrained.tokenizer, exactly=False)
        if len(tokens) < trials * n:
            raise ValueError(
                f"the text has {len(tokens)} tokens, enough for {len(tokens) // n} trials of {n} tokens, but {trials} "
                "are asked for; give a longer text, fewer trials or smaller lengths"
            )
        return cls(pretrained, tokens)

    def states(self, trial: int, n: int, layers: Sequence[int]) -> dict[int, Tensor]:
        """Compute what enters the layers on the piece of text of a trial: (n, width) each."""
        return hidden_states(self.pretrained, self.tokens[trial * n : (trial + 1) * n], layers)

    def qkv(self, hidden: Tensor, trial: int, layer: int, weights: str, seed: int) -> QKV:
        """Project states to queries, keys and values, (1, h, n, p) each."""
        seed = stream_seed(seed, trial, "weights")
        return project_qkv(self.pretrained, hidden, layer, weights=weights, seed=seed)


class Passes(NamedTuple):
    """A forward pass, and a forward and backward pass, as functions without arguments."""

    forward: Action
    both: Action


def passes_of(spec: MethodSpec, qkv: QKV) -> Passes:
    """Return the passes of a method, which draws again in every call; its parameters have gradients too."""
    return Passes(call_of(spec, qkv, "forward"), call_of(spec, qkv, "both"))


def specs_of(methods: Sequence[str], budgets: Sequence[int]) -> list[MethodSpec]:
    """Return every method at every budget; a ValueError names a method that a model cannot take."""
    specs = [spec for method in parse_all(methods) for spec in method.at(budgets)]
    for spec in specs:
        if spec != EXACT:
            budget, options = spec.settings()
            Policy.create(spec.method, budget=budget, **options)
    return list(dict.fromkeys(specs))


def switch(model: Any, spec: MethodSpec, seed: int = 0) -> None:
    """Set the attention of a model of transformers to a method, at every length."""
    if spec == EXACT:
        model.set_attn_implementation("sdpa")
        return
    budget, options = spec.settings()
    if spec.method != "policy":
        huggingface.sketch(model, spec.method, budget=budget, min_length=0, seed=seed, **options)
        return
    policy: Any = spec.build(8, None).method  # of benchmarks.gradients: a model takes its exact layers
    huggingface.sketch(model, "cluster", budget=budget, min_length=0, seed=seed)
    for layer in filter(policy.is_exact, range(int(model.config.num_hidden_layers))):
        attention = self_attention(model, layer)
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "sdpa"
