"""Every number and every verdict of the stored reports, worked out a second time.

Nothing of the package is imported here: what models are comes from their published configs, written down below; which
backend serves what, from the rules of docs/design.md; bytes, from its table of slots; the rest is arithmetic. The
reports are parsed as text. So a wrong rule or sum in the package cannot agree with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "tests" / "golden" / "explain"
CONFIGS = ROOT / "configs" / "models"

BLOCK = 16
ROWS = 256  # query rows that the workspace is for
GIB = 2**30
# arch: (name, GiB, compute units), as their makers publish them
DEVICES = {
    "gfx942": ("Instinct MI300X", 192, 304),
    "gfx950": ("Instinct MI355X", 288, 256),
    "sm_90": ("H200", 141, 132),
}


@dataclass(frozen=True)
class Published:
    """A model as its makers describe it. kind: of layer i. window: of sliding layers. gib: of the weights."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head: int
    gib: float
    kind: Callable[[int], str] = lambda i: "full"
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    latent: tuple[int, int] | None = None
    warnings: tuple[str, ...] = ()


def every(n: int, other: str) -> Callable[[int], str]:
    return lambda i: "full" if i % n == n - 1 else other


PATTERN = "the layer pattern is not given: the one of this model type (transformers)"
UNUSED = "sliding_window=131072 is set and not used (use_sliding_window is false)"
MODELS = {
    "deepseek-v3": Published(
        "deepseek-ai/DeepSeek-V3", 61, 128, 128, 192, 641.3, lambda i: "mla", latent=(512, 64)
    ),
    "gemma-2-9b": Published(
        "google/gemma-2-9b",
        42,
        16,
        8,
        256,
        17.2,
        every(2, "sliding"),
        window=4096,
        soft_cap=50.0,
        warnings=("stored in float32: taken to be served in bf16", PATTERN),
    ),
    "gemma-3-27b": Published(
        "google/gemma-3-27b-it", 62, 32, 16, 128, 51.1, every(6, "sliding"), window=1024, warnings=(PATTERN,)
    ),
    "gpt-oss-120b": Published(
        "openai/gpt-oss-120b", 36, 64, 8, 64, 60.8, every(2, "sliding"), window=128, sinks=True
    ),
    "jamba-1.5-mini": Published(
        "ai21labs/AI21-Jamba-1.5-Mini", 32, 32, 8, 128, 96.1, lambda i: "full" if i % 8 == 4 else "linear"
    ),
    "llama-3.1-70b": Published("meta-llama/Llama-3.1-70B", 80, 64, 8, 128, 131.4),
    "llama-3.1-8b": Published("meta-llama/Llama-3.1-8B", 32, 32, 8, 128, 15.0),
    "llama-4-scout": Published(
        "meta-llama/Llama-4-Scout-17B-16E", 48, 40, 8, 128, 202.9, every(4, "chunked"), chunk=8192
    ),
    "minimax-m2.5": Published("MiniMaxAI/MiniMax-M2.5", 62, 48, 8, 128, 214.0),
    "mistral-7b": Published("mistralai/Mistral-7B-v0.3", 32, 32, 8, 128, 13.5),
    "phi-3-mini": Published(
        "microsoft/Phi-3-mini-4k-instruct", 32, 32, 32, 96, 7.1, lambda i: "sliding", window=2047
    ),
    "qwen2.5-72b": Published("Qwen/Qwen2.5-72B-Instruct", 80, 64, 8, 128, 135.4, warnings=(UNUSED,)),
    "qwen2.5-7b": Published("Qwen/Qwen2.5-7B-Instruct", 28, 28, 4, 128, 14.2, warnings=(UNUSED,)),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B", 48, 32, 4, 128, 56.9),
    "qwen3-32b": Published("Qwen/Qwen3-32B", 64, 64, 8, 128, 61.0),
    "qwen3-4b": Published("Qwen/Qwen3-4B", 36, 32, 8, 128, 7.5),
    "qwen3-next-80b-a3b": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", 48, 16, 2, 256, 151.5, every(4, "linear")
    ),
    "smollm2-135m": Published("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 9, 3, 64, 0.25),
}

# ---- reading a report -----------------------------------------------------------------------------------

Rows = list[tuple[str, ...]]


