"""Every method on tensors that say they are on CUDA and hold nothing: prints the methods that ran, or raises.

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
from skeinformer.attention.queries import query_rows
from skeinformer.kernels.fused import attend_with_normalizer, row_gradients


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
    """Refuses a tensor with numbers that is made elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                raise RuntimeError(f"{func} makes a tensor on the CPU")
        return result


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
    """The normalizers, and the gradients that are called by hand."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        for p, weighted in ((64, True), (64, False), (256, True)):
            q, k, v = inputs(33, 50, p, 48, dtype)
            exact = torch.float64 if dtype == torch.float64 else torch.float32
            log_weight = torch.empty(2, 3, 50, device="cuda", dtype=exact) if weighted else None
            output, normalizer = attend_with_normalizer(q, k, v, log_weight, 0.1)
            assert output.shape == (2, 3, 33, 48)
            assert (normalizer.shape, normalizer.dtype) == ((2, 3, 33), exact)
            gradient = torch.empty(2, 3, 33, 48, device="cuda", dtype=exact)
            d_key, d_value = row_gradients(q.to(exact), k, v, log_weight, gradient, 0.1)
            assert (d_key.shape, d_value.shape) == (k.shape, v.shape)
            u, mass = torch.empty(2, 3, 33, device="cuda"), torch.empty(2, 3, 50, device="cuda", dtype=exact)
            asked = torch.zeros(2, 3, 20, device="cuda", dtype=torch.long)
            rows = query_rows(q, k, output, output, asked[..., :4], u, asked, asked > 0, 32, 0.1)
            d_key, d_value = rows.gradients(k, v, log_weight, mass, 0.1)
            assert (d_key.dtype, d_value.dtype) == (exact, exact)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # autocast says that there is no CUDA
    with FakeTensorMode(), Unguarded(), torch.no_grad():
        kernels()
        for name in sys.argv[1:] or METHODS:
            run(name)
    print("done", *(sys.argv[1:] or METHODS))
