"""What decode must do, as functions of a device: run interpreted (l1) and compiled (l2) alike.

The bar. Output is compared with fp64 attention over the dequantised cache. Over a whole case its error must stay within
twice that of plain torch attention in the query's dtype over the same keys and values (the tighter of the two for fp16
queries: a plain bf16 attention is eight times worse). Every query head of every row is also compared on its own, so
that a wrong mapping of heads does not hide in an average: twice the plain error of that head again, or of what rounding
each operand once must be expected to cost (``expected_error``), where plain attention is better by luck.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.cases import TORCH_DTYPES, gaussian, layer_spec
from turboquant_rocm import Decision, Preset, bind, get_preset
from turboquant_rocm.backends._torch.reference import ReferenceOps
from turboquant_rocm.spec import Target
from turboquant_rocm.target import get_target

PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
ROTATED = tuple(f"{name}+rotated_values" for name in PRESETS)
LAYOUTS = ("soa", "aos")
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-11}
"""Relative error of the output's own rounding, and of one operand's."""


@dataclass(frozen=True)
class Config:
    """What kernels are compiled for. padding: bytes added to each slot."""

    preset: str | Preset = "4bit_nc"
    layout: str = "soa"
    head_size: int = 64
    heads: int = 2
    group: int = 4
    block_size: int = 16
    dtype: str = "bf16"
    window: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    padding: int = 0
    most_queries: int = 1
    arch: str = ""

    def __str__(self) -> str:
        flags = "".join(
            f"-{n}"
            for n in ("window", "sinks", "soft_cap", "padding")
            if getattr(self, n) not in (False, None, 0)
        )
        return (
            f"{self.preset}-{self.layout}-D{self.head_size}-{self.heads}x{self.group}-bs{self.block_size}"
            f"-{self.dtype}-q{self.most_queries}{flags}{'-' + self.arch if self.arch else ''}"
        )


@dataclass(frozen=True)
class Case:
    """One call. queries: query tokens of each sequence, None: one each without query_start_loc. cut: the batch is cut
    by its lengths, where there are several splits."""

    lens: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    window: int | None = None
    splits: int | None = None
    cut: bool = False
    seed: int = 0
    scale: float | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    spare_rows: int = 0
    extra: dict[str, Any] = field(default_factory=dict, hash=False)


def bound_layers(
    config: Config, case: Case, target: Target | None, **options: Any
) -> tuple[Any, ReferenceOps]:
    """The Triton layer (its route asserted) and the fp64 oracle over the same layout."""
    layer = layer_spec(
        config.head_size, config.heads, config.group, config.dtype,
        window=case.window if config.window else None, sinks=config.sinks, soft_cap=config.soft_cap,
    )  # fmt: skip
    preset = get_preset(config.preset)
    backend = "triton_rotated" if preset.rotated_values else f"triton_{config.layout}"
    where = target if target is not None and not config.arch else get_target(config.arch or "sm_90")
    decision = Decision(layer, where, preset, config.block_size, backend, config.layout)
    stride = None
    if config.padding:
        stride = bind(decision, checks="off").layout.slot_bytes + config.padding
    if case.cut and (case.splits or 1) > 1:
        options["cut"] = True
    bound = bind(decision, slot_stride=stride, splits=case.splits, **options)
    assert bound.backend == backend
    return bound, ReferenceOps(decision, bound.layout, math_dtype=torch.float64)


def plain_attention(
    query: torch.Tensor,  # [q, Hq, D] fp16/bf16
    key: torch.Tensor,  # [S, Hk, D] fp64
    value: torch.Tensor,  # [S, Hk, Dv] fp64
    visible: torch.Tensor,  # [q, S]
    scale: float,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention as one writes it in torch in the dtype of ``query``; softmax in fp32."""
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(groups, 1)
    value = value.to(dtype).repeat_interleave(groups, 1)
    score = torch.einsum("qhd,shd->hqs", query, key).float() * scale
    if soft_cap is not None:
        score = soft_cap * torch.tanh(score / soft_cap)
    score = score.masked_fill(~visible[None], float("-inf"))
    if sinks is not None:
        sink = sinks[:, None, None].expand(-1, score.shape[1], 1)
        score = torch.cat([score, sink], -1)
    weight = torch.softmax(score, -1)[..., : key.shape[0]].to(dtype)
    return torch.einsum("hqs,shd->qhd", weight, value)


