"""Time and memory beside SDPA: what a record says, what is measured again, and where methods are left out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention import METHODS
from skeinformer.lab.contender import parse
from skeinformer.lab.measure.crossing import crossover, growth_exponent
from skeinformer.lab.measure.speed import (
    IDENTITY,
    Entry,
    InputSizes,
    bench_records,
    both_run,
    contender_entry,
    default_contenders,
    expected_seconds,
    forward_run,
    matmul_peak,
    random_inputs,
    sdpa_entry,
    timed_rounds,
)
from skeinformer.lab.records import Record, check, key_of

TINY: dict[str, Any] = {"batch": 1, "heads": 1, "head_dim": 8, "rounds": 3}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of a millisecond and a small product for the peak: what is tested here is no time."""
    monkeypatch.setattr("skeinformer.lab.measure.speed.SHORTEST", 0.001)
    monkeypatch.setattr("skeinformer.lab.measure.speed.PEAK_SIZE", 64)


def slow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Twenty times the work of SDPA."""
    return torch.stack([F.scaled_dot_product_attention(q, k, v) for _ in range(20)]).mean(0)


def fake(method: str, call: Any, multiply_adds: int = 1000) -> Entry:
    return Entry(method, method, lambda n: call, lambda n, backward: multiply_adds * n)


FAST, SLOW = fake("fast", lambda q, k, v: v + q), fake("slow", slow)


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_a_ratio_above_one_is_faster_than_sdpa(mode: str) -> None:
    rows = {str(r["method"]): r for r in bench_records([FAST, SLOW], [256], modes=[mode], **TINY)}
    assert list(rows) == ["sdpa", "fast", "slow"]
    assert rows["sdpa"]["ratio"] == 1
    for name, faster in (("fast", True), ("slow", False)):
        ratio, seconds, reference = (float(x or 0) for x in (*_fields(rows[name]), rows["sdpa"]["seconds"]))
        assert (ratio > 1) == (seconds < reference) == faster


def _fields(record: Record) -> tuple[Any, Any]:
    return record["ratio"], record["seconds"]


def test_what_a_record_holds() -> None:
    entries = [contender_entry(parse(spec), 8, 16) for spec in ("skeinformer:num_pilots=4", "vmean", "reformer")]
    steps: list[float] = []
    rows = list(bench_records(entries, [128, 64], **TINY, on_step=lambda detail, done: steps.append(done)))
    assert [(r["n"], r["mode"], r["method"]) for r in rows] == [
        (n, mode, method)
        for n in (64, 128)
        for mode in ("forward", "both")
        for method in ("sdpa", "skeinformer", "vmean", "reformer")
    ]
    assert steps == sorted(steps)
    assert 0 <= steps[0] <= steps[-1] <= 1
    peaks: dict[Any, Any] = {}
    for row in rows:
        check(row)
        values: dict[str, Any] = dict(row)
        assert (values["kind"], values["batch"], values["heads"], values["head_dim"]) == ("bench", 1, 1, 8)
        assert values["threads"] == torch.get_num_threads()
        assert values["rounds"] == 3
        for name in ("seconds", "ratio"):
            assert 0 < values[f"{name}_q25"] <= values[name] <= values[f"{name}_q75"]
        share = values["executed_flops"] / values["seconds"] / values["matmul_flops"]
        assert values["peak_fraction"] == pytest.approx(share)
        assert values["budget"] == (16 if values["method"] in ("skeinformer", "reformer") else None)
        peaks[values["method"], values["n"], values["mode"]] = values["peak_bytes"]
    sdpa = {r["mode"]: r["flops"] for r in rows if r["method"] == "sdpa" and r["n"] == 128}
    assert sdpa == {"forward": 4 * 128**2 * 8, "both": 14 * 128**2 * 8}
    assert rows[1]["options"] == "num_pilots=4"
    assert rows[1]["label"] == "Skeinformer, 4 pilots"
    assert all(peaks[method, 64, "forward"] < peaks[method, 128, "forward"] for method in ("sdpa", "vmean", "reformer"))
    assert peaks["sdpa", 128, "forward"] < peaks["sdpa", 128, "both"]


def test_memory_beyond_the_inputs() -> None:
    (row,) = [r for r in bench_records([FAST], [64], modes=["forward"], **TINY) if r["method"] == "fast"]
    assert row["peak_bytes"] == 64 * 8 * 4


def test_the_batch_of_long_sequences() -> None:
    options = {**TINY, "batch": 3, "long_batch": 2, "long_from": 64, "modes": ["forward"]}
    rows = list(bench_records([FAST], [32, 64], **options))
    assert [(r["n"], r["batch"]) for r in rows if r["method"] == "fast"] == [(32, 3), (64, 2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    entries = [contender_entry(parse("linformer"), 8, 16)]
    rows = list(bench_records(entries, [64], dtype=dtype, **{**TINY, "rounds": 1}))
    assert {r["dtype"] for r in rows} == {dtype}
    assert len(rows) == 4


def test_what_is_known_is_not_measured_again() -> None:
    known = list(bench_records([FAST], [32, 64], **TINY))

    def never(n: int) -> Any:
        raise AssertionError("made again")

    assert list(bench_records([FAST._replace(make=never)], [32, 64], known=known, **TINY)) == []
    more = list(bench_records([FAST._replace(make=never), SLOW], [32, 64], known=known, **TINY))
    assert [(r["n"], r["mode"], r["method"]) for r in more] == [
        (n, mode, "slow") for n in (32, 64) for mode in ("forward", "both")
    ]
    assert all(r["ratio"] is not None for r in more)  # SDPA ran beside it
    other = list(bench_records([FAST], [32], known=known, **{**TINY, "batch": 2}))
    assert len(other) == 4
    assert not {key_of(r, IDENTITY) for r in other} & {key_of(r, IDENTITY) for r in known}


def test_identity_is_of_the_settings() -> None:
    record: Record = dict.fromkeys(IDENTITY, 1)
    assert key_of({**record, "seconds": 1.0, "started": "now"}, IDENTITY) == key_of(record, IDENTITY)
    for name in IDENTITY:
        assert key_of({**record, name: 2}, IDENTITY) != key_of(record, IDENTITY)


def test_methods_that_would_take_too_long_are_left_out_with_the_reason() -> None:
    skipped: list[tuple[str, str]] = []
    options = {**TINY, "modes": ["forward"], "max_seconds": 1e-9}
    known = list(bench_records([FAST], [32], **TINY))
    rows = list(bench_records([FAST], [32, 64], known=known, **options, on_skip=lambda *skip: skipped.append(skip)))
    assert rows == []
    assert [what for what, _ in skipped[-2:]] == ["SDPA at n = 64, forward", "fast at n = 64, forward"]
    assert all("more than max_seconds = 1e-09" in reason for _, reason in skipped)


def test_a_first_length_whose_products_alone_take_too_long_is_left_out() -> None:
    """SDPA at a million tokens takes hours, and nothing shorter was timed that would tell."""

    def never(n: int) -> Any:
        raise AssertionError("made")

    hopeless = Entry("hopeless", "hopeless", never, lambda n, backward: 10**18)
    skipped: list[str] = []
    rows = list(bench_records([FAST, hopeless], [32], **TINY, on_skip=lambda what, reason: skipped.append(what)))
    assert {r["method"] for r in rows} == {"sdpa", "fast"}
    assert skipped == ["hopeless at n = 32, forward", "hopeless at n = 32, both"]


def test_without_sdpa_there_is_no_ratio() -> None:
    known = [{**r, "seconds": 100.0} for r in bench_records([], [32], modes=["forward"], **TINY)]
    (row,) = bench_records([FAST], [64], modes=["forward"], known=known, **TINY)
    assert row["method"] == "fast"
    assert row["ratio"] is row["ratio_q25"] is row["ratio_q75"] is None


def test_expected_seconds() -> None:
    """From the greatest smaller length; by FLOPs, or by the number of tokens where that grows more."""
    settings: Record = dict.fromkeys(IDENTITY, 1)
    history: list[Record] = [
        {**settings, "n": n, "batch": 4, "seconds": seconds, "flops": flops}
        for n, seconds, flops in ((100, 1.0, 10**6), (200, 3.0, 4 * 10**6), (800, 1e9, 1))
    ]
    asked: Record = {**settings, "n": 400, "batch": 4}
    assert expected_seconds({**asked, "flops": 16 * 10**6}, history) == pytest.approx(12.0)
    assert expected_seconds({**asked, "flops": 0}, history) == pytest.approx(6.0)
    assert expected_seconds({**asked, "batch": 1, "flops": 4 * 10**6}, history) == pytest.approx(3.0)
    assert expected_seconds({**asked, "n": 100, "flops": 1}, history) is None
    assert expected_seconds({**asked, "method": 2, "flops": 1}, history) is None


def test_crossover() -> None:
    assert crossover([256, 1024], [0.5, 2.0]) == pytest.approx(512)
    assert crossover([1024, 256], [2.0, 0.5]) == pytest.approx(512)
    assert crossover([256, 512, 1024], [1.5, 2.0, 4.0]) == 256
    assert crossover([256, 512, 1024], [0.1, 0.2, 0.9]) is None
    assert crossover([256, 512, 1024], [2.0, 0.5, 2.0]) == pytest.approx(512 * math.sqrt(2))  # for good
    assert crossover([256, 512, 1024], [0.5, 1.0, 2.0]) == pytest.approx(512)
    assert crossover([], []) is None


def test_growth_exponent() -> None:
    assert growth_exponent(1024, 1.0, 4096, 16.0) == pytest.approx(2)
    assert growth_exponent(1024, 3.0, 2048, 6.0) == pytest.approx(1)
    assert growth_exponent(1024, 3.0, 2048, 3.0) == 0


def test_short_calls_are_repeated_and_divided() -> None:
    calls: dict[str, int] = {"short": 0, "long": 0}

    def count(name: str, work: int) -> None:
        calls[name] += 1
        sum(range(work))

    runs = {"short": lambda: count("short", 100), "long": lambda: count("long", 2_000_000)}
    seconds = timed_rounds(runs, 4)
    assert {name: len(values) for name, values in seconds.items()} == {"short": 4, "long": 4}
    repeats, rest = divmod(calls["short"] - 1, 4)
    assert rest == 0
    assert repeats > 1
    assert calls["long"] < calls["short"]
    assert max(seconds["short"]) < min(seconds["long"])


def test_runs_compute_outputs_and_all_gradients() -> None:
    q, k, v = random_inputs(InputSizes(16, 2, 2, 4))
    weight = torch.ones(4, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v) * weight

    output: Any = forward_run(attend, (q, k, v))()
    assert output.shape == (2, 2, 16, 4)
    assert not output.requires_grad
    gradients: Any = both_run(attend, (q, k, v), [weight])()
    assert [tuple(g.shape) for g in gradients] == [(2, 2, 16, 4)] * 3 + [(4,)]
    shared: Any = both_run(attend, (q, q, v))()  # one gradient for a tensor that is given twice
    assert len(shared) == 2
    unused: Any = both_run(lambda q, k, v: 2 * v, (q, k, v))()
    assert [g is None for g in unused] == [True, True, False]


def test_inputs_are_those_of_the_seed() -> None:
    sizes = InputSizes(16, 1, 2, 4)
    first, again, other = random_inputs(sizes), random_inputs(sizes), random_inputs(sizes, seed=1)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_the_default_contenders() -> None:
    contenders = default_contenders()
    assert {c.method for c in contenders} == {name for name, row in METHODS.items() if row.same_as is None}
    assert [c.options_text for c in contenders if c.method == "skeinformer"] == ["num_pilots=256", "num_pilots=32"]
    assert [c.spec for c in default_contenders(["skeinformer", "vmean"], [8])] == ["skeinformer:num_pilots=8", "vmean"]
    given = ["skeinformer:row_norm=simple"]
    assert [c.spec for c in default_contenders(given, [8])] == given  # options given are left as they are
    with pytest.raises(ValueError, match="did you mean 'skeinformer'"):
        default_contenders(["skienformer"])


def test_matmul_peak_is_a_speed() -> None:
    assert matmul_peak(torch.float32, calls=1) > 0


def test_sdpa_is_counted_as_exact_attention() -> None:
    assert sdpa_entry(8).multiply_adds(32, False) == 2 * 32**2 * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [0]}, "length must be at least 1"),
        ({"modes": []}, "modes is empty"),
        ({"modes": ["backward"]}, "mode='backward' is not known"),
        ({"dtype": "float8"}, "dtype='float8' is not known"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"long_batch": 0}, "long_batch must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"max_seconds": 0.0}, "max_seconds must be positive"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(bench_records([FAST], **{"lengths": [32], **TINY, **options}))
