"""Every method on tensors that are on CUDA by name and hold nothing: prints the methods that ran, or raises.

Only without gradients: with them torch ends the process. Run as `python -m tests.attention.fake_cuda`.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skeinformer import METHODS, build
from skeinformer.kernels.fused import attend_backward, attend_with_lse, route

SYNCHRONIZING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")
seen: list[str] = []  # fused kernels that were called


class Unguarded(TorchFunctionMode):
    """Some methods of a tensor ask CUDA for its current device, which a torch without CUDA has not: others in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return self.get(*args)
        if func is Tensor.__setitem__:
            return self.get(*args[:2]).copy_(args[2])
        name = {"__invert__": "bitwise_not"}.get(func.__name__, func.__name__)
        if name == "log_softmax":
            return args[0] - args[0].logsumexp(args[1], keepdim=True)
        if name in ("bitwise_not", "contiguous"):
            func = getattr(torch.ops.aten, name)
        return func(*args, **(kwargs or {}))

    def get(self, x: Tensor, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        counted = sum(part is not None and part is not ... for part in index)
        dim, tensors = 0, [None] * x.dim()
        for part in index:
            if part is ...:
                dim = x.dim() - counted
                continue
            if part is None:
                x = x.unsqueeze(dim)
            elif isinstance(part, slice):
                x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
            elif isinstance(part, int):
                x, dim = x.select(dim, part), dim - 1
            else:
                tensors[dim] = part
            counted -= part is not None
            dim += 1
        return x if all(part is None for part in tensors) else torch.ops.aten.index(x, tensors)


class OnDevice(TorchDispatchMode):
    """Refuses tensors elsewhere, operations that the host waits for, and what a fused kernel cannot take."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCHRONIZING:
            raise RuntimeError(f"{func} makes the host wait for the device")
        if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"):
            seen.append(name)
            check_kernel(name, *args[:3], args[3] if "efficient" in name else None)
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                raise RuntimeError(f"{func} makes a tensor on the CPU")
        return result


def check_kernel(name: str, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> None:
    """Raise unless a kernel of CUDA takes these: four dimensions, one width, dense rows, an aligned bias."""
    assert query.dim() == keys.dim() == values.dim() == 4
    assert query.shape[-1] == keys.shape[-1] == values.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (query, keys, values))
    assert ("flash" in name) == (query.dtype != torch.float32 and query.shape[-1] <= 256)
    if bias is not None:
        assert bias.shape == (*query.shape[:-1], keys.shape[-2])
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:-1])


def inputs(n: int, n_k: int, p: int, p_v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty(2, 3, *size, device="cuda", dtype=dtype) for size in ((n, p), (n_k, p), (n_k, p_v)))
    return q, k, v


def run(name: str) -> None:
    """With masks in bfloat16 and without in float32, and the certificate."""
    row = METHODS[name]
    for dtype, masked in ((torch.bfloat16, True), (torch.float32, False)):
        q, k, v = inputs(130, 97 if row.cross_attention else 130, 20, 20 if masked else 12, dtype)
        k = q if row.shares_keys else k
        torch.set_default_dtype(dtype)
        with torch.device("cuda"):
            module = build(name, head_dim=20, max_len=130, budget=16, seed=0)
        torch.set_default_dtype(torch.float32)
        masks = {}
        if masked:
            names = (("key_mask", k), ("query_mask", q))
            masks = {x: torch.empty(2, y.shape[2], dtype=torch.bool, device="cuda") for x, y in names}
        with OnDevice():
            output, info = module.eval().certify(q, k, v, **masks)
            module.train()(q, k, v, **masks)
        assert (output.shape, output.dtype, output.device.type) == ((2, 3, 130, v.shape[-1]), dtype, "cuda")
        assert info.error.shape == (2, 3)


def kernels() -> None:
    """The fused kernel with the logs of row sums, and its gradient."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for p, weighted in ((64, True), (64, False), (256, True)):
            q, k, v = inputs(33, 50, p, 48, dtype)
            exact = torch.float64 if dtype == torch.float64 else torch.float32
            log_weight = torch.empty(2, 3, 50, device="cuda", dtype=exact) if weighted else None
            seen.clear()
            with OnDevice():
                output, lse = attend_with_lse(q, k, v, log_weight, 0.1)
                gradients = attend_backward(output, q, k, v, log_weight, output, lse, 0.1)
            assert output.shape == (2, 3, 33, 48)
            assert (lse.shape, lse.dtype) == ((2, 3, 33), exact)
            assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, exact) for x in (q, k, v)]
            kernel = route("cuda", dtype, p, 48, weighted).kernel
            assert seen == ([] if kernel == "scores" else [f"_scaled_dot_product_{kernel}_attention"])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # autocast says that there is no CUDA
    with FakeTensorMode(), Unguarded(), torch.no_grad():
        kernels()
        for name in sys.argv[1:] or METHODS:
            run(name)
    print("done", *(sys.argv[1:] or METHODS))
