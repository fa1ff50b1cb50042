"""Run the FlyDSL kernels' machine code in the simulator, from torch tensors to torch tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import yaml

from turboquant_rocm.backends._flydsl.config import DecodeConfig
from turboquant_rocm.backends._flydsl.offline import Compiled, compile_offline
from turboquant_rocm.backends._flydsl.tables import QUERY_LIMIT, key_tables
from turboquant_rocm.backends._torch.reference import ReferenceOps, rotate
from turboquant_rocm.dispatch import Decision
from turboquant_rocm.layouts import Layout, make_layout
from turboquant_rocm.layouts.views import allocate
from turboquant_rocm.spec import LayerSpec, Target

DIM = 128
LOG2E = math.log2(math.e)
LIMITS: dict[str, Any] = yaml.safe_load(
    files("turboquant_rocm.configs").joinpath("budgets/flydsl.yaml").read_text()
)


@cache
def compiled(kind: str, config: DecodeConfig, arch: str) -> Compiled:
    """One compilation per kernel, specialisation and test session."""
    return compile_offline(kind, config, arch)


def check_resources(code: Compiled, arch: str) -> None:
    """No spill, no scratch, four waves per SIMD by registers and by LDS."""
    limits = LIMITS[arch]
    for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert code.resource(field) == 0, field
    assert "scratch_" not in code.assembly
    assert code.waves_per_simd >= limits["waves_per_simd"]
    lds = code.resource("group_segment_fixed_size")
    groups = limits["lds_per_cu"] // lds if lds else 16
    assert groups * DecodeConfig.__dataclass_fields__["waves"].default >= 4 * limits["waves_per_simd"]


@dataclass
class Case:
    """A filled cache with everything that a decode call takes."""

    layer: LayerSpec
    layout: Layout
    cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    query: torch.Tensor
    starts: torch.Tensor | None = None
    max_query_len: int = 1

    @property
    def oracle(self) -> ReferenceOps:
        """The reference in float64 over this layout."""
        decision = Decision(
            self.layer,
            Target("cpu", "cpu"),
            self.layout.preset,
            self.layout.block_size,
            "torch_reference",
            "soa",
        )
        return ReferenceOps(decision, self.layout, math_dtype=torch.float64)

    def expected(self, scale: float | None = None, sinks: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Output and lse of the oracle, float64."""
        out = torch.zeros((*self.query.shape[:2], DIM), dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -math.inf, dtype=torch.float64)
        self.oracle.decode(
            self.query, self.cache, self.table, self.lens, self.starts, self.max_query_len,
            scale or self.layer.softmax_scale, sinks, out, lse,
        )  # fmt: skip
        return out, lse


