"""GPUs: on any machine by tensors that have a device and no numbers, and with numbers where there is one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skeinformer import METHODS
from tests.helpers import VARIANTS, draw, inputs_for, map_inputs, map_noise, masks_for, random_mask

ROOT = Path(__file__).parents[2]
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@pytest.mark.slow
def test_everything_stays_on_the_device_and_kernels_get_what_they_take() -> None:
    """In a process of its own: an operation that such tensors do not have ends it."""
    command = [sys.executable, "-m", "tests.attention.fake_cuda"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == ["done", *METHODS]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_values_and_gradients_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    inputs = inputs_for(name, 2, 2, 200, dtype=dtype, p=32)
    module = VARIANTS[name].build(budget=32, head_dim=32, max_len=200).eval()
    masks, noise = masks_for(name, random_mask(2, 200), random_mask(2, 200)), draw(module, *inputs[:2])
    expected = module(*inputs, **masks, noise=noise)
    there = map_inputs(lambda x: x.detach().cuda().requires_grad_(), inputs)
    masks = {key: None if mask is None else mask.cuda() for key, mask in masks.items()}
    ours = module.cuda()(*there, **masks, noise=map_noise(noise, lambda x: x.cuda()))
    assert ours.dtype == dtype
    upstream = torch.ones_like(expected)
    pairs = [(ours, expected)]
    if expected.requires_grad:
        theirs = torch.autograd.grad(expected, inputs, upstream, materialize_grads=True)
        pairs += zip(torch.autograd.grad(ours, there, upstream.cuda(), materialize_grads=True), theirs, strict=True)
    for x, y in pairs:
        bound = TOLERANCE[dtype] * float(y.detach().abs().max())
        torch.testing.assert_close(x.detach().cpu(), y.detach(), rtol=0, atol=bound)


@pytest.mark.cuda
@pytest.mark.parametrize("name", METHODS)
def test_the_host_never_waits(name: str) -> None:
    inputs = map_inputs(lambda x: x.detach().cuda().requires_grad_(), inputs_for(name, 2, 2, 100, dtype=torch.float32))
    module, mask = VARIANTS[name].build(budget=8).cuda(), random_mask(2, 100).cuda()
    weight = torch.ones(2, 2, 100, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = module(*inputs, key_mask=mask, query_mask=mask)
        torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_memory_grows_with_the_length_alone(name: str) -> None:
    """At n = 65536 and 256 pilots a matrix of float32 scores would be 64 MiB for each head."""
    q, k, v = (torch.randn(1, 4, 65536, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    module = VARIANTS[name].build(budget=256, head_dim=64).cuda()
    module(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        module(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 8 * q.nbytes + 64 * 2**20
