"""The matrix file, the GitHub matrix made of it, and the workflow that runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ci.legs import MATRIX, ROOT, MatrixError, load_legs
from ci.matrix import entries, main, select
from turboquant_rocm.backends import get_backend
from turboquant_rocm.target import get_target

LEGS = load_legs()
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
WANTED = (
    "cpu-reference",
    "triton-interpret",
    "compile-all",
    "sim-gfx942",
    "sim-gfx950",
    "nvidia",
    "mi300",
    "mi355",
)
HARDWARE = ("nvidia", "mi300", "mi355")


# ---- the file --------------------------------------------------------------------------------------------


def test_the_legs():
    assert tuple(LEGS) == WANTED
    assert tuple(leg.name for leg in LEGS.values() if leg.self_hosted) == HARDWARE
    assert LEGS["mi300"].arches == ("gfx942",)
    assert LEGS["mi355"].arches == ("gfx950",)


@pytest.mark.parametrize("leg", LEGS.values(), ids=lambda leg: leg.name)
def test_what_a_leg_names_exists(leg):
    for path in leg.tests:
        assert (ROOT / path).exists(), path
    for name in leg.backends:
        get_backend(name)
    if leg.target != "local":
        get_target(leg.target)
    for arch in leg.arches:
        get_target(arch)


def test_every_automatic_backend_has_a_leg():
    from turboquant_rocm.backends import backends

    required = {name for leg in LEGS.values() for name in leg.backends}
    assert {
        b.name for b in backends() if b.ready and (b.automatic or b.name == "torch_reference")
    } <= required


def broken(tmp_path: Path, **changes: Any) -> Path:
    """A matrix file with one leg, good but for ``changes`` (None: the field is left out)."""
    leg: dict[str, Any] = {
        "title": "x", "mode": "reference", "target": "cpu", "backends": {"torch_reference": "all"},
        "tests": ["tests"], "runner": ["ubuntu-latest"], "timeout_minutes": 5,
    }  # fmt: skip
    leg = {k: v for k, v in {**leg, **changes}.items() if v is not None}
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "legs": {"one": leg}}))
    return path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mode": "guess"}, "mode='guess'"),
        ({"tests": []}, "tests"),
        ({"tests": None}, "tests"),
        ({"backends": {}}, "backends"),
        ({"backends": {"torch_reference": 0}}, "torch_reference=0"),
        ({"runner": []}, "runner"),
        ({"vendor": "amd"}, "vendor='amd'"),
        ({"mode": "device", "vendor": "amd"}, "target='cpu'"),
        ({"timeout_minutes": 0}, "timeout_minutes=0"),
        ({"may_skip": [{"pattern": "(", "why": "x"}]}, "may_skip '('"),
        ({"may_skip": [{"pattern": "x"}]}, "may_skip"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], named: str):
    assert load_legs(broken(tmp_path))
    with pytest.raises(MatrixError, match=re.escape(named)) as caught:
        load_legs(broken(tmp_path, **changes))
    assert "leg one" in str(caught.value)


@pytest.mark.parametrize("text", ["", "version: 2\nlegs: {}", "[", "legs: {}", "version: 1\nlegs: {a: 3}"])
def test_a_wrong_file_is_an_error(tmp_path: Path, text: str):
    path = tmp_path / "matrix.yaml"
    path.write_text(text)
    with pytest.raises(MatrixError):
        load_legs(path)


# ---- GitHub's matrix -------------------------------------------------------------------------------------


def names(*args: Any, **more: Any) -> list[str]:
    return [leg.name for leg in select(LEGS, *args, **more)]


def test_hardware_legs_only_where_they_are_named():
    assert names() == [n for n in WANTED if n not in HARDWARE]
    assert names(["mi300"]) == [n for n in WANTED if n not in ("nvidia", "mi355")]
    assert names(HARDWARE, event="push") == list(WANTED)


@pytest.mark.parametrize("event", ["pull_request", "pull_request_target"])
def test_pull_requests_get_no_hardware(event: str):
    assert names(HARDWARE, event=event) == [n for n in WANTED if n not in HARDWARE]


def test_only_the_named_ones():
    assert names(only=["sim-gfx950"]) == ["sim-gfx950"]
    assert names(["nvidia"], ["nvidia"]) == ["nvidia"]


@pytest.mark.parametrize(
    ("hardware", "only", "named"),
    [
        (["mi400"], [], "mi400"),
        ([], ["mi300"], "mi300"),
        (["compile-all"], [], "compile-all"),
        ([], ["x"], "x"),
    ],
)
def test_a_leg_that_cannot_run_is_an_error(hardware: list[str], only: list[str], named: str):
    with pytest.raises(MatrixError, match=named):
        select(LEGS, hardware, only)


def test_command_line(capsys: pytest.CaptureFixture[str]):
    assert main(["--hardware", "nvidia, mi355", "--event", "push"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert [e["leg"] for e in matrix["include"]] == [n for n in WANTED if n != "mi300"]
    assert main(["--legs", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in WANTED)


# ---- the workflow ----------------------------------------------------------------------------------------


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return loaded


def test_the_workflow_reads_the_matrix():
    jobs = workflow()["jobs"]
    assert jobs["leg"]["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.matrix) }}"
    assert jobs["leg"]["needs"] == "plan"
    assert "ci.matrix" in json.dumps(jobs["plan"])
    assert "ci/run.sh" in json.dumps(jobs["leg"])
    assert "ci.compare" in json.dumps(jobs["compare"])


def test_the_workflow_uses_exactly_what_the_matrix_gives():
    text = WORKFLOW.read_text(encoding="utf-8")
    used = set(re.findall(r"matrix\.([a-z_]+)", text.replace("steps.matrix.outputs.matrix", "")))
    used -= {"py", "matrix"}
    given = {key for entry in entries(LEGS.values()) for key in entry}
    assert used - {"yaml"} == given


def test_no_leg_is_written_into_the_workflow():
    code = "\n".join(line for line in WORKFLOW.read_text().splitlines() if not line.lstrip().startswith("#"))
    assert not [name for name in LEGS if name in code]


def test_machines_with_a_gpu_measure_the_floors_of_served_tasks():
    (step,) = (s for s in workflow()["jobs"]["leg"]["steps"] if "ci.evals gsm8k" in s.get("run", ""))
    assert "matrix.self_hosted" in step["if"] and "schedule" in step["if"]


def test_the_linter_knows_the_runner_labels():
    known = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())["self-hosted-runner"]["labels"]
    wanted = {label for leg in LEGS.values() if leg.self_hosted for label in leg.runner} - {
        "self-hosted",
        "linux",
    }
    assert set(known) == wanted


def test_steps_are_well_formed_and_needs_exist():
    jobs = workflow()["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs), name
        assert job["timeout-minutes"], name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            # what others control reaches the shell through the environment, never through the script's text
            assert "${{" not in step.get("run", ""), step


def test_actionlint():
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("no actionlint on the PATH")
    done = subprocess.run([program, str(WORKFLOW)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_matrix_file_is_the_one_that_is_shipped():
    assert ROOT / "configs" / "ci_matrix.yaml" == MATRIX
