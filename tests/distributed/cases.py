"""What the processes of the pool do. Every function gets the group first; what it returns is sent back."""

import copy
import os
import pickle
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skeinformer import MultiheadAttention, build, cluster_attention, distributed, skein_attention
from skeinformer.attention import Attention, over_ranks
from skeinformer.distributed.world import Ranks
from skeinformer.kernels import plain
from skeinformer.noise import from_generator
from tests.helpers import generator, tensors

Result = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One call of a method, whole or divided."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    b: int = 2
    h: int = 2
    n: int = 37
    n_k: int | None = None
    p: int = 4
    p_v: int | None = None
    dtype: torch.dtype = torch.float64
    peak: float = 1.0
    size: float = 1.0
    """Of the values."""
    gradient_size: float = 1.0
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    noise: str = "seed"
    """seed, argument, generator, or global."""
    queries: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Lengths of the shares, by the number of ranks, where they are not equal."""
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)
    certify: bool = False

    def lengths(self, ranks: int, of_keys: bool) -> tuple[int, ...]:
        n = self.n if self.n_k is None or not of_keys else self.n_k
        lengths = self.queries if self.n_k is None or not of_keys else self.keys
        return lengths.get(ranks, distributed.share_lengths(n, ranks))


def compute(case: Case, group: Any = None) -> Result:
    """Output, gradients and certificate, of the whole or of this rank's share."""
    rank, ranks = (0, 1) if group is None else (distributed.Group.of(group).rank, distributed.Group.of(group).size)
    whole = tensors(case.b, case.h, case.n, case.n_k, p=case.p, p_v=case.p_v, dtype=case.dtype, peak=case.peak)
    whole = (*whole[:2], whole[2] * case.size)
    of_queries, of_keys = (_share(case.lengths(ranks, of), rank) for of in (False, True))
    q, k, v = (
        x.detach()[:, :, at].requires_grad_() for x, at in zip(whole, (of_queries, of_keys, of_keys), strict=True)
    )
    if case.key_mask is not None:  # what is padding is never seen
        padding = ~case.key_mask[:, None, of_keys, None]
        k, v = (x.detach().masked_fill(padding, torch.nan).requires_grad_() for x in (k, v))
    masks = {
        name: None if mask is None else mask[:, at]
        for name, mask, at in (("key_mask", case.key_mask, of_keys), ("query_mask", case.query_mask, of_queries))
    }
    seed = 5 if case.noise == "seed" else None
    module: Attention = build(case.method, head_dim=case.p, seed=seed, group=group, **case.options).eval()
    source: dict[str, Any] = {}
    if case.noise == "generator":
        source["generator"] = generator(3)
    elif case.noise == "argument":
        drawn = module.draw_noise(whole[0], whole[1], from_generator((case.b, case.h), generator=generator(3)))
        source["noise"] = tuple(
            x if where is None else x[..., of_queries if where == "queries" else of_keys]
            for x, where in zip(drawn, module.method.noise_along, strict=True)
        )
    call = module.certify if case.certify else module
    result = call(q, k, v, **masks, **source)
    output, info = result if case.certify else (result, None)
    weight = torch.randn((*whole[0].shape[:3], output.shape[-1]), generator=generator(7), dtype=torch.float64)
    weight = weight * case.gradient_size
    loss = (output * weight[:, :, of_queries].to(output.dtype)).sum()
    if loss.requires_grad:
        loss.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad / case.gradient_size for x in (q, k, v)]
    reported = {} if info is None else info._asdict()
    return as_arrays({"output": output, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)), **reported})


def share_of_attention(group: Any, case: Case) -> Result:
    return compute(case, group)


def certified_with_one_nan(group: Any, method: str) -> Result:
    """One query of the second head, on rank 1, is NaN; which heads of all ranks' output are not finite."""
    q, k, v = (x.detach() for x in tensors(1, 2, 300))
    q[0, 1, 150] = torch.nan
    q, k, v = (distributed.shard(x, group=group, dim=2) for x in (q, k, v))
    output, info = build(method, head_dim=4, budget=5, seed=3, group=group).eval().certify(q, k, v, num_checks=2)
    lost = ~distributed.gather(output, group, dim=2).isfinite().all(-1).all(-1)
    errors = {name: getattr(info, name) for name in ("error", "error_se", "error_upper")}
    return as_arrays({"lost": lost, **errors})


def as_arrays(tensors: dict[str, Tensor]) -> Result:
    return {name: (x.float() if x.dtype == torch.bfloat16 else x).detach().numpy() for name, x in tensors.items()}


