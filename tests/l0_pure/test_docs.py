"""What the documents say is run or looked up: code blocks, make targets, files, the demo's table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.repository import ROOT, files

DOCUMENTS = sorted(
    p
    for p in files()
    if (p.suffix == ".md" and p.parts[0] in ("docs", "examples")) or (len(p.parts) == 1 and p.suffix == ".md")
)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / path).read_text(), re.M | re.S)


def test_readme_code_runs(capsys: pytest.CaptureFixture[str]):
    """All blocks in order in one namespace; a comment behind a print is what it prints (up to the first ...)."""
    pytest.importorskip("torch")
    code = "\n".join(blocks(Path("README.md"), "python"))
    assert code.count("\n") > 20
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    out, lse = namespace["out"], namespace["lse"]
    assert out.shape == (1, 32, 128)
    assert lse.shape == (1, 32)
    assert out.isfinite().all()
    printed = capsys.readouterr().out
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    assert promised
    for text in promised:
        assert text.split(" ...")[0] in printed


def test_readme_results_are_those_of_the_demo(tmp_path: Path):
    """Every number of the table, as far as its digits go."""
    pytest.importorskip("torch")
    from turboquant_rocm.verify import main

    report = tmp_path / "rows.json"
    assert (
        main(["--input", str(ROOT / "examples/kv/smollm2_135m.npz"), "--repeats", "1", "--json", str(report)])
        == 0
    )
    measured = {
        (row["tensors"], row["preset"].removeprefix("turboquant_"), row["layout"]): row
        for row in json.loads(report.read_text())["rows"]
    }
    fields = ("bytes_per_token", "compression", "key_nmse", "value_nmse", "output_error", "output_cosine")
    table = re.findall(r"^\| (l\d+) \| (\w+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(table) * 2 == len(measured)
    for tensors, preset, cells in table:
        for layout in ("aos", "soa"):
            for field, cell in zip(fields, cells.split(" | "), strict=True):
                digits = len(cell.rstrip("x%").partition(".")[2])
                got = measured[tensors, preset, layout][field] * (100 if cell.endswith("%") else 1)
                room = 1.2 * 10.0**-digits  # one in the last digit: layouts and machines round differently
                assert abs(float(cell.rstrip("x%")) - got) <= room, f"{tensors} {preset} {layout} {field}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / path).read_text()):
        if "://" not in target:
            assert (ROOT / path.parent / target).exists(), f"{path} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_commands_exist(path: Path):
    text = (ROOT / path).read_text()
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in re.findall(r"(?:^|`)\s*make ([a-z-]+)", text, re.M):
        assert name in rules, f"{path}: make {name}"
    for module in re.findall(r"python -m (turboquant_rocm[\w.]*)", text):
        at = ROOT / module.replace(".", "/")
        assert at.with_suffix(".py").exists() or (at / "__main__.py").exists(), f"{path}: python -m {module}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_files_named_in_code_style_exist(path: Path):
    roots = "turboquant_rocm|backends|layouts|configs|tests|ci|docs|examples|constraints"
    for name in re.findall(rf"`((?:{roots})/[\w/.-]+)`", (ROOT / path).read_text()):
        assert (ROOT / name).exists(), f"{path} names {name}"
