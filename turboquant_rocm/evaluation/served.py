"""``python -m turboquant_rocm.evaluation.served SPEC --endpoint URL --preset NAME``: a task against a served model.

SPEC is a file of configs/evals: model, task, examples, number of questions, and the least accuracy of every preset. The
server (any with OpenAI's completions API) was started with that model and ``--kv-cache-dtype NAME``; nothing here can
see which cache it has. lm-eval asks the questions; the task ``repeat`` is built in and needs neither it nor a data set.
Exit codes: 0 at or above the floor, or no floor; 1 below it; 2 the task could not be run: the text says why.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..presets import get_preset, load_yaml
from ..spec import SpecError, checked_int

__all__ = ["ANY", "Result", "Spec", "load_spec", "main", "run", "spec_names", "unreachable"]

BUILT_IN: Final = "repeat"
ANY: Final = "any"
_WORDS: Final = (
    "lamp",
    "river",
    "stone",
    "cloud",
    "apple",
    "train",
    "glass",
    "horse",
    "paper",
    "green",
    "chair",
    "light",
)
_UNREACHABLE: Final = (
    "ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "Couldn't reach", "couldn't connect",
    "Cannot send a request", "Max retries exceeded", "Name or service not known",
    "Temporary failure in name resolution",
)  # fmt: skip
"""What Hugging Face's libraries print where a data set or a tokenizer is neither here nor fetched."""


@dataclass(frozen=True)
class Spec:
    """One file of configs/evals, see there. floors: least accuracy by preset name; may be empty."""

    name: str
    model: str
    max_length: int
    task: str
    fewshot: int
    questions: int
    metric: str
    floors: Mapping[str, float]


def unreachable(said: str) -> bool:
    """True if the output of a program says that it could not fetch a data set, a model or a tokenizer."""
    return any(text in said for text in _UNREACHABLE)


