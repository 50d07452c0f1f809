"""What holds on any device: the host never reads a value, and numbers are those of the loops that a CPU has."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import READS_NUMBERS, SHARED_QK, VARIANTS, draw, gradients, inputs_for, masks_for, random_mask

SYNCHRONIZING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_dim", "_unique2")


class NoHostSynchronization(TorchDispatchMode):
    """Refuses every operation for which the host would wait. A mode that watches gets the steps of other devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in SYNCHRONIZING, f"{func} makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - READS_NUMBERS))
def test_every_method_runs_where_tensors_have_no_values(name: str, masked: bool) -> None:
    """Tensors of the device "meta" are shapes only: reading a value of one is an error."""
    module = VARIANTS[name].build(budget=4).to("meta")
    q, k, v = (torch.empty(2, 2, 12, 4, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.empty(2, 12, dtype=torch.bool, device="meta") if masked else None
    output = module(q, q if name in SHARED_QK else k, v, key_mask=mask, query_mask=mask)
    assert output.shape == (2, 2, 12, 4)
    (gradient,) = torch.autograd.grad(output.sum(), v)
    assert gradient.shape == v.shape


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - READS_NUMBERS))
def test_no_host_waits_and_the_numbers_are_those_of_the_cpu(name: str, masked: bool) -> None:
    """Output, gradients and certificate, by the steps of other devices and by those of a CPU."""
    inputs = inputs_for(name, 2, 3, 90, 70, peak=2)
    q, k, _ = inputs
    masks = masks_for(name, random_mask(2, k.shape[2]), random_mask(2, q.shape[2], seed=1)) if masked else {}
    module = VARIANTS[name].build(budget=7)
    noise = draw(module, q, k)

    def results() -> list[Tensor]:
        output = module(*inputs, noise=noise, **masks)
        _, info = module.certify(*inputs, noise=noise, **masks)
        return [output, *gradients(output, inputs), info.error, info.error_upper]

    with NoHostSynchronization():
        ours = results()
    for x, y in zip(ours, results(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-7 * max(1.0, float(y.detach().abs().max())))
