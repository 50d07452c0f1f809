"""Methods of studies in the table of methods, for commands that take them by name."""

from collections.abc import Iterator
from contextlib import contextmanager

from skeinformer.attention import METHODS, Method
from skeinformer.attention.table import Entry
from studies.mixed import Mixed
from studies.policies import Policy

OFFERED: dict[str, tuple[type[Method], str, str]] = {
    "mixed": (Mixed, "Mixed", "the cluster sketch with exact parts put in"),
    "policy": (Policy, "Policy", "the cluster sketch with a policy of training"),
}


@contextmanager
def studied_methods(*names: str) -> Iterator[None]:
    """The named ones are methods."""
    for name in names:
        kind, label, summary = OFFERED[name]
        METHODS[name] = Entry(
            kind,
            label,
            summary,
            "none: a study",
            "O(n^2 p)",  # not marked as quadratic, which would keep it out of a model
            exact_from=METHODS["cluster"].exact_from,
            random=True,
            in_table_1=False,
        )
    try:
        yield
    finally:
        for name in names:
            METHODS.pop(name, None)
