"""Make the virtual environment that `make demo` and `make test` run in. Standard library only.

    python ci/bootstrap.py --venv .venv [--extras test,dev] [--torch auto|reuse|install] [--strict] [--dry-run]

The question it answers is whose torch is used. A ROCm or CUDA image brings a torch that fits its driver, and
replacing it by another build is the classic way to break such a machine, so a torch that the base interpreter can
import is reused: the environment sees the base's packages and neither torch nor triton is installed. Otherwise the
versions in constraints/ are installed. What was decided, and why, is printed before anything is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 11)

PROBE = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except Exception as error:
        if not (isinstance(error, ImportError) and error.name == name):
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        continue
    found[name] = {"version": str(getattr(module, "__version__", "?"))}
    if name == "torch":
        found[name]["hip"] = module.version.hip
        found[name]["cuda"] = module.version.cuda
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Machine:
    """What the decision depends on. base: what the base interpreter can import (name -> facts of PROBE)."""

    system: str
    machine: str
    base: dict[str, dict[str, str | None]]

    def version(self, name: str) -> str | None:
        """Version of a package that the base interpreter can really import."""
        return self.base.get(name, {}).get("version")


@dataclass(frozen=True)
class Step:
    """One pip call. why: printed before it. optional: a failure is printed and survived (without --strict)."""

    why: str
    args: tuple[str, ...]
    optional: bool = False
    unless_importable: str = ""


@dataclass(frozen=True)
class Plan:
    """What will be done: whether the base's packages are visible, remarks to print, pip calls in order."""

    system_site: bool
    notes: tuple[str, ...]
    steps: tuple[Step, ...]


def decide(machine: Machine, torch: str, extras: Sequence[str], index: str | None = None) -> Plan:
    """The Plan for ``machine``. torch: "auto", "reuse" or "install". index: where torch is installed from."""
    notes: list[str] = []
    steps: list[Step] = []
    ours: tuple[str, ...] = ("-c", "constraints/torch.txt")
    kernels = ("-c", "constraints/kernels.txt", "--only-binary", ":all:", "--no-deps")
    tools = ("-c", "constraints/tools.txt")
    base_torch = machine.version("torch")
    if error := machine.base.get("torch", {}).get("error"):
        notes.append(f"torch is there, but does not import ({error})")
    if torch == "reuse" and base_torch is None:
        raise SystemExit("TORCH=reuse, but the base interpreter cannot import torch; try TORCH=install")
    reuse = torch == "reuse" or (torch == "auto" and base_torch is not None)
    linux = machine.system == "Linux"
    has_triton_wheels = linux and machine.machine in ("x86_64", "aarch64")

    if reuse:
        facts = machine.base["torch"]
        kind = (
            f"ROCm {facts['hip']}"
            if facts.get("hip")
            else f"CUDA {facts['cuda']}"
            if facts.get("cuda")
            else "CPU"
        )
        notes.append(f"reusing torch {base_torch} ({kind}) of this machine; nothing of it is replaced")
        if machine.version("triton"):
            notes.append(f"reusing triton {machine.version('triton')} of this machine")
        elif facts.get("hip") or facts.get("cuda"):
            notes.append("its GPU build of torch has no triton beside it: Triton backends will be refused")
        ours = ()
    else:
        notes.append("no torch in the base interpreter" if torch == "auto" else "installing our own torch")
        source = ("--index-url", index) if index else ()
        steps.append(Step("torch, the version of constraints/torch.txt", (*source, *ours, "torch")))

    if not has_triton_wheels:
        notes.append(
            f"no triton for {machine.system} {machine.machine}: Triton backends will be refused there"
        )
    elif not reuse or not (facts.get("hip") or facts.get("cuda") or machine.version("triton")):
        # torch has the last word: the triton that its own requirements have brought stays.
        why = "triton, since torch has brought none"
        steps.append(Step(why, (*kernels, "triton"), optional=True, unless_importable="triton"))

    if not (linux and machine.machine == "x86_64"):
        notes.append(
            f"no flydsl for {machine.system} {machine.machine}: FlyDSL backends will be refused there"
        )
    elif machine.version("flydsl") and reuse:
        notes.append(f"reusing flydsl {machine.version('flydsl')} of this machine")
    else:
        steps.append(Step("flydsl", (*kernels, "flydsl"), optional=True))

    what = f".[{','.join(extras)}]" if extras else "."
    steps.append(Step(f"turboquant_rocm (editable) {what}", (*ours, *tools, "-e", what)))
    return Plan(reuse, tuple(notes), tuple(steps))


