"""The measuring core: interleaved calls in one process, ratios of times in the same round, memory, errors."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.nn import functional as F

from skeinformer.checks import check_count
from skeinformer.cli.records import Record
from skeinformer.comparison.measure import Quartiles as Quartiles
from skeinformer.comparison.measure import frobenius_error as frobenius_error
from skeinformer.comparison.measure import interleaved as interleaved
from skeinformer.comparison.measure import quartiles as quartiles
from skeinformer.comparison.measure import ratio as ratio
from skeinformer.comparison.measure import real_rows

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else torch's profiler writes a line at each start
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
SHORTEST = 0.02  # seconds that one timing lasts at least
MOST_REPEATS = 1000
PEAK_SIZE = 1024  # of the square matrices whose product is taken for the speed of the machine
QKV = tuple[Tensor, Tensor, Tensor]
Action = Callable[[], object]
BUSY = "import torch; torch.set_num_threads({}); a = torch.ones(1024, 1024); print(flush=True)\nwhile True: a @ a"


class Sizes(NamedTuple):
    """The shape (batch, heads, n, head_dim) of queries, keys and values, their dtype and device."""

    n: int
    batch: int
    heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def fields(self) -> Record:
        """How records name them. Those of a CPU name no device."""
        fields = self._asdict()
        return fields | device_field(fields.pop("device"))


def device_field(name: str) -> Record:
    """Return the field of records that names the device; those of a CPU have none."""
    return {} if name == "cpu" else {"device": name}


def check_device(name: str) -> None:
    """Raise a ValueError where torch has no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU; leave out --device to use the CPU")


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set torch's thread count for the block; None leaves it as it is."""
    before = torch.get_num_threads()
    if number is not None:
        check_count("threads", number)
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def busy_machine(number: int = 2) -> Iterator[None]:
    """Run matrix products in another process, on so many threads, until the block ends."""
    with subprocess.Popen([sys.executable, "-c", BUSY.format(number)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            yield
        finally:
            process.kill()


def random_inputs(sizes: Sizes, seed: int = 0, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Draw standard normal queries, keys and values, (b, h, n, p): the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.heads, sizes.n, sizes.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(sizes.device, DTYPES[sizes.dtype]) for _ in range(3))
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad), v.requires_grad_(requires_grad)


def action(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], mode: str = "both", parameters: Sequence[Tensor] = ()
) -> Action:
    """Return a call, in mode "both" with the gradients of inputs and parameters, as a function without arguments.

    The gradient of the output is fixed, in the layout that a model hands back: the heads of a token are neighbours.
    """
    last = inputs[-1].transpose(1, 2)  # (b, n, h, p), the shape of the output
    upstream = torch.randn(last.shape, generator=torch.Generator().manual_seed(1)).to(last).transpose(1, 2)
    sources = list({id(x): x for x in (*inputs, *parameters)}.values())

    def forward() -> object:
        with torch.no_grad():
            return call(*inputs)

    def both() -> object:
        return torch.autograd.grad(call(*inputs), sources, upstream, allow_unused=True)

    return forward if mode == "forward" else both


def timed_rounds(
    runs: Mapping[str, Action],
    rounds: int,
    *,
    setup: Mapping[str, Action] = {},
    agree: Callable[[dict[str, float]], dict[str, float]] = dict,
) -> dict[str, list[float]]:
    """Measure the seconds of one call of every function in each of `rounds` interleaved rounds.

    Args:
        runs: The functions by name.
        rounds: How many rounds are measured.
        setup: Called before each timing, without being timed.
        agree: Makes of the seconds of the first calls those that decide how often a short call is repeated, so that
            several processes repeat it equally often.

    Returns:
        For each name the seconds of a call in each round. Calls of less than 20 ms are repeated within a round.

    Raises:
        ValueError: `rounds` is below 1.

    Example:
        >>> len(timed_rounds({"sum": lambda: sum(range(1000))}, 3)["sum"])
        3
    """
    check_count("rounds", rounds)
    once = agree({name: times[0] for name, times in interleaved(runs, 1, warmup=0, setup=setup).items()})
    repeats = {name: min(MOST_REPEATS, math.ceil(SHORTEST / max(time, 1e-9))) for name, time in once.items()}
    repeated = {name: partial(_repeat, run, repeats[name]) for name, run in runs.items()}
    seconds = interleaved(repeated, rounds, warmup=0, setup=setup)
    return {name: [value / repeats[name] for value in values] for name, values in seconds.items()}


