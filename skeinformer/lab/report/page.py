"""One self-contained HTML page of sections, with filters over all of them and a footer that says how it was made.

The page asks for nothing else: no font, no image, no address. It follows the reader's light or dark setting. Its script
only shows and hides what is already there; without it everything is visible.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import FIGURE_1, Styles, swatch_svg
from skeinformer.lab.report.format import count, distinct, label, listed
from skeinformer.lab.report.tables import attributes_html
from skeinformer.lab.report.template import PAGE, SCRIPT, STYLE

SETTINGS = (
    *("recipe", "task", "data", "device", "precision", "processes"),
    *("model", "text", "weights", "layer", "n", "budget", "batch", "heads", "head_dim", "dtype", "mode"),
)
RUNS = ("trials", "rounds", "seed", "started")
MACHINE = ("cpu", "cores", "threads", "gpu", "torch", "python", "skeinformer", "commit", "command")


class Section(NamedTuple):
    """A part of the page. Its elements carry the `fields` of its `records` as data attributes, for the filters."""

    heading: str
    html: str
    fields: frozenset[str] = frozenset()
    records: Sequence[Record] = ()


class FieldFilter(NamedTuple):
    """A choice among the values of a field of the records."""

    field: str
    heading: str
    show: Callable[[Value], str] = str


FILTERS = (
    FieldFilter("recipe", "recipe"),
    FieldFilter("task", "task", str),
    FieldFilter("model", "model"),
    FieldFilter("text", "text"),
    FieldFilter("n", "length n", count),
    FieldFilter("weights", "weights"),
    FieldFilter("layer", "layer"),
    FieldFilter("mode", "speed of", lambda value: "with backward" if value == "both" else str(value)),
)
MOST = 8  # commands in the footer
FEW = 4  # methods that need no filter
LARGEST, ALL = "largest", "all"  # choices of the sample size beside the sizes themselves


def page_html(
    records: Sequence[Record], sections: Sequence[Section], styles: Styles, title: str, lede: Sequence[str] = ()
) -> str:
    """The page; `lede` are the sentences below its title.

    A section has a heading where there are several. There are filters where there is much to choose.
    """
    filters = filters_html(sections, styles)
    script = f"<script>{SCRIPT}</script>" if filters else ""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    several = len(sections) > 1
    return PAGE.substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
        style=STYLE,
        title=escape(title),
        lede="".join(f"<p class='lede'>{escape(sentence)}</p>\n" for sentence in lede),
        layout="filtered" if filters else "plain",
        filters=filters,
        sections="\n".join(_section_html(section, several) for section in sections),
        footer=footer_html(records),
        script=script,
    )


def filters_html(sections: Sequence[Section], styles: Styles) -> str:
    """A fieldset for each field of which there are several values; the methods' is the legend of all figures too.

    Nothing where no field has several, no figure needs a legend, and the methods are few.
    """

    def records(field: str) -> list[Record]:
        return [record for section in sections if field in section.fields for record in section.records]

    parts = []
    for field, heading, show in FILTERS:
        values = distinct(records(field), field)
        if len(values) > 1:
            boxes = "".join(_checkbox(field, str(value), escape(show(value))) for value in values)
            parts.append(f"<fieldset class='control'><legend>{escape(heading)}</legend>{boxes}</fieldset>")
    sizes = distinct(records("budget"), "budget")
    if len(sizes) > 1:
        choices = {LARGEST: "the largest", ALL: "all", **{str(size): str(size) for size in sizes}}
        select = select_html("budget", choices, "sample size d")
        parts.append(f"<fieldset class='control'><legend>sample size d in tables</legend>{select}</fieldset>")
    drawn = any(section.fields and "<g data-label" in section.html for section in sections)
    if not parts and not drawn and len(distinct(records("label"), "label")) <= FEW:
        return ""
    parts.append(_methods_html(records("label"), styles))
    form = f"<form>\n{''.join(parts)}\n</form>"
    return f"<aside><details open><summary>Filters and legend</summary>\n{form}</details></aside>"


def select_html(field: str, choices: Mapping[str, str], heading: str) -> str:
    """A choice of one value of `field`, at first the first."""
    options = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in choices.items())
    attributes = f'data-filter="{escape(field)}" aria-label="{escape(heading)}" autocomplete="off"'
    return f'<select class="control" {attributes}>{options}</select>'


def footer_html(records: Sequence[Record]) -> str:
    """How the records were made; the commands as a block, a line each."""
    made = {name: text for name, text in made_by(records).items() if name != "command"}
    items = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in made.items())
    commands = [str(command) for command in distinct(records, "command")]
    block = command_html(commands[:MOST]) if commands else ""
    block += f"\n<p>and {len(commands) - MOST} more</p>" if len(commands) > MOST else ""
    return f"<h2>How this was made</h2>\n<dl>{''.join(items)}</dl>\n{block}"


def command_html(lines: Sequence[str]) -> str:
    """Commands, or lines of code, as a block that one click selects."""
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


def made_by(records: Sequence[Record]) -> dict[str, str]:
    """Settings, machine, versions, commit and command; several values where the records differ."""
    items = {}
    for name in (*SETTINGS, *RUNS, *MACHINE):
        # what `compare` calls a layer is its name
        values = distinct((r for r in records if name != "layer" or r.get("kind") != "compare_layer"), name)
        if name == "started" and len(values) > 2:
            text = f"{min(map(str, values))} to {max(map(str, values))}"
        else:
            text = listed(values)
        if values:
            items[name.replace("_", " ")] = text
    return items


def _section_html(section: Section, several: bool) -> str:
    heading = f"<h2>{escape(section.heading)}</h2>\n" if several else ""
    return f"<section>\n{heading}{section.html}\n</section>"


def _methods_html(records: Sequence[Record], styles: Styles) -> str:
    methods = {label(r): (r.get("method"), r.get("options")) for r in records if label(r)}
    boxes = []
    for name, (method, options) in methods.items():
        paper = {"paper": ""} if method in FIGURE_1 and not options else {}
        boxes.append(_checkbox("label", name, f"{swatch_svg(styles[name])}{escape(name)}", attributes_html(paper)))
    presets = "".join(
        f'<button type="button" data-preset="{preset}">{text}</button>'
        for preset, text in (("all", "all"), ("paper", "Figure 1's"), ("none", "none"))
    )
    return (
        f"<fieldset class='methods'><legend>method</legend><div class='control presets'>{presets}</div>"
        f"{''.join(boxes)}</fieldset>"
    )


def _checkbox(field: str, value: str, html: str, attributes: str = "") -> str:
    return (
        f'<label><input type="checkbox" class="control" data-filter="{field}" value="{escape(value)}"{attributes} '
        f'checked autocomplete="off">{html}</label>'
    )
