"""Uniform numbers and their transforms: distributions, independence, stability. Bounds are 4 standard errors."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from skeinformer.noise import SMALLEST, Window, from_generator, from_seed, gumbel, integer, normal, sign
from tests.helpers import generator

COUNT = 20_000
SEEDS = [0, 1, 2**31, -5, 2**40 + 3]
FLOATS = [torch.float32, torch.float64]


def assert_uniform(u: Tensor) -> None:
    """Kolmogorov-Smirnov: sqrt(n) sup |F_n - F| exceeds 2.2 with probability 1.2e-4, like 4 standard errors."""
    ordered = u.flatten().double().sort().values
    n = len(ordered)
    step = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((step[1:] - ordered).max(), (ordered - step[:-1]).max())
    assert math.sqrt(n) * distance < 2.2


def assert_uncorrelated(x: Tensor, y: Tensor) -> None:
    x, y = x.flatten().double(), y.flatten().double()
    x, y = x - x.mean(), y - y.mean()
    assert abs((x * y).sum() / (x.norm() * y.norm())) < 4 / math.sqrt(len(x))


def assert_moment(x: Tensor, expected: float) -> None:
    x = x.flatten().double()
    assert abs(x.mean() - expected) < 4 * x.std() / math.sqrt(len(x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_a_seed_are_uniform(seed: int, dtype: torch.dtype) -> None:
    rand = from_seed((1, 3), seed)
    u = rand(COUNT, dtype=dtype)
    assert u.dtype == dtype
    assert ((u > 0) & (u < 1)).all()
    for head in range(3):
        assert_uniform(u[0, head])


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_heads_draws_and_seeds_are_uniform(seed: int) -> None:
    rand = from_seed((1, 3), seed)
    across_heads = from_seed((1, COUNT), seed)(2)
    assert_uniform(across_heads[0, :, 0])
    across_draws = torch.stack([rand(1) for _ in range(1000)])
    assert_uniform(across_draws)
    across_seeds = torch.stack([from_seed((1, 1), seed + i)(1) for i in range(1000)])
    assert_uniform(across_seeds)


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_of_a_seed_are_independent(seed: int) -> None:
    """No correlation between neighbours, positions, heads, draws or seeds."""
    rand = from_seed((1, 4), seed)
    first, second = rand(COUNT)[0], rand(COUNT)[0]
    other = from_seed((1, 4), seed + 1)(COUNT)[0]
    streams = [*first, *second, *other]
    for x, y in itertools.combinations(streams, 2):
        assert_uncorrelated(x, y)
        assert (x == y).double().mean() < 1e-3
    for lag in (1, 2, 3, 64, 256):
        assert_uncorrelated(first[:, lag:], first[:, :-lag])
    heads = from_seed((1, COUNT), seed)(1)[0, :, 0]
    assert_uncorrelated(heads[1:], heads[:-1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_a_seed_do_not_depend_on_the_length(dtype: torch.dtype) -> None:
    short, long = from_seed((2, 3), 5), from_seed((4, 3), 5)
    for shape, longer in [((7,), (19,)), ((7, 4), (19, 4)), ((1,), (1000,))]:
        u, v = short(*shape, dtype=dtype), long(*longer, dtype=dtype)
        assert u.shape == (2, 3, *shape)
        assert torch.equal(u, v[:2, :, : shape[0]])
        assert torch.equal(v[0], v[3])


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_a_seed_are_distinct(dtype: torch.dtype) -> None:
    """Ties would be ranked at random, and differently at another length."""
    u = from_seed((1, 3), 7)(200_000, dtype=dtype)[0]
    assert all(len(head.unique()) == 200_000 for head in u)


def test_a_seed_repeats_and_leaves_the_global_state_alone() -> None:
    before = torch.get_rng_state()
    rand, again = from_seed((2, 2), 3), from_seed((2, 2), 3)
    first, second = rand(8), rand(8)
    assert torch.equal(first, again(8))
    assert torch.equal(second, again(8))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_a_generator(dtype: torch.dtype) -> None:
    u = from_generator((2, 3), generator=generator(4))(COUNT, dtype=dtype)
    assert u.shape == (2, 3, COUNT)
    assert u.dtype == dtype
    assert ((u > 0) & (u < 1)).all()
    assert_uniform(u)
    assert torch.equal(u, from_generator((2, 3), generator=generator(4))(COUNT, dtype=dtype))
    assert not torch.equal(u, from_generator((2, 3), generator=generator(5))(COUNT, dtype=dtype))


def test_a_generator_leaves_the_global_state_alone_and_no_generator_uses_it() -> None:
    before = torch.get_rng_state()
    from_generator((2,), generator=generator())(5)
    assert torch.equal(torch.get_rng_state(), before)
    first = from_generator((2,))(5)
    torch.set_rng_state(before)
    assert torch.equal(from_generator((2,))(5), first)


def test_a_generator_never_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.rand can give 0, once in 2^24 draws: its logarithm must stay finite."""
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.zeros(size))
    u = from_generator((2,))(3)
    assert (u == SMALLEST).all()
    assert gumbel(u).isfinite().all()
    assert normal(u).isfinite().all()


