"""What enters an attention over shares: checked on each rank, agreed on by all, with noise by global position."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.inputs import FOR_CHECKS, Inputs, Noise, Passed, check_source, prepare
from skeinformer.distributed.agreement import Shares, agree, fingerprint, told
from skeinformer.distributed.collectives import noted
from skeinformer.distributed.group import Group
from skeinformer.kernels.choice import recorded
from skeinformer.noise import Rand, from_generator, from_seed

COUNTED = 2**26  # numbers of one draw up to which all ranks draw all of them, as one process would
Along = Literal["queries", "keys"] | None


class Settled(NamedTuple):
    """What a method is given, and where the certificate gets its numbers from."""

    inputs: Inputs
    noise: Noise
    rand: Rand
    shares: Shares


def settle_shares(
    call: Passed,
    facts: Mapping[str, object],
    draw_noise: Callable[[Tensor, Tensor, Rand], Noise],
    along: Sequence[Along],
    check: Callable[[], None],
    group: Group,
) -> Settled:
    """The inputs of this rank, and the shares of all: one exchange.

    facts: what all ranks must agree on, beside what is here. along: what each draw of the noise has a number for.
    check: raises for what a method cannot take. A rank without tokens gets one that is padding: nothing in a method
    has to know that a rank can be empty.
    """
    with told(group):
        query, key, value, key_mask, query_mask, noise, generator, seed = call
        _check_kinds(query, key, value)
        check()
        check_source(draw_noise, query, key, noise, generator)
        padded_query, query_mask = _not_empty(query, query_mask)
        padded_key, of_keys = _not_empty(key, key_mask)
        padded_value, _ = _not_empty(value, None)
        inputs = prepare(padded_query, padded_key, padded_value, of_keys, query_mask)
    drawn_from = "given" if noise is not None else "a generator" if generator is not None else "drawn"
    facts = {
        **facts,
        "seed": seed,
        "noise": drawn_from,
        "the generator's state": None if generator is None else fingerprint(_bytes(generator.get_state())),
        "dtype": inputs.query.dtype,
        "device": query.device.type,
        "batch": query.shape[0],
        "heads": query.shape[1],
        "width": query.shape[-1],
        "value width": value.shape[-1],
        "gradients of": [name for name, x in (("query", query), ("key", key), ("value", value)) if recorded(x)],
    }
    undecided = noise is None and generator is None and seed is None
    state = fingerprint(_bytes(_global_state(query.device))) if undecided else 0
    shares = agree(group, facts, query.shape[2], key.shape[2], state)
    for name, n in (("queries", shares.n), ("keys", shares.n_k)):
        if n == 0:
            raise ValueError(f"no rank of the group has any {name}; one at least needs a token")
    with noted(group):
        rand = source_of_numbers(call, along, shares)
        if noise is None:
            noise = draw_noise(query, key, rand)
    return Settled(inputs, _not_empty_noise(noise), rand, shares)


def source_of_numbers(call: Passed, along: Sequence[Along], shares: Shares) -> Rand:
    """Numbers by global position. The last draw is the certificate's, one for each query.

    Without noise, generator and seed: where all ranks have one random state, from it, as one process draws. Where they
    differ, or where that would be very many numbers, from a seed made of rank 0's.
    """
    query, noise, generator, seed = call.query, call.noise, call.generator, call.seed
    batch, device = (query.shape[0], query.shape[1]), query.device
    of = {"queries": shares.of_queries, "keys": shares.of_keys, None: None}
    windows = [of[each] for each in (*along, "queries")]
    if noise is not None:
        return from_seed(batch, FOR_CHECKS, device=device, windows=windows[-1:])
    if generator is not None:
        return from_generator(batch, generator=generator, device=device, windows=windows)
    if seed is not None:
        return from_seed(batch, seed, device=device, windows=windows)
    if shares.states_agree and math.prod(batch) * max(shares.n, shares.n_k) <= COUNTED:
        return from_generator(batch, device=device, windows=windows)
    torch.rand((), device=device)  # the next call finds another state
    hashed = from_seed((1, math.prod(batch)), shares.state, device=device, windows=windows)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return hashed(*shape, dtype=dtype).reshape(*batch, *shape)

    return rand


def _check_kinds(*tensors: object) -> None:
    """Raise for what has no shape to look at; `prepare` says the rest."""
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected four dimensions (batch, heads, tokens, width)"
            )


def _not_empty(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tokens (b, h, n, p) and their mask; where there are none, one of padding."""
    if x.shape[2]:
        return x, mask
    return F.pad(x, (0, 0, 0, 1)), torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)


def _not_empty_noise(noise: Noise) -> Noise:
    if noise is None or all(x.shape[-1] for x in noise):
        return noise
    return tuple(x if x.shape[-1] else F.pad(x, (0, 1), value=0.5) for x in noise)


def _global_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()
