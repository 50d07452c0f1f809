"""Linear attention: the kernel exp(s q . k) replaced by an inner product of positive features, sum_f phi_f(q) phi_f(k).

Performer (Choromanski et al. 2021) draws features of which it is the mean; the Linear Transformer (Katharopoulos et al.
2020) takes elu(x) + 1. In both the *logarithm* of a feature is an inner product, log phi_f(x) = w_f . x, of a
transformed x, and the output is then two softmax attentions in a row,

    u_f = sum_j softmax_j(w_f . k_j) v_j,    c_f = log sum_j exp(w_f . k_j)        the features read the keys,
    r_i = sum_f softmax_f(q_i . w_f + c_f) u_f                                     the queries read the features:

virtual keys w_f with values u_f and log weights c_f. Features are never exponentiated on their own, so nothing
underflows or divides by zero at any logits, rows sum to one, and on the fused kernel there is no n x m matrix.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.sharded.sums import features_over_shares
from skeinformer.attention.virtual_keys import VirtualKeys, attend, attend_with_normalizer, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.noise import Rand, normal


class PerformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    directions: Tensor  # (b, h, ceil(m / p), p, p): blocks of Gaussian rows, to be orthogonalized
    lengths: Tensor  # (b, h, m, p): Gaussian rows that lend each feature its length


class PerformerOptions(NamedTuple):
    """What Performer is told beside its inputs."""

    budget: int = 256
    redraw: bool = True
    scale: float | None = None


def favor_attention(
    inputs: Inputs, noise: tuple[Tensor, Tensor], options: PerformerOptions, shares: Shares | None = None
) -> tuple[Tensor, Trace]:
    """Linear attention with the features that the noise draws."""
    query, key, value, key_mask, _ = inputs
    given, dtype = query.dtype, statistics_dtype(query)
    root = math.sqrt(default_scale(query, options.scale))
    features = orthogonal_features(PerformerNoise(*noise), dtype)  # (b, h, m, p)
    query, key = root * query.to(dtype), root * key.to(dtype)
    # w . k - |k|^2 / 2 = (w, 1) . (k, -|k|^2 / 2); |q|^2 / 2 is the same for all features and cancels
    key = torch.cat([key, -0.5 * key.square().sum(-1, keepdim=True)], -1)  # (b, h, n_k, p + 1)
    query, features = F.pad(query, (0, 1)), F.pad(features, (0, 1), value=1.0)
    return linear_attention(query, key, value.to(dtype), features, key_mask, shares).to(given), Trace()


class Performer(Attention):
    """FAVOR+ of Choromanski et al. (2021): E[phi(q) . phi(k)] = exp(s q . k), `budget` features.

    phi_f(x) = exp(w_f . x - |x|^2 / 2) / sqrt(m) with x scaled by sqrt(s) = p^(-1/4). The w_f are N(0, I), orthogonal
    in blocks of p. By default every call in training draws them anew for each example and head, as does evaluation
    without `seed`. With `redraw=False` they are those of `seed` (0 unless given) in training too, one draw for each
    head, until `redraw_features()` is called: redrawing on request. Time O(n m p), memory O((n + m) p); the m x n
    scores are formed on devices other than CPU and CUDA.
    """

    Options = PerformerOptions
    drawn: Tensor

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.draws = 0  # how often redraw_features() was called; a Python number, so that no call waits for the device
        if not self.options.redraw:
            self.register_buffer("drawn", torch.tensor(0))  # the same, for state_dict

    @staticmethod
    def complete(options: PerformerOptions) -> PerformerOptions:
        if options.scale is not None and not options.scale > 0:
            raise ValueError(
                f"scale must be positive, got {options.scale}: queries and keys are each multiplied by its root"
            )
        return options

    def redraw_features(self) -> None:
        """Draw other features for the calls to come, where `redraw` is False."""
        if self.options.redraw:
            raise ValueError("every call draws its own features; build with redraw=False to keep them between calls")
        self.draws += 1
        self.drawn.fill_(self.draws)

    def seed_in_force(self) -> int | None:
        if self.options.redraw:
            return super().seed_in_force()
        return (self.seed or 0) + 0x51ED27 * self.draws

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if not self.options.redraw:
            self.draws = int(self.drawn)

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: PerformerOptions) -> PerformerNoise:
        p = query.shape[-1]
        return PerformerNoise(rand(math.ceil(options.budget / p), p, p), rand(options.budget, p))

    compute = compute_shares = staticmethod(favor_attention)
    along = (None, None)


def elu_attention(inputs: Inputs, noise: None, options: Any, shares: Shares | None = None) -> tuple[Tensor, Trace]:
    """Linear attention with the p features elu(x) + 1."""
    query, key, value, key_mask, _ = inputs
    dtype, p = statistics_dtype(query), query.shape[-1]
    features = torch.eye(p, dtype=dtype, device=query.device).expand(*query.shape[:2], p, p)
    log_query, log_key = log_elu_plus_one(query.to(dtype)), log_elu_plus_one(key.to(dtype))
    output = linear_attention(log_query, log_key, value.to(dtype), features, key_mask, shares)
    return output.to(query.dtype), Trace()


class LinearTransformer(Attention):
    """phi(x) = elu(x) + 1 of Katharopoulos et al. (2020): p features, no scale, not an approximation of softmax.

    The budget is not used. Time O(n p^2), memory O(n p).
    """

    compute = compute_shares = staticmethod(elu_attention)


def linear_attention(
    query: Tensor,  # (b, h, n, r)
    key: Tensor,  # (b, h, n_k, r)
    value: Tensor,  # (b, h, n_k, p_v)
    features: Tensor,  # (b, h, m, r), without gradient
    key_mask: Tensor | None,  # (b, 1, n_k)
    shares: Shares | None = None,
) -> Tensor:
    """sum_j (phi(q) . phi(k_j)) v_j / sum_j phi(q) . phi(k_j) with log phi_f(x) = w_f . x: (b, h, n, p_v).

    Time O((n + n_k) m r), memory O((n + n_k + m) r).
    """
    context, log_mass = read_keys(features, from_mask(key, value, key_mask))  # (b, h, m, p_v), (b, h, m)
    if shares is not None:  # other ranks hold keys too
        empty = None if key_mask is None else ~key_mask.any(-1, keepdim=True)  # (b, 1, 1)
        context, log_mass = features_over_shares(context, log_mass, empty, shares)
    query = F.pad(query, (0, 1), value=1.0)  # q . w + c = (q, 1) . (w, c): a log weight that carries a gradient
    features = torch.cat([features, log_mass[..., None]], -1)  # (b, h, m, r + 1)
    return attend(query, from_mask(features, context), 1.0)


def read_keys(features: Tensor, source: VirtualKeys) -> tuple[Tensor, Tensor]:
    """u_f = softmax_j(w_f . k_j) v_j and c_f = log sum_j exp(w_f . k_j), both with gradients to keys and values.

    The kernel's normalizer has no gradient. That of c_f is P_fj w_f in k_j, and so is that of w_f . (sum_j P_fj k_j)
    where the weights P are held constant: a third attention, which adds 0 to the value.
    """
    context, log_mass = attend_with_normalizer(features, source, 1.0)
    if source.keys.requires_grad:
        mean_key = attend(features, VirtualKeys(source.keys.detach(), source.keys, source.log_weight), 1.0)
        score = (features * mean_key).sum(-1)  # (b, h, m)
        log_mass = log_mass + (score - score.detach())
    return context, log_mass


@torch.no_grad()
def orthogonal_features(noise: PerformerNoise, dtype: torch.dtype) -> Tensor:
    """w_f, (b, h, m, p): each one N(0, I), orthogonal to the others of its block of p.

    Directions are the rows of a uniformly distributed orthogonal matrix, Q of Gaussian = QR with a positive diagonal
    of R; lengths are those of independent Gaussian vectors. Noise that all examples share (a seed's) is orthogonalized
    once. O(m p^2) for each example and head.
    """
    directions, lengths = (normal((u[:1] if u.stride(0) == 0 else u).to(dtype)) for u in noise)
    rotation: Tensor
    rotation, triangle = torch.linalg.qr(directions)
    # without this the first entry of every block would be negative, and the estimate of the kernel biased
    flip = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(dtype)  # (b, h, blocks, p)
    rows = (rotation * flip[..., None, :]).mT.flatten(-3, -2)  # (b, h, blocks * p, p)
    rows = rows[..., : lengths.shape[-2], :] * lengths.square().sum(-1, keepdim=True).sqrt()
    return rows.expand(noise.lengths.shape)


def log_elu_plus_one(x: Tensor) -> Tensor:
    """log(elu(x) + 1): x below zero, log(1 + x) above."""
    return torch.where(x < 0, x, x.clamp(min=0).log1p())
