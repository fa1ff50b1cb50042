"""What the kernels of TurboQuant_prod must do, as functions of a device: interpreted (l1) and compiled (l2) alike."""

from __future__ import annotations

import torch

from tests.cases import TORCH_DTYPES, gaussian, layer_spec, reference, rel_l2, shuffled_tables
from tests.store_checks import mixed
from turboquant_rocm import BoundLayer, Decision, Target, get_preset, make_layout
from turboquant_rocm.backends import get_backend
from turboquant_rocm.backends._triton.prod import ProdOps
from turboquant_rocm.backends._triton.workspace import Workspace
from turboquant_rocm.layouts.packing import unpack
from turboquant_rocm.layouts.views import field_view
from turboquant_rocm.seeded import cache_sketch

PRESETS = ("turboquant_prod_k3v2", "turboquant_prod_k3v4", "turboquant_prod_k4v4")


def made(
    preset: str,
    head_size: int,
    device: str,
    heads: int = 2,
    group: int = 4,
    dtype: str = "bf16",
    arch: str | None = None,
    **options: int,
) -> tuple[BoundLayer, BoundLayer, ProdOps]:
    """(reference, fp64 oracle, kernels) of one layer; the kernels for ``arch``, one of AMD's that is simulated, or for
    this machine's GPU, or NVIDIA's without one."""
    layer = layer_spec(head_size, heads, group, dtype)
    bound = reference(layer, preset, "soa", 16)
    oracle = reference(layer, preset, "soa", 16, torch.float64)
    amd = arch or (device != "cpu" and torch.version.hip is not None)
    target = Target("amd", arch or "gfx942") if amd else Target("nvidia", "sm_90")
    decision = Decision(layer, target, get_preset(preset), 16, "triton_prod", "soa")
    return bound, oracle, ProdOps(decision, make_layout("soa", preset, head_size, heads, 16), **options)


def check_store(
    preset: str, head_size: int, device: str, dtype: str = "bf16", arch: str | None = None
) -> None:
    """Every byte is the reference's, but for signs whose sketch is within 1e-5 of the residual's length of 0."""
    bound, _, ops = made(preset, head_size, device, heads=3, dtype=dtype, arch=arch)
    layout, g = bound.layout, torch.Generator().manual_seed(head_size)
    key, value = (mixed(45, 3, head_size, g, TORCH_DTYPES[dtype]) for _ in range(2))
    slots = torch.randperm(64, generator=g)[:45]
    slots[[4, 30]] = -1
    want, got = bound.allocate(4, "cpu", fill=0xCD), bound.allocate(4, device, fill=0xCD)
    counts = [torch.zeros(2, dtype=torch.int32, device=d) for d in ("cpu", device)]
    bound.store(key, value, want, slots, nonfinite=counts[0])
    ops.store(key.to(device), value.to(device), got.data, slots.to(device), counts[1])
    assert counts[0].tolist() == counts[1].tolist() and counts[0].min() > 0
    mine = got.data.cpu()
    for name, _ in layout.places:
        a, b = field_view(mine, layout, name), field_view(want.data, layout, name)
        if name == "value_zero":  # -0 and 0 have no order
            a, b = (x.contiguous().view(torch.float16) + 0.0 for x in (a, b))
        if name == "key_signs":
            continue
        assert torch.equal(a, b), name
    kept = slots >= 0
    block, offset = slots[kept] // 16, slots[kept] % 16
    finite = torch.where(torch.isfinite(key).all(-1, keepdim=True), key, 0)[kept]
    signs = [
        unpack(field_view(c, layout, "key_signs")[block, offset], 1, head_size) for c in (mine, want.data)
    ]
    _, _, y = bound.ops._codebook(finite, layout.preset.code_bits, folded=False)
    codes = unpack(field_view(mine, layout, "key_data")[block, offset], layout.preset.code_bits, head_size)
    from turboquant_rocm.codebook import centroids

    left = y.double() - torch.tensor(centroids(head_size, layout.preset.code_bits)).double()[codes.long()]
    sketched = left @ torch.tensor(cache_sketch(head_size)).double().T
    sure = sketched.abs() > 1e-5 * left.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    assert sure.double().mean() > 0.99
    assert torch.equal(signs[0][sure], signs[1][sure])
    untouched = torch.ones(4, 16, dtype=torch.bool)
    untouched[block, offset] = False
    for name, _ in layout.places:
        assert (field_view(mine, layout, name)[untouched] == 0xCD).all(), name