def spec_names() -> tuple[str, ...]:
    """Names of the files of configs/evals."""
    folder = resources.files("turboquant_rocm.configs").joinpath("evals")
    return tuple(sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")))


def load_spec(name: str) -> Spec:
    """The specification called ``name``, checked; SpecError names what is wrong."""
    if name not in spec_names():
        raise SpecError("SPEC", name, f"one of {', '.join(spec_names())}")
    data = load_yaml("evals", f"{name}.yaml")
    source = f"configs/evals/{name}.yaml"
    known = {f.name for f in fields(Spec)} - {"name"}
    if not isinstance(data, dict) or data.pop("version", None) != 1 or set(data) != known:
        raise SpecError(source, type(data).__name__, f"version: 1 and exactly {', '.join(sorted(known))}")
    for field, low in (("max_length", 1), ("fewshot", 0), ("questions", 1)):
        checked_int(f"{source} {field}", data[field], low)
    for preset, floor in data["floors"].items():
        get_preset(preset)
        if not isinstance(floor, float) or not 0 < floor < 1:
            raise SpecError(f"{source} floors {preset}", floor, "a number between 0 and 1")
    return Spec(name=name, **data)


@dataclass(frozen=True)
class Result:
    """accuracy: share of ``questions`` answered right. floor: None without one or with ``limit``."""

    spec: str
    model: str
    preset: str
    questions: int
    accuracy: float
    floor: float | None

    @property
    def ok(self) -> bool:
        return self.floor is None or self.accuracy >= self.floor

    def __str__(self) -> str:
        floor = "no floor" if self.floor is None else f"floor {self.floor}"
        return f"{self.spec}, {self.model}, {self.preset}: {self.accuracy:.4f} of {self.questions} ({floor})"


# ---- the server ----------------------------------------------------------------------------------------------


def _ask(url: str, body: Mapping[str, Any] | None = None, seconds: float = 60.0) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        detail = error.read(300).decode(errors="replace")
        raise SpecError("--endpoint", url, f"an answer, not status {error.code}: {detail}") from None
    except (OSError, ValueError) as error:
        raise SpecError("--endpoint", url, f"a server with OpenAI's completions API ({error})") from None


def served_model(spec: Spec, endpoint: str, model: str | None = None) -> str:
    """The name by which the server has the model; SpecError if it has another, or one with too short a context."""
    listed = _ask(f"{endpoint}/v1/models")
    try:
        there = {str(m["id"]): m.get("max_model_len") for m in listed["data"]}
    except (TypeError, KeyError, AttributeError):
        raise SpecError("--endpoint", endpoint, "a list of models at /v1/models") from None
    wanted = model or (next(iter(there), "") if spec.model == ANY else spec.model)
    if wanted not in there:
        raise SpecError("--endpoint", ", ".join(there) or "no model", f"a server of {wanted or 'some model'}")
    length = there[wanted]
    if isinstance(length, int) and length < spec.max_length:
        raise SpecError(
            "--endpoint", f"max_model_len={length}", f"at least {spec.max_length}, as {spec.name} says"
        )
    return wanted


# ---- tasks ---------------------------------------------------------------------------------------------------


def _repeat(spec: Spec, endpoint: str, model: str, questions: int) -> float:
    """Accuracy of repeating lines of words, greedy."""
    chance = random.Random(0)

    def line() -> str:
        return " ".join(chance.sample(_WORDS, 6))

    right = 0
    for _ in range(questions):
        examples = "".join(f"Line: {x}\nAgain: {x}\n\n" for x in (line() for _ in range(spec.fewshot)))
        wanted = line()
        body = {
            "model": model, "prompt": f"{examples}Line: {wanted}\nAgain:", "max_tokens": 40, "temperature": 0,
            "stop": ["\n"],
        }  # fmt: skip
        answer = _ask(f"{endpoint}/v1/completions", body)
        try:
            text = str(answer["choices"][0]["text"])
        except (TypeError, KeyError, IndexError):
            raise SpecError("--endpoint", endpoint, "completions with choices and text") from None
        right += text.strip() == wanted
    return right / questions


def _lm_eval(spec: Spec, endpoint: str, model: str, questions: int, concurrent: int) -> float:
    """Accuracy by lm-eval, in a process of its own; SpecError says what it could not fetch, or how it failed."""
    if find_spec("lm_eval") is None:
        raise SpecError("import lm_eval", "not installed", "it installed: pip install 'lm-eval[api]'")
    settings = {
        "model": model, "base_url": f"{endpoint}/v1/completions", "num_concurrent": concurrent,
        "max_length": spec.max_length, "max_retries": 3,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", spec.task,
            "--model_args", ",".join(f"{k}={v}" for k, v in settings.items()),
            "--num_fewshot", str(spec.fewshot), "--output_path", out,
        ]  # fmt: skip
        if questions < spec.questions:
            command += ["--limit", str(questions)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(out).rglob("results*.json"))
        if done.returncode or not found:
            said = (done.stderr + done.stdout).strip()
            last = " ".join((said.splitlines() or ["nothing"])[-1].split())[:300]
            if unreachable(said):
                raise SpecError(
                    f"task {spec.task}", last,
                    "its data set and the tokenizer fetched or in the local cache: neither could be reached from here",
                )  # fmt: skip
            raise SpecError(f"lm_eval, exit code {done.returncode}", last, "a run that writes results")
        data = json.loads(found[-1].read_text(encoding="utf-8"))
    return _accuracy(data, spec, questions)


def _accuracy(data: Any, spec: Spec, questions: int) -> float:
    try:
        value = data["results"][spec.task][spec.metric]
        asked = data["n-samples"][spec.task]["effective"]
    except (TypeError, KeyError) as error:
        raise SpecError(
            "results of lm-eval", f"no {error}", f"{spec.metric} and the samples of {spec.task}"
        ) from None
    if asked != questions:
        raise SpecError("results of lm-eval", f"{asked} questions", f"{questions}")
    return float(value)


def run(
    spec: Spec,
    endpoint: str,
    preset: str,
    *,
    model: str | None = None,
    limit: int | None = None,
    concurrent: int = 32,
) -> Result:
    """Ask all questions, or the first ``limit``. SpecError where the task cannot be run."""
    name = get_preset(preset).name if preset != "auto" else preset
    endpoint = endpoint.rstrip("/").removesuffix("/v1")
    questions = spec.questions if limit is None else min(checked_int("limit", limit, 1), spec.questions)
    served = served_model(spec, endpoint, model)
    if spec.task == BUILT_IN:
        accuracy = _repeat(spec, endpoint, served, questions)
    else:
        accuracy = _lm_eval(spec, endpoint, served, questions, concurrent)
    floor = spec.floors.get(name) if questions == spec.questions else None
    return Result(spec.name, served, name, questions, accuracy, floor)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.evaluation.served", description=__doc__)
    parser.add_argument("spec", metavar="SPEC", help=f"of {', '.join(spec_names())}")
    parser.add_argument("--endpoint", required=True, metavar="URL", help="as http://localhost:8000")
    parser.add_argument(
        "--preset", required=True, metavar="NAME", help="what the server's cache is; auto: 16 bits"
    )
    parser.add_argument("--model", metavar="NAME", help="the server's name for the model, if another")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N questions; no floor applies then"
    )
    parser.add_argument(
        "--concurrent", type=int, default=32, metavar="N", help="requests at a time (default 32)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(argv)
    try:
        checked_int("--concurrent", args.concurrent, 1)
        result = run(
            load_spec(args.spec), args.endpoint, args.preset, model=args.model, limit=args.limit,
            concurrent=args.concurrent,
        )  # fmt: skip
        if args.json is not None:
            args.json.write_text(
                json.dumps({**asdict(result), "ok": result.ok}, indent=2) + "\n", encoding="utf-8"
            )
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
