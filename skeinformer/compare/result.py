"""What `compare` found: records, and what they say in plain text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import IO

from skeinformer.compare.contender import Contender, parse
from skeinformer.compare.record import Record
from skeinformer.compare.text import of_comparison, paragraphs, text_table, verdicts
from skeinformer.nn.verdict import CALL, Choice, Verdict


@dataclass(frozen=True, repr=False)
class Comparison:
    """Exact and sketched attention side by side. `print()` shows it, `records()` are what `skein report` reads."""

    layers: tuple[Record, ...]
    """For each attention call: the whole layer, with head None, then its heads."""
    whole: Record
    """The model: outputs, time, how many layers are safe."""
    left: Mapping[str, str]
    """Layers that stay exact, each with the reason."""

    @property
    def safe(self) -> tuple[str, ...]:
        """Names of the layers whose error is at most the tolerance, at every call."""
        return tuple(verdicts(self.layers)[0])

    @property
    def unsafe(self) -> tuple[str, ...]:
        """Names of the others."""
        return tuple(verdicts(self.layers)[1])

    @property
    def verdict(self) -> Verdict:
        """What each layer is to attend by, as `skeinformer.apply` takes it: the method where it is safe, else exactly.

        After a search, what it has found.
        """
        return verdict_of(self.whole, self.layers, self.left)

    def json(self) -> str:
        """The verdict and the records as text, which `skeinformer.apply` reads."""
        return json.dumps({"verdict": self.verdict.to_dict(), "records": self.records()}, indent=1)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def records(self) -> list[Record]:
        """Flat records of the kinds compare_layer and compare_model."""
        return [*self.layers, self.whole]

    def text(self, *, heads: bool = True) -> str:
        """A table of layers, and of their heads unless told otherwise; then what it says, in sentences."""
        return f"{text_table(self.layers, heads=heads)}\n\n{paragraphs(self.whole, self.layers)}"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        told = self.whole
        size = "" if told.get("budget") is None else f", d = {told['budget']}"
        safe = f"{told.get('layers_safe')} of {told.get('layers')} attention layers safe"
        return f"<Comparison of {told.get('model')} with {told.get('label')}{size}: {safe}; print() shows all of it>"

    def print(self, file: IO[str] | None = None, *, heads: bool = True) -> None:
        """Write the text to a file, or where `print` writes: at most 80 columns wide."""
        print(self.text(heads=heads), file=file)


def verdict_of(whole: Record, records: Sequence[Record], left: Mapping[str, str] | None = None) -> Verdict:
    """What the records of a comparison say of each layer: what a search chose, else the method where it was safe.

    A layer that is called several times has one choice. Calls that stayed exact are named too, for their number.
    """
    own = [record for record in records if record.get("head") is None and of_comparison(record, whole)]
    exact_calls = re.findall(rf"(?:^|; )({CALL}\d+): ", str(whole.get("left") or ""))
    layers = dict.fromkeys((name for name in left or exact_calls if name.startswith(CALL)), Choice())
    safe = verdicts(own)[0]
    for record in own:
        name = str(record["layer"])
        spec = record.get("chosen") or (spec_of(whole) if name in safe else None)
        layers[name] = Choice() if spec is None else choice_of(parse(str(spec)))
    seed = whole.get("seed")
    return Verdict({name: layers[name] for name in sorted(layers, key=_number)}, seed if isinstance(seed, int) else 0)


def spec_of(whole: Record) -> str:
    """The method of a comparison with its options and its budget, as `parse` reads it."""
    options = [str(whole["options"])] if whole.get("options") else []
    options += [] if whole.get("budget") is None else [f"budget={whole['budget']}"]
    return f"{whole['method']}:{','.join(options)}" if options else str(whole["method"])


def choice_of(contender: Contender) -> Choice:
    """What a layer gets by it."""
    budget, options = contender.settings(None)
    return Choice(contender.method, budget, tuple(options.items()))


def _number(name: str) -> int:
    """Of a call; layers with other names come before, in their order."""
    return int(name.removeprefix(CALL)) if name.startswith(CALL) else -1
