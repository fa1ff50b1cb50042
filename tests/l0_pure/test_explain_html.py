"""The HTML report in a real browser, headless: it renders, says everything, and fits a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from turboquant_rocm.explain import run

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium here (Debian: apt-get install chromium): the page was not opened"
)

PHONE, DESKTOP = 390, 1280

# The page lies in a frame of the wanted width, since browsers have a least width of window. What is measured there is
# written into the outer document, which the browser then dumps.
PROBE = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" style="border:0;width:WIDTHpx;height:4000px" srcdoc="PAGE"></iframe><pre id="found"></pre>
<script>
addEventListener('load', () => {
  const view = document.getElementById('frame').contentWindow, page = view.document;
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.right, r.width, r.height]; };
  const cells = [...page.querySelectorAll('#grid tbody tr')].map(row => [...row.children].map(cell => ({
    text: cell.innerText, label: cell.dataset.label || '', kind: cell.className, box: box(cell),
    columns: cell.colSpan, shown: view.getComputedStyle(cell, '::before').content })));
  const wide = [...page.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > view.innerWidth + 1
    && !e.closest('thead')).map(e => e.tagName + ' ' + e.innerText.slice(0, 40));
  document.getElementById('found').textContent = JSON.stringify({ inner: view.innerWidth,
    scroll: page.documentElement.scrollWidth, height: page.documentElement.scrollHeight, wide, cells,
    title: page.title, headings: [...page.querySelectorAll('h1,h2')].map(e => e.innerText),
    head: [...page.querySelectorAll('#grid thead th')].map(e => e.innerText),
    size: parseFloat(view.getComputedStyle(page.body).fontSize) });
});
</script>"""


def open_page(page: str, width: int, folder: Path) -> dict[str, Any]:
    """What the browser sees of ``page`` at ``width`` CSS pixels."""
    assert BROWSER is not None
    probe = folder / "probe.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", html.escape(page)), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000",
    ]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    done = subprocess.run(
        [*command, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    assert found.group(1), "the page did not load"
    answer: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return answer


def page_and_document(command: str) -> tuple[str, dict[str, Any]]:
    words = shlex.split(command)
    return run([*words, "--format", "html"])[1], json.loads(run([*words, "--format", "json"])[1])


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize(
    "command",
    [
        "gpt-oss-120b --target gfx950 --memory 288GiB",
        "deepseek-v3 --target gfx942",
        "gemma-3-27b --target sm_90",
    ],
)
def test_layers_by_backends(command: str, width: int, tmp_path: Path):
    page, doc = page_and_document(command)
    seen = open_page(page, width, tmp_path)
    assert seen["inner"] == width
    assert seen["scroll"] <= width, seen["wide"]
    assert not seen["wide"]
    assert seen["size"] >= 16
    assert doc["model"]["name"] in seen["title"]
    assert len(seen["cells"]) == len(doc["groups"])
    for row, group in zip(seen["cells"], doc["groups"], strict=True):
        head, *cells = row
        assert head["text"].startswith(group["ranges"])
        if group["role"] == "native":
            assert group["reason"] in cells[0]["text"]
            continue
        by_name = {cell["label"]: cell for cell in cells}
        assert set(by_name) >= set(doc["backends"])
        if group["backend"]:
            assert "chosen" in by_name[group["backend"]]["text"]
            assert by_name[group["backend"]]["kind"] == "yes"
        for refused in group["refused"]:
            cell = by_name[refused["backend"]]
            assert cell["kind"] in ("no", "plan")
            for reason in refused["reasons"]:
                assert reason["text"] in cell["text"]
            assert cell["box"][3] > 20, "a cell with reasons has a height"
    labels = [cell["shown"] for row in seen["cells"] for cell in row[1:]]
    if width == PHONE:  # cards: each cell under the other, named
        assert all(len({tuple(cell["box"][:2]) for cell in row}) == 1 for row in seen["cells"])
        assert all(label not in ("none", "normal", "") for label in labels)
    else:
        assert seen["head"][1:] == doc["backends"]
        tops = [{cell["box"][0] for cell in row} for row in seen["cells"] if len(row) > 2]
        assert all(len(lefts) > 2 for lefts in tops), "a table: cells beside each other"


def test_sections_of_the_page(tmp_path: Path):
    page, _ = page_and_document("qwen3-32b --target gfx942 --memory 192GiB")
    headings = " | ".join(open_page(page, PHONE, tmp_path)["headings"])
    for part in ("Pages", "Memory", "Warnings", "Block sizes"):
        assert part in headings


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("command", ["--all-targets", "qwen3-32b --all-targets", ""])
def test_other_documents_fit(command: str, width: int, tmp_path: Path):
    page, _ = page_and_document(command)
    seen = open_page(page, width, tmp_path)
    assert not seen["wide"]
    assert seen["scroll"] <= width


def test_markup_in_names_is_not_run(tmp_path: Path):
    model = tmp_path / "x.yaml"
    model.write_text(
        "name: '<img src=x onerror=document.title=1>'\n"
        "layers: [{count: 6, num_heads: 8, num_kv_heads: 1, head_size: 128}]\n"
    )
    page, _ = page_and_document(f"{model} --target gfx942")
    seen = open_page(page, DESKTOP, tmp_path)
    assert seen["title"].startswith("<img src=x")
