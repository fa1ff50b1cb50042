"""Models as far as their KV cache is concerned: from a config.json, a YAML file, or the bundled ones.

load_model("qwen3-32b")                      a bundled model (configs/models)
load_model("path/to/config.json")            a Hugging Face config, or the directory that holds it
load_model("Qwen/Qwen3-32B")                 a model id in the local Hugging Face cache; nothing is downloaded
load_model("mine.yaml")                      a config in YAML, or layers spelled out:

    name: mine
    layers:
      - {count: 30, num_heads: 32, num_kv_heads: 8, head_size: 128}
      - {count: 2, num_heads: 32, num_kv_heads: 8, head_size: 128, kind: sliding, window: 1024}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from .hf_config import MAX_LAYERS, model_from_config, parse_json
from .presets import load_yaml, parse_yaml
from .spec import AttentionKind, LayerSpec, ModelSpec, SpecError, is_number

__all__ = ["bundled_models", "load_model", "model_from_config", "pad_heads", "split"]

MAX_BYTES: Final = 4 << 20
"""Largest description that is read. Published config.json files are a few kilobytes."""


@cache
def bundled_models() -> tuple[str, ...]:
    """Names of the models in ``configs/models``, sorted."""
    folder = resources.files("turboquant_rocm.configs").joinpath("models")
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    )


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError("model", str(path), f"a readable file ({error.strerror})") from None
    if len(data) > MAX_BYTES:
        raise SpecError(
            "model", f"{path.name}: more than {MAX_BYTES >> 20} MiB", "a config.json or YAML description"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError("model", f"{path.name}: byte {error.start} is not UTF-8", "UTF-8 text") from None


def _from_layers(data: Mapping[str, Any], source: str) -> ModelSpec:
    """A description whose layers are spelled out."""
    groups = data["layers"]
    if not isinstance(groups, list) or not groups:
        raise SpecError("layers", groups, "a list with at least one group of layers")
    known = {f.name for f in fields(LayerSpec)} - {"index", "notes"}
    layers: list[LayerSpec] = []
    for position, group in enumerate(groups):
        where = f"layers[{position}]"
        if not isinstance(group, Mapping):
            raise SpecError(where, group, "a mapping of fields")
        values = dict(group)
        count = values.pop("count", 1)
        if (
            isinstance(count, bool)
            or not isinstance(count, int)
            or not 1 <= count <= MAX_LAYERS - len(layers)
        ):
            raise SpecError(f"{where}.count", count, f"an integer from 1 to {MAX_LAYERS} layers in all")
        unknown = set(values) - known
        if unknown:
            raise SpecError(
                f"{where}.{sorted(map(str, unknown))[0][:120]}",
                "unknown",
                "count, " + ", ".join(sorted(known)),
            )
        for name in ("num_heads", "num_kv_heads", "head_size"):
            if name not in values:
                raise SpecError(f"{where}.{name}", None, "an integer >= 1")
        try:
            first = LayerSpec(index=len(layers), **values)
        except SpecError as error:
            raise SpecError(f"{where}.{error.field}", error.got, error.wants) from None
        except (TypeError, ValueError) as error:
            raise SpecError(where, str(error), "fields as in LayerSpec") from None
        layers += [replace(first, index=len(layers) + i) for i in range(count)]
    return ModelSpec(
        name=_string(data, "name", source), layers=tuple(layers), source=_string(data, "source", source)
    )


def _string(data: Mapping[str, Any], key: str, default: str) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise SpecError(key, value, "a string (quoted, if YAML reads it as something else)")
    return value


def _from_data(data: Any, name: str, source: str) -> ModelSpec:
    if not isinstance(data, Mapping):
        raise SpecError("model", type(data).__name__, "a mapping, as in config.json")
    if isinstance(data.get("config"), Mapping):  # a bundled model: its config, and where that is from
        model = model_from_config(
            data["config"], name=_string(data, "name", name), source=_string(data, "source", source)
        )
        return replace(model, weight_gib=_weights(data))
    if "config" in data and "model_type" not in data:
        raise SpecError("config", data["config"], "a mapping, as in config.json")
    if "layers" in data and not isinstance(data["layers"], int):
        return _from_layers(data, name)
    return model_from_config(data, name=name, source=source)


def _weights(data: Mapping[str, Any]) -> float | None:
    value = data.get("weight_gib")
    if value is None:
        return None
    if not is_number(value):
        raise SpecError("weight_gib", value, "a number > 0, in GiB")
    return float(value)


def _cache_folders() -> Iterator[Path]:
    environ = os.environ
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            yield Path(environ[variable])
    home = environ.get("HF_HOME")
    yield (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


def _cached(model_id: str) -> Path | None:
    """config.json of ``model_id`` in the local Hugging Face cache: of refs/main, else of the newest snapshot."""
    for folder in _cache_folders():
        repo = folder / ("models--" + model_id.replace("/", "--"))
        snapshots = repo / "snapshots"
        if not snapshots.is_dir():
            continue
        main = repo / "refs" / "main"
        if main.is_file():
            commit = main.read_bytes()[:256].decode("ascii", "replace").strip()
            if re.fullmatch(r"[\w.-]{1,128}", commit) and (snapshots / commit / "config.json").is_file():
                return snapshots / commit / "config.json"
        found = sorted(
            (path for path in snapshots.glob("*/config.json") if path.is_file()),
            key=lambda path: path.stat().st_mtime,
        )
        if found:
            return found[-1]
    return None


def load_model(source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a description, on all heads (tp 1).

    source: name of a bundled model, path of a JSON or YAML file, a directory with a config.json, a model id in the
    local Hugging Face cache, or a parsed config. SpecError names the field that is missing or wrong.
    """
    if isinstance(source, Mapping):
        return _from_data(source, "model", "a mapping")
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(text, str) or not text or "\0" in text:
        raise SpecError("model", text, "a name, a path, a model id or a parsed config")
    name = text.lower()
    if name in bundled_models():
        return _from_data(load_yaml("models", f"{name}.yaml"), name, f"configs/models/{name}.yaml")
    try:
        path_given = Path(text).expanduser()
        if path_given.is_dir():
            path_given = path_given / "config.json"
            if not path_given.is_file():
                raise SpecError("model", text, "a directory with a config.json")
            label = path_given.resolve().parent.name
        else:
            label = path_given.stem
        exists = path_given.exists()
    except OSError as error:
        raise SpecError("model", text[:200], f"a usable path ({error.strerror})") from None
    except RuntimeError as error:  # ~user of whom no home is known
        raise SpecError("model", text[:200], f"a usable path ({error})") from None
    if exists and not path_given.is_file():  # a pipe would be waited for, a device never ends
        raise SpecError("model", text[:200], "a regular file, or a directory with a config.json")
    if exists:
        content = _read(path_given)
        if path_given.suffix.lower() in (".yaml", ".yml"):
            return _from_data(parse_yaml(content, path_given.name), label, path_given.name)
        return _from_data(parse_json(content, path_given.name), label, path_given.name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        try:
            cached = _cached(text)
        except (OSError, RuntimeError) as error:
            raise SpecError("model", text[:200], f"a readable Hugging Face cache ({error})") from None
        if cached is not None:
            return _from_data(
                parse_json(_read(cached), text), text, f"config.json of {text} in the local cache"
            )
        by_hub = {hub.lower(): bundled for bundled, hub in _hub_ids().items()}
        if name in by_hub:
            return load_model(by_hub[name])
    raise SpecError(
        "model",
        text[:200],
        "a config.json, a directory with one, a YAML file, a model id in the local Hugging Face cache, or one of "
        + ", ".join(bundled_models()),
    )


@cache
def _hub_ids() -> dict[str, str]:
    return {name: str(load_yaml("models", f"{name}.yaml").get("name", name)) for name in bundled_models()}


# ---- changing a model -----------------------------------------------------------------------------------


def split(model: ModelSpec, tp: int) -> ModelSpec:
    """``model`` on one of ``tp`` tensor-parallel ranks: its layers hold local heads.

    Query heads are divided. KV heads are divided, or, where tp is larger, replicated: then each rank holds one, and
    tp must be a multiple of their number. Latent (MLA) caches are whole on every rank. SpecError if it cannot be.
    """
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise SpecError("tp", tp, "an integer >= 1")
    if model.tp != 1:
        raise SpecError("tp", model.tp, "a model on all heads (tp 1) to split")
    if tp == 1:
        return model
    return replace(model, tp=tp, layers=tuple(_split_layer(layer, tp) for layer in model.layers))


def _split_layer(layer: LayerSpec, tp: int) -> LayerSpec:
    if layer.kind in (AttentionKind.LINEAR, AttentionKind.NONE):
        return layer
    heads, kv = layer.num_heads, layer.num_kv_heads
    if heads % tp:
        raise SpecError("tp", tp, f"a divisor of num_attention_heads={heads} (layer {layer.index})")
    if layer.kind is AttentionKind.MLA:
        return replace(layer, num_heads=heads // tp)
    if kv >= tp:
        if kv % tp:
            raise SpecError(
                "tp", tp, f"a divisor or multiple of num_key_value_heads={kv} (layer {layer.index})"
            )
        return replace(layer, num_heads=heads // tp, num_kv_heads=kv // tp)
    if tp % kv:
        raise SpecError("tp", tp, f"a divisor or multiple of num_key_value_heads={kv} (layer {layer.index})")
    note = f"each KV head is held by {tp // kv} ranks"
    return replace(layer, num_heads=heads // tp, num_kv_heads=1, notes=(*layer.notes, note))


def pad_heads(model: ModelSpec, head_size: int) -> ModelSpec:
    """``model`` with every smaller head (query, key and value) padded with zeros to ``head_size``.

    Scores do not change, since the softmax scale of the original head size is kept.
    """
    if isinstance(head_size, bool) or not isinstance(head_size, int) or not 1 <= head_size <= 4096:
        raise SpecError("pad_heads", head_size, "an integer from 1 to 4096")

    def pad(layer: LayerSpec) -> LayerSpec:
        if layer.kind in (AttentionKind.LINEAR, AttentionKind.NONE, AttentionKind.MLA):
            return layer
        if layer.head_size >= head_size and layer.value_size >= head_size:
            return layer
        return replace(
            layer,
            head_size=max(layer.head_size, head_size),
            value_head_size=max(layer.value_size, head_size),
            scale=layer.softmax_scale,
            notes=(*layer.notes, f"heads padded from {layer.head_size} to {head_size}"),
        )

    return replace(model, layers=tuple(pad(layer) for layer in model.layers))
