"""Tasks against a served endpoint: a server of this file answers, and stand-ins take lm-eval's place."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from turboquant_rocm import SpecError
from turboquant_rocm.evaluation import served


class Server(BaseHTTPRequestHandler):
    """Repeats the last line of the prompt; every ``wrong``-th answer is another text."""

    models: list[dict[str, Any]] = []  # noqa: RUF012 - set by the fixture
    wrong = 0
    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self._send({"data": self.models} if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        line = re.findall(r"Line: (.*)", body["prompt"])[-1]
        bad = self.wrong and len(self.asked) % self.wrong == 0
        self._send({"choices": [{"text": " no" if bad else f" {line}"}]})


@pytest.fixture
def endpoint() -> Iterator[str]:
    Server.models, Server.wrong, Server.asked = [{"id": "small", "max_model_len": 2048}], 0, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_maths_specification():
    spec = served.load_spec("gsm8k")
    assert (spec.model, spec.fewshot, spec.questions, spec.max_length) == ("Qwen/Qwen3-4B", 5, 1319, 4096)
    assert dict(spec.floors) == {
        "turboquant_k8v4": 0.80, "turboquant_4bit_nc": 0.80, "turboquant_k3v4_nc": 0.78, "turboquant_3bit_nc": 0.75,
    }  # fmt: skip


def test_the_built_in_task(endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "result.json"
    base = ["repeat", "--endpoint", f"{endpoint}/v1/", "--preset", "4bit_nc", "--json", str(out)]
    assert served.main(base) == 0
    assert "repeat, small, turboquant_4bit_nc: 1.0000 of 20 (no floor)" in capsys.readouterr().out
    assert json.loads(out.read_text())["accuracy"] == 1.0
    assert len(Server.asked) == 20
    assert all(b["temperature"] == 0 and b["prompt"].count("Again:") == 4 for b in Server.asked)
    Server.wrong = 4
    assert served.main([*base, "--limit", "8"]) == 0
    assert json.loads(out.read_text()) == {
        "spec": "repeat", "model": "small", "preset": "turboquant_4bit_nc", "questions": 8, "accuracy": 0.75,
        "floor": None, "ok": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["nothing"], "SPEC='nothing' (wants one of gsm8k, repeat)"),
        (["repeat", "--preset", "5bit"], "preset='5bit'"),
        (["repeat", "--limit", "0"], "limit=0"),
        (["repeat", "--concurrent", "0"], "--concurrent=0"),
        (["repeat", "--endpoint", "http://127.0.0.1:9"], "--endpoint='http://127.0.0.1:9/v1/models'"),
        (["repeat", "--model", "other"], "--endpoint='small' (wants a server of other)"),
        (["gsm8k"], "--endpoint='small' (wants a server of Qwen/Qwen3-4B)"),
        (["gsm8k", "--model", "small"], "--endpoint='max_model_len=2048' (wants at least 4096"),
    ],
)
def test_wrong_arguments_are_named(
    endpoint: str, more: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    assert served.main([more[0], "--endpoint", endpoint, "--preset", "auto", *more[1:]]) == 2
    assert what in capsys.readouterr().err


def test_servers_that_answer_something_else(endpoint: str):
    Server.models = [{"name": "small"}]
    with pytest.raises(SpecError, match="a list of models"):
        served.served_model(served.load_spec("repeat"), endpoint)
    Server.models = []
    with pytest.raises(SpecError, match="no model"):
        served.served_model(served.load_spec("repeat"), endpoint)


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module ``lm_eval`` that runs what the test writes into it; ``arguments.json`` is what it was called with."""
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    Server.models = [{"id": "Qwen/Qwen3-4B", "max_model_len": 4096}]
    return package / "__main__.py"


ANSWER = """
import json, pathlib, sys
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(__file__).with_name("arguments.json").write_text(json.dumps(args))
out = pathlib.Path(args["--output_path"]) / "model"
out.mkdir()
(out / "results_2000.json").write_text(json.dumps({
    "results": {"gsm8k": {"exact_match,flexible-extract": ACCURACY, "exact_match,strict-match": 0.1}},
    "n-samples": {"gsm8k": {"original": 1319, "effective": int(args.get("--limit", 1319))}},
}))
"""


@pytest.mark.parametrize(
    ("preset", "accuracy", "code"), [("3bit_nc", 0.75, 0), ("3bit_nc", 0.74, 1), ("4bit_nc", 0.79, 1)]
)
def test_floors_decide(
    preset: str, accuracy: float, code: int, endpoint: str, lm_eval: Path, capsys: pytest.CaptureFixture[str]
):
    lm_eval.write_text(ANSWER.replace("ACCURACY", str(accuracy)))
    base = ["gsm8k", "--endpoint", endpoint, "--preset", preset]
    assert served.main(base) == code
    assert f"{accuracy:.4f} of 1319 (floor 0." in capsys.readouterr().out
    args = json.loads(lm_eval.with_name("arguments.json").read_text())
    assert (args["--tasks"], args["--num_fewshot"]) == ("gsm8k", "5")
    assert f"base_url={endpoint}/v1/completions" in args["--model_args"]
    assert served.main([*base, "--limit", "10"]) == 0  # too few for a floor
    assert "of 10 (no floor)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("raise ConnectionError('Couldn\\'t reach the Hub')", "its data set and the tokenizer fetched"),
        ("raise SystemExit('some other reason')", "lm_eval, exit code 1='some other reason'"),
        ("", "a run that writes results"),
        (ANSWER.replace("ACCURACY", "0.9").replace("int(args", "1 + int(args"), "1320 questions"),
        (ANSWER.replace("ACCURACY", "0.9").replace("flexible", "other"), "exact_match,flexible-extract"),
    ],
)
def test_why_a_task_could_not_be_run(
    code: str, what: str, endpoint: str, lm_eval: Path, capsys: pytest.CaptureFixture[str]
):
    lm_eval.write_text(code)
    assert served.main(["gsm8k", "--endpoint", endpoint, "--preset", "k8v4"]) == 2
    assert what in capsys.readouterr().err


def test_without_lm_eval(endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    Server.models = [{"id": "Qwen/Qwen3-4B"}]
    monkeypatch.setattr(served, "find_spec", lambda name: None)
    assert served.main(["gsm8k", "--endpoint", endpoint, "--preset", "k8v4"]) == 2
    assert "pip install 'lm-eval[api]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 2}, "version: 1"),
        ({"more": 1}, "exactly"),
        ({"questions": 0}, "questions=0"),
        ({"floors": {"5bit": 0.5}}, "preset='5bit'"),
        ({"floors": {"k8v4": 80.0}}, "floors k8v4=80.0"),
    ],
)
def test_wrong_specifications_are_named(change: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch):
    from turboquant_rocm.presets import load_yaml

    data = {**load_yaml("evals", "gsm8k.yaml"), **change}
    monkeypatch.setattr(served, "load_yaml", lambda *parts: data)
    with pytest.raises(SpecError, match=re.escape(what)):
        served.load_spec("gsm8k")