def cells(line: str) -> tuple[str, ...]:
    inner = line.removeprefix("|").removesuffix("|")
    return tuple(cell.strip().replace("&lt;", "<") for cell in inner.split(" | "))


@cache
def parsed(name: str) -> dict[str, dict[str, tuple[str, Rows]]]:
    """arch -> first words of a section's title -> (the whole title, its rows)."""
    found: dict[str, dict[str, tuple[str, Rows]]] = {}
    section: Rows = []
    for line in (REPORTS / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            arch = line.split(" layers on ")[1].split()[0]
            found[arch] = {"head": (line.removeprefix("## "), [])}
        elif line.startswith("### "):
            title, section = line.removeprefix("### "), []
            found[arch][title.split(":")[0].split(" of one")[0]] = (title, section)
        elif line.startswith("| "):
            section.append(cells(line))
        else:
            assert line == "" or set(line) <= set("|-"), line
    for sections in found.values():
        for title, (_, rows) in sections.items():
            if title != "head":
                rows.pop(0)  # the header
    return found


def listed(text: str) -> list[int]:
    """``0-3, 8, 10-20 step 2`` as numbers."""
    numbers: list[int] = []
    for part in text.split(", "):
        bounds, _, step = part.partition(" step ")
        first, _, last = bounds.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


# ---- what it has to say ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    model: Published
    arch: str

    @property
    def tp(self) -> int:
        """One device if the weights fit; else the fewest that hold them with a fifth to spare."""
        memory = DEVICES[self.arch][1]
        if self.model.gib < memory:
            return 1
        return next(n for n in (2, 4, 8, 16) if n * memory > 1.2 * self.model.gib)

    @property
    def heads(self) -> int:
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        return 1 if self.model.latent else self.model.kv_heads // self.tp

    @property
    def sizes(self) -> tuple[int, int]:
        """Widths of a key and a value, as cached."""
        if self.model.latent:
            rank, rotary = self.model.latent
            return rank + rotary, rank
        return self.model.head, self.model.head

    @property
    def kinds(self) -> list[str]:
        return [self.model.kind(i) for i in range(self.model.layers)]

    @property
    def hybrid(self) -> bool:
        return "linear" in self.kinds

    def role(self, i: int) -> str:
        """native, refused, no cache or the backend that runs."""
        kind = self.kinds[i]
        if kind == "linear":
            return "no cache"
        if not self.hybrid and (i < 2 or i >= self.model.layers - 2):
            return "native"
        return next((name for name, why in self.reasons(kind).items() if not why), "refused")

    def reasons(self, kind: str) -> dict[str, list[str]]:
        """Backend -> what stands against it, by the rules of docs/design.md for 4/4 bits and block 16."""
        key, value = self.sizes
        group = self.heads // self.kv_heads
        triton = []
        if kind not in ("full", "sliding"):
            triton.append(f"kind={kind} (wants one of full, sliding)")
        profile = list(triton)
        sizes = (64, 80, 96, 112, 128, 192, 256)
        for what, size in (("head_size", key), ("value_head_size", value)):
            if size != 128:
                profile.append(f"{what}={size} (wants 128)")
            if size not in sizes:
                triton.append(f"{what}={size} (wants one of {', '.join(map(str, sizes))})")
        if group > 16:
            profile.append(f"gqa_ratio={group} (wants 1 to 16)")
        if group > 32:
            triton.append(f"gqa_ratio={group} (wants 1 to 32)")
        fly = {
            f"flydsl_{arch}": ([] if self.arch == arch else [f"arch={self.arch} (wants {arch})"]) + profile
            for arch in ("gfx950", "gfx942")
        }
        rotated = [*triton[: kind not in ("full", "sliding")], "rotated_values=no (wants yes)"]
        for what, size in (("head_size", key), ("value_head_size", value)):
            if size not in (64, 128, 256):
                rotated.append(f"{what}={size} (wants one of 64, 128, 256)")
        if group > 16:
            rotated.append(f"gqa_ratio={group} (wants 1 to 16)")
        return {**fly, "triton_soa": triton, "triton_aos": triton, "triton_rotated": rotated}

    def change(self, backend: str, why: list[str]) -> str:
        """What alone gets a backend: its GPU, or heads padded with zeros, and what these cost in the cache."""
        if len(why) == 1 and why[0].startswith("arch="):
            return f"another GPU: {backend.removeprefix('flydsl_')}"
        if self.model.head < 128 and all("head_size=" in text for text in why):
            return f"--pad-heads 128 (cache +{134 / (self.model.head + 6) - 1:.0%})"
        return "no single change"

    def prefill(self, kind: str) -> str:
        if kind in ("linear", "mla"):
            return ""
        if self.arch == "sm_90":
            return "flash_attention_3"
        if self.model.sinks:
            return "triton_unified"
        return "aiter_flash" if self.model.head in (64, 128, 256) else "flash_attention_2"

    def what(self, kind: str) -> str:
        if kind == "linear":
            return "linear"
        key, value = self.sizes
        text = f"{kind}, {self.heads}/{self.kv_heads} heads of {key}" + (f"/{value}" if value != key else "")
        if kind == "sliding":
            text += f", window {self.model.window}"
        if kind == "chunked":
            text += f", chunk {self.model.chunk}"
        if self.model.soft_cap:
            text += f", soft cap {self.model.soft_cap}"
        return text + (", sinks" if self.model.sinks else "")

    def note(self, kind: str, role: str) -> str:
        if role == "native":
            return "boundary protection"
        if role == "no cache":
            return "linear: keeps a state of fixed size"
        if self.model.latent:
            rank, rotary = self.model.latent
            return f"latent attention: one vector of kv_lora_rank={rank} + rotary {rotary} per token"
        return "learned sinks: from the table of model types (transformers)" if self.model.sinks else ""

    # ---- bytes

    @property
    def native_block(self) -> int:
        """Two bytes an element; a latent vector is one for keys and values."""
        key, value = self.sizes
        return BLOCK * self.kv_heads * 2 * (key if self.model.latent else key + value)

    @property
    def soa_block(self) -> int:
        """Half a byte an element, and three fp16 fields a token and head: key norm, value scale, value zero."""
        return BLOCK * self.kv_heads * (self.model.head // 2 * 2 + 6)

    @property
    def counts(self) -> dict[str, int]:
        """Layers that have native and SoA blocks."""
        roles = [self.role(i) for i in range(self.model.layers)]
        found = {
            "native": sum(role in ("native", "refused") for role in roles),
            "soa": sum("_" in role for role in roles),
        }
        return {what: count for what, count in found.items() if count}

    @property
    def blocks(self) -> dict[str, int]:
        return {"native": self.native_block, "soa": self.soa_block}

    @property
    def page(self) -> int:
        return max(self.blocks[what] for what in self.counts)

    def tokens_per_page(self, what: str) -> int:
        return self.page // self.blocks[what] * BLOCK

    @property
    def per_token(self) -> float:
        return sum(n * self.page / self.tokens_per_page(what) for what, n in self.counts.items())

    @property
    def content(self) -> float:
        return sum(n * self.blocks[what] / BLOCK for what, n in self.counts.items())

    @property
    def unquantized(self) -> float:
        return sum(self.counts.values()) * self.native_block / BLOCK

    @property
    def workspace(self) -> int:
        """Queries and partial results of the fewest programs that keep 16 on each compute unit; or of three pieces of
        each sequence, which the Triton kernels cut batches into, with what says how."""
        if "soa" not in self.counts:
            return 0
        fly = any(self.role(i).startswith("flydsl_") for i in range(self.model.layers))
        most = 128 if fly else 64  # splits
        least = 0 if fly else 3
        programs = 16 * DEVICES[self.arch][2]
        tokens = max(1, 16 // (self.heads // self.kv_heads))
        width = max(128, 2 ** math.ceil(math.log2(self.model.head)))
        partials = 0
        for power in range(10):
            tiles = min(2**power, ROWS)
            splits = max(least, min(most, math.ceil(programs / (tiles * self.kv_heads))))
            partials = max(partials, min(tiles * tokens, ROWS) * splits)
        tiles = math.ceil(ROWS / tokens)
        partials = max(partials, ROWS * max(least, min(most, math.ceil(programs / (tiles * self.kv_heads)))))
        schedule = 16 * partials + 8 * ROWS if least else 0
        return self.heads * (ROWS * (2 * (width + 4) + 4) + partials * 4 * (width + 1)) + schedule + 1280

    @property
    def free(self) -> float:
        return (DEVICES[self.arch][1] - self.model.gib / self.tp) * GIB


CASES = [(name, arch) for name in MODELS for arch in DEVICES]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest) -> tuple[Expected, dict[str, tuple[str, Rows]]]:
    name, arch = request.param
    return Expected(MODELS[name], arch), parsed(name)[arch]


def amount(n: float) -> str:
    if n >= GIB:
        return f"{n / GIB:,.1f} GiB"
    if n >= 2**20:
        return f"{n / 2**20:,.1f} MiB"
    return f"{n:,.0f} B" if n == int(n) else f"{n:,.1f} B"


# ---- the comparison -------------------------------------------------------------------------------------


def test_there_is_a_report_of_every_bundled_model_and_target():
    assert set(MODELS) == {path.stem for path in CONFIGS.glob("*.yaml")}
    assert all(list(parsed(name)) == list(DEVICES) for name in MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_bundled_config_is_the_published_model(name: str):
    data = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    model = MODELS[name]
    config = data["config"].get("text_config", data["config"])
    assert (data["name"], data["weight_gib"]) == (model.name, model.gib)
    assert config["num_hidden_layers"] == model.layers
    assert config["num_attention_heads"] == model.heads
    assert config["num_key_value_heads"] == model.kv_heads
    if model.latent:
        assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == model.latent
        assert config["qk_nope_head_dim"] + config["qk_rope_head_dim"] == model.head
    else:
        assert config.get("head_dim", config["hidden_size"] / model.heads) == model.head
    assert config.get("attn_logit_softcapping") == model.soft_cap
    used = config.get("use_sliding_window", True)
    assert (config.get("sliding_window") if used else None) == model.window
    assert config.get("attention_chunk_size") == model.chunk


def test_head(case):
    want, report = case
    name, memory, _ = DEVICES[want.arch]
    tp = f", tp {want.tp}" if want.tp > 1 else ""
    assert report["head"][0] == (
        f"{want.model.name}: {want.model.layers} layers on {want.arch} ({name}), turboquant_4bit_nc, block 16{tp}"
    )
    assert want.free > 0
    assert memory * want.tp > want.model.gib


def test_layers(case):
    want, report = case
    seen: dict[int, tuple[str, ...]] = {}
    for layers, count, *rest in report["Layers"][1]:
        assert len(listed(layers)) == int(count)
        for i in listed(layers):
            assert i not in seen
            seen[i] = tuple(rest)
    assert sorted(seen) == list(range(want.model.layers))
    for i, kind in enumerate(want.kinds):
        role = want.role(i)
        layout = "soa" if "_" in role else ""
        assert seen[i] == (want.what(kind), role, layout, want.prefill(kind), want.note(kind, role)), i


def test_reasons(case):
    want, report = case
    expected: dict[tuple[int, str], tuple[str, str]] = {}
    for i, kind in enumerate(want.kinds):
        role = want.role(i)
        if role in ("native", "no cache"):
            continue
        for backend, why in want.reasons(kind).items():
            if backend == role:
                break
            expected[i, backend] = (", ".join(why), want.change(backend, why))
    served = any("_" in want.role(i) for i in range(want.model.layers))
    title = "Why not a faster one" if served else "Why not"
    found = {
        (i, backend): (why, change)
        for layers, backend, why, change in report.get(title, ("", []))[1]
        for i in listed(layers)
    }
    assert found == expected


def test_prefill_limits(case):
    want, report = case
    expected: Rows = []
    everywhere = f"0-{want.model.layers - 1}"
    route = want.prefill(want.kinds[0])
    if route == "triton_unified":
        expected = [
            (everywhere, name, "sinks=yes (wants none)") for name in ("aiter_flash", "flash_attention_2")
        ]
    if route == "flash_attention_2":
        expected = [(everywhere, "aiter_flash", "head_size=96 (wants one of 64, 128, 256)")]
    assert report.get("Prefill", ("", []))[1] == expected


def test_pages(case):
    want, report = case
    title, rows = report["Pages"]
    sizes = f"({amount(want.page)})"
    waste = 1 - want.content / want.per_token
    if len(want.counts) == 1:
        assert title == f"Pages: one size serves all groups {sizes}"
        assert waste == 0
    else:
        assert want.page % want.soa_block
        assert title == f"Pages: padded to the largest, {waste:.1%} of the cache is padding {sizes}"
    assert rows == [
        (what, str(n), "16", amount(want.blocks[what]), str(want.tokens_per_page(what)))
        for what, n in want.counts.items()
    ]


def suggestions(report: dict[str, tuple[str, Rows]]) -> Iterator[tuple[int, int, str, str]]:
    for sizes, padding, backends in report.get("Block sizes with less padding", ("", []))[1]:
        native, soa = sizes.split(", ")
        yield int(native.removeprefix("native ")), int(soa.removeprefix("soa ")), padding, backends


def test_suggested_block_sizes(case):
    want, report = case
    assert bool(list(suggestions(report))) == (len(want.counts) == 2)
    previous = 1 - want.content / want.per_token
    for native, soa, padding, backends in suggestions(report):
        assert (native % 16, soa % 16) == (0, 0)
        page = max(native * want.native_block, soa * want.soa_block) / BLOCK
        assert (soa + 16) * want.soa_block / BLOCK > page  # another step would not fit
        total = want.counts["native"] * page / native + want.counts["soa"] * page / soa
        waste = 1 - want.content / total
        assert padding == f"{waste:.1%}"
        assert waste <= previous / 2
        roles = [want.role(i) for i in range(want.model.layers)]
        (mine,) = {role for role in roles if "_" in role}
        if mine.startswith("flydsl_") and soa not in (16, 32, 64, 128):
            mine = "triton_soa"
        assert backends == mine
        previous = waste


def test_memory(case):
    want, report = case
    title, rows = report["Memory"]
    assert title == ("Memory of one rank" if want.tp > 1 else "Memory")
    memory = DEVICES[want.arch][1]
    counted = f"in {memory} GiB less {want.model.gib / want.tp:g} GiB of weights"
    if {"sliding", "chunked"} & set(want.kinds):
        counted += ", if every layer keeps every token"
    if want.hybrid:
        counted += ", recurrent states not counted"
    tokens = math.floor((want.free - want.workspace) / want.per_token)
    assert rows == [
        (
            "cache per token",
            amount(round(want.per_token, 3)),
            "native layers, meta regions and padding included",
        ),
        ("without padding", amount(want.content), ""),
        ("unquantized", amount(want.unquantized), ""),
        ("effective compression", f"{want.unquantized / want.per_token:.2f}x", "over the whole model"),
        ("workspace", amount(want.workspace), "scratch memory of decode, at most"),
        ("tokens that fit", f"{tokens:,}", counted),
        ("unquantized", f"{math.floor(want.free / want.unquantized):,}", ""),
    ]


def test_warnings(case):
    want, report = case
    expected = {("model", text) for text in want.model.warnings}
    full = want.kinds.count("full")
    served = {want.role(i) for i in range(want.model.layers) if "_" in want.role(i)}
    if served and full and want.model.layers - full >= 3 * full:
        text = f"{full} of {want.model.layers} layers carry all long-range recall: quantizing them costs more than in "
        text += "a dense model; measure long-range copying, or keep some native (--skip-layers)"
        expected.add(("few_full_layers", text))
    if len(want.counts) == 2:
        waste = 1 - want.content / want.per_token
        text = f"no page size serves all groups of layers: padding takes {waste:.1%} of the cache; "
        expected.add(("padding", text + "see the block sizes suggested"))
    if want.hybrid:
        text = "unknown: the size of the recurrent states. Servers enlarge the attention block until its page matches "
        text += "them (528, 784, 1568 ...): pass that block size with --block-size"
        expected.add(("hybrid_pages", text))
    if served:
        expected.add(("warmup", "the first decode of each shape compiles: call warmup() before serving"))
        needs = ["flydsl>=0.5,<0.6"] if any(role.startswith("flydsl_") for role in served) else []
        text = ", ".join([*needs, "triton>=3.6,<4"])
        expected.add(("assumed", f"taken to be installed on {want.arch}: {text}"))
    rows = report.get("Warnings", ("", []))[1]
    assert set(rows) == expected
    assert len(rows) == len(expected)


def test_sections(case):
    """Nothing is in a report that is not compared above."""
    _, report = case
    assert set(report) <= {
        "head",
        "Layers",
        "Why not a faster one",
        "Why not",
        "Prefill",
        "Pages",
        "Block sizes with less padding",
        "Memory",
        "Warnings",
    }
