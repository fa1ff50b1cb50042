"""Documents as one self-contained HTML page, readable on a phone. No scripts, no fonts, nothing loaded."""

from __future__ import annotations

from html import escape

from .document import Document
from .text import Table, backend_text, cell_text, layer_text, sections, to_get_it

__all__ = ["page"]

STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --line: #d1d9e0; --paper: #fff;
  --yes: #dafbe1; --no: #fff1ee; --plan: #fff8c5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
    --yes: #12341d; --no: #3b1a17; --plan: #3a3113; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
ul { margin: .2rem 0 0; padding-left: 1.1rem; }
small { color: var(--soft); }
.yes { background: var(--yes); } .no { background: var(--no); } .plan { background: var(--plan); }
.none { color: var(--soft); }
@media (max-width: 46rem) {
  body { padding: .6rem; }
  table, tbody, tr, td, th { display: block; width: 100%; }
  thead { position: absolute; left: -9999px; }
  tr { margin: 0 0 1rem; }
  tr > * + * { border-top: 0; }
  td[data-label]::before { content: attr(data-label); display: block; color: var(--soft); font-size: .8rem; }
}
"""


def _tag(name: str, content: str, **attributes: str) -> str:
    text = "".join(
        f' {key.replace("_", "-").strip("-")}="{escape(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{text}>{content}</{name}>"


def _row(cells: list[str]) -> str:
    return _tag("tr", "".join(cells))


def _head(names: list[str]) -> str:
    return _tag("thead", _row([_tag("th", escape(name), scope="col") for name in names]))


def _plain_table(header: list[str], rows: list[list[str]]) -> str:
    body = [
        _row(
            [
                _tag("td", escape(cell), data_label=name) if name else _tag("td", escape(cell))
                for name, cell in zip(header, row, strict=True)
            ]
        )
        for row in rows
    ]
    return _tag("table", _head(header) + _tag("tbody", "".join(body)))


def _reasons(group: Document, refused: Document) -> str:
    items = "".join(_tag("li", escape(reason["text"])) for reason in refused["reasons"])
    return _tag("ul", items) + _tag("p", "To get it: " + _tag("strong", escape(to_get_it(group, refused))))


def _cell(group: Document, name: str, slower: bool) -> str:
    """One backend for one group: chosen, refused with every reason, or not asked."""
    refused = next((entry for entry in group["refused"] if entry["backend"] == name), None)
    if group["backend"] == name:
        return _tag(
            "td",
            f"<strong>chosen</strong> <small>{escape(group['layout'])}</small>",
            _class="yes",
            data_label=name,
        )
    if refused is None:
        return _tag("td", "slower" if slower else "not asked", _class="none", data_label=name)
    if group["planned"] == name:
        return _tag(
            "td", "<strong>planned</strong>" + _reasons(group, refused), _class="plan", data_label=name
        )
    return _tag("td", "<strong>refused</strong>" + _reasons(group, refused), _class="no", data_label=name)


def _grid(doc: Document) -> str:
    """Layers by backends."""
    names: list[str] = list(doc["backends"])
    asked = [entry["backend"] for group in doc["groups"] for entry in group["refused"]]
    names += [
        name
        for name in dict.fromkeys([*asked, *(g["backend"] for g in doc["groups"])])
        if name and name not in names
    ]
    rows = []
    for group in doc["groups"]:
        title = f"<strong>{escape(group['ranges'])}</strong><br>{escape(layer_text(group))}"
        notes = "; ".join(group["layer"]["notes"])
        if group["prefill"]:
            notes = f"prefill: {group['prefill']['route'] or 'none'}" + (f"; {notes}" if notes else "")
        if notes:
            title += f"<br><small>{escape(notes)}</small>"
        cells = [_tag("th", title, scope="row")]
        if group["role"] in ("native", "no cache"):
            text = f"{escape(group['role'])}: {escape(group['reason'])}"
            cells.append(_tag("td", text, colspan=str(len(names)), _class="none", data_label="all backends"))
        else:
            chosen = names.index(group["backend"]) if group["backend"] in names else len(names)
            cells += [_cell(group, name, position > chosen) for position, name in enumerate(names)]
        rows.append(_row(cells))
    return _tag("table", _head(["layers", *names]) + _tag("tbody", "".join(rows)), id="grid")


def _matrix_grid(doc: Document) -> str:
    arches = [target["arch"] for target in doc["targets"]]
    rows = []
    for row in doc["rows"]:
        cells = [_tag("th", escape(row["model"]["name"]), scope="row")]
        for arch in arches:
            cell = row["cells"][arch]
            good = "error" not in cell and not cell["refused"] and cell["backends"]
            items = "".join(_tag("li", escape(reason)) for reason in cell.get("reasons", []))
            content = escape(cell_text(cell)) + (_tag("ul", items) if items else "")
            cells.append(_tag("td", content, _class="yes" if good else "no", data_label=arch))
        rows.append(_row(cells))
    return _tag("table", _head(["model", *arches]) + _tag("tbody", "".join(rows)), id="grid")


def _section(entry: Table) -> str:
    title, header, rows = entry
    if not header:
        return _tag("p", escape(title))
    return _tag("section", _tag("h2", escape(title)) + _plain_table(header, rows))


def page(doc: Document) -> str:
    """A document as an HTML page."""
    kind = doc["schema"].split("/")[0].rsplit(".", 1)[1]
    tables = sections(doc)
    title = (
        tables[0][0] if kind in ("plan", "matrix") else {"env": "This machine", "support": "Backends"}[kind]
    )
    body = [_tag("h1", escape(title))]
    if kind == "plan":
        chosen = "; ".join(f"{group['ranges']}: {backend_text(group)}" for group in doc["groups"])
        body.append(_tag("p", escape(chosen)))
        body.append(_grid(doc))
        hidden = ("Layers", "Why not", "Why not a faster one")
        body += [_section(entry) for entry in tables[1:] if entry[0] not in hidden]
    elif kind == "matrix":
        body.append(_matrix_grid(doc))
    else:
        body += [_section(entry) for entry in tables]
    body.append(_tag("footer", f"<small>turboquant_rocm {escape(doc['version'])}</small>"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>{''.join(body)}</main></body></html>\n"
    )
