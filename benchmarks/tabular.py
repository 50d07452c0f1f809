"""What a sketch does to TabPFN on a made-up table: `python -m benchmarks.tabular`.

The training rows attend to each other by the sketch, the test rows to the training rows exactly. The table has 12
features and 5 classes; the same rows for all variants.
"""

import time
from typing import Any

import numpy as np
import torch
import tyro

from benchmarks.models.tabpfn import load_tabpfn, predict
from skeinformer import convert

VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "tolerance 0.1": {"tolerance": 0.1},
    "tolerance 0.2": {"tolerance": 0.2},
    "16 clusters": {"method": "cluster"},
    "128 clusters": {"method": "cluster", "quality": "accurate"},
}


def made_up_table(rows: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return features, (rows, 12), and classes, (rows), of which a nonlinear function decides."""
    source = np.random.default_rng(seed)
    features, weights = source.standard_normal((rows, 12)), source.standard_normal((12, 5))
    return features, (np.tanh(features @ weights) + np.sin(2 * features[:, :5]) / 2).argmax(1)


@torch.no_grad()
def main(rows: int = 8192, test_rows: int = 1024, seeds: tuple[int, ...] = (0, 1), threads: int = 2) -> None:
    """Print accuracy and time of the whole model.

    Args:
        rows: Training rows.
        test_rows: Test rows.
        seeds: One table for each.
        threads: Threads of torch.
    """
    torch.set_num_threads(threads)
    print(f"{rows} training rows\n{'':16}" + "".join(f"  table {seed}: right %, seconds" for seed in seeds))
    tables = [made_up_table(rows + test_rows, seed) for seed in seeds]
    for name, options in VARIANTS.items():
        cells = []
        for features, classes in tables:
            model = load_tabpfn()
            if options:
                convert(model, **options)
            start = time.perf_counter()
            probabilities = predict(model, features[:rows], classes[:rows], features[rows:])
            seconds = time.perf_counter() - start
            right = 100 * (probabilities.argmax(1) == classes[rows:]).mean()
            cells.append(f"{right:18.1f} {seconds:8.1f}")
        print(f"{name:16}" + "  ".join(cells), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