def check_dequantize(preset: str, head_size: int, device: str, arch: str | None = None) -> None:
    """Ranges of sequences in shuffled blocks read back as by the fp64 reference."""
    _, oracle, ops = made(preset, head_size, device, arch=arch)
    g = torch.Generator().manual_seed(1)
    table, slots, blocks = shuffled_tables([40, 0, 17], 16, g)
    cache = oracle.allocate(blocks, "cpu")
    key, value = (gaussian((57, 2, head_size), g, torch.bfloat16) for _ in range(2))
    oracle.store(key, value, cache, torch.cat(slots))
    lens, starts = torch.tensor([40, 0, 17], dtype=torch.int32), torch.tensor([5, 0, 0], dtype=torch.int32)
    want = oracle.dequantize(cache, table, lens, starts=starts, dtype=torch.float64)
    got = [torch.full((52, 2, head_size), 7.0, device=device) for _ in range(2)]
    ops.dequantize(
        cache.data.to(device),
        table.to(device),
        lens.to(device),
        starts.to(device),
        want.cu_lens.to(device),
        *got,
    )
    assert rel_l2(got[0], want.key) < 1e-5
    assert rel_l2(got[1], want.value) < 1e-6


def check_decode(
    preset: str, head_size: int, device: str, group: int = 4, queries: tuple[int, ...] | None = None, splits: int = 2,
    dtype: str = "bf16", arch: str | None = None,
) -> None:  # fmt: skip
    """Output and lse of every row within the declared tolerance of fp64 attention over the same bytes."""
    seq_lens = [70, 33, 0, 16, 1]
    _, oracle, ops = made(preset, head_size, device, group=group, dtype=dtype, arch=arch, splits=splits)
    g = torch.Generator().manual_seed(group)
    table, slots, blocks = shuffled_tables(seq_lens, 16, g)
    cache = oracle.allocate(blocks, "cpu")
    key, value = (gaussian((sum(seq_lens), 2, head_size), g, TORCH_DTYPES[dtype]) for _ in range(2))
    oracle.store(key, value, cache, torch.cat(slots))
    rows = len(seq_lens) if queries is None else sum(queries)
    query = gaussian((rows, 2 * group, head_size), g, TORCH_DTYPES[dtype], 2.0)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    loc = None
    if queries is not None:
        loc = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    exact = torch.empty(rows, 2 * group, head_size, dtype=torch.float64)
    want, want_lse = oracle.decode(query, cache, table, lens, loc, out=exact, return_lse=True)
    out = torch.full((rows, 2 * group, head_size), 7.0, dtype=TORCH_DTYPES[dtype], device=device)
    lse = torch.zeros(rows, 2 * group, device=device)
    ops.decode(
        query.to(device), cache.data.to(device), table.to(device), lens.to(device),
        None if loc is None else loc.to(device), 1 if queries is None else max(queries), head_size**-0.5, None,
        out, lse,
    )  # fmt: skip
    empty = torch.isinf(want_lse)
    assert torch.equal(torch.isinf(lse.cpu()), empty)
    assert not out.cpu()[empty].any()
    assert torch.allclose(lse.cpu()[~empty].double(), want_lse[~empty].double(), atol=1e-2)
    tolerance = get_backend("triton_prod").tolerance(dtype)
    for row in range(rows):
        if not empty[row].any():
            assert rel_l2(out[row], want[row]) < tolerance, row


def check_warmup(preset: str, head_size: int, device: str) -> None:
    """After warm-up no call in the range compiles a kernel, and none makes the workspace grow."""
    import triton

    _, _, ops = made(preset, head_size, device, group=3)
    space = Workspace(device)
    count = ops.warmup(3, 6 * 16, 6, device=device, workspace=space)
    reserved, compiled = space.nbytes, []
    assert reserved > 0 and count == (3 if triton.knobs.runtime.interpret else 7)
    cache = torch.zeros(4, *ops.layout.shape, dtype=torch.uint8, device=device)
    triton.knobs.runtime.jit_post_compile_hook = lambda *a, **k: compiled.append(k)
    try:
        for batch, width, queries in ((3, 6, None), (1, 1, None), (3, 6, 6), (2, 5, 4), (3, 1, 1)):
            rows = batch * (queries or 1)
            starts = None
            if queries is not None:
                starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
            out = torch.full((rows, 6, head_size), 7.0, dtype=torch.bfloat16, device=device)
            lse = torch.zeros(rows, 6, device=device) if batch == 3 else None
            ops.decode(
                torch.ones_like(out), cache, torch.zeros(batch, width, dtype=torch.int32, device=device),
                torch.zeros(batch, dtype=torch.int32, device=device), starts, queries or 1, head_size**-0.5, None,
                out, lse, space,
            )  # fmt: skip
            assert not out.any(), "no token is seen"
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert space.nbytes == reserved
    assert not compiled
