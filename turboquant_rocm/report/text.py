"""Documents as terminal tables (rich) and as Markdown. Both show the same rows, made here once."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from ..planning import ranges
from .document import Document, value_text
from .environment import environment_rows

__all__ = ["Table", "markdown", "sections", "table", "table_of", "to_get_it"]

# (title, header, rows); a paragraph is (text, [], []).
Table = tuple[str, list[str], list[list[str]]]


def amount(n: float) -> str:
    """Bytes for people: 98,304 B, 1.2 MiB, 3.4 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n:,.0f} B" if n == int(n) else f"{n:,.1f} B"


def backend_text(group: Document) -> str:
    """The chosen backend of a group, or what it is instead."""
    if group["backend"] is None:
        return str(group["role"])
    if group["planned"]:
        return f"{group['planned']} (planned; until then {group['backend']})"
    return str(group["backend"])


def layer_text(group: Document) -> str:
    """Geometry of a group's layers in a few words."""
    layer = group["layer"]
    if group["role"] == "no cache":
        return str(layer["kind"])
    size = str(layer["head_size"])
    if layer["value_head_size"] != layer["head_size"]:
        size += f"/{layer['value_head_size']}"
    text = f"{layer['kind']}, {layer['num_heads']}/{layer['num_kv_heads']} heads of {size}"
    for name in ("window", "chunk", "soft_cap", "position_bias"):
        if layer[name] is not None:
            text += f", {name.replace('_', ' ')} {value_text(layer[name])}"
    if layer["sinks"]:
        text += ", sinks"
    if group["shares_cache"]:
        text += ", reads another layer's cache"
    return text


def _why(refused: Document) -> str:
    return ", ".join(reason["text"] for reason in refused["reasons"])


def _remarks(group: Document) -> Iterator[str]:
    """Backends that a group of layers would get on request, and what becomes of the options of the cache in it."""
    if "on_request" in group:
        yield f"on request: {' or '.join(f'--force {name}' for name in group['on_request'])}"
    if "options" in group:
        found = group["options"]
        if found["refused"]:  # a cache leaves options out where there is a window, and refuses other layers
            windowed = any(reason["code"] == "window" for reason in found["refused"])
            what = "without the options" if windowed else "cannot have the options"
            yield f"{what}: {_why({'reasons': found['refused']})}"
        elif found["exact_tokens"]:
            yield f"up to {found['exact_tokens']} exact tokens, {found['exact_bytes']:,} B per layer and sequence"
        else:
            yield "with the options"


def to_get_it(group: Document, refused: Document) -> str:
    """The smallest change that gets a refused backend for the layers of ``group``, in a few words."""
    if group["shares_cache"]:
        return "what the cache's owner needs"
    if refused["change"] is not None:
        return str(refused["change"]["text"])
    if refused["targets"]:
        kernels = ", and a version with its kernels" if refused["planned"] else ""
        return f"another GPU: {', '.join(refused['targets'])}{kernels}"
    if [reason["code"] for reason in refused["reasons"]] == ["kernels"]:
        return "a version with its kernels"
    return "no single change"