def expected_score_error(
    query: torch.Tensor,  # [q, Hq, D]
    key: torch.Tensor,  # [S, Hk, D] fp64
    score: torch.Tensor,  # [q, Hq, S] fp64, -inf where not visible
    scale: float,
    dtype: str,
) -> torch.Tensor:
    """Standard deviation [q, Hq, S] of a score whose key and whose own value are rounded once to ``dtype``."""
    unit = ROUNDING[dtype] / 3**0.5
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    products = torch.einsum("qhd,shd->qhs", query.double() ** 2, key**2).sqrt() * scale
    return unit * torch.sqrt(products**2 + score.nan_to_num(0.0, 0.0, 0.0) ** 2)


def expected_error(
    weight: torch.Tensor,  # [q, Hq, S]
    value: torch.Tensor,  # [S, Hk, Dv] fp64
    spread: torch.Tensor,  # [q, Hq, S], of the scores
    config: Config,
) -> torch.Tensor:
    """Expected error [q, Hq] of plain attention: scores as in ``spread``; weights, values and output rounded once."""
    unit = ROUNDING[config.dtype] / 3**0.5
    value = value.repeat_interleave(config.group, 1)
    out = torch.einsum("qhs,shd->qhd", weight, value)
    square = (value**2).sum(-1).T  # [Hq, S]
    size = (out**2).sum(-1)  # [q, Hq]
    away = square - 2 * torch.einsum("qhd,shd->qhs", out, value) + size[..., None]  # |v - out|^2
    variance = (weight**2 * (away * spread**2 + 2 * unit**2 * square)).sum(-1) + unit**2 * size
    return variance.clamp(min=0).sqrt()


@dataclass(frozen=True)
class Setup:
    """Tensors of one case on one device."""

    bound: Any
    oracle: ReferenceOps
    cache: Any
    table: torch.Tensor
    lens: torch.Tensor
    query: torch.Tensor
    starts: torch.Tensor | None
    sinks: torch.Tensor | None


