"""The page's frame, its style and its script."""

from string import Template

from skeinformer.lab.report.families import FAMILIES

LIGHT = "--ink: #1b1f24; --paper: #ffffff; --tint: #f5f7f9; --line: #d8dee4; --faint: #57606a; --mark: #fff3c4;"
DARK = "--ink: #e6edf3; --paper: #0f1318; --tint: #181e25; --line: #30363d; --faint: #9aa5b1; --mark: #3d3413;"
# a method's own colour is a bar before its name
FAMILY_STYLE = "\n".join(
    f"td.{name} {{ box-shadow: inset 4px 0 0 {color}; font-weight: 600; }}" for name, color in FAMILIES.items()
)

STYLE = (
    f"""
:root {{ color-scheme: light dark; {LIGHT} --shade: #1b1f2440; }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} --shade: #000000b0; }} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 2rem 1.25rem 3rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: clamp(1.5rem, 1.1rem + 1.6vw, 2.1rem); line-height: 1.2; letter-spacing: -.012em; margin: 0 0 1rem;
  max-width: 28em; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 0 0 .75rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p, ul, figcaption { max-width: 46rem; }
.lede { font-size: 1.15rem; line-height: 1.5; margin: 0 0 1rem; }
main { min-width: 0; }
section { margin: 0 0 1rem; }
section + section, footer { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1.75rem; }
figure { margin: 0; min-width: 0; }
figure.wide { margin: 1.5rem 0; max-width: 38rem; }
.columns { margin-top: 2rem; }
figcaption { font-size: .875rem; }
.grid { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  margin: 1rem 0; }
.grid figure { max-width: 36rem; }
svg { display: block; width: 100%; height: auto; color: var(--ink); }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, sans-serif; }
svg [data-label] text { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
svg.swatch { display: inline-block; width: 2rem; height: .8rem; margin-right: .4rem; flex: none; }
/* a shadow at an edge behind which a table goes on; paper that moves with the table covers it at the end */
.scroll { overflow-x: auto; margin: .75rem 0; scrollbar-width: thin; background:
  linear-gradient(to right, var(--paper) 50%, transparent) left / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--paper) 50%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to right, var(--shade), transparent) left / 1.25rem 100% no-repeat scroll,
  linear-gradient(to left, var(--shade), transparent) right / 1.25rem 100% no-repeat scroll; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid; outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; white-space: nowrap;
  font-size: .9rem; line-height: 1.4; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
thead th { border-bottom: 2px solid var(--line); color: var(--faint); font-weight: 600; font-size: .8rem; }
:is(th, td).word { text-align: left; }
:is(th, td):first-child { position: sticky; left: 0; z-index: 1; background: var(--paper); white-space: normal;
  min-width: 5rem; max-width: min(15rem, 38vw); border-right: 1px solid var(--line); }
th { white-space: normal; vertical-align: bottom; }
td { vertical-align: top; }
td small { display: block; }
td.best { font-weight: 700; background: var(--mark); }
td.best small { font-weight: 400; }
tr.group > * { border-top: 2px solid var(--line); }
.sortable { font-size: .85rem; }
:is(th, td)[data-published] { color: var(--faint); font-weight: 400; }
.sortable td small { font-size: .75rem; }
"""
    + FAMILY_STYLE
    + """
.heat { border-spacing: 2px; }
.heat :is(th, td) { border: 0; padding: .35rem .45rem; font-size: .8rem; }
.heat tbody td:not(.word) { border-radius: .2rem; min-width: 3rem; text-align: center; }
.heat :is(th, td):first-child { border-right: 0; }
.heat thead th:not(.word) { text-align: center; }
.heat td.whole { font-weight: 700; }
.scale { display: flex; flex-wrap: wrap; gap: .25rem; font-size: .8rem; align-items: center; margin: .5rem 0; }
.scale span { padding: .1rem .5rem; border-radius: .2rem; }
pre { margin: .5rem 0; padding: .75rem 1rem; background: var(--tint); border: 1px solid var(--line);
  border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; line-height: 1.5; }
pre code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; user-select: all; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid; outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.faint, small, footer { color: var(--faint); font-size: .875rem; }
footer h2 { color: var(--ink); font-size: 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.25rem; margin: 0 0 1rem; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
ul { padding-left: 1.25rem; }
summary { cursor: pointer; padding: .25rem 0; font-weight: 600; }
.filtered { max-width: 100rem; }
.filtered > .columns { display: grid; gap: 0 2rem; grid-template-columns: 100%; }
fieldset { border: 1px solid var(--line); border-radius: .4rem; margin: 0 0 .75rem; padding: .25rem .6rem .4rem;
  min-width: 0; display: flex; flex-wrap: wrap; gap: 0 .9rem; font-size: .875rem; }
fieldset label { display: flex; align-items: center; padding: .1rem 0; }
fieldset.methods label { flex: 1 1 12rem; }
fieldset.methods label:hover { background: var(--mark); }
input { margin: 0 .4rem 0 0; flex: none; }
.presets { flex: 1 0 100%; display: flex; gap: .4rem; margin: .2rem 0; }
button, select { font: inherit; color: inherit; }
@media (min-width: 64rem) {
  .filtered > .columns { grid-template-columns: 17rem minmax(0, 1fr); }
  aside { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: .5rem 0; }
  fieldset.methods { display: block; }
}
@media (max-width: 30rem) {
  body { padding: 1.25rem 1rem 2rem; }
  dl { grid-template-columns: 100%; }
  dd { margin: 0 0 .4rem; }
}
html:not(.js) .control { display: none; }
.off { display: none !important; }
.dim { opacity: .12; }
.holds.nothing::after { content: "Nothing to show with these filters."; color: var(--faint); }
"""
    + f"@media print {{ :root {{ color-scheme: light; {LIGHT} }} }}\n"
    + """
@media print {
  @page { margin: 14mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  aside { display: none; }
  .filtered > .columns { display: block; }
  .grid { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; background: none; }
  table, .sortable { font-size: 6.5pt; white-space: normal; width: 100%; overflow-wrap: anywhere; }
  thead th { font-size: inherit; }
  th, td, .heat :is(th, td) { padding: .15rem .2rem; min-width: 0; font-size: inherit; }
  .heat tbody td:not(.word) { min-width: 0; }
  :is(th, td):first-child { position: static; max-width: none; min-width: 0; }
  td small, .sortable td small { font-size: 5.5pt; }
  figure, tr, pre { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""
)

SCRIPT = r"""
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  document.documentElement.classList.add("js");
  const controls = all("[data-filter]");
  const fields = [...new Set(controls.map(control => control.dataset.filter))];
  const parts = all("main " + fields.map(field => `[data-${field}]`).join(", main "));
  const tables = all("table.sortable");

  // the values of each field that are shown
  const chosen = () => {
    const values = Object.fromEntries(fields.map(field => [field, new Set()]));
    for (const control of controls)
      if (control.type !== "checkbox" || control.checked) values[control.dataset.filter].add(control.value);
    return values;
  };
  const isShown = (part, values) => fields.every(field => {
    const value = part.dataset[field];
    if (value === undefined || values[field].has(value)) return true;
    if (field !== "budget") return false;
    return values.budget.has("all") || (values.budget.has("largest") && "largest" in part.dataset);
  });

  // bold: the best rival among the rows that are shown
  const mark = table => {
    const rows = all("tbody tr[data-rival]:not(.off)", table);
    all("thead th", table).forEach((heading, column) => {
      if (!heading.dataset.best) return;
      const sign = heading.dataset.best === "low" ? 1 : -1;
      const number = row => sign * (row.cells[column].dataset.value ?? NaN);
      const best = Math.min(...rows.map(number).filter(value => !Number.isNaN(value)));
      for (const row of all("tbody tr", table))
        row.cells[column].classList.toggle("best", rows.includes(row) && number(row) === best);
    });
  };
  const apply = () => {
    const values = chosen();
    for (const part of parts) part.classList.toggle("off", !isShown(part, values));
    tables.forEach(mark);
    for (const holder of all(".holds")) {
      const shown = all("figure, tbody tr, li", holder).some(part => !part.closest(".off"));
      holder.classList.toggle("nothing", !shown);
    }
  };

  // the address keeps what differs from the first state: boxes without their tick, and other choices
  const save = () => {
    const state = new URLSearchParams();
    for (const control of controls) {
      const field = control.dataset.filter;
      if (control.type !== "checkbox") { if (control.selectedIndex > 0) state.set(field, control.value); }
      else if (!control.checked) state.append("no-" + field, control.value);
    }
    location.replace("#" + (state.toString() || "show=all"));
  };
  const load = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const control of controls) {
      const field = control.dataset.filter;
      if (control.type === "checkbox") control.checked = !state.getAll("no-" + field).includes(control.value);
      else control.selectedIndex = Math.max(0, [...control.options].map(x => x.value).indexOf(state.get(field)));
    }
    apply();
  };
  const change = () => { apply(); save(); };
  document.addEventListener("change", event => { if (event.target.dataset.filter) change(); });
  window.addEventListener("hashchange", load);
  for (const form of all("form")) form.addEventListener("submit", event => event.preventDefault());
  for (const button of all("[data-preset]")) button.addEventListener("click", () => {
    const preset = button.dataset.preset;
    for (const box of all("[data-filter=label]"))
      box.checked = preset === "all" || (preset === "paper" && "paper" in box.dataset);
    change();
  });

  // pointing at a method dims the others
  const point = label => {
    for (const series of all("main svg [data-label]"))
      series.classList.toggle("dim", label !== null && series.dataset.label !== label);
  };
  for (const label of all("fieldset.methods label")) {
    const box = label.querySelector("input");
    label.addEventListener("pointerenter", event => { if (event.pointerType === "mouse") point(box.value); });
    label.addEventListener("pointerleave", () => point(null));
    box.addEventListener("focus", () => { if (box.matches(":focus-visible")) point(box.value); });
    box.addEventListener("blur", () => point(null));
  }

  // a click on a heading sorts by it, a second one the other way round
  const sort = (table, heading, column) => {
    const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const body = table.tBodies[0];
    const number = row => parseFloat(row.cells[column].dataset.value);
    const text = row => row.cells[column].textContent;
    body.append(...[...body.rows].sort((a, b) => {
      const [x, y] = [number(a), number(b)];
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;  // rows without a number come last
      return direction * (Number.isNaN(x) ? text(a).localeCompare(text(b)) : x - y);
    }));
  };
  for (const table of tables) all("thead th", table).forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sort(table, heading, column));
  });

  if (matchMedia("(max-width: 63.99rem)").matches) for (const details of all("aside details")) details.open = false;
  load();
})();
"""

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body class="$layout">
<h1>$title</h1>
$lede<div class="columns">
$filters
<main>
$sections
<footer>
$footer
</footer>
</main>
</div>
$script
</body>
</html>
""")