def _plan(doc: Document) -> Iterator[Table]:
    model, target = doc["model"], doc["target"]
    where = f"{target['arch']} ({target['name']}{', this machine' if target['local'] else ''})"
    preset = doc["preset"] + doc.get("options", "")
    head = f"{model['name']}: {model['layers']} layers on {where}, {preset}, block {doc['block_size']}"
    if model["tp"] > 1:
        head += f", tp {model['tp']}"
    yield (head, [], [])
    restrictions = [
        f"{name} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in doc["policy"].items()
        if value not in (None, [], True) and name != "variables"
    ]
    if restrictions:
        source = f" (set by {', '.join(doc['policy']['variables'])})" if doc["policy"]["variables"] else ""
        yield (f"Policy: {'; '.join(restrictions)}{source}", [], [])

    rows, why = [], []
    for group in doc["groups"]:
        prefill = group["prefill"]
        rows.append(
            [
                group["ranges"],
                str(group["count"]),
                layer_text(group),
                backend_text(group),
                group["layout"] or "",
                (prefill["route"] or "none") if prefill else "",
                "; ".join([group["reason"] or "; ".join(group["layer"]["notes"]), *_remarks(group)]).strip(
                    "; "
                ),
            ]
        )
        for refused in group["refused"]:
            why.append([group["ranges"], refused["backend"], _why(refused), to_get_it(group, refused)])
    yield ("Layers", ["layers", "n", "what", "decode", "layout", "prefill", "notes"], rows)
    if why:
        served = any(group["backend"] is not None for group in doc["groups"])
        yield (
            "Why not a faster one" if served else "Why not",
            ["layers", "backend", "every failed check", "smallest change that gets it"],
            why,
        )
    limits = _prefill_limits(doc)
    if limits:
        yield ("Prefill: routes refused", ["layers", "route", "every failed check"], limits)

    pages = doc["pages"]
    if pages["groups"]:
        rows = [
            [
                g["what"],
                str(len(g["layers"])),
                str(g["block_size"]),
                amount(g["block_bytes"]),
                str(g["tokens_per_page"]),
            ]
            for g in pages["groups"]
        ]
        title = {
            "equal": "Pages: one size serves all groups",
            "divisible": "Pages: the largest is a multiple of the others",
            "padded": f"Pages: padded to the largest, {pages['waste']:.1%} of the cache is padding",
        }[pages["rule"]]
        yield (
            f"{title} ({amount(pages['page_bytes'])})",
            ["group", "layers", "block", "bytes", "tokens per page"],
            rows,
        )
        if pages["suggestions"]:
            rows = [
                [
                    ", ".join(f"{what} {size}" for what, size in s["block_sizes"].items()),
                    f"{s['waste']:.1%}",
                    ", ".join(s["backends"]),
                ]
                for s in pages["suggestions"]
            ]
            yield ("Block sizes with less padding", ["block sizes", "padding", "backends"], rows)

    b = doc["bytes"]
    rows = [
        ["cache per token", amount(b["per_token"]), "native layers, meta regions and padding included"],
        ["without padding", amount(b["content_per_token"]), ""],
        ["unquantized", amount(b["native_per_token"]), ""],
        ["effective compression", f"{b['compression']:.2f}x", "over the whole model"],
        ["workspace", amount(b["workspace"]), "scratch memory of decode, at most"],
    ]
    if b["tokens"] is not None:
        rows.append(["tokens that fit", f"{b['tokens']:,}", _budget(doc)])
        rows.append(["unquantized", f"{b['native_tokens']:,}", ""])
    yield ("Memory of one rank" if model["tp"] > 1 else "Memory", ["what", "amount", "counted"], rows)
    if doc["warnings"]:
        yield ("Warnings", ["code", "what"], [[w["code"], w["text"]] for w in doc["warnings"]])
    expect = doc["expect"]
    if expect is not None:
        text = "met" if expect["met"] else f"NOT met by {len(expect['missed_layers'])} layers"
        yield (f"Expected {expect['backend']}: {text}", [], [])


def _prefill_limits(doc: Document) -> list[list[str]]:
    """Prefill routes that are built for the target and refused, with the layers that each reason holds for."""
    found: dict[tuple[str, str], list[int]] = {}
    for group in doc["groups"]:
        for name, reasons in (group["prefill"] or {"refused": {}})["refused"].items():
            if not any(r["code"] == "arch" for r in reasons):
                found.setdefault((name, ", ".join(r["text"] for r in reasons)), []).extend(group["layers"])
    return [[ranges(sorted(layers)), name, text] for (name, text), layers in found.items()]


def _budget(doc: Document) -> str:
    """What a number of tokens that fit counts, and what it leaves out."""
    b, tp = doc["bytes"], doc["model"]["tp"]
    weights = b["weights_gib"]
    text = f"in {b['memory_gib']:g} GiB"
    text += f" less {weights / tp:g} GiB of weights" if weights else ", weights not counted"
    if any(group["layer"]["window"] or group["layer"]["chunk"] for group in doc["groups"]):
        text += ", if every layer keeps every token"
    if doc["model"]["hybrid"]:
        text += ", recurrent states not counted"
    return text


def cell_text(cell: Document) -> str:
    """One cell of the matrix in a few words."""
    if "error" in cell:
        return str(cell["error"])
    parts = [f"{name} x{count}" for name, count in cell["planned"].items()]
    text = "".join(f"{part} (planned), " for part in parts)
    text += ", ".join(f"{name} x{count}" for name, count in cell["backends"].items())
    for name in ("native", "refused"):
        if cell[name]:
            text += f"{', ' if text else ''}{name} x{cell[name]}"
    return text or "no cache"


