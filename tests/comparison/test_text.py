"""A comparison in plain text: at most 100 columns, aligned, no number broken, sentences that name the worst head."""

import pytest

from skeinformer.comparison import Comparison
from skeinformer.comparison.measure import Record
from skeinformer.comparison.result import sentences, text_table

COMMON: Record = {
    "model": "BertModel",
    "text": "<a text>",
    "method": "cluster",
    "options": "",
    "label": "Cluster sketch",
    "budget": 64,
    "tolerance": 0.3,
    "seed": 0,
    "started": "2026-01-02T03:04:05.678+00:00",
    "n": 4096,
}


def layer(index: int, error: float, /, **changed: object) -> Record:
    record: Record = {
        "kind": "compare_layer",
        **COMMON,
        "index": index,
        "layer": f"layer.{index}",
        "head": None,
        "error": error,
        "estimate": error,
        "bound": 2 * error,
        "seconds_exact": 0.1,
        "seconds_sketched": 0.02,
        "ratio": 0.2,
        "ratio_q25": 0.15,
        "ratio_q75": 0.25,
        "safe": error <= 0.3,
    }
    return {**record, **changed}  # type: ignore[dict-item]


def head(index: int, number: int, error: float) -> Record:
    times = dict.fromkeys(("seconds_exact", "seconds_sketched", "ratio", "ratio_q25", "ratio_q75"))
    return layer(index, error, head=number, **times)


def whole(**changed: object) -> Record:
    record: Record = {
        "kind": "compare_model",
        **COMMON,
        "layers": 2,
        "layers_safe": 1,
        "error_worst": 0.5,
        "error_median": 0.2,
        "output": "logits",
        "cosine": 0.99,
        "cosine_min": 0.9,
        "change": 0.1,
        "logits_change": 0.05,
        "logits_change_max": 0.5,
        "argmax_agreement": 0.75,
        "ratio": 0.25,
        "ratio_q25": 0.2,
        "ratio_q75": 0.3,
        "left": "layer.2: causal",
    }
    return {**record, **changed}  # type: ignore[dict-item]


def test_sentences_name_the_worst_head_and_the_ratio() -> None:
    heads = [head(0, 0, 0.1), head(0, 1, 0.6), head(1, 0, 0.2), head(1, 1, 0.15)]
    records = [layer(0, 0.25, safe=False), *heads[:2], layer(1, 0.2), *heads[2:]]
    first, change, worst, *_, exact = sentences(whole(), records)
    assert "d = 64" in first
    assert "4.00 times as fast" in first
    assert "75.0%" in change
    assert "head 1 of layer.0" in worst
    assert "layer.2: causal" in exact
    assert "2.00 times as long" in sentences(whole(ratio=2.0, argmax_agreement=None, left="", budget=None), records)[0]
    with pytest.raises(ValueError, match="'ratio'"):
        sentences(whole(ratio=None), records)


def test_a_layer_of_several_calls_is_named_once_and_safe_if_every_call_is() -> None:
    calls = [layer(0, 0.2), layer(0, 0.5, call=2), layer(1, 0.1, call=1)]
    assert sentences(whole(), calls)[2:4] == [
        "Safe at d = 64, no head has an error above 0.300: layer.1.",
        "Not safe at d = 64, a head has an error above 0.300: layer.0.",
    ]
    rows = text_table(calls, heads=False).splitlines()[2:]
    assert [row[:17].rstrip() for row in rows] == ["layer.0", "layer.0 (call 2)", "layer.1"]


LONG = [
    *(f"encoder.layer.{i}.attention.self" for i in (0, 5, 11)),
    *(f"model.decoder.layers.{i}.{name}" for i in (1, 10) for name in ("self_attn", "multihead_attn", "encoder_attn")),
    "vision_tower.vision_model.encoder.layers.23.self_attn",
    "a_layer_without_a_single_dot_or_number_in_its_very_long_name_which_goes_on_and_on_until_it_ends",
]


@pytest.mark.parametrize("heads", [True, False])
def test_at_most_100_columns_whatever_the_names_and_numbers(heads: bool) -> None:
    large = {"error": 1.2e-7, "estimate": 8.7e-9, "bound": 1.1e-8, "ratio": 123.4, "seconds_exact": 98.76}
    records = [
        layer(i, 0.5, head=number, layer=name, call=1 + i % 3, **(large if i % 2 else {}))
        for i, name in enumerate(LONG)
        for number in (None, 0, 11)
    ]
    comparison = Comparison(tuple(records), whole(left="; ".join(f"{name}: causal" for name in LONG)), {})
    assert max(map(len, comparison.text(heads=heads).splitlines())) <= 100
    rows = [line for line in text_table(records, heads=heads).splitlines()[2:] if line]
    assert len(rows) == len(records) // (1 if heads else 3)
    assert len({len(line) for line in rows}) == 1  # every row ends in the last column
    assert rows[0].startswith(LONG[0])
    assert rows[-1].startswith("...")
    assert " (call 2)" in rows[-1]
