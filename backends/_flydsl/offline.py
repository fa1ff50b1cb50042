"""Compile a kernel for a GPU that is not here: for tests, the simulator and instruction budgets.

FlyDSL ends the process on some failures, and keeps its target for the life of a process, so each compilation runs in a
process of its own. Where no ``ld.lld`` of a ROCm installation is found, Triton's linker stands in for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...packages import installed_version
from .. import CompileError
from . import config as configs

__all__ = ["Compiled", "compile_ahead", "compile_offline"]

TIMEOUT = 300.0

Job = tuple[str, Any]
"""A kind of kernel (decode, prepare, reduce) and its specialisation."""

_LINKER = """#!{python}
import sys
from triton._C import libtriton
args = sys.argv[1:]
out = args[args.index("-o") + 1]
objects = [a for a in args if a != out and (a.endswith(".o") or a.startswith("/"))]
libtriton.amd.link_hsaco(objects[0], out)
"""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A code object, its assembly text, and its kernel's name and resources."""

    name: str
    hsaco: bytes
    assembly: str

    def resource(self, field: str) -> int:
        """A number of the kernel's metadata: vgpr_count, agpr_count, sgpr_count, vgpr_spill_count ..."""
        found = re.search(rf"\.{re.escape(field)}:\s+(\d+)", self.assembly)
        if found is None:
            raise KeyError(field)
        return int(found.group(1))

    @property
    def waves_per_simd(self) -> int:
        """Waves per SIMD that the registers allow."""
        found = re.search(r"\.amdhsa_next_free_vgpr (\d+)", self.assembly)
        assert found is not None
        registers = max(int(found.group(1)), self.resource("vgpr_count"), 1)
        return min(8, 512 // (-(-registers // 8) * 8))


def _root() -> str:
    """The folder that the package is imported from."""
    top = sys.modules[__name__.partition(".")[0]]
    assert top.__file__ is not None
    return str(Path(top.__file__).parents[1])


def toolchain(folder: Path) -> str:
    """A ROCm root with a linker: the machine's own, or one made in ``folder``."""
    own = os.environ.get("ROCM_PATH", "/opt/rocm")
    if Path(own, "llvm", "bin", "ld.lld").exists():
        return own
    linker = folder / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text(_LINKER.format(python=sys.executable))
    linker.chmod(0o755)
    return str(folder)


def _run(jobs: Sequence[Job], target: str, env: dict[str, str]) -> None:
    """Compile in another process; CompileError with the end of what it printed."""
    request = [
        {"kind": kind, "type": type(config).__name__, "config": dataclasses.asdict(config)}
        for kind, config in jobs
    ]
    what = f"{', '.join(dict(jobs))} for {jobs[0][1].arch}"
    path = os.pathsep.join([_root(), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        run = subprocess.run(
            [sys.executable, "-m", __spec__.name, json.dumps(request), target],
            env={**os.environ, "COMPILE_ONLY": "1", "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{what}: no end within {TIMEOUT:.0f} s") from error
    except OSError as error:
        raise CompileError(f"{what}: the compiler cannot be started: {error}") from error
    if run.returncode != 0:
        ended = (
            f"exit status {run.returncode}" if run.returncode > 0 else f"ended by signal {-run.returncode}"
        )
        tail = "\n".join((run.stdout + run.stderr).strip().splitlines()[-15:])
        raise CompileError(f"{what}: {ended}\n{tail}")


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Compile into FlyDSL's disk cache, so that a compiler that aborts does not take this process with it.

    What an earlier process has put there is not tried again: a file beside the cache says so for each kernel. One
    process compiles all that is left; CompileError if it does not succeed.
    """
    folder = _records()
    records = {job: folder / _record(*job) for job in jobs} if folder else {}
    missing = [job for job in jobs if job not in records or not records[job].exists()]
    if not missing:
        return
    _run(missing, "", {})
    for job in missing:
        if job in records:
            records[job].parent.mkdir(parents=True, exist_ok=True)
            records[job].touch()


def _records() -> Path | None:
    """Where successes are noted: inside FlyDSL's cache, so that whoever deletes it deletes them too. None: no cache."""
    if os.environ.get("FLYDSL_RUNTIME_ENABLE_CACHE", "1").lower() not in ("1", "true", "yes", "on"):
        return None
    cache = os.environ.get("FLYDSL_RUNTIME_CACHE_DIR") or str(Path.home() / ".flydsl" / "cache")
    return Path(cache) / "turboquant_rocm"


def _record(kind: str, config: Any) -> str:
    """A name for everything that the outcome of a compilation depends on."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    settings = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(("FLYDSL_", "ROCM_"))
    )
    versions = (sys.version, installed_version("flydsl"))
    digest.update(repr((kind, config, settings, versions)).encode())
    return digest.hexdigest()


def compile_offline(kind: str, config: Any, arch: str) -> Compiled:
    """The machine code of kernel ``kind`` (decode, prepare, reduce) for ``arch``; CompileError with the reason."""
    with tempfile.TemporaryDirectory(prefix="flydsl") as name:
        folder = Path(name)
        env = {
            "FLYDSL_GPU_ARCH": arch,
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
            "FLYDSL_DEBUG_DUMP_ASM": "1",
            "FLYDSL_DUMP_DIR": str(folder / "dump"),
            "ROCM_PATH": toolchain(folder / "rocm"),
        }
        _run([(kind, config)], str(folder / "out.hsaco"), env)
        listings = sorted(folder.glob("dump/**/*final_isa*.s"))
        if not listings:
            raise CompileError(f"{kind} for {arch}: no assembly was dumped")
        assembly = listings[-1].read_text()
        found = re.search(r"\.amdhsa_kernel (\S+)", assembly)
        assert found is not None
        return Compiled(found.group(1), (folder / "out.hsaco").read_bytes(), assembly)


def _code_object(text: str) -> bytes:
    """The ELF in the ``gpu.binary`` operation of a printed module."""
    start = text.index('bin = "') + len('bin = "')
    out = bytearray()
    i = start
    while text[i] != '"':
        if text[i] == "\\":
            if text[i + 1] in '\\"':
                out.append(ord(text[i + 1]))
                i += 2
            else:
                out.append(int(text[i + 1 : i + 3], 16))
                i += 3
        else:
            out += text[i].encode()
            i += 1
    return bytes(out)


def _main() -> None:
    request, target = json.loads(sys.argv[1]), sys.argv[2]
    from .compile import build

    for job in request:
        print(f"compiling {job['kind']}: {job['config']}", file=sys.stderr, flush=True)
        config = getattr(configs, job["type"])(**job["config"])
        text = build(job["kind"], config, artifact=True)
        if target:
            Path(target).write_bytes(_code_object(text))


if __name__ == "__main__":
    _main()
