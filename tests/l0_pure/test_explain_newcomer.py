"""What a stranger does to ``python -m turboquant_rocm.explain``: odd files, paths, terminals and pipes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from turboquant_rocm import explain as explain_module
from turboquant_rocm.explain import FORMATS, main, render, run
from turboquant_rocm.planning import Question
from turboquant_rocm.target import target_names

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((ROOT / "docs" / "explain_schema.json").read_text(encoding="utf-8"))
)
BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LAYERS = "layers: [{count: 6, num_heads: 8, num_kv_heads: 2, head_size: 128%s}]"
SECONDS = 10.0


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says about bad input: exit 3, in bounded time, no traceback, nothing on standard output."""
    capsys.readouterr()
    started = time.monotonic()
    try:
        status = main(arguments)
    except SystemExit as ended:  # argparse
        status = ended.code
    taken = time.monotonic() - started
    out, err = capsys.readouterr()
    assert status == 3, (status, out[:300], err)
    assert "Traceback" not in err
    assert out == ""
    assert taken < SECONDS
    assert len(err) < 2000
    return err


def file(folder: Path, content: str | bytes, suffix: str = ".json") -> str:
    path = folder / f"model{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# ---- fields ---------------------------------------------------------------------------------------------

# field -> values that it cannot have
NOT_COUNTS = ["6", 1.5, True, {}, -1, 0, 10**30, float("inf"), float("nan"), "auto", {"a": {"b": None}}]
NOT_FLAGS = ["x", -1, 0, 1.5, [None], {"a": None}, float("nan"), "\u202e\x1b[31m"]
NOT_LISTS = ["x", -1, 0, 1.5, True, {"a": None}, float("nan"), 10**40]
NOT_NUMBERS = ["x", -1, 0, True, [None], {"0": None}, float("nan"), float("inf"), 10**400]
FIELDS: list[tuple[str, list[Any]]] = [
    ("hidden_size", [*NOT_COUNTS, [8]]),
    ("num_hidden_layers", [*NOT_COUNTS, [8]]),
    ("num_attention_heads", [*NOT_COUNTS, []]),
    ("num_key_value_heads", [*NOT_COUNTS, [], [3], [None] * 6]),
    ("head_dim", [*NOT_COUNTS, [8]]),
    ("max_position_embeddings", ["6", 1.5, {}, -1, 0, float("nan"), [1]]),
    ("sliding_window", ["6", 1.5, {}, -2, float("nan"), [[]], [1] * 1000]),
    ("attn_logit_softcapping", NOT_NUMBERS),
    ("layer_types", [*NOT_LISTS, [None], ["x"] * 6, [["full_attention"]] * 6, ["full_attention"] * 100_000]),
    ("attn_type_list", [*NOT_LISTS, [None] * 6, [2] * 6]),
    ("kv_source_layers", [*NOT_LISTS, [5] * 6, [0] * 5]),
    ("local_layer_ids", [*NOT_LISTS, [6], [None]]),
    ("per_layer_config", ["x", 1, True, {"a": {}}, {"6": {}}, {"0": None}, [None], {"0": {"head_dim": "x"}}]),
    ("block_configs", [*NOT_LISTS, [1] * 6, [{}] * 6, [{"attention": None}] * 6]),
    ("num_kv_shared_layers", ["6", 1.5, {}, -1, 7, float("nan")]),
    ("attn_layer_period", ["x", 0, 1.5, {}, float("nan")]),
    ("hybrid_override_pattern", [1, ["M"], "MX", {"a": None}, "\x1b[2J"]),
    ("linear_attn_config", NOT_LISTS[:5]),
    ("is_encoder_decoder", NOT_FLAGS),
    ("add_cross_attention", NOT_FLAGS),
    ("use_sliding_window", NOT_FLAGS),
    ("use_cla", NOT_FLAGS),
    ("alibi", NOT_FLAGS),
    ("model_type", [1, [], {}, True]),
]


