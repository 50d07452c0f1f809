"""How a paddle and a disk look on a grid of pixels: which pixels they cover, and how bright.

Coordinates are (row, column) in pixels; the centre of a pixel is a pair of whole numbers. A picture here is a square
window of 2 reach + 1 pixels around its own origin.
"""

import numpy as np
from numpy.typing import NDArray

LANCZOS_LOBES = 3
TOLERANCE = 1e-9  # a pixel whose centre lies on an edge, but for rounding, is inside


def circle(radius: float) -> NDArray[np.int64]:
    """Return the pixels nearest to a circle around the origin, (count, 2), each once, by angle."""
    angles = np.linspace(-np.pi, np.pi, 64 * max(1, round(radius)), endpoint=False)
    pixels = np.unique(np.rint(radius * unit(angles)).astype(np.int64), axis=0)
    return pixels[np.argsort(angle(pixels))]


def unit(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return unit vectors (row, column) of angles that begin at the column axis, (..., 2)."""
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1)


def angle(vectors: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the angles of vectors (row, column), in (-pi, pi]."""
    return np.arctan2(vectors[..., 0], vectors[..., 1])


def distance(points: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how far points (..., 2) are from the segment between `start` and `end`."""
    along = end - start
    share = np.clip((points - start) @ along / max(float(along @ along), TOLERANCE), 0.0, 1.0)
    away = points - start - share[..., None] * along
    return np.hypot(away[..., 0], away[..., 1])


def window(reach: int, scale: int = 1) -> NDArray[np.float64]:
    """Return coordinates of a window's pixels, (side, side, 2), or of the pixels of a grid `scale` times finer."""
    ticks = np.arange(-reach * scale, reach * scale + 1) / scale
    return np.stack(np.meshgrid(ticks, ticks, indexing="ij"), axis=-1)


def covered(
    start: NDArray[np.float64], end: NDArray[np.float64], radius: float, reach: int, scale: int = 1
) -> NDArray[np.bool_]:
    """Return the pixels of a window whose centre is within `radius` of the segment; start = end gives a disk."""
    return distance(window(reach, scale), start, end) <= radius + TOLERANCE


def brightness(
    start: NDArray[np.float64], end: NDArray[np.float64], radius: float, reach: int, scale: int
) -> NDArray[np.float64]:
    """Draw `covered` on a grid `scale` times finer and bring it back to pixels by a Lanczos filter; 1 is full."""
    fine = covered(start, end, radius, reach, scale).astype(np.float64)
    ticks = np.arange(-reach * scale, reach * scale + 1) / scale
    offsets = np.arange(-reach, reach + 1)[:, None] - ticks  # (pixels, fine pixels)
    weights = np.where(np.abs(offsets) < LANCZOS_LOBES, np.sinc(offsets) * np.sinc(offsets / LANCZOS_LOBES), 0.0)
    # every pixel's filter is the same: the sum of a whole one, not of what is left of it at the window's edge
    whole = np.arange(-LANCZOS_LOBES * scale, LANCZOS_LOBES * scale + 1) / scale
    weights /= (np.sinc(whole) * np.sinc(whole / LANCZOS_LOBES)).sum()
    return weights @ fine @ weights.T
