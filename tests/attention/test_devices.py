"""What holds on any device: the host never reads a value, and the fused kernel is called in a form that GPUs take."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from skeinformer.attention.skein import skein_attention
from tests.helpers import SHARED_QK, VARIANTS, generator, gradients, inputs_for, random_mask, tensors

SYNCHRONIZING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")


class NoHostSynchronization(TorchDispatchMode):
    """Refuses every operation that would make the host wait for a value."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in SYNCHRONIZING, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


class KernelCalls(TorchFunctionMode):
    """Notes what scaled_dot_product_attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls.append((*args[:3], (kwargs or {}).get("attn_mask")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_method_runs_where_tensors_have_no_values(name: str, masked: bool) -> None:
    """Tensors of the device "meta" are shapes only: reading a value of one is an error."""
    module = VARIANTS[name].build(budget=4).to("meta")
    q, k, v = (torch.empty(2, 2, 12, 4, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.empty(2, 12, dtype=torch.bool, device="meta") if masked else None
    output = module(q, q if name in SHARED_QK else k, v, key_mask=mask, query_mask=mask)
    assert output.shape == (2, 2, 12, 4)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    assert gradient.shape == v.shape


@pytest.mark.parametrize("name", VARIANTS)
def test_no_host_synchronization_forward_and_backward(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9, dtype=torch.float32)
    mask = random_mask(2, 9, seed=1)
    module = VARIANTS[name].build(budget=4)
    with NoHostSynchronization():
        output = module(q, k, v, key_mask=mask, query_mask=mask)
        gradients(output, (v,))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("row_norm", ["adaptive", "simple", "none"])
def test_the_kernel_is_called_in_a_form_that_gpus_take(row_norm: Any, masked: bool) -> None:
    """Rows dense in memory, values as wide as keys, and log weights that are one row, never n of them."""
    q, k, v = (x.detach().float() for x in tensors(2, 2, 16, p=8, p_v=6))
    mask = random_mask(2, 16, seed=1) if masked else None
    with NoHostSynchronization(), KernelCalls() as kernel:  # a mode that watches: the code that other devices run
        skein_attention(q, k, v, key_mask=mask, query_mask=mask, budget=5, num_pilots=3, row_norm=row_norm)
    assert kernel.calls
    for query, keys, values, log_weight in kernel.calls:
        assert query.dim() == keys.dim() == values.dim() == 4
        assert query.shape[-1] == keys.shape[-1] == values.shape[-1]
        assert all(x.stride(-1) == 1 for x in (query, keys, values))
        if log_weight is not None:
            assert log_weight.shape == (*query.shape[:2], 1, keys.shape[-2])
            assert log_weight.stride(-1) == 1
            assert log_weight.dtype == query.dtype
            assert not log_weight.requires_grad


def test_the_general_path_equals_the_one_of_the_cpu() -> None:
    """A mode that watches sends `skein_attention` down the path of other devices."""
    q, k, v = tensors(2, 2, 40, p=8, p_v=8)
    mask = random_mask(2, 40, seed=1)
    options = {"key_mask": mask, "query_mask": mask, "budget": 7, "num_pilots": 12}
    results = []
    for path in (NoHostSynchronization(), nullcontext()):
        with path:
            output = skein_attention(q, k, v, generator=generator(1), **options)
        results.append((output, *gradients(output, (q, k, v))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
