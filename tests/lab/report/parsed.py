"""A page as its elements and tables."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, cells of the table bodies, and a check that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.bold: list[str] = []
        self.in_best = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if "tbody" in self.open:
            if tag == "tr":
                self.rows.append([])
            elif tag == "td":
                self.rows[-1].append("")
                self.in_best = dict(attrs).get("class") == "best"
            elif tag == "small":
                self.in_best = False

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open:
            self.rows[-1][-1] += data
            if self.in_best:
                self.bold.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def values(self, attribute: str) -> set[str]:
        """All values of an attribute on the page."""
        return {attributes[attribute] or "" for _, attributes in self.elements if attribute in attributes}