def _share(lengths: tuple[int, ...], rank: int) -> slice:
    start = sum(lengths[:rank])
    return slice(start, start + lengths[rank])


def counted(group: Any, case: Case) -> tuple[list[distributed.Exchange], list[distributed.Exchange]]:
    """The exchanges of a call, forward and backward."""
    with distributed.watch() as seen:
        compute(case, group)
    steps = [x.step for x in seen]
    sums = [i for i, step in enumerate(steps) if step == "all_sum"]  # where there is one, the second is its gradient
    backward = [i for i, step in enumerate(steps) if step.startswith("gradients")]
    forward = backward[0] if backward else sums[1]
    return seen[:forward], seen[forward:]


def counted_by_torch(group: Any, case: Case) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    mode = CommDebugMode()
    with mode:
        compute(case, group)
    counts = {str(name): count for name, count in mode.get_comm_counts().items()}
    of = {"gather": "allgather", "sum": "allreduce"}
    return {kind: sum(n for name, n in counts.items() if part in name) for kind, part in of.items()}


def disagreeing(group: Any, who: int, change: dict[str, Any], functional: bool = False) -> None:
    """One rank calls with something changed."""
    call = {"method": "cluster", "budget": 5, "seed": 5, "batch": 2, "dtype": torch.float64, "requires_grad": True}
    call |= {"generator": None, "mask": 10, "mask_dtype": torch.bool, "sparse": False, "num_checks": 32}
    call |= {"scale": None, "width": 4, "noise": None}
    call |= change if distributed.Group.of(group).rank == who else {}
    whole = tensors(call["batch"], 2, 10, p=call["width"], p_v=4, dtype=call["dtype"])
    q, k, v = (x.detach().requires_grad_(call["requires_grad"]) for x in whole)
    options: dict[str, Any] = {"scale": call["scale"], "noise": call["noise"]}
    if call["batch"] == 2:
        options["key_mask"] = torch.ones(2, call["mask"]).to(call["mask_dtype"])
        options["key_mask"] = options["key_mask"].to_sparse() if call["sparse"] else options["key_mask"]
    if call["generator"] is not None:
        options["generator"] = generator(call["generator"])
    if functional:
        cluster_attention(q, k, v, budget=call["budget"], group=group, **options)
    else:
        seed = None if call["generator"] is not None else call["seed"]
        module = build(call["method"], head_dim=4, budget=call["budget"], seed=seed, group=group)
        module.eval().certify(q, k, v, **options, num_checks=call["num_checks"])


def shard_of_different_masks(group: Any) -> None:
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 3] = distributed.Group.of(group).rank != 2
    distributed.shard(torch.arange(10)[None], mask, group=group)


def shares_that_differ(group: Any, what: str) -> None:
    """Two ranks that do not ask for the same."""
    rank, whole = distributed.Group.of(group).rank, torch.arange(20).view(2, 10)
    if what == "numbers":
        distributed.shard(*[whole] * (1 + rank), group=group)
    elif what == "lengths":
        distributed.shard(whole, group=group, lengths=(5 - rank, 5 + rank))
    elif what == "dim":
        distributed.shard(whole, group=group, dim=1 + rank)
    elif what == "shapes":
        distributed.gather(torch.zeros(2 + rank, 3), group)
    elif what == "positions":
        distributed.token_at(torch.zeros(2, 3), rank, group)
    elif what == "kinds":
        distributed.shard(whole if rank else whole.tolist(), group=group)
    elif what == "fractions":
        distributed.shard(whole, group=group, lengths=(2.5, 7.5))
    elif what == "sums":
        distributed.all_sum(torch.ones(2 + rank), group)
    elif what == "means":
        distributed.mean_over_tokens(torch.zeros(2 + rank, 3, 5), None, group)
    elif what == "masks":
        distributed.mean_over_tokens(
            torch.zeros(2, 3), torch.ones(2, 3).to(torch.float32 if rank else torch.bool), group
        )
    elif what in ("gradients", "parameters"):
        width, bias = (2, rank == 0) if what == "parameters" else (2 + rank, False)
        distributed.average_gradients(torch.nn.Linear(width, 1, bias=bias), group)


def of_another_group(group: Any) -> str:
    """The error of the ranks that are not in a group of the first."""
    first = torch.distributed.new_group([0])
    try:
        attend(first)
    except (TypeError, ValueError) as error:
        return str(error).partition(" that share")[0]
    return ""


def ready(group: Any) -> None:
    attend(group)


def attend(group: Any) -> Tensor:
    q, k, v = tensors(1, 1, 10)
    return cluster_attention(q, k, v, budget=3, group=group)


