"""A comparison in plain text: at most 80 columns, aligned, no number broken, sentences that say what was found."""

import pytest

from skeinformer.compare import Comparison
from skeinformer.compare.record import Record
from skeinformer.compare.text import SETTINGS, sentences, shared_name, text_table

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


def layer(index: int, error: float, needed: int | None, /, **changed: object) -> Record:
    record: Record = {
        "kind": "compare_layer",
        **COMMON,
        "index": index,
        "layer": f"layer.{index}",
        "head": None,
        "error": error,
        "estimate": error,
        "bound": 2 * error,
        "entropy": 5.0,
        "seconds_exact": 0.1,
        "seconds_sketched": 0.02,
        "ratio": 0.2,
        "ratio_q25": 0.15,
        "ratio_q75": 0.25,
        "safe": error <= 0.3,
        "budget_needed": needed,
        "budget_estimated": 2 * needed if needed else None,
    }
    return {**record, **changed}  # type: ignore[dict-item]


def whole(**changed: object) -> Record:
    record: Record = {
        "kind": "compare_model",
        **COMMON,
        "layers": 2,
        "layers_safe": 1,
        "budget_needed": 512,
        "budget_estimated": 256,
        "output": "logits",
        "cosine": 0.99,
        "cosine_min": 0.9,
        "change": 0.1,
        "pooled_cosine": None,
        "logits_change": 0.05,
        "logits_change_max": 0.5,
        "argmax_agreement": 0.75,
        "ratio": 0.25,
        "ratio_q25": 0.2,
        "ratio_q75": 0.3,
        "left": "layer.2: causal",
    }
    return {**record, **changed}  # type: ignore[dict-item]


def test_sentences() -> None:
    records = [layer(0, 0.5, 512), layer(0, 0.1, 16, head=0), layer(1, 0.2, 32)]
    assert sentences(whole(), records) == [
        "Cluster sketch at d = 64 in BertModel, n = 4,096: the mean cosine between its logits and the exact model's is "
        "0.9900. The sketched model is 4.00 times as fast (time / exact 0.250, 0.200 to 0.300).",
        "Logits change by 0.0500 on average and 0.500 at most; the largest is the same in 75.0 % of the rows.",
        "Safe at d = 64, with an error of at most 0.300: layer.1. Not safe at d = 64, with a larger error: layer.0.",
        "All layers are safe at d = 512 (32 for layer.1; 512 for layer.0). "
        "By the method's own estimate it would be 256.",
        "Exact in both models: layer.2: causal.",
    ]
    slow = whole(ratio=2.0, argmax_agreement=None, budget_needed=None, left="", budget=None)
    assert sentences(slow, [{**r, "budget": None} for r in records])[0].startswith("Cluster sketch in BertModel")
    assert "The sketched model takes 2.00 times as long (time / exact" in sentences(slow, records)[0]
    with pytest.raises(ValueError, match="record field 'ratio' is None, expected a number"):
        sentences(whole(ratio=None), records)


def test_a_layer_of_several_calls_is_named_once_and_safe_if_every_call_is() -> None:
    calls = [layer(0, 0.2, 32), layer(0, 0.5, 512, call=2), layer(1, 0.1, 16, call=1)]
    found = sentences(whole(), calls)
    said = "Safe at d = 64, with an error of at most 0.300: layer.1. Not safe at d = 64, with a larger error: layer.0."
    assert said in found
    assert "(16 for layer.1; 32 for layer.0; 512 for layer.0 (call 2))" in found[3]
    assert [line[:10].rstrip() for line in text_table(calls, heads=False).splitlines()[2:]] == [
        "layer.0",
        "layer.0 #2",
        "layer.1",
    ]


