"""How near the embeddings of a sketched model are to those of the exact one: cosines, and the neighbours kept."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skeinformer.lab.records import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]


def nearness(rows: "Array", exact: "Array", neighbours: Sequence[int]) -> Record:
    """Cosines with the exact embeddings, mean and least, and the share of the nearest neighbours that are the same.

    rows, exact: (passages, width), of length 1. recall_k of the record is that of the k nearest, for each k given.
    """
    cosine = np.sum(rows.astype(np.float64) * exact, axis=1)
    result: Record = {"cosine": float(cosine.mean()), "cosine_min": float(cosine.min())}
    for k in neighbours:
        result[f"recall_{k}"] = recall(rows, exact, k)
    return result


def recall(rows: "Array", exact: "Array", k: int) -> float:
    """The mean share of the k nearest other rows among `exact` that are also among the k nearest within `rows`."""
    k = min(k, len(rows) - 1)

    def nearest(x: "Array") -> "NDArray[np.int64]":
        similarity = x.astype(np.float64) @ x.T.astype(np.float64)
        np.fill_diagonal(similarity, -np.inf)
        return np.argsort(-similarity, axis=1, kind="stable")[:, :k]

    pairs = zip(nearest(rows), nearest(exact), strict=True)
    return float(np.mean([len(np.intersect1d(ours, theirs)) / k for ours, theirs in pairs]))
