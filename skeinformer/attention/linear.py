"""Linear attention: the kernel exp(s q . k) replaced by an inner product of positive features, sum_f phi_f(q) phi_f(k).

In Performer and in the Linear Transformer the *logarithm* of a feature is an inner product, log phi_f(x) = w_f . x, of
a transformed x, and the output is then two softmax attentions in a row,

    u_f = sum_j softmax_j(w_f . k_j) v_j,    c_f = log sum_j exp(w_f . k_j)        the features read the keys,
    r_i = sum_f softmax_f(q_i . w_f + c_f) u_f                                     the queries read the features.

Features are never exponentiated on their own: nothing underflows or divides by zero, and rows sum to one.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Attention, Call, Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.virtual_keys import VirtualKeys, attend, attend_with_lse, from_mask
from skeinformer.distributed.world import World
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.noise import Rand, normal


class PerformerModule(Attention):
    """Performer with features that stay between calls where `redraw` is False."""

    method: "Performer"
    drawn: Tensor

    def __init__(self, method: "Performer", **arguments: Any) -> None:
        super().__init__(method, **arguments)
        if self.scale is not None:
            check_positive(self.scale)
        self.draws = 0  # how often redraw_features() was called: a Python number, so that no call waits for the device
        if not method.redraw:
            self.register_buffer("drawn", torch.tensor(0))  # the same number for state_dict

    def redraw_features(self) -> None:
        """Draw other features for later calls, where `redraw` is False."""
        if self.method.redraw:
            raise ValueError("every call draws its own features; build with redraw=False to keep them between calls")
        self.draws += 1
        self.drawn.fill_(self.draws)

    def seed_of_call(self, call: Call) -> int | None:
        if self.method.redraw or call.seed is not None:
            return super().seed_of_call(call)
        return (self.seed or 0) + 0x51ED27 * self.draws

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if not self.method.redraw:
            self.draws = int(self.drawn)


class Performer(Method):
    """FAVOR+ of Choromanski et al. (2021): E[phi(q) . phi(k)] = exp(s q . k), `budget` features.

    phi_f(x) = exp(w_f . x - |x|^2 / 2) / sqrt(m) with x scaled by sqrt(s). The w_f are N(0, I), orthogonal in blocks of
    p. Every call in training draws other features for each example and head, as does evaluation without a seed. With
    `redraw=False` they are those of the seed (by default 0) in training too, one draw for each head, until
    `redraw_features()`. Time O(n m p), memory O((n + m) p), and m x n scores on devices other than CPU and CUDA.
    """

    budget: int = 256
    redraw: bool = True
    module: ClassVar = PerformerModule
    takes_group: ClassVar[bool] = True
    noise_along: ClassVar = (None, None)

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw (b, h, ceil(m / p), p, p) numbers for the directions and (b, h, m, p) for the lengths of the w_f."""
        p = query.shape[-1]
        return rand(math.ceil(self.budget / p), p, p), rand(self.budget, p)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        check_positive(inputs.scale)
        dtype, root = statistics_dtype(inputs.query), math.sqrt(inputs.scale)
        features = orthogonal_features(noise, dtype)  # (b, h, m, p)
        query, key = root * inputs.query.to(dtype), root * inputs.key.to(dtype)
        # w . k - |k|^2 / 2 = (w, 1) . (k, -|k|^2 / 2); |q|^2 / 2 is the same for all features and cancels
        key = torch.cat([key, -0.5 * key.square().sum(-1, keepdim=True)], -1)  # (b, h, n_k, p + 1)
        query, features = F.pad(query, (0, 1)), F.pad(features, (0, 1), value=1.0)
        return linear_attention(inputs, query, key, features), Trace()


class LinearTransformer(Method):
    """phi(x) = elu(x) + 1 of Katharopoulos et al. (2020): p features, no scale, not softmax. Time O(n p^2)."""

    budget: int = 256
    takes_group: ClassVar[bool] = True

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        (b, h, _, p), dtype = inputs.query.shape, statistics_dtype(inputs.query)
        query, key = (log_elu_plus_one(x.to(dtype)) for x in inputs[:2])
        features = torch.eye(p, dtype=dtype, device=query.device).expand(b, h, p, p)
        return linear_attention(inputs, query, key, features), Trace()