def test_the_table() -> None:
    records = [layer(0, 0.5, 512), layer(0, 0.1, None, head=0, seconds_exact=None, seconds_sketched=None, ratio=None)]
    assert text_table([*records, layer(1, 0.2, 1024, entropy=0.05)]).splitlines() == [
        "              true  est.            exact sketch  time           d  d by",
        "layer   head error error bound nats    ms     ms ratio safe needed  est.",
        "layer.0  all 0.500 0.500  1.00 5.00   100   20.0 0.200   no    512 1,024",
        "layer.0    0 0.100 0.100 0.200 5.00                     yes",
        "",
        "layer.1  all 0.200 0.200 0.400 0.05   100   20.0 0.200  yes  1,024 2,048",
    ]
    assert text_table(records, heads=False).splitlines() == [
        "         true  est.            exact sketch  time           d  d by",
        "layer   error error bound nats    ms     ms ratio safe needed  est.",
        "layer.0 0.500 0.500  1.00 5.00   100   20.0 0.200   no    512 1,024",
    ]


LONG = [
    *(f"encoder.layer.{i}.attention.self" for i in (0, 5, 11)),
    *(f"model.decoder.layers.{i}.{name}" for i in (1, 10) for name in ("self_attn", "multihead_attn", "encoder_attn")),
    "vision_tower.vision_model.encoder.layers.23.self_attn",
    "backbone.stages.2.blocks.17.attention.attention",
    "a_layer_without_a_single_dot_or_number_in_its_very_long_name_which_goes_on_for_ever",
    "transformer12h345.mixer",
]


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("extreme", [False, True])
def test_at_most_80_columns_whatever_the_names_and_numbers(extreme: bool, heads: bool) -> None:
    large = {
        "error": 1.2e-7,
        "estimate": 8.7e-9,
        "bound": 1.1e-8,
        "ratio": 123.4,
        "budget_needed": 131072,
        "budget_estimated": 131072,
    }
    large |= {"seconds_exact": 98.76, "seconds_sketched": 12.34, "entropy": 1.2e-5}
    records = [
        layer(i, 0.5, 512, head=head, layer=name, call=1 + i % 3, **(large if extreme else {}))
        for i, name in enumerate(LONG)
        for head in (None, 0, 11)
    ]
    found = Comparison(tuple(records), whole(left="; ".join(f"{name}: causal" for name in LONG[:9])), {})
    text = found.text(heads=heads)
    assert max(len(line) for line in text.splitlines() if line.split(" #")[0] not in LONG) <= 80
    shown = text_table(records, heads=heads)
    assert all(name in shown for name in LONG)  # whole: none is cut
    numbers = [line for line in shown.splitlines() if line.rstrip().endswith(("1,024", "131,072"))]
    assert len(numbers) == len(records) // (1 if heads else 3)
    assert len({len(line) for line in numbers}) == 1  # every row ends in the last column
    if extreme:
        assert all("1.2e-07" in line and "98760" in line and line.endswith("131,072 131,072") for line in numbers)


def test_what_names_share_is_said_once() -> None:
    records = [layer(i, 0.5, 512, layer=f"encoder.layer.{i}.attention.self", call=1 + i % 2) for i in range(12)]
    lines = text_table(records, heads=False).splitlines()
    assert lines[0] == "layers: encoder.layer.*.attention.self"
    assert [line.split(" 0.5")[0].rstrip() for line in lines[3:]] == [f"{i}{' #2' if i % 2 else ''}" for i in range(12)]
    said = sentences(whole(), records)
    assert "Not safe at d = 64, with an error above 0.300: 0, 1, 2, 3, 4, 5, 6, 7 and 4 more." in said
    assert "A layer's name is short for encoder.layer.*.attention.self, where it stands for the *." in said


@pytest.mark.parametrize(
    ("names", "shared", "rest"),
    [
        (("a.0.b", "a.1.b"), "a.*.b", ["0", "1"]),
        (("a.0.b", "a.1.0.b"), "a.*.b", ["0", "1.0"]),
        (("a.0", "b.0"), "*.0", ["a", "b"]),
        (("a.a.a", "a.a"), "a.*", ["a.a", "a"]),
        (("a.0", "b.1"), "", ["a.0", "b.1"]),
        (("alone.0",), "", ["alone.0"]),
        (("call 0", "call 1"), "", ["call 0", "call 1"]),
    ],
)
def test_shared_names(names: tuple[str, ...], shared: str, rest: list[str]) -> None:
    assert shared_name(names) == (shared, dict(zip(names, rest, strict=True)))


def test_the_settings_of_a_comparison_are_those_of_its_records() -> None:
    assert set(SETTINGS) <= COMMON.keys()