@pytest.mark.parametrize(("field", "values"), FIELDS, ids=[name for name, _ in FIELDS])
def test_a_wrong_value_is_told_by_its_field(
    field: str, values: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for value in values:
        more = {"sliding_window": 64} if field in ("use_sliding_window", "local_layer_ids") else {}
        said = told(
            [file(tmp_path, json.dumps({**BASE, **more, field: value})), "--target", "gfx942"], capsys
        )
        named = "layer" if field == "layer_types" else field  # whose words are layer kinds
        assert named in said, (field, value, said)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_field_is_told(
    field: str, nested: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data: Any = {k: v for k, v in BASE.items() if k != field}
    if nested:
        data = {"text_config": {"text_config": {**data, field: None}}}
    name = f"text_config.text_config.{field}" if nested else field
    assert f"error: {name}=None" in told([file(tmp_path, json.dumps(data)), "--target", "gfx942"], capsys)


# ---- files ----------------------------------------------------------------------------------------------

FILES: dict[str, tuple[str | bytes, str, str]] = {
    "empty": ("", ".json", "model.json"),
    "only a brace": ("{", ".json", "model.json"),
    "zero bytes": (b"\0" * 100, ".json", "model.json"),
    "UTF-16": (json.dumps(BASE).encode("utf-16"), ".json", "UTF-8"),
    "Latin-1": (b'{"model_type": "\xe9"}', ".json", "UTF-8"),
    "deep lists": ("[" * 100_000, ".json", "model.json"),
    "deep mappings": ('{"a":' * 100_000, ".json", "model.json"),
    "an endless integer": ('{"hidden_size": ' + "9" * 10_000 + "}", ".json", "model.json"),
    "a list": ("[1, 2]", ".json", "mapping"),
    "a string": ('"llama"', ".json", "mapping"),
    "null": ("null", ".json", "mapping"),
    "NaN": ("NaN", ".json", "mapping"),
    "nested nulls": ('{"text_config": {"decoder": {"text_config": null}}}', ".json", "text_config.decoder."),
    "50 MB of spaces": (b" " * (50 << 20), ".json", "4 MiB"),
    "50 MB of one string": (b'{"a": "' + b"x" * (50 << 20) + b'"}', ".json", "4 MiB"),
    "50 MB of YAML": (b"a: 1\n" * (10 << 20), ".yaml", "4 MiB"),
    "YAML that is empty": ("", ".yaml", "mapping"),
    "YAML of two documents": ("a: 1\n---\nb: 2", ".yaml", "model.yaml"),
    "YAML that runs code": ("!!python/object/apply:os.system ['true']", ".yaml", "model.yaml"),
    "YAML with tabs": ("a:\n\tb: 1", ".yaml", "model.yaml"),
    "YAML with an alias": ("a: &a [1]\nb: *a", ".yaml", "without aliases"),
    "YAML with a key twice": ("name: a\nname: b", ".yaml", "name is given twice"),
    "YAML with a key that is a list": ("? [1]\n: 2", ".yaml", "model.yaml"),
    "no layers": ("layers: null", ".yaml", "layers"),
    "an empty list of layers": ("layers: []", ".yaml", "layers"),
    "layers that are words": ("layers: [full]", ".yaml", "layers[0]"),
    "too many layers": ("layers: [{count: 99999999, num_heads: 1}]", ".yaml", "layers[0].count"),
    "a count that is a date": ("layers: [{count: 2020-01-01, num_heads: 1}]", ".yaml", "layers[0].count"),
    "a field that is none": (LAYERS % ", colour: red", ".yaml", "layers[0].colour"),
    "NaN heads": ((LAYERS % "").replace("num_heads: 8", "num_heads: .nan"), ".yaml", "layers[0].num_heads"),
    "a kind that is none": (LAYERS % ", kind: magic", ".yaml", "layers[0].kind"),
    "sliding without a window": (LAYERS % ", kind: sliding", ".yaml", "layers[0].window"),
    "a config that is a word": ("config: llama", ".yaml", "config='llama'"),
    "a config that is null": ("config: null", ".yaml", "config=None"),
    "weights that are a word": (
        json.dumps({"config": BASE, "weight_gib": "lots"}),
        ".yaml",
        "weight_gib",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_describe_no_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content, suffix, named = FILES[name]
    assert named in told([file(tmp_path, content, suffix), "--target", "gfx942"], capsys)


def test_paths_that_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "config.json").mkdir(parents=True)
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    paths = [str(path) for path in tmp_path.iterdir()]
    paths += [
        "",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
        "~nobody-here/x",
        "a\0b",
        "x" * 5000,
        "модель",
        "\udcff",
    ]
    paths += ["nobody/nothing", "../" * 500, "-", str(tmp_path / ("circle/" * 60))]
    for path in paths:
        assert "model=" in told(["--target", "gfx942", "--", path], capsys), path


@pytest.fixture
def nobody() -> Iterator[None]:
    """Without the rights of root, who may read everything."""
    user = os.geteuid()
    run(["qwen3-4b", "--target", "gfx942"])  # imports what a report needs, perhaps from folders of root
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.mark.usefixtures("nobody")
def test_files_that_may_not_be_read(capsys: pytest.CaptureFixture[str]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(file(Path(folder), json.dumps(BASE)))
        locked = Path(folder) / "locked"
        locked.mkdir()
        path.chmod(0)
        locked.chmod(0)
        for name in (path, locked, locked / "config.json"):
            assert "Permission denied" in told([str(name), "--target", "gfx942"], capsys)
        said = told(["qwen3-4b", "--target", "gfx942", "--output", str(locked / "x")], capsys)
        assert "--output" in said
        assert "Permission denied" in said


def test_a_model_of_layers_that_all_differ_is_explained_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The whole model is split once, not once for each change that is tried for each layer."""
    calls = []
    whole = Question.local_model.fget
    monkeypatch.setattr(Question, "local_model", property(lambda self: calls.append(1) or whole(self)))
    layers = {str(i): {"head_dim": 65 + i} for i in range(64)}
    config = {**BASE, "num_hidden_layers": 64, "per_layer_config": layers}
    started = time.monotonic()
    status, text, _ = run([file(tmp_path, json.dumps(config)), "--target", "gfx942", "--format", "json"])
    assert status == 1
    assert len(json.loads(text)["groups"]) > 60
    assert len(calls) == 1
    assert time.monotonic() - started < SECONDS


# ---- what is printed ------------------------------------------------------------------------------------

EVIL = "a\x1b[2J\x1b]0;b\x07\r\u202e\u200f\ud800\x00\x9b31m\u2028\tc <script>alert(1)</script> é 模型 🙂"
CONTROL = ("\x1b", "\x07", "\r", "\u202e", "\u200f", "\ud800", "\x00", "\x9b", "\t")


def test_control_characters_of_a_description_are_escaped_everywhere(tmp_path: Path):
    data = {"name": EVIL, "source": EVIL, "config": {**BASE, "dtype": EVIL, "model_type": EVIL}}
    path = file(tmp_path, json.dumps(data))
    for command in (
        "--target gfx942",
        "--target gfx942 --env",
        "--all-targets",
        "--target gfx942 --memory 1GiB",
    ):
        for form in FORMATS:
            _, text, _ = run([path, *shlex.split(command), "--format", form])
            if form == "json":
                document = json.loads(text)
                assert document.get("model", document.get("rows", [{}])[0].get("model"))["name"].startswith(
                    "a\\x1b[2J"
                )
                text = json.dumps(document, ensure_ascii=False)
                text.encode()  # no lone surrogate is left
            else:
                assert "\\x1b[2J" in text
                assert "\\u202e" in text
            for character in CONTROL:
                assert character not in text, (form, character)
            if form in ("html", "markdown"):
                assert "<script" not in text


def test_errors_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for said in (
        told([file(tmp_path, json.dumps({**BASE, "layer_types": [EVIL] * 6})), "--target", "gfx942"], capsys),
        told(["x\x1b[31m\u202e", "--target", "gfx942"], capsys),
        told(["qwen3-4b", "--target", "gfx\x1b[31m\u202e"], capsys),
    ):
        assert not any(character in said for character in CONTROL)


def test_escaping_keeps_what_is_harmless():
    document = {"a": ["é\n模型", ("\x1b", 1, None, True, 1.5)], "\x07": {"b": "\U0001f642"}}
    assert explain_module._printable(document) == {
        "a": ["é\n模型", ("\\x1b", 1, None, True, 1.5)],
        "\\x07": {"b": "\U0001f642"},
    }


def test_a_fault_of_ours_is_no_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(explain_module, "plan_document", broken)
    assert main(["qwen3-4b", "--target", "gfx942"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "ZeroDivisionError: on purpose" in err
    assert "a fault of turboquant_rocm" in err


# ---- as a process: terminals and pipes ------------------------------------------------------------------


def spawn(arguments: list[str], environment: dict[str, str] | None = None, **options: Any) -> Any:
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))
    }
    return subprocess.run(
        [sys.executable, "-m", "turboquant_rocm.explain", *arguments],
        cwd=ROOT,
        env={**inherited, **(environment or {})},
        check=False,
        **{"capture_output": True, **options},
    )


C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "ascii:strict"},
        C_LOCALE,
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=lambda e: ",".join(f"{k}={v}" for k, v in e.items()),
)
def test_terminals_without_unicode(environment: dict[str, str], tmp_path: Path):
    path = file(tmp_path, "name: é模🙂\n" + LAYERS % "", ".yaml")
    for form in FORMATS:
        done = spawn([path, "--target", "gfx942", "--format", form], environment)
        assert (done.returncode, done.stderr) == (0, b""), form
        if form == "json":  # valid UTF-8 and JSON, whatever the terminal is
            document = json.loads(done.stdout.decode("utf-8"))
            VALIDATOR.validate(document)
            assert document["model"]["name"] == "é模🙂"
        elif form == "html":
            assert "&#233;&#27169;&#128578;: 6 layers" in done.stdout.decode("ascii")
        else:
            text = done.stdout.decode("latin-1" if "latin-1" in str(environment) else "ascii")
            assert "\\u6a21\\U0001f642: 6 layers" in text
            assert ("é" if "latin-1" in str(environment) else "\\xe9") in text


def test_errors_on_a_terminal_without_unicode():
    done = spawn(["模型", "--target", "gfx942"], C_LOCALE)
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"error: model=" in done.stderr
    assert b"Traceback" not in done.stderr
    missed = spawn(["qwen3-4b", "--target", "gfx942", "--expect", "triton_aos"], C_LOCALE)
    assert missed.returncode == 2


def test_the_help_fits_any_terminal():
    assert spawn(["--help"], C_LOCALE).returncode == 0
    assert b"4 a fault of this program" in spawn(["--help"], {"COLUMNS": "200"}).stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_told():
    with open("/dev/full", "wb") as full:
        done = spawn(
            ["qwen3-4b", "--target", "gfx942"], capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: standard output: No space left")
    assert b"Traceback" not in done.stderr
    done = spawn(["qwen3-4b", "--target", "gfx942", "--output", "/dev/full"])
    assert done.returncode == 3
    assert b"--output" in done.stderr


def test_closed_standard_streams():
    python = shlex.quote(sys.executable)
    for arguments, streams, status in (
        ("qwen3-4b --target gfx942", ">&-", 0),
        ("qwen3-4b --target gfx942 --expect triton_aos", ">&- 2>&-", 2),
        ("nope --target gfx942", ">&- 2>&-", 3),
        ("qwen3-4b --target", "2>&-", 3),
        ("--help", ">&-", 0),
    ):
        command = f"{python} -m turboquant_rocm.explain {arguments} {streams}"
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == status, (command, done.stderr)
        assert b"Traceback" not in done.stderr


# ---- every output against the schema --------------------------------------------------------------------

SMALL = LAYERS % ", kind: sliding, window: 64, sinks: true, soft_cap: 30.0, position_bias: alibi"
ONE = "num_heads: 8, num_kv_heads: 2, head_size: 128"
SHARED = f"layers: [{{{ONE}}}, {{{ONE}, kv_shared_with: 0}}]"
KINDS = "layers:\n" + "".join(
    f"- {{{ONE}, kind: {kind}, chunk: 64{', window: 64' if kind == 'sliding' else ''}}}\n"
    for kind in ("full", "sliding", "chunked", "linear", "mla", "cross", "encoder", "sparse", "none")
)
COMMANDS = [
    "",
    "--env",
    "--all-targets",
    "--all-targets --preset k8v4 --block-size 24",
    "--all-targets --tp 3",
    *(f"FILE --target {arch}" for arch in target_names()),
    "FILE",
    "FILE --env",
    "FILE --all-targets --env",
    "FILE --target local",
    "FILE --target gfx942 --protect 0 --memory 1TiB --weights 10GB --rows 1",
    "FILE --target gfx942 --protect 0 --skip-layers full,0 --pad-heads 256 --dtype fp16",
    "FILE --target gfx950 --force torch_reference --layout aos --protect 0",
    "FILE --target gfx950 --deny triton_soa --require triton_aos --protect 0 --expect triton_aos",
    "FILE --target gfx1100 --no-fallback --policy strict --expect triton_soa",
]


@pytest.mark.parametrize("description", ["small", "shared", "kinds"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_json_document_follows_the_schema_and_every_format_is_made(
    command: str, description: str, tmp_path: Path
):
    if "FILE" not in command and description != "small":
        return
    if "env" in command or "local" in command:
        pytest.importorskip("torch")
    content = {"small": SMALL, "shared": SHARED, "kinds": KINDS}[description]
    words = shlex.split(command.replace("FILE", file(tmp_path, content, ".yaml")))
    status, text, _ = run([*words, "--format", "json"])
    document = json.loads(text)
    VALIDATOR.validate(document)
    assert document["exit"] == status
    assert status in (0, 1, 2)
    for form in ("table", "markdown", "html"):
        assert run([*words, "--format", form])[0] == status
        assert render(document, form).strip()


def test_the_schema_refuses_what_is_not_written_down():
    document = json.loads(run(["qwen3-4b", "--target", "gfx942", "--format", "json"])[1])
    for path in ((), ("groups", 0), ("groups", 1, "refused", 0), ("bytes",), ("pages",), ("policy",)):
        changed = json.loads(json.dumps(document))
        part = changed
        for step in path:
            part = part[step]
        part["surprise"] = 1
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(changed)
