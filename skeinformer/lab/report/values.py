"""What the fields of records may hold, so that a record from a stranger is a page or an error that names its field."""

from collections.abc import Sequence
from pathlib import Path

from skeinformer.lab.fields import LARGEST
from skeinformer.lab.records import Record, Value

# names of fields; a field that stands nowhere here may hold anything
NAMES = {
    "count": """
    n budget batch micro_batch accumulation steps max_steps step test_examples valid_examples heads
    head_dim trials rounds passages parameters processes cores threads
""",
    "place": """
    seed layer head trial best_step min_tokens examples_seen
""",
    "share": """
    test_accuracy valid_accuracy majority recall_1 recall_3 recall_10
""",
    "amount": """
    seconds cpu_seconds seconds_total seconds_per_thousand_steps step_seconds peer_seconds
    tokens_per_second ratio forward both forward_ratio both_ratio peak_bytes both_peak_bytes
    peer_peak_bytes flops executed_flops matmul_flops peak_fraction spectral spectral_relative
    spectral_to_vmean frobenius frobenius_relative row grad_query grad_key grad_value estimate
    estimate_ratio entropy loss valid_loss test_loss learning_rate memory_budget
""",
    "number": """
    cosine cosine_min cosine_se
""",
    "text": """
    kind method options label task recipe overrides model text weights mode dtype peer part reason data
    stopped started command commit cpu gpu torch python skeinformer device precision
""",
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}
SPREADS = ("_q25", "_q75", "_se")  # of an amount, which are amounts


def check_values(records: Sequence[Record], where: Path | str) -> None:
    """A ValueError that names `where`, the record and the field that holds what such a field cannot."""
    for number, record in enumerate(records, start=1):
        for name, value in record.items():
            if value is not None and (expected := _expected(name, value)):
                shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
                raise ValueError(f"{where}, record {number}, field {name!r} is {shown}, expected {expected}")


def _expected(name: str, value: Value) -> str:
    """What a field of this name holds, where this is not a value of it; else ""."""
    stem = next((name.removesuffix(end) for end in SPREADS if name.endswith(end)), "")
    kind = KINDS.get(name) or ("amount" if KINDS.get(stem) == "amount" else "")
    if kind == "text":
        return "" if isinstance(value, str) else "a text"
    if not kind:
        return ""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    if kind in ("count", "place"):
        least = 1 if kind == "count" else 0
        fits = number is not None and number.is_integer() and least <= number <= LARGEST
        return "" if fits else f"a whole number of at least {least}"
    if kind == "share":
        return "" if number is not None and 0 <= number <= 1 else "a number from 0 to 1"
    if kind == "amount":
        return "" if number is not None and number >= 0 else "a number of at least 0"
    return "" if number is not None else "a number"