def make_case(
    lens: list[int],
    *,
    hk: int = 1,
    gqa: int = 8,
    block_size: int = 16,
    query_lens: list[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    garbage: bool = True,
    block_stride: int | None = None,
    spare_blocks: int = 3,
    preset: str = "turboquant_4bit_nc",
    **layer_options: Any,
) -> Case:
    """Random keys and values (with per-channel offsets, as real ones have) stored by the reference.

    Blocks are shuffled, table entries past a sequence's end are invalid, and bytes that nobody stores are 0xFF
    (NaN as fp16) if ``garbage``.
    """
    g = torch.Generator().manual_seed(seed)
    layer = LayerSpec(0, hk * gqa, hk, DIM, **layer_options)
    layout = make_layout("soa", preset, DIM, hk, block_size, block_stride=block_stride)
    per_seq = [-(-n // block_size) for n in lens]
    blocks = sum(per_seq) + spare_blocks
    order = torch.randperm(blocks, generator=g)
    width = max([*per_seq, 1]) + 1
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    table[1::2] = 2**31 - 1
    cache = allocate(layout, blocks, "cpu", 0xFF if garbage else 0)
    at, slots = 0, []
    for i, n in enumerate(lens):
        mine = order[at : at + per_seq[i]]
        table[i, : per_seq[i]] = mine.to(torch.int32)
        token = torch.arange(n)
        slots.append(mine[token // block_size] * block_size + token % block_size)
        at += per_seq[i]
    slot = torch.cat(slots)
    shape = (len(slot), hk, DIM)
    key = key_scale * (torch.randn(shape, generator=g) + 2.0 * torch.randn((1, hk, DIM), generator=g))
    value = value_scale * (torch.randn(shape, generator=g) + torch.randn((1, hk, DIM), generator=g))
    query_lens = query_lens or [1] * len(lens)
    query = torch.randn((sum(query_lens), hk * gqa, DIM), generator=g).to(dtype)
    starts = None
    if query_lens != [1] * len(lens):
        starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    case = Case(
        layer, layout, cache, table, torch.tensor(lens, dtype=torch.int32), query, starts, max(query_lens)
    )
    case.oracle.store(key.to(dtype), value.to(dtype), cache, slot)
    return case


def prepared_query(query: torch.Tensor, factor: float, bits: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """What the preparation kernel writes: int8 [N, Hq, 2, 128] and (scale, centre) fp32 [N, Hq, 2], in numpy."""
    tables = key_tables(bits)
    q = rotate(query.to(torch.float32)).numpy().astype(np.float64)
    largest = np.abs(q).max(-1, keepdims=True)
    step = np.where(largest > 0, largest / QUERY_LIMIT, 1.0)
    t = np.rint(q / step).astype(np.int64)
    high = (t + 64) >> 7
    low = t - 128 * high
    out = np.empty((*q.shape[:2], 2, DIM), np.int8)
    # 4 bits: in each 8 dims the even ones, then the odd ones. 3: in each 32 dims those that are equal modulo 8.
    places = (16, 4, 2) if bits == 4 else (4, 4, 8)
    for part, x in enumerate((high, low)):
        out[:, :, part] = x.reshape(*q.shape[:2], *places).swapaxes(-1, -2).reshape(*q.shape[:2], DIM)
    scale = step[..., 0] * tables.beta / math.sqrt(DIM) * factor
    centre = -tables.centre * t.sum(-1) * scale
    return out, np.stack([scale, centre], -1).astype(np.float32)


def simulate_decode(
    case: Case, arch: str, splits: int, *, check: Any = "all", scale: float | None = None, waves: int = 4
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Partial outputs merged in numpy: (out, lse in natural logarithm, counters)."""
    from ci.cdna_sim import Simulator

    layer = case.layer
    config = DecodeConfig.of(
        arch, case.layout, layer.gqa_ratio, multi=case.starts is not None, window=layer.window,
        soft_cap=layer.soft_cap, waves=waves,
    )  # fmt: skip
    code = compiled("decode", config, arch)
    factor = (scale or layer.softmax_scale) * LOG2E
    if layer.soft_cap is not None:
        factor *= 2.0 / layer.soft_cap
    q8, meta = prepared_query(case.query, factor, config.key_bits)
    n, hq = case.query.shape[:2]
    batch = len(case.lens)
    groups = -(-case.max_query_len // config.tokens_per_group)
    out = np.full((n, hq, splits, DIM), np.nan, np.float32)
    sums = np.full((n, hq, splits), np.nan, np.float32)
    cache = np.lib.stride_tricks.as_strided(
        case.cache.numpy(), (case.cache.shape[0] * case.layout.block_stride,), (1,)
    )
    starts = np.zeros(batch + 1, np.int32) if case.starts is None else case.starts.numpy()
    arrays = [
        ("query", q8), ("meta", meta), ("cache", cache), ("table", case.table.numpy()),
        ("lens", case.lens.numpy()), ("starts", starts), ("out", out), ("sums", sums),
    ]  # fmt: skip

    def arguments(at: dict[int, int]) -> bytes:
        places = [*(at[i] for i in range(8)), 0]
        return struct.pack("<9Q8i", *places, case.table.shape[1], splits, batch, n, groups, 0, 0, 0)

    simulator = Simulator(code.hsaco, check=check)
    result = simulator.launch(
        (splits, case.layout.num_kv_heads, batch * groups), (64 * waves,), arguments, arrays
    )
    merged, lse = merge(out, sums)
    return merged, lse, result


def merge(out: np.ndarray, sums: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits merged by their log2 sums. out [..., S, D], sums [..., S]."""
    s = sums.astype(np.float64)
    top = s.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weight = np.where(np.isneginf(s), 0.0, np.exp2(s - np.where(np.isneginf(top), 0.0, top)))
    total = weight.sum(-1, keepdims=True)
    used = np.where(weight[..., None] > 0, out.astype(np.float64), 0.0)
    merged = (used * weight[..., None]).sum(-2) / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (top[..., 0] + np.log2(total[..., 0])) / LOG2E
    return torch.from_numpy(merged), torch.from_numpy(np.where(total[..., 0] > 0, lse, -np.inf))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 error over everything."""
    norm = float(want.norm())
    return float((got.to(torch.float64) - want).norm()) / norm if norm else float(got.norm())


class SimulatedRuntime:
    """A Runtime that executes the machine code in the simulator instead of a device.

    memory: tensors that kernels may touch, by name; an address argument is found among them.
    """

    ARGUMENTS = {"prepare": (3, "3if"), "decode": (9, "8i"), "reduce": (6, "6i")}  # noqa: RUF012

    def __init__(self, arch: str, units: int = 1, check: Any = "all") -> None:
        self.arch, self.units, self.check = arch, units, check
        self.memory: dict[str, torch.Tensor] = {}
        self.undefined: set[str] = set()
        self.launches: list[tuple[str, Any]] = []
        self._handles: dict[tuple[str, Any], Any] = {}

    @property
    def kernels(self) -> list[Compiled]:
        """Everything that was asked for, compiled."""
        return [compiled(kind, config, self.arch) for kind, config in self._handles]

    def arrays(self) -> list[tuple[str, np.ndarray]]:
        """The bytes of every tensor in ``memory``, pads included."""
        out = []
        for name, t in self.memory.items():
            size = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
            flat = torch.as_strided(t, (size,), (1,), t.storage_offset())
            out.append((name, flat.view(torch.uint8).numpy()))
        return out

    @staticmethod
    def translate(value: int, arrays: list[tuple[str, np.ndarray]], at: dict[int, int]) -> int:
        """A host address as the simulator's; 0 stays 0, and what lies in no array becomes an address of nothing."""
        for i, (_, array) in enumerate(arrays):
            base = array.__array_interface__["data"][0]
            if base <= value < base + array.size:
                return at[i] + value - base
        return 0 if value == 0 else 0xDEAD0000

    def stream(self, device: torch.device) -> int:
        return 0

    def compute_units(self, device: torch.device) -> int:
        return self.units

    def compile(self, jobs: Any) -> None:
        """Nothing: ``handle`` compiles."""

    def handle(self, kind: str, config: Any) -> Any:
        if (kind, config) not in self._handles:
            self._handles[kind, config] = self._handle(kind, config)
        return self._handles[kind, config]

    def _handle(self, kind: str, config: Any) -> Any:
        code = compiled(kind, config, self.arch)

        def launch(*args: Any) -> None:
            self._launch(kind, config, code, args[:-1])

        return launch

    def _launch(self, kind: str, config: Any, code: Compiled, args: tuple[Any, ...]) -> None:
        from ci.cdna_sim import Simulator

        pointers, rest = self.ARGUMENTS[kind]
        arrays = self.arrays()

        def packed(at: dict[int, int]) -> bytes:
            found = [self.translate(value, arrays, at) for value in args[:pointers]]
            return struct.pack(f"<{pointers}Q{rest}", *found, *args[pointers:])

        if kind == "decode":
            _, splits, batch, rows, groups = args[9:14]
            grid, block = (splits, config.num_kv_heads, batch * groups), (64 * config.waves,)
        else:
            rows = args[5] if kind == "prepare" else args[7]
            grid, block = (config.num_heads, rows, 1), (64,)
        simulator = Simulator(code.hsaco, check=self.check)
        result = simulator.launch(grid, block, packed, arrays, undefined=self.undefined)
        self.launches.append((kind, result))


def run_ops(
    case: Case, arch: str, *, splits: int | None = None, units: int = 1, sinks: torch.Tensor | None = None,
    padding: int = 0, check: Any = "all", spread: bool = False, want_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, SimulatedRuntime]:  # fmt: skip
    """The backend's own decode over the simulator. padding: rows behind the last one, which must stay as they are.

    spread: outputs are views with gaps, which must stay too. want_lse: else lse stays at -77.
    """
    from turboquant_rocm.backends._flydsl.ops import FlydslOps
    from turboquant_rocm.backends._triton.workspace import Workspace

    runtime = SimulatedRuntime(arch, units, check)
    decision = Decision(
        case.layer,
        Target("amd", arch),
        case.layout.preset,
        case.layout.block_size,
        "flydsl",
        "soa",
    )
    ops = FlydslOps(decision, case.layout, splits=splits, runtime=runtime)
    query = torch.cat([case.query, torch.zeros((padding, *case.query.shape[1:]), dtype=case.query.dtype)])
    rows, heads = query.shape[:2]
    gap = 8 if spread else 0
    all_out = torch.full((rows + 1, heads + gap, DIM + gap), -77.0, dtype=query.dtype)
    all_lse = torch.full((rows + 1, heads + gap), -77.0)
    out, lse = all_out[:rows, :heads, :DIM], all_lse[:rows, :heads]
    workspace = Workspace("cpu", 1 << 22)
    runtime.memory = {
        "query": query, "cache": case.cache, "table": case.table, "lens": case.lens, "out": out, "lse": lse,
        "workspace": workspace._buffers[-1],
    }  # fmt: skip
    if case.starts is not None:
        runtime.memory["starts"] = case.starts
    if sinks is not None:
        runtime.memory["sinks"] = sinks
    ops.decode(
        query, case.cache, case.table, case.lens, case.starts, case.max_query_len, case.layer.softmax_scale, sinks,
        out, lse if want_lse else None, workspace,
    )  # fmt: skip
    for whole, part in ((all_out, out), (all_lse, lse)):
        assert (whole == -77.0).sum() - (part == -77.0).sum() == whole.numel() - part.numel(), "wrote outside"
    rows = len(case.query)
    if padding:
        assert (out[rows:] == -77.0).all()
        assert (lse[rows:] == -77.0).all()
    return out[:rows], lse[:rows], runtime
