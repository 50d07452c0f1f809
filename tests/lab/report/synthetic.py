"""Records as `skein approx` and `skein bench` write them, made up: errors that fall with d, times that grow with n."""

from skeinformer.attention import METHODS
from skeinformer.lab.contender import OFFERED, Contender, has_budget, parse
from skeinformer.lab.records import Record
from skeinformer.sketch import SKETCHES

MACHINE: Record = {
    "started": "2026-01-02T03:04:05+00:00",
    "cpu": "A & B <processor>",
    "cores": 2,
    "threads": 2,
    "torch": "2.0",
    "python": "3.11",
    "commit": "abc123",
    "command": "skein approx --out 'x y'",
}
FIGURE_1 = ("vmean", "informer", "linformer", "skeinformer")
MANY = (
    *METHODS,
    "skeinformer:num_pilots=32",
    *(f"sketched:sketch={name}" for name in SKETCHES),
)
# spectral error at d = 16, where it is not made from the method's place in METHODS; it falls with the root of d
ERRORS = {"softmax": 1e-6, "vmean": 0.4, "informer": 0.32, "linformer": 4.0, "skeinformer": 0.25}


def approx_records(
    specs: tuple[str, ...] = FIGURE_1,
    *,
    lengths: tuple[int, ...] = (1024, 4096),
    budgets: tuple[int, ...] = (8, 16, 32, 64, 128, 256),
    weights: tuple[str, ...] = ("initialized", "pretrained"),
    layers: tuple[int, ...] = (0,),
    trials: int = 2,
) -> list[Record]:
    """Trials of every contender at every d, and their times."""
    rows: list[Record] = []
    for spec in specs:
        contender = parse(spec)
        for n in lengths:
            for d in budgets if has_budget(contender) else (None,):
                rows.append(time_record(contender, n, d))
                for kind in weights:
                    for layer in layers:
                        rows += [trial_record(contender, n, d, kind, layer, trial) for trial in range(trials)]
    return rows


def names(contender: Contender, n: int, d: int | None) -> Record:
    return {
        "model": "MiniLM",
        "text": "a text",
        "seed": 0,
        "n": n,
        "heads": 12,
        "head_dim": 32,
        "method": contender.method,
        "options": contender.options_text,
        "label": contender.label,
        "budget": d,
        **MACHINE,
    }


def trial_record(contender: Contender, n: int, d: int | None, weights: str, layer: int, trial: int) -> Record:
    place = list(OFFERED).index(contender.method) + 0.37 * len(contender.options_text)
    error = ERRORS.get(contender.spec, 0.1 + place * 0.613 % 1)
    error *= (16 / d) ** 0.5 if d else 1
    error *= (1 + 0.1 * trial) * (1 + 0.1 * layer) * (0.3 if weights == "initialized" else 1)
    exact = contender.method == "softmax"
    return {
        "kind": "approx",
        **names(contender, n, d),
        "weights": weights,
        "layer": layer,
        "trial": trial,
        "spectral": error * (n / 64) ** 0.5,
        "spectral_relative": error,
        "frobenius": error * n**0.5,
        "frobenius_relative": error * 1.2,
        "row": error * 2,
        "cosine": 1 - min(0.9, error / 2),
        "grad_query": None if trial > 1 else error * 3,
        "grad_key": None if trial > 1 else error * 2,
        "grad_value": None if trial > 1 else error,
        "estimate": error * 1.25 if contender.method.startswith("skeinformer") else None,
        "estimate_ratio": 1.04 if contender.method.startswith("skeinformer") and not exact else None,
    }


def time_record(contender: Contender, n: int, d: int | None) -> Record:
    place = list(OFFERED).index(contender.method) + len(contender.options_text)
    ratio = 1.0 if contender.method == "softmax" else (0.02 + (d or 8) / n * (1 + place * 0.37 % 2))
    times: Record = {}
    for name, factor in (("forward", 1.0), ("both", 0.8)):
        for suffix, share in (("", 1.0), ("_q25", 0.9), ("_q75", 1.2)):
            times[f"{name}{suffix}"] = 1e-9 * n * n * ratio * factor * share
            times[f"{name}_ratio{suffix}"] = ratio * factor * share
    return {
        "kind": "approx_time",
        **names(contender, n, d),
        "weights": "initialized",
        "layer": 0,
        "batch": 1,
        **times,
        "peak_bytes": int(1e5 + 100 * n * ratio),
        "both_peak_bytes": int(2e5 + 300 * n * ratio),
        "flops": int(64 * n * n * ratio),
    }


