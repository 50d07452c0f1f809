"""Figures of matplotlib as small svg elements: text stays text, ink is the page's text colour, nothing is clipped.

A clip path inside a picture that the page hides would blank the pictures that share it, so there must be none.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from skeinformer.lab.report.tables import attributes_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#102030"  # stands for the page's text colour while matplotlib draws
FONT = 9.0  # points
STYLE = """<style>
svg { color: #1b1f24; background: #ffffff; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, sans-serif; }
svg [data-label] text { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3; background: #0f1318; }
  svg [data-label] text { stroke: #0f1318; }
}
</style>"""


@contextmanager
def drawing(salt: str = "skeinformer") -> Iterator[None]:
    """matplotlib's settings while it draws. Pictures of one page need different salts, for different names inside."""
    import matplotlib

    # a name with a dollar sign is no formula
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False, "font.size": FONT}
    ):
        yield


def svg_element(figure: "Figure", title: str, labels: Sequence[str] = ()) -> str:
    """The figure as an svg element. What was drawn with gid "series-i" gets labels[i] as its data-label and tooltip."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # its only style goes into the page's, or the file's
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", _compact, svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r'<g>\n(?:<use [^>]*style="([^"]*)"/>\n)+</g>', _share_style, svg)
    used = set(re.findall(r'href="#([^"]+)"', svg))

    def named(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("series-"):
            text = labels[int(name.removeprefix("series-"))]
            return f"{attributes_html({'label': text})}><title>{escape(text)}</title>"
        return match[0] if name in used else match[2]

    svg = re.sub(r' id="([^"]*)"(>?)', named, svg)
    return svg.replace(INK, "currentColor").replace("<svg", f"<svg role='img' aria-label='{escape(title)}'", 1)


def stand_alone(svg: str) -> str:
    """The element as the text of an svg file that follows the reader's light or dark setting."""
    element, drawing = svg.split(">", 1)
    return f"{element}>\n{STYLE}{drawing}"


def _share_style(group: re.Match[str]) -> str:
    """Marks that look the same have their style from the group."""
    marks = group[0].removeprefix("<g>").replace(f' style="{group[1]}"', "")
    return group[0] if "style=" in marks else f'<g style="{group[1]}">{marks}'


def _compact(tag: re.Match[str]) -> str:
    """A tag on one line, with three digits to a number and without fonts; what stands between tags is the reader's."""
    rounded = re.sub(r"\d+\.\d{2,}", _rounded, tag[0])
    plain = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;?', "", rounded)
    return " ".join(plain.split())


def _rounded(number: re.Match[str]) -> str:
    value = float(number[0])
    return f"{value:.{1 if value >= 10 else 2}f}".rstrip("0").rstrip(".")