def set_up(config: Config, case: Case, device: str, target: Target | None = None, **options: Any) -> Setup:
    """A cache full of NaN patterns but for the stored tokens, tables with poison in unused entries."""
    g = torch.Generator().manual_seed(case.seed)
    bound, oracle = bound_layers(config, case, target, **options)
    bs, dtype = config.block_size, TORCH_DTYPES[config.dtype]
    need = [-(-n // bs) for n in case.lens]
    width = max([*need, 1]) + 1
    order = torch.randperm(sum(need) + 2, generator=g)
    table = torch.full((len(case.lens), width), -1, dtype=torch.int32)
    table[1::2] = 2**31 - 1  # pitfall 21: entries that must never be read
    cache = bound.allocate(len(order), device, fill=0xFF)
    used = 0
    for b, (length, count) in enumerate(zip(case.lens, need, strict=True)):
        blocks = order[used : used + count]
        used += count
        table[b, :count] = blocks.int()
        first = 0
        if case.window is not None and config.window:  # blocks that left every window may have been freed
            rows = 1 if case.queries is None else case.queries[b]
            first = max(0, length - rows + 1 - case.window) // bs * bs if rows else 0
            table[b, : first // bs] = -1
        position = torch.arange(first, length)
        if len(position):
            key = gaussian((len(position), config.heads, config.head_size), g, dtype, case.key_scale)
            value = gaussian((len(position), config.heads, config.head_size), g, dtype, case.value_scale)
            slots = blocks[position // bs] * bs + position % bs
            if device == "cpu":
                oracle32 = ReferenceOps(bound.decision, bound.layout)
                oracle32.store(key, value, cache.data, slots)
            else:
                bound.store(key.to(device), value.to(device), cache, slots.to(device))
    queries = [1] * len(case.lens) if case.queries is None else list(case.queries)
    rows = sum(queries) + case.spare_rows
    query = gaussian((rows, config.heads * config.group, config.head_size), g, dtype).to(device)
    starts = None
    if case.queries is not None:
        starts = torch.tensor(
            [0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32, device=device
        )
    sinks = None
    if config.sinks:
        sinks = torch.randn(config.heads * config.group, generator=g).to(device)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=device)
    return Setup(bound, oracle, cache, table.to(device), lens, query, starts, sinks)


def decode(setup: Setup, case: Case, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, both poisoned before the call."""
    out = torch.full_like(setup.query, float("nan"))
    lse = torch.full(setup.query.shape[:2], float("nan"), device=setup.query.device)
    setup.bound.decode(
        setup.query, setup.cache, setup.table, setup.lens, setup.starts,
        max_query_len=None if case.queries is None else max([*case.queries, 1]),
        scale=case.scale, sinks=setup.sinks, out=out, lse=lse, **more,
    )  # fmt: skip
    return out, lse


def check(config: Config, case: Case, device: str, target: Target | None = None, **options: Any) -> float:
    """Runs one case against the bar; returns the largest ratio of a head's error to what is allowed."""
    setup = set_up(config, case, device, target, **options)
    setup.bound.checks = "shapes"  # the full checks read freed blocks' entries, which hold poison
    out, lse = decode(setup, case)
    return compare(setup, config, case, out, lse)


def store_again(
    setup: Setup, sequence: int, tokens: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Replaces what the cache holds for ``tokens`` of a sequence; key, value: [tokens, Hk, D]."""
    layout, data = setup.bound.layout, setup.cache.data
    tokens = tokens.to(data.device)
    page = setup.table[sequence][tokens // layout.block_size].long()
    slots = page * layout.block_size + tokens % layout.block_size
    key, value = (x.to(data.device, setup.query.dtype) for x in (key, value))
    if data.device.type == "cpu":
        ReferenceOps(setup.bound.decision, layout).store(key, value, data, slots)
    else:
        setup.bound.store(key, value, setup.cache, slots)


def check_a_value_that_few_see(
    config: Config, device: str, target: Target | None = None, **options: Any
) -> None:
    """The last of 512 values is nearly a billion times the others, and only the last query token sees it: the others
    lose no digit, in one split or two. config: of several query tokens and one KV head."""
    count = config.most_queries
    for splits in (1, 2):
        case = Case((512,), (count,), splits=splits)
        setup = set_up(config, case, device, target, **options)
        setup.bound.checks = "shapes"
        g = torch.Generator().manual_seed(1)
        key, value = (torch.randn(512, 1, config.head_size, generator=g) for _ in range(2))
        size = torch.full((512, 1, 1), 1e-4)
        size[-1] = 6e4
        store_again(setup, 0, torch.arange(512), key * 0.3, (value * size).clamp(-6e4, 6e4))
        compare(setup, config, case, *decode(setup, case))


def check_lazy(preset: str, layout: str, head_size: int, device: str, target: Target | None = None) -> None:
    """A reference of the softmax that moves only where it must: past what is added up every 32 tiles; keys that grow,
    so that it must again and again; one value that is far above the others, before and after them."""
    config = Config(preset, layout, head_size, 1, 4, arch="" if target else "sm_90")
    check(config, Case((0, 1100, 40), splits=1), device, target, tuning={"lazy": True})
    for place in (0, 199):
        case = Case((200,), splits=1)
        setup = set_up(config, case, device, target, tuning={"lazy": True})
        setup.bound.checks = "shapes"
        g = torch.Generator().manual_seed(5)
        key, value = (torch.randn(200, 1, head_size, generator=g) for _ in range(2))
        growth = torch.arange(200)[:, None, None] / 20
        store_again(setup, 0, torch.arange(200), key * growth, value)
        compare(setup, config, case, *decode(setup, case))
        size = torch.full((200, 1, 1), 1e-4)
        size[place] = 1e4
        store_again(setup, 0, torch.arange(200), key, value * size)
        compare(setup, config, case, *decode(setup, case))


def check_queries_at(shift: int, cut: bool, device: str, target: Target | None = None) -> None:
    """Queries ``shift`` numbers behind an aligned address, tokens apart: only aligned ones do without prepare."""
    config, case = Config(), Case((70, 33), splits=2, cut=cut)
    setup = set_up(config, case, device, target)
    tokens, heads, size = setup.query.shape
    token = heads * size + 24
    memory = torch.full((tokens * token + 16,), float("nan"), dtype=setup.query.dtype, device=device)
    query = memory.as_strided((tokens, heads, size), (token, size, 1), shift)
    query.copy_(setup.query)
    setup = replace(setup, query=query)
    setup.bound.checks = "shapes"
    out, lse = decode(setup, case)
    compare(setup, config, case, out, lse)
    launches = setup.bound.ops._launches.values()
    assert {launch.prepare is None for launch in launches} == {not query.data_ptr() & 15}


def check_both_ways(config: Config, case: Case, device: str, target: Target | None = None) -> None:
    """Decode with prepare and without it: both right, and as near to each other as two roundings of queries are."""
    found = []
    for alone in (False, True):
        setup = set_up(config, case, device, target, tuning={"alone": alone})
        setup.bound.checks = "shapes"
        out, lse = decode(setup, case)
        compare(setup, config, case, out, lse)
        assert {launch.prepare is None for launch in setup.bound.ops._launches.values()} == {alone}
        found.append((out.double(), lse.double()))
    rows = sum(case.queries) if case.queries is not None else len(case.lens)
    (a, lse_a), (b, lse_b) = ((out[:rows], lse[:rows]) for out, lse in found)
    assert float((a - b).norm()) <= 2 * ROUNDING[config.dtype] * float(a.norm())
    seen = lse_a > float("-inf")
    assert torch.equal(seen, lse_b > float("-inf"))
    assert float((lse_a - lse_b)[seen].abs().max()) < 1e-3


def compare(setup: Setup, config: Config, case: Case, out: torch.Tensor, lse: torch.Tensor) -> float:
    """Every query head of every row against the oracle."""
    device = out.device
    queries = [1] * len(case.lens) if case.queries is None else list(case.queries)
    scale = setup.bound.layer.softmax_scale if case.scale is None else case.scale
    window = setup.bound.layer.window
    row = 0
    errors: list[torch.Tensor] = []
    plains: list[torch.Tensor] = []
    for b, (length, count) in enumerate(zip(case.lens, queries, strict=True)):
        here = slice(row, row + count)
        row += count
        if not count:
            continue
        high = length - count + 1 + torch.arange(count, device=device)
        low = torch.zeros_like(high) if window is None else (high - window).clamp(min=0)
        first = min(int(low.min()), length)
        key, value = setup.oracle.read(setup.cache.data, setup.table[b], first, length)
        token = torch.arange(first, length, device=device)
        visible = (token >= low[:, None]) & (token < high[:, None])
        query = setup.query[here]
        groups = config.group
        score = torch.einsum("qhd,shd->qhs", query.double(), key.repeat_interleave(groups, 1)) * scale
        if config.soft_cap is not None:
            score = config.soft_cap * torch.tanh(score / config.soft_cap)
        score = score.masked_fill(~visible[:, None], float("-inf"))
        if setup.sinks is not None:
            sink = setup.sinks.double().expand(count, -1)[..., None]
            score = torch.cat([score, sink], -1)
        some = visible.any(-1)  # [count]
        want_lse = torch.logsumexp(score, -1)
        weight = torch.exp(score - want_lse[..., None])[..., : length - first]
        want = torch.einsum("qhs,shd->qhd", weight, value.repeat_interleave(groups, 1))
        assert bool((out[here][~some] == 0).all()), "rows that see no key must be zero"
        assert bool((lse[here][~some] == float("-inf")).all()), "rows that see no key have lse = -inf"
        if not bool(some.any()):
            continue
        got, want, want_lse = out[here][some].double(), want[some], want_lse[some]
        plain = plain_attention(query, key, value, visible, scale, setup.sinks, config.soft_cap)[
            some
        ].double()
        spread = expected_score_error(query, key, score[..., : length - first], scale, config.dtype)
        expected = expected_error(weight, value, spread, config)[some]
        error = (got - want).norm(dim=-1)
        plain_error = (plain - want).norm(dim=-1)
        ratio = float((error / torch.maximum(plain_error, expected).clamp(min=1e-30)).max())
        assert ratio <= 2.0, (  # NaN fails too
            f"{config} {case}: sequence {b}: a head's error is {ratio:.2f} times the plain one"
            f" (relative {float((error / want.norm(dim=-1)).max()):.2e})"
        )
        errors.append(error.flatten())
        plains.append(plain_error.flatten())
        off = (lse[here][some].double() - want_lse).abs()
        near = spread.masked_fill(~visible[:, None], 0.0).amax(-1)[some]
        assert bool((off <= 2e-4 + 5 * near).all()), f"{config} {case}: lse off by {float(off.max()):.2e}"
    worst = 0.0
    if errors:
        total, plain_total = torch.cat(errors), torch.cat(plains)
        worst = float(total.norm() / plain_total.norm().clamp(min=1e-30))
        assert worst <= 2.0, f"{config} {case}: the error is {worst:.2f} times the plain one"
    if case.spare_rows:  # padding rows past query_start_loc[-1] stay as they were
        assert bool(out[row:].isnan().all())
        assert bool(lse[row:].isnan().all())
    return worst