def bench_records(
    specs: tuple[str, ...] = FIGURE_1, *, lengths: tuple[int, ...] = (1024, 4096, 16384), budget: int = 256
) -> list[Record]:
    """SDPA, quadratic, and methods that are linear and overtake it."""
    rows: list[Record] = []
    for mode, factor in (("forward", 1.0), ("both", 3.5)):
        for n in lengths:
            batch = 4 if n < 16384 else 1
            for i, spec in enumerate(("sdpa", *specs)):
                contender = None if spec == "sdpa" else parse(spec)
                exact = n * n * 1e-9 * batch * factor
                time = exact if contender is None else (1 + 0.31 * i) * n * 1e-6 * batch * factor
                rows.append(
                    {
                        "kind": "bench",
                        "method": "sdpa" if contender is None else contender.method,
                        "options": "" if contender is None else contender.options_text,
                        "label": "SDPA" if contender is None else contender.label,
                        "n": n,
                        "batch": batch,
                        "heads": 2,
                        "head_dim": 32,
                        "budget": budget if contender is not None and has_budget(contender) else None,
                        "dtype": "float32",
                        "mode": mode,
                        "seconds": time,
                        "seconds_q25": time * 0.9,
                        "seconds_q75": time * 1.2,
                        "ratio": exact / time,
                        "ratio_q25": exact / time * 0.9,
                        "ratio_q75": exact / time * 1.1,
                        "peak_bytes": int(n * 1000 * factor * (1 + 0.2 * i)) * batch,
                        "flops": int(n * n * 64) if contender is None else n * 64 * 256,
                        "peak_fraction": 0.4 / (1 + i),
                        "rounds": 7,
                        **MACHINE,
                    }
                )
    return rows


def embedding_records(
    specs: tuple[str, ...] = ("softmax", "vmean", "skeinformer:num_pilots=32", "cluster"),
    *,
    budgets: tuple[int, ...] = (64, 256),
    n: int = 4096,
) -> list[Record]:
    """Embeddings that come nearer with d, and take longer."""
    rows: list[Record] = []
    for i, spec in enumerate(specs):
        contender = parse(spec)
        for d in budgets if has_budget(contender) else (None,):
            distance = 0.0 if spec == "softmax" else 0.5 / (1 + i) / (1 + (d or 0)) ** 0.3
            ratio = 1.0 if spec == "softmax" else 0.3 + (d or 0) / 2000 + 0.01 * i
            rows.append(
                {
                    "kind": "embeddings",
                    **names(contender, n, d),
                    "passages": 200,
                    "cosine": 1 - distance,
                    "cosine_min": 1 - 1.5 * distance,
                    "recall_1": 1 - distance,
                    "recall_10": 1 - distance / 2,
                    "seconds": 4 * ratio,
                    "seconds_q25": 3.9 * ratio,
                    "seconds_q75": 4.2 * ratio,
                    "ratio": ratio,
                    "ratio_q25": ratio * 0.9,
                    "ratio_q75": ratio * 1.1,
                    "rounds": 7,
                }
            )
    return rows


def finetune_records(
    specs: tuple[str, ...] = ("softmax", "skeinformer:num_pilots=32", "cluster"), *, seeds: tuple[int, ...] = (0, 1)
) -> list[Record]:
    """Two seeds of every method."""
    rows: list[Record] = []
    for i, spec in enumerate(specs):
        contender = parse(spec)
        for seed in seeds:
            ratio = 1 - 0.1 * i
            rows.append(
                {
                    "kind": "finetune",
                    **names(contender, 1024, 128 if has_budget(contender) else None),
                    "seed": seed,
                    "min_tokens": 512,
                    "steps": 200,
                    "batch": 8,
                    "learning_rate": 5e-5,
                    "test_accuracy": 0.9 - 0.02 * i + 0.01 * seed,
                    "test_examples": 500,
                    "seconds": 1000 * ratio + 100 * seed,
                    "ratio": ratio,
                    "ratio_q25": ratio * 0.9,
                    "ratio_q75": ratio * 1.1,
                }
            )
    return rows