def _matrix(doc: Document) -> Iterator[Table]:
    arches = [target["arch"] for target in doc["targets"]]
    title = f"{doc['preset']}, block {doc['block_size']}"
    if len(doc["rows"]) == 1:
        row = doc["rows"][0]
        yield (f"{row['model']['name']} on every target, {title}", [], [])
        rows = []
        for arch in arches:
            cell = row["cells"][arch]
            compression = f"{cell['compression']:.2f}x" if cell.get("backends") else ""
            rows.append([arch, cell_text(cell), compression, "; ".join(cell.get("reasons", []))])
        yield (
            "What it gets",
            ["target", "layers", "smaller", "refused, of those built for the target"],
            rows,
        )
        return
    yield (f"Models on every target, {title}", [], [])
    rows = [
        [row["model"]["name"], *(cell_text(row["cells"][arch]) for arch in arches)] for row in doc["rows"]
    ]
    yield ("What each model gets", ["model", *arches], rows)


def _support(doc: Document) -> Iterator[Table]:
    arches = [target["arch"] for target in doc["targets"]]
    rows = []
    for backend in doc["backends"]:
        mark = "yes" if backend["ready"] else "planned"
        if not backend["automatic"]:
            mark = "on request"
        rows.append(
            [
                backend["backend"],
                backend["layout"],
                *(mark if a in backend["targets"] else "" for a in arches),
            ]
        )
    yield ("Where each backend runs", ["backend", "layout", *arches], rows)
    for backend in doc["backends"]:
        rows = [[r["code"], r["wants"]] for r in backend["requires"]]
        state = "" if backend["ready"] else " Planned: its kernels are not in this version."
        if not backend["automatic"]:
            state += " Never chosen unless asked for."
        yield (f"{backend['backend']}: {backend['description']}.{state}", ["check", "wants"], rows)
    rows = [
        [
            option["option"],
            option["what"],
            option["how"],
            ", ".join(option["backends"]),
            ", ".join(f"{need['code']}: {need['wants']}" for need in option["layer"]),
        ]
        for option in doc["options"]
    ]
    header = ["option", "what it does", "how", "backends", "layers that it needs"]
    yield ("Options for accuracy, behind a preset's name", header, rows)
    rows = [
        [f["arch"], f["name"], str(f["wave_size"]), amount(f["lds_bytes"]), f["fp8_format"] or "emulated"]
        for f in doc["facts"]
    ]
    yield ("Targets", ["arch", "for example", "wave", "LDS", "FP8"], rows)


def sections(doc: Document) -> list[Table]:
    """The tables of a document, whatever its kind."""
    kind = doc["schema"].split("/")[0].rsplit(".", 1)[1]
    makers = {"plan": _plan, "matrix": _matrix, "env": environment_rows, "support": _support}
    found = list(makers[kind](doc))
    if "environment" in doc:
        found += environment_rows(doc["environment"])
    return found


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def markdown(doc: Document) -> str:
    """A document as Markdown tables."""
    out: list[str] = []
    for position, (title, header, rows) in enumerate(sections(doc)):
        if not header:
            out.append(f"{'## ' if position == 0 else ''}{_escape(title)}\n")
            continue
        out.append(f"### {_escape(title)}\n")
        out.append("| " + " | ".join(map(_escape, header)) + " |")
        out.append("|" + "---|" * len(header))
        out += ["| " + " | ".join(map(_escape, row)) + " |" for row in rows]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def table(doc: Document, width: int | None = None, color: bool = False) -> str:
    """A document as terminal tables. width: columns (default: those of the terminal)."""
    return table_of(sections(doc), width, color)


def table_of(found: Iterable[Table], width: int | None = None, color: bool = False) -> str:
    """:func:`table` for some of the :func:`sections` of a document."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, force_terminal=color, highlight=False, soft_wrap=False)
    for title, header, rows in found:
        console.print(Text(title, style="bold"))
        if not header:
            continue
        grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(header))
        for column, name in enumerate(header):
            grid.add_column(Text(name), overflow="fold", min_width=_longest_word(column, rows))
        for row in rows:
            grid.add_row(*(Text(cell) for cell in row))
        console.print(grid)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _longest_word(column: int, rows: list[list[str]]) -> int:
    """Width below which rich would break words, within reason."""
    words = [word for row in rows for word in row[column].split()]
    return min(24, max((len(word) for word in words), default=1))
