"""Accuracy of a served model against the floors of configs/evals: a vLLM server for every cache, started here.

    python -m ci.evals SPEC [--presets NAME ...] [--model FOLDER] [--limit N] [--json FILE] [-- OPTIONS OF vllm serve]

Run it from the checkout, with the interpreter that has vLLM and this package. Each server must say in its log that this
package serves the model, or its answers do not count. --presets: default those with a floor; "auto" is 16 bits.

Exit codes: 0 every floor is met, 1 one is not, 2 a server or the task could not be run: the text says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ci.processes import end
from turboquant_rocm.evaluation.served import ANY, Result, Spec, load_spec, run, spec_names, unreachable
from turboquant_rocm.presets import get_preset
from turboquant_rocm.spec import SpecError, checked_int

__all__ = ["main", "serving"]

SERVER: Final = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs. That command itself does not start from the wheel for CPUs, which has another name."""
PLAIN: Final = "auto"
PROOF: Final = "turboquant_rocm serves this model"
START_SECONDS: Final = 1800
STOP_SECONDS: Final = 60


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _why(log: str) -> str:
    """The first exception in a server's log: later ones are what it led to. Without one, the last line."""
    if found := re.search(r"(?:^|[\])] )([\w.]+(?:Error|Exception): .*)", log, re.M):
        return found[1][:300]
    return (log.strip().splitlines() or ["nothing"])[-1][:300]


@contextmanager
def serving(model: str, preset: str, max_length: int, options: Sequence[str] = ()) -> Iterator[str]:
    """The endpoint of a vLLM server of ``model`` with the cache ``preset``; SpecError if there is none, or another."""
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    # From a folder of its own: an egg-info of a checkout would hide the installed entry points.
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        server = subprocess.Popen(
            [
                sys.executable, "-P", "-m", SERVER, "--model", model, "--host", "127.0.0.1", "--port", str(port),
                "--kv-cache-dtype", preset, "--max-model-len", str(max_length), *options,
            ],
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
            env={**os.environ, "TURBOQUANT_ROCM_VLLM": "required"},
        )  # fmt: skip
        try:
            stop = time.monotonic() + START_SECONDS
            while not _answers(endpoint):
                if server.poll() is not None or time.monotonic() > stop:
                    code = server.poll()
                    got = f"no answer in {START_SECONDS} s" if code is None else f"exit code {code}"
                    said = Path(log.name).read_text(errors="replace")
                    wants = (
                        "the model fetched or in a local folder" if unreachable(said) else "one that starts"
                    )
                    raise SpecError(f"vllm serve {model}", got, f"{wants}: {_why(said)}")
                time.sleep(1)
            if preset != PLAIN and PROOF not in Path(log.name).read_text(errors="replace"):
                raise SpecError("the server's log", "no plan of turboquant_rocm", f"a line with {PROOF!r}")
            yield endpoint
        finally:
            end(server, STOP_SECONDS)


def _measured(spec: Spec, preset: str, model: str, limit: int | None, options: Sequence[str]) -> Result:
    with serving(model, preset, spec.max_length, options) as endpoint:
        return run(spec, endpoint, preset, model=model, limit=limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    given, options = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m ci.evals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", metavar="SPEC", help=f"of {', '.join(spec_names())}")
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="caches to serve with")
    parser.add_argument("--model", metavar="FOLDER", help="the model, if not the specification's")
    parser.add_argument("--limit", type=int, metavar="N", help="only N questions; no floor applies then")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    args = parser.parse_args(given)
    try:
        spec = load_spec(args.spec)
        model = args.model or spec.model
        if model == ANY:
            raise SpecError("--model", None, f"a model: {spec.name} names none")
        presets = [
            n if n == PLAIN else get_preset(n).name for n in (args.presets or tuple(spec.floors) or (PLAIN,))
        ]
        if args.limit is not None:
            checked_int("--limit", args.limit, 1)
        results = []
        for preset in presets:
            found = _measured(spec, preset, model, args.limit, options)
            results.append(found)
            print(found, flush=True)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                told = [{**asdict(r), "ok": r.ok} for r in results]
                args.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
