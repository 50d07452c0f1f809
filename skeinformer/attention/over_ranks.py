"""The inputs of a call over ranks: checked on each, agreed on by all, with noise by the place of each token."""

import math
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.inputs import CHECK_SEED, Inputs, Noise, check_source, check_tensor, prepare
from skeinformer.checks import check_count
from skeinformer.distributed.handshake import Agreement, broadcast_errors, fingerprint, handshake
from skeinformer.kernels.choice import needs_grad
from skeinformer.noise import Rand, Window, from_generator, from_seed

if TYPE_CHECKING:  # base.py imports this file
    from skeinformer.attention.base import Attention, Call

COUNTED = 2**26  # numbers of one draw up to which all ranks draw all of them, as one process would


def prepare_ranks(attention: "Attention", call: "Call", num_checks: int | None) -> tuple[Inputs, Noise, Rand]:
    """Return the inputs of this rank with its world, the noise, and numbers for the certificate, by one exchange."""
    group, method = attention.group, attention.method
    assert group is not None
    query, key, value, noise, generator = call.query, call.key, call.value, call.noise, call.generator
    tensors = {"query": query, "key": key, "value": value}
    with broadcast_errors(group):  # a rank without tokens gets one of padding, so that methods need not know of it
        for name, x in tensors.items():
            check_tensor(name, x)
        attention.check(query, key, value)
        if num_checks is not None:
            check_count("num_checks", num_checks)
        check_source(attention.draw_noise, query, key, noise, generator)
        padded_query, query_mask = _not_empty(query, call.query_mask)
        padded_key, key_mask = _not_empty(key, call.key_mask)
        scale = attention.scale if call.scale is None else call.scale
        inputs = prepare(padded_query, padded_key, _not_empty(value, None)[0], key_mask, query_mask, scale)
    seed = attention.seed_of_call(call)
    facts: dict[str, object] = {"method": type(method).__name__, **asdict(method), "num_checks": num_checks}
    facts |= {"scale": inputs.scale, "seed": seed, "dtype": inputs.query.dtype, "device": query.device.type}
    facts["noise"] = "an argument" if noise is not None else "a generator" if generator is not None else "drawn"
    facts["the generator's state"] = None if generator is None else _fingerprint(generator.get_state())
    facts |= {"batch": query.shape[0], "heads": query.shape[1]}
    facts |= {"width": query.shape[-1], "value width": value.shape[-1]}
    facts["gradients of"] = [name for name, x in tensors.items() if needs_grad(x)]
    from_global_state = noise is None and generator is None and seed is None
    state = _fingerprint(_global_state(query.device)) if from_global_state else 0
    agreement = handshake(group, facts, query.shape[2], key.shape[2], state)
    for name, lengths in (("queries", agreement.ranks.queries), ("keys", agreement.ranks.keys)):
        if sum(lengths) == 0:
            raise ValueError(f"no rank of the group has any {name}; one at least needs a token")
    rand = source_of_numbers(call, seed, method.noise_along, agreement)
    noise = attention.draw_noise(query, key, rand) if noise is None else noise
    noise = tuple(x if x.shape[-1] else F.pad(x, (0, 1), value=0.5) for x in noise)
    return inputs._replace(world=agreement.ranks), noise, partial(_numbers_of_queries, rand, query.shape[2])


def source_of_numbers(call: "Call", seed: int | None, along: Any, agreement: Agreement) -> Rand:
    """Return numbers by global position. The last draw is the certificate's, one number for each query.

    Without noise, generator and seed they are drawn from the random state as in one process. Where the ranks' states
    differ, or there are very many numbers, they come from a seed computed from rank 0's state.
    """
    ranks, device, batch = agreement.ranks, call.query.device, (call.query.shape[0], call.query.shape[1])
    n, n_k = sum(ranks.queries), sum(ranks.keys)
    window_of = {"queries": Window(ranks.query_start, n), "keys": Window(ranks.key_start, n_k), None: None}
    windows = [window_of[each] for each in (*along, "queries")]
    if call.noise is not None:
        return from_seed(batch, CHECK_SEED, device=device, windows=windows[-1:])
    if call.generator is not None:
        return from_generator(batch, generator=call.generator, device=device, windows=windows)
    if seed is not None:
        return from_seed(batch, seed, device=device, windows=windows)
    if agreement.same_state and math.prod(batch) * max(n, n_k) <= COUNTED:
        return from_generator(batch, device=device, windows=windows)
    torch.rand((), device=device)  # the next call gets another state
    hashed = from_seed((1, math.prod(batch)), agreement.state, device=device, windows=windows)
    return lambda *shape, dtype=torch.float32: hashed(*shape, dtype=dtype).reshape(*batch, *shape)


def _numbers_of_queries(rand: Rand, held: int, size: int) -> Tensor:
    """Draw one number for each query of this rank; a rank without any has one query, which is padding."""
    drawn = rand(held)
    return drawn if held else F.pad(drawn, (0, size), value=0.5)


def _not_empty(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return tokens (b, h, n, p) and their mask; where there are none, one token of padding."""
    if x.shape[2]:
        return x, mask
    return F.pad(x, (0, 0, 0, 1)), torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)


def _global_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _fingerprint(state: Tensor) -> int:
    return fingerprint(state.cpu().numpy().tobytes())
