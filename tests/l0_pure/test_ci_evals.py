"""ci/evals.py with a stand-in for vLLM: servers that answer, fail to start, or are served by somebody else.

With the real server: tests/vllm/test_evals.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ci import evals

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

SAID
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def send(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.send({"data": [{"id": args["--model"], "max_model_len": int(args["--max-model-len"])}]})
    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        right = args["--kv-cache-dtype"] == args["--right"]
        self.send({"choices": [{"text": prompt.rsplit("Line: ", 1)[1].split(chr(10))[0] if right else "no"}]})
HTTPServer(("127.0.0.1", int(args["--port"])), Handler).serve_forever()
"""


CHAIN = """
print("WARNING errors such as `OSError: [Errno 24]`")
print("(EngineCore pid=1) ERROR 11-30 [core.py:9] ValueError: the cause")
raise RuntimeError("see above")
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is run in place of vLLM's server."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package / "api_server.py"


def test_one_server_for_every_cache(server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server.write_text(SERVER.replace("SAID", f"print('INFO {evals.PROOF}.', flush=True)"))
    out = tmp_path / "deep" / "results.json"
    base = ["repeat", "--model", "m", "--presets", "4bit_nc", "auto", "--limit", "4", "--json", str(out)]
    assert evals.main([*base, "--", "--right", "auto"]) == 0
    found = json.loads(out.read_text())
    assert [(r["preset"], r["accuracy"], r["ok"]) for r in found] == [
        ("turboquant_4bit_nc", 0.0, True),
        ("auto", 1.0, True),
    ]
    assert "repeat, m, auto: 1.0000 of 4 (no floor)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "raise ValueError('no such layer')",
            "vllm serve m='exit code 1' (wants one that starts: ValueError: no such layer)",
        ),
        (
            'raise OSError("We couldn\'t connect to the hub")',
            "(wants the model fetched or in a local folder: OSError: We couldn't",
        ),
        (
            CHAIN,
            "(wants one that starts: ValueError: the cause)",
        ),
        ("print('INFO another backend', flush=True)", "no plan of turboquant_rocm"),
    ],
)
def test_a_server_that_does_not_count(said: str, told: str, server: Path, capsys: pytest.CaptureFixture[str]):
    server.write_text(SERVER.replace("SAID", said))
    assert evals.main(["repeat", "--model", "m", "--presets", "4bit_nc", "--", "--right", "auto"]) == 2
    assert told in capsys.readouterr().err


def test_a_missed_floor_fails(server: Path, monkeypatch: pytest.MonkeyPatch):
    server.write_text(SERVER.replace("SAID", f"print('{evals.PROOF}', flush=True)"))
    base = ["repeat", "--model", "m", "--presets", "3bit_nc", "--", "--right"]
    spec = evals.load_spec("repeat")
    monkeypatch.setattr(evals, "load_spec", lambda name: replace(spec, floors={"turboquant_3bit_nc": 0.5}))
    assert evals.main([*base, "turboquant_3bit_nc"]) == 0
    assert evals.main([*base, "auto"]) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["nothing"], "SPEC='nothing'"),
        (["repeat"], "--model=None (wants a model: repeat names none)"),
        (["repeat", "--model", "m", "--limit", "0"], "--limit=0"),
        (["repeat", "--model", "m", "--presets", "5bit"], "preset='5bit'"),
    ],
)
def test_wrong_arguments_are_named(more: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert evals.main(more) == 2
    assert told in capsys.readouterr().err