def layer_of_another_width(group: Any, who: int) -> None:
    """A layer whose input has the wrong width on one rank."""
    layer = MultiheadAttention(8, 2, batch_first=True, group=group)
    x = torch.ones(1, 4, 9 if distributed.Group.of(group).rank == who else 8)
    layer(x, x, x)


def dies(group: Any, who: int) -> None:
    if distributed.Group.of(group).rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    attend(group)


def absent(group: Any, who: int) -> str | None:
    if distributed.Group.of(group).rank == who:
        return "elsewhere"
    attend(group)
    return None


def without_tokens(group: Any) -> None:
    q, k, v = (x[:, :, :0] for x in tensors(1, 1, 10))
    cluster_attention(q, k, v, budget=3, group=group)


def wrong_groups(group: Any) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "sequence"), _init_backend=False)
    q, k, v = tensors(1, 1, 10)
    messages = []
    for wrong, options in (("ranks", {}), (mesh, {}), (group, {"row_norm": "none"})):
        try:
            skein_attention(q, k, v, budget=3, group=wrong, **options)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def pickled(group: Any) -> tuple[str, bool]:
    module = build("cluster", head_dim=4, budget=3, group=group)
    same = copy.deepcopy(module).group is module.group
    again = pickle.loads(pickle.dumps(module))
    try:
        again(*tensors(1, 1, 10))
    except RuntimeError as error:
        return str(error), same
    return "", same


def shard_and_gather(group: Any) -> dict[str, Any]:
    whole = torch.arange(20).view(2, 10)
    ids, none = distributed.shard(whole, None, group=group)
    unequal = distributed.shard(whole, group=group, lengths=(1, 0, 9))
    wrong = ""
    try:
        distributed.shard(whole, group=group, lengths=(1, 9))
    except ValueError as error:
        wrong = str(error)
    back = distributed.gather(unequal, group)
    return {
        **as_arrays({"ids": ids, "unequal": unequal, "back": back}),
        "none": none is None,
        "wrong": wrong,
        "held": ids.untyped_storage().nbytes() // 8,
    }


def gathered_dtypes(group: Any) -> Result:
    short, long = torch.arange(3, dtype=torch.float32), torch.full((1,), 0.5, dtype=torch.float64)
    gathered = Ranks(distributed.Group.of(group)).gather("test", short, long)
    return as_arrays(dict(zip(("short", "long"), gathered, strict=True)))


def losses(group: Any) -> dict[str, Any]:
    x = torch.randn(2, 10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.arange(10) < torch.tensor([[7], [0]])
    x, mask = distributed.shard(x, mask, group=group, lengths=(2, 0, 8))
    x.requires_grad_()
    mean, token = distributed.mean_over_tokens(x, mask, group), distributed.token_at(x, 6, group)
    loss = mean.square().sum() + token.square().sum() + distributed.gather(x, group).pow(3).sum()
    loss.backward()
    wrong = ""
    try:
        distributed.token_at(x, 10, group)
    except ValueError as error:
        wrong = str(error)
    return {**as_arrays({"mean": mean, "token": token, "gradient": x.grad}), "wrong": wrong}


def mean_in_half_precision(group: Any) -> dict[str, Any]:
    """Of more tokens than float16 can count."""
    mean = distributed.mean_over_tokens(torch.full((1, 50_000, 1), 2.0, dtype=torch.float16), None, group)
    try:
        distributed.mean_over_tokens(torch.zeros(1, 2, 1), torch.ones(1, 2), group)
    except TypeError as error:
        return {"mean": mean.item(), "dtype": str(mean.dtype), "wrong": str(error)}
    return {}


def averaged(group: Any) -> dict[str, Any]:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1, bias=False), "unused": torch.nn.Linear(2, 1)})
    if distributed.Group.of(group).rank == 0:
        model["used"](torch.ones(1, 2)).sum().backward()
    distributed.average_gradients(model, group)
    return {name: None if layer.weight.grad is None else layer.weight.grad.numpy() for name, layer in model.items()}


def drawn_twice(group: Any, case: Case) -> list[Result]:
    """Two calls, where ranks have different random states."""
    rank, size = distributed.Group.of(group).rank, distributed.Group.of(group).size
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        if size == 1:  # which would draw from its own state
            patch.setattr(over_ranks, "COUNTED", 0)
        return [compute(case, group), compute(case, group)]


def plainly(group: Any, case: Case) -> Result:
    """By the steps of devices other than a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"skeinformer.attention.{case.method.replace('skeinformer', 'skein')}.steps_for", lambda x: plain)
        return compute(case, group)
