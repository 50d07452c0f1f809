"""The two sketches that the pages are about: each has a colour of its own, in every figure and table."""

from skeinformer.lab.records import Record

# by name of the method, whatever its options; at least 4 to 1 against the page's light and its dark paper
FAMILIES = {"cluster": "#1f7ac4", "skeinformer": "#d55e00"}


def family(record: Record) -> str:
    """The name of the family that the record's method is of, or an empty text."""
    method = str(record.get("method"))
    return method if method in FAMILIES else ""