def matmul_speed(dtype: str, device: str = "cpu") -> float:
    """Measure the FLOPs in a second of the fastest of a few products of two square matrices."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).to(device, DTYPES[dtype])
    return float(2 * PEAK_SIZE**3 / min(interleaved({"product": lambda: a @ b}, 5)["product"]))


def quartile_fields(name: str, values: Quartiles | None) -> Record:
    """Return median and quartiles as the fields `name`, `name_q25` and `name_q75`."""
    names = (name, f"{name}_q25", f"{name}_q75")
    return dict.fromkeys(names) if values is None else dict(zip(names, values, strict=True))


def time_fields(times: Sequence[float], top: Sequence[float] | None, bottom: Sequence[float]) -> Record:
    """Return the fields `seconds` of the times, and `ratio` of two times in the same rounds."""
    ratios = None if top is None else ratio(top, bottom)
    return {**quartile_fields("seconds", quartiles(times)), **quartile_fields("ratio", ratios)}


def peak_memory(run: Action, device: torch.device | str = "cpu") -> int:
    """Return the most bytes of tensors that a call holds at one time, above what was there when it began.

    On a CPU the events of torch's allocator are summed: results, temporaries and scratch space that kernels take from
    it, but not what libraries below torch take from the system. Calls the function once.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    with profile(profile_memory=True) as profiler:
        result = run()  # its release is not to be among the events
    del result
    events = profiler.kineto_results.events() if profiler.kineto_results else []
    allocations = sorted(
        (int(e.start_ns()), i, int(e.nbytes())) for i, e in enumerate(events) if e.name() == "[memory]"
    )
    return max(accumulate((size for *_, size in allocations), initial=0))


def exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute softmax(Q K^T / sqrt(p)) V in float64: what errors are measured against. O(n^2 p) time, O(n p) memory."""
    return F.scaled_dot_product_attention(query.double(), key.double(), value.double())


def relative_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """|approx - exact|_F / |exact|_F over the real rows, (b, h), in float64. Both zero gives 0."""
    norm = frobenius_error(torch.zeros_like(exact), exact, query_mask)
    return quotient(frobenius_error(approx, exact, query_mask), norm)


def spectral_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None, *, relative: bool = True) -> Tensor:
    """|approx - exact|_2, divided by |exact|_2 if `relative`: (b, h), float64.

    The loss of Chen et al. (2022), Section 5, which reports it undivided. The norm is the root of the largest
    eigenvalue of the p x p Gram matrix: O(n p^2).
    """
    approx, exact = real_rows(approx, query_mask), real_rows(exact, query_mask)
    error = _spectral_norm(approx - exact)
    return quotient(error, _spectral_norm(exact)) if relative else error


def finite(x: Tensor) -> float | None:
    """Return the number that a tensor holds, or None where JSON has no such number."""
    return float(x) if torch.isfinite(x) else None


def quotient(error: Tensor, norm: Tensor) -> Tensor:
    """error / norm; both zero gives 0."""
    return (error / norm).masked_fill((error == 0) & (norm == 0), 0)


def _spectral_norm(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(x.mT @ x)[..., -1]  # of (b, h, p, p)
    return largest.clamp(min=0).sqrt()


def _repeat(run: Action, count: int) -> None:
    for _ in range(count):
        run()
