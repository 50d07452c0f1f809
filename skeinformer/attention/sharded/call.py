"""A call with a group: agreed on, computed by the ranks together, certified where that is asked for."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from skeinformer.attention.inputs import Passed, default_scale
from skeinformer.attention.run import run
from skeinformer.attention.sharded.certificate import shared_certificate
from skeinformer.attention.sharded.settle import settle_shares
from skeinformer.distributed.agreement import told
from skeinformer.distributed.collectives import noted, outside_of_graphs
from skeinformer.distributed.group import Group
from skeinformer.registry import check_count


@outside_of_graphs
def attend_over_group(
    kind: Any, options: Any, call: Passed, check: Callable[[], None], num_checks: int | None, group: Group
) -> tuple[Tensor, Any]:
    """The method `kind`, a class of Attention, for this rank's share of the tokens: its share of the output.

    And with `num_checks` what the method says of the output of all ranks. check: raises for what a module cannot take.
    """
    facts = {"method": kind.__name__, **options._asdict(), "num_checks": num_checks}
    draw = partial(kind.draw, options=options)

    def check_call() -> None:
        check()
        if num_checks is not None:
            check_count("num_checks", num_checks)

    inputs, noise, rand, shares = settle_shares(call, facts, draw, kind.along, check_call, group)
    info = None
    with noted(group):
        output, trace = run(partial(kind.compute_shares, options=options, shares=shares), inputs, noise)
        if num_checks is not None:
            scale = default_scale(inputs.query, getattr(options, "scale", None))
            found, error = shared_certificate(inputs, output, trace, rand, num_checks, scale, shares)
            if inputs.key_mask is not None:  # without what an empty share was given
                inputs = inputs._replace(key_mask=inputs.key_mask[..., : call.key.shape[2]])
            info = kind.describe(inputs, trace._replace(found=found), options, error)
    return output[..., : call.query.shape[2], :], info


@outside_of_graphs
def function_over_group(
    kind: Any, name: str, options: Mapping[str, Any], call: Passed, num_checks: int | None, group: Any
) -> tuple[Tensor, Any]:
    """The same for the functional form, which a user calls by `name`, with options that are not read yet."""
    shared = Group.of(group)
    with told(shared):
        read = kind.read(options, name)
        kind.accept(shared, read)
    return attend_over_group(kind, read, call, _anything, num_checks, shared)


def _anything() -> None:
    """A function takes heads of any width."""