def check_positive(scale: float) -> None:
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}: queries and keys are each multiplied by its root")


def linear_attention(inputs: Inputs, query: Tensor, key: Tensor, features: Tensor) -> Tensor:
    """Compute r_i, (b, h, n, p_v), of transformed queries and keys as wide as the features, (b, h, m, r)."""
    value, key_mask = inputs.value.to(query.dtype), inputs.key_mask
    context, log_mass = read_keys(features, from_mask(key, value, key_mask))  # (b, h, m, p_v), (b, h, m)
    if inputs.world.size > 1:
        context, log_mass = sum_over_ranks(context, log_mass, key_mask, inputs.world)
    query = F.pad(query, (0, 1), value=1.0)  # q . w + c = (q, 1) . (w, c): a log weight that carries a gradient
    features = torch.cat([features, log_mass[..., None]], -1)  # (b, h, m, r + 1)
    return attend(query, from_mask(features, context), 1.0).to(inputs.query.dtype)


def read_keys(features: Tensor, source: VirtualKeys) -> tuple[Tensor, Tensor]:
    """Return u_f and c_f, both with gradients to keys and values."""
    context, log_mass = attend_with_lse(features, source, 1.0)
    if source.keys.requires_grad:
        # the kernel's c_f has no gradient: take that of w_f . sum_j P_fj k_j with constant weights P, and add 0
        mean_key = attend(features, VirtualKeys(source.keys.detach(), source.keys, source.log_weight), 1.0)
        score = (features * mean_key).sum(-1)  # (b, h, m)
        log_mass = log_mass + (score - score.detach())
    return context, log_mass


def sum_over_ranks(context: Tensor, log_mass: Tensor, key_mask: Tensor | None, world: World) -> tuple[Tensor, Tensor]:
    """Return u_f and c_f over the keys of all ranks: c = log sum_r exp(c_r), u = sum_r exp(c_r - c) u_r."""
    if key_mask is not None:  # where this rank has no key
        log_mass = log_mass.masked_fill(~key_mask.any(-1, keepdim=True), -torch.inf)
    (log_masses,) = world.gather("feature sums", log_mass)
    largest = log_masses.amax(0)
    largest = largest.where(largest > -torch.inf, 0)  # no rank has a key
    share = (log_mass - largest).exp()[..., None]  # (b, h, m, 1)
    sums = world.sum_with_gradients(torch.cat([share * context, share], -1))
    mass = sums[..., -1].clamp(min=torch.finfo(sums.dtype).tiny)
    return sums[..., :-1] / mass[..., None], largest + mass.log()


@torch.no_grad()
def orthogonal_features(noise: Noise, dtype: torch.dtype) -> Tensor:
    """w_f, (b, h, m, p): each one N(0, I), orthogonal to the others of its block of p. Costs O(b h m p^2)."""
    # rows of Q of Gaussian = QR, and lengths of other Gaussian vectors; once where examples share the noise of a seed
    directions, lengths = (normal((u[:1] if u.stride(0) == 0 else u).to(dtype)) for u in noise)
    rotation, triangle = torch.linalg.qr(directions)
    # without this the first entry of every block would be negative, and the estimate of the kernel biased
    flip = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(dtype)  # (b, h, blocks, p)
    rows: Tensor = (rotation * flip[..., None, :]).mT.flatten(-3, -2)  # (b, h, blocks * p, p)
    rows = rows[..., : lengths.shape[-2], :] * lengths.square().sum(-1, keepdim=True).sqrt()
    return rows.expand_as(noise[1])


def log_elu_plus_one(x: Tensor) -> Tensor:
    """log(elu(x) + 1): x below zero, log(1 + x) above."""
    return torch.where(x < 0, x, x.clamp(min=0).log1p())