EXTREMES = torch.tensor([SMALLEST, 2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24])


@pytest.mark.parametrize("transform", [gumbel, normal, sign])
def test_transforms_are_finite_at_the_ends(transform: object) -> None:
    for u in (EXTREMES, EXTREMES.double()):
        x = transform(u)
        assert x.dtype == u.dtype
        assert x.isfinite().all()


def uniform(count: int = 200_000, dtype: torch.dtype = torch.float32) -> Tensor:
    return from_generator((), generator=generator(11))(count, dtype=dtype)


def test_normal_has_the_moments_of_a_standard_normal() -> None:
    x = normal(uniform())
    for power, moment in [(1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)]:
        assert_moment(x**power, moment)


def test_gumbel_has_its_mean_variance_and_distribution() -> None:
    x = gumbel(uniform()).double()
    euler = 0.5772156649015329
    assert_moment(x, euler)
    assert_moment((x - euler) ** 2, math.pi**2 / 6)
    assert_uniform(torch.exp(-torch.exp(-x)))


def test_sign_is_fair() -> None:
    x = sign(uniform())
    assert set(x.unique().tolist()) == {-1.0, 1.0}
    assert_moment(x, 0)


@pytest.mark.parametrize("high", [1, 2, 7, 100])
def test_integer_is_uniform(high: int) -> None:
    x = integer(uniform(), high)
    assert x.dtype == torch.long
    counts = torch.bincount(x, minlength=high).double()
    assert len(counts) == high
    share = 1 / high
    bound = 4 * math.sqrt(len(x) * share * (1 - share))
    assert ((counts - len(x) * share).abs() <= bound).all()


@pytest.mark.parametrize("high", [1, 3, 2**24, 2**31])
@pytest.mark.parametrize("dtype", FLOATS)
def test_integer_stays_below_its_bound(high: int, dtype: torch.dtype) -> None:
    u = torch.cat([EXTREMES.to(dtype), torch.nextafter(torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype))])
    x = integer(u, high)
    assert x.min() >= 0
    assert x.max() < high
    assert x.max() >= (high - 1) * (1 - 2.0**-22)


def test_a_compiled_graph_holds_each_hash_as_one_operation() -> None:
    """Without the operation inductor needs minutes: each line reads its operand twice, and it writes both out."""
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def numbers(x: Tensor) -> Tensor:
        return from_seed((1, 2), 3)(x.shape[0])

    torch._dynamo.reset()
    compiled = torch.compile(numbers, fullgraph=True, backend=record)
    for n in (30, 41, 57):  # the last ones with a symbolic length
        assert torch.equal(compiled(torch.zeros(n)), numbers(torch.zeros(n)))
    hashes = [node for node in graphs[0].graph.nodes if "skeinformer.scramble" in str(node.target)]
    assert len(hashes) == 3  # of the head, of the position, of both


@pytest.mark.parametrize("source", ["seed", "generator"])
def test_a_window_is_the_same_part_of_the_full_sequence(source: str) -> None:
    def draws(windows: list[Window | None], length: int, third_length: int) -> list[Tensor]:
        if source == "seed":
            rand = from_seed((2, 3), 7, windows=windows)
        else:
            rand = from_generator((2, 3), generator=generator(7), windows=windows)
        return [rand(length), rand(2, 4), rand(third_length)]

    first, second, third = draws([], 50, 30)
    for start, length in ((0, 50), (20, 13), (50, 0)):
        windows = [Window(start, 50), None, Window(4, 30)]
        parts = draws(windows, length, 5)
        assert torch.equal(parts[0], first[..., start : start + length])
        assert torch.equal(parts[1], second)
        assert torch.equal(parts[2], third[..., 4:9])
