"""Centers of clusters, and which of them each key is nearest to, in the metric of the queries."""

from types import ModuleType

import torch
from torch import Tensor

from skeinformer.attention.rows import Rows, weighted_mean

METRIC_QUERIES = 4  # queries per dimension that the metric is made of
RIDGE = 0.1  # of the metric, in its mean eigenvalue: what no query asks for decides between keys that are else alike
LEAST = 1e-6  # of the metric's mean eigenvalue, where all queries are alike


def query_metric(queries: Tensor, live: Tensor | None) -> Tensor:
    """Return the covariance of the live queries with a ridge, up to a factor: (B, m, p) -> (B, p, p)."""
    if live is None:
        around = queries - queries.mean(1, keepdim=True)
    else:
        live = live.expand(len(queries) // len(live), *live.shape[1:]) if live.dim() == 2 else live
        weight = live.reshape(len(queries), -1, 1).to(queries.dtype)  # (B, m, 1)
        around = (queries - weighted_mean(queries, weight)) * weight
    around = around / around.abs().amax((1, 2), keepdim=True).clamp_(min=torch.finfo(around.dtype).tiny)
    covariance = torch.bmm(around.mT, around)  # of numbers up to 1
    diagonal = covariance.diagonal(dim1=1, dim2=2)
    diagonal.add_(diagonal.mean(-1, keepdim=True).clamp_(min=LEAST), alpha=RIDGE)
    return covariance


def find_centers(
    points: Tensor, live: Tensor | None, d: int, num_steps: int, metric: Tensor, steps: ModuleType
) -> Tensor:
    """Move the first d of points (b, h, m, p), best first, by Lloyd steps (1982): (B, d, p). O(m d p) a step."""
    (b, h, m, p), num_heads = points.shape, len(metric)
    weight = points.new_ones(num_heads * m, 1) if live is None else live.reshape(-1, 1).to(points.dtype)
    points = points if live is None else points * weight.view(b, h, m, 1)
    centers = points[:, :, :d].reshape(num_heads, d, p)
    first = torch.arange(0, num_heads * d, d, device=points.device).view(b, h, 1)  # of each head's clusters
    for _ in range(num_steps):
        row = (steps.nearest_center(points, *linear_scores(centers, metric)) + first).view(-1)
        sums = points.new_zeros(num_heads * d, p).index_add_(0, row, points.reshape(-1, p))
        total = points.new_zeros(num_heads * d, 1).index_add_(0, row, weight)
        centers = torch.where(total > 0, sums / total, centers.reshape(-1, p)).view(num_heads, d, p)
    return centers


def linear_scores(centers: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return directions, (B, d, p), and offsets, (B, d, 1): k . direction_c - offset_c / 2 is largest for the nearest.

    The nearest center has the largest k . Sigma (c - m) - (c + m) . Sigma (c - m) / 2 for any m, Sigma the metric. With
    the mean center, what keys have in common does not cost digits.
    """
    mean = centers.mean(1, keepdim=True)  # (B, 1, p)
    around = centers - mean
    direction = torch.bmm(around, metric)
    size = (around * direction).sum(-1, keepdim=True).amax(1, keepdim=True)  # (B, 1, 1)
    direction = direction / size.clamp_(min=torch.finfo(size.dtype).tiny ** 0.5)
    return direction, (direction * (centers + mean)).sum(-1, keepdim=True)


def own_clusters(rows: Rows, assignment: Tensor) -> Tensor:
    """Give each of the rows that is on this rank the cluster of its own rank, and leave the assignment of others."""
    number = torch.arange(1, rows.index.shape[-1] + 1, device=assignment.device).expand(rows.index.shape)
    number = number if rows.here is None else number.where(rows.here, 0)
    own = torch.zeros_like(assignment).scatter_add_(-1, rows.index, number)
    return torch.where(own > 0, own - 1, assignment)