def probe(python: str, *names: str) -> dict[str, dict[str, str | None]]:
    """Import ``names`` in a fresh interpreter, away from the checkout; a crash counts as not there."""
    done = subprocess.run(
        [python, "-c", PROBE, *names],
        capture_output=True,
        text=True,
        cwd=os.path.dirname(python),
        check=False,
    )
    try:
        found: dict[str, dict[str, str | None]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {names[0]: {"error": f"the interpreter ended with {done.returncode}"}}
    return found


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


def make_venv(venv: Path, system_site: bool) -> Path:
    """A fresh virtual environment; returns its interpreter."""
    options = ["--system-site-packages"] if system_site else []
    python = venv / "bin" / "python"
    made = subprocess.run([sys.executable, "-m", "venv", *options, str(venv)], capture_output=True, text=True)
    if made.returncode:  # Debian without python3-venv has no ensurepip; pip can serve another interpreter
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True).returncode:
            raise SystemExit(
                f"{made.stdout}{made.stderr}\nThis Python can make no virtual environment and has no pip. "
                "On Debian and Ubuntu: apt-get install python3-venv"
            )
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", *options, str(venv)], check=True)
        subprocess.run([*pip, "--python", str(python), "install", "-q", "pip", "setuptools"], check=True)
    if system_site and sys.prefix != sys.base_prefix:
        # The base is itself a virtual environment (usual in ROCm images), which --system-site-packages looks past.
        lib = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        Path(lib, "_base_environment.pth").write_text("".join(f"{p}\n" for p in paths))
    return python


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, comma separated")
    parser.add_argument("--torch", choices=("auto", "reuse", "install"), default="auto")
    parser.add_argument(
        "--torch-index", default="", help="index URL for torch, for example one with CPU builds"
    )
    parser.add_argument("--strict", action="store_true", help="a failing optional step is an error (CI)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    args = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        wants = ".".join(map(str, MIN_PYTHON))
        raise SystemExit(
            f"Python {platform.python_version()} is too old (wants {wants} or newer): set PYTHON=..."
        )
    os.chdir(ROOT)
    start = time.monotonic()
    mark = args.venv / "bootstrap.json"  # what the environment was made from
    if Path(sys.prefix).resolve() == args.venv.resolve():  # it is activated, and is not its own base
        os.execv(base := json.loads(mark.read_text())["base"], [base, *sys.argv])

    machine = Machine(
        platform.system(), platform.machine(), probe(sys.executable, "torch", "triton", "flydsl")
    )
    extras = [e for e in args.extras.split(",") if e]
    plan = decide(machine, args.torch, extras, args.torch_index or None)
    say(f"Python {platform.python_version()} at {sys.executable}, {machine.system} {machine.machine}")
    for note in plan.notes:
        say(note)
    if args.dry_run:
        for step in plan.steps:
            say(f"would run: pip install {' '.join(step.args)}")
        return 0

    python = args.venv / "bin" / "python"
    made = {"base": sys.executable, "version": platform.python_version(), "system_site": plan.system_site}
    if not (python.exists() and mark.exists() and json.loads(mark.read_text()) == made):
        if args.venv.exists() and not mark.exists():
            raise SystemExit(
                f"bootstrap: {args.venv} exists and was not made here: remove it, or set VENV=..."
            )
        say(f"making {args.venv}")
        shutil.rmtree(args.venv, ignore_errors=True)
        args.venv.mkdir(parents=True)
        mark.write_text(json.dumps({**made, "version": "incomplete"}))
        make_venv(args.venv, plan.system_site)
        mark.write_text(json.dumps(made) + "\n")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if os.environ.get("CI") or not sys.stdout.isatty():
        pip.append("-q")
    # setuptools warns of every editable install that a folder named like the package may shadow it: that is the plan.
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore:Editable installation"}
    for step in plan.steps:
        name = step.unless_importable
        if name and (there := probe(str(python.absolute()), name).get(name, {}).get("version")):
            say(f"{name} {there} is there already")
            continue
        say(f"installing {step.why}")
        done = subprocess.run([*pip, *step.args], env=quiet, check=False)
        if done.returncode and (args.strict or not step.optional):
            raise SystemExit(f"bootstrap: pip install {' '.join(step.args)} failed; its message is above")
        if done.returncode:
            say(f"{step.args[-1]} could not be installed; going on without it, its backends will be refused")
    got = probe(str(python.absolute()), "torch", "triton", "flydsl")
    had = machine.version("torch")
    if plan.system_site and got.get("torch", {}).get("version") != had:
        raise SystemExit(
            f"bootstrap: an installation has replaced torch {had}: {got.get('torch')}; make clean"
        )
    if "version" not in got.get("torch", {}):
        raise SystemExit(f"bootstrap: torch does not import: {got.get('torch')}")
    listed = ", ".join(f"{n} {f.get('version') or f.get('error')}" for n, f in got.items())
    say(f"ready in {time.monotonic() - start:.0f} s: {listed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
