"""Tables of studies in pages of the documentation: between two marks, so that a command writes them anew."""

from collections.abc import Iterable, Mapping, Sequence

END = "<!-- end -->"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with each text between its marks, `<!-- name -->` and `<!-- end -->`."""
    for name, text in texts.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if not mark or END not in rest:
            raise ValueError(f"the page has no <!-- {name} --> that an {END} follows")
        page = f"{before}{mark}{text}\n{END}{rest.partition(END)[2]}"
    return page
