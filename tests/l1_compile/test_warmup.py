"""What warm-up compiles is all that decode launches: keys of specialisations compared, nothing is run."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.cases import layer_spec  # noqa: E402
from turboquant_rocm import Decision, bind, get_preset  # noqa: E402
from turboquant_rocm.backends._triton import launch, one_pass, ops  # noqa: E402
from turboquant_rocm.backends._triton.workspace import Workspace  # noqa: E402
from turboquant_rocm.target import get_target  # noqa: E402


class Compiled:
    """Stands for a compiled kernel, which is launched without another look at its arguments."""

    function, packed_metadata = 0, ()

    def _init_handles(self):
        pass

    def run(self, *args):
        pass


@pytest.fixture
def keys(monkeypatch):
    """Keys of the launches since the last clear: kernel, kinds of the arguments, constants and options."""
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend
    from triton.runtime.jit import JITFunction

    found = set()

    def run(self, *args, grid, warmup, **constants):
        kinds = []
        given = dict(zip(self.arg_names, args, strict=False)) | constants
        for parameter in self.params:
            if parameter.is_constexpr:
                continue
            value, plain = given[parameter.name], parameter.do_not_specialize
            aligned = not parameter.do_not_specialize_on_alignment and not plain
            kinds.append((parameter.name, specialize(HIPBackend, value, False, not plain, aligned)))
        fixed = {k: v for k, v in given.items() if k not in dict(kinds)}
        found.add((self.__name__, tuple(kinds), repr(sorted(fixed.items()))))
        return Compiled()

    monkeypatch.setattr(JITFunction, "run", run)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return found


CASES = [(f"triton_{layout}", layout, p) for layout in ("soa", "aos") for p in ("4bit_nc", "k3v4_nc", "k8v4")]
CASES += [("triton_rotated", "soa", f"{preset}+rotated_values") for preset in ("3bit_nc", "k8v4")]
CASES = [(*case, window, sinks) for case in CASES for window in (None, 100) for sinks in (False, True)]
CASES += [("triton_prod", "soa", preset, None, False) for preset in ("prod_k3v2", "prod_k4v4")]
KERNELS = {
    "triton_rotated": {"rotated_decode_kernel", "rotated_reduce_kernel"},
    "triton_prod": {"prod_prepare_kernel", "prod_decode_kernel", "prod_reduce_kernel"},
}


@pytest.mark.parametrize(("kernels_of", "layout", "preset", "window", "sinks"), CASES)
def test_decode_launches_only_what_was_compiled(kernels_of, layout, preset, window, sinks, keys):
    layer = layer_spec(64, 2, 4, "bf16", window=window, sinks=sinks)
    decision = Decision(layer, get_target("gfx942"), get_preset(preset), 16, kernels_of, layout)
    bound = bind(decision, checks="off")
    cache = bound.allocate(4, "cpu")
    blocks, most = 64, 6
    bound.warmup(8, blocks * 16, most, device="cpu")
    warm = set(keys)
    keys.clear()
    rng = random.Random(0)
    for _ in range(60):
        batch, width, count = rng.randint(1, 8), rng.randint(1, blocks), rng.randint(1, most)
        starts = None if rng.random() < 0.4 else torch.arange(batch + 1, dtype=torch.int32) * count
        rows = batch if starts is None else batch * count
        bound.decode(
            torch.zeros(rows, 8, 64, dtype=torch.bfloat16), cache, torch.zeros(batch, width, dtype=torch.int32),
            torch.zeros(batch, dtype=torch.int32), starts, max_query_len=count, return_lse=rng.random() < 0.5,
            sinks=torch.zeros(8) if sinks else None,
        )  # fmt: skip
    assert {name for name, _, _ in keys} >= KERNELS.get(kernels_of, {"prepare_kernel", "decode_kernel"})
    assert keys <= warm, f"not compiled by warm-up: {sorted(keys - warm)}"


@pytest.mark.parametrize(
    ("kernels_of", "preset"),
    [("triton_soa", "4bit_nc"), ("triton_rotated", "3bit_nc+rotated_values"), ("triton_prod", "prod_k3v2")],
)
def test_caches_of_any_size_are_compiled_for(kernels_of, preset, keys, monkeypatch):
    """AMD's compiler addresses memory of less than 2 GiB with 32 bits: what it made for a small cache is not launched
    with a large one, nor left for the first call to compile."""
    monkeypatch.setattr(launch, "RANGES", True)
    decision = Decision(
        layer_spec(64, 2, 4, "bf16"), get_target("gfx942"), get_preset(preset), 16, kernels_of, "soa"
    )
    bound = bind(decision, checks="off")
    small = bound.allocate(4, "cpu")
    vast = torch.empty(1 << 31, dtype=torch.uint8)[: small.data.untyped_storage().size()]  # never touched
    large = bound.wrap(vast.as_strided(small.data.shape, small.data.stride()))
    bound.warmup(2, 640, device="cpu")
    warm = set(keys)
    keys.clear()
    found = []
    for cache in (small, large, small):
        bound.decode(
            torch.zeros(2, 8, 64, dtype=torch.bfloat16), cache, torch.zeros(2, 40, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip
        of_cache = [dict(kinds) for _, kinds, _ in keys if "cache_ptr" in dict(kinds)]
        found.append({repr(kinds["cache_ptr"]) for kinds in of_cache})
        assert keys <= warm, f"not compiled by warm-up: {sorted(keys - warm)}"
    assert len(found[0]) == 1 and len(found[1]) == 2 and found[2] == found[1]
    if kernels_of == "triton_soa":
        assert len({id(made.decode) for made in bound.ops._launches.values()}) == 2


def test_later_launches_are_given_addresses(keys, monkeypatch):
    """Where a tensor stood, its address, and all else as in the first launch."""
    seen = []
    monkeypatch.setattr(
        Compiled, "run", lambda self, *args: seen.append(args[9:])
    )  # behind grid, stream and hooks
    layer = layer_spec(64, 2, 4, "bf16")
    decision = Decision(layer, get_target("gfx942"), get_preset("4bit_nc"), 16, "triton_soa", "soa")
    bound = bind(decision, checks="off")
    cache = bound.allocate(4, "cpu")
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 40, dtype=torch.int32)
    query, out = torch.zeros(2, 8, 64, dtype=torch.bfloat16), torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    for _ in range(3):
        bound.decode(query, cache, table, lens, out=out)
    (launch,) = bound.ops._launches.values()
    kernels = [k for k in (launch.prepare, launch.decode, launch.reduce) if k is not None]
    assert len(seen) == 2 * len(kernels) and seen[: len(kernels)] == seen[len(kernels) :]
    for kernel, args in zip(kernels, seen, strict=False):
        names = kernel._kernel.arg_names
        given = dict(zip(names, args, strict=True))
        assert all(type(given[name]) is int for name in names if name.endswith("_ptr"))
        assert not any(isinstance(value, torch.Tensor) for value in args)
        wanted = {"cache_ptr": cache.data, "table_ptr": table, "seq_lens_ptr": lens}
        assert all(given[name] == wanted[name].data_ptr() for name in set(wanted) & set(names))
    assert seen[0][0] == query.data_ptr() or seen[1][0] == query.data_ptr()


@pytest.mark.parametrize("group", [4, 8, 16, 32])
@pytest.mark.parametrize("sinks", [False, True])
def test_of_32_columns_as_well(group, sinks, keys, monkeypatch):
    """On sm_90, where some query counts take the one kernel and some the other."""
    monkeypatch.setattr(ops, "target_kind", lambda vendor: "cuda")
    monkeypatch.setattr(ops, "_compute_units", lambda device: 132)
    layer = layer_spec(128, 2, group, "bf16", sinks=sinks)
    decision = Decision(layer, get_target("sm_90"), get_preset("4bit_nc"), 16, "triton_soa", "soa")
    bound = bind(decision, checks="off")
    cache, blocks, most = bound.allocate(4, "cpu"), 256, 9
    bound.warmup(80, blocks * 16, most, device="cpu")
    warm = set(keys)
    keys.clear()
    rng = random.Random(0)
    for _ in range(80):
        batch, width, count = rng.randint(1, 80), rng.randint(1, blocks), rng.randint(1, most)
        starts = None if rng.random() < 0.3 else torch.arange(batch + 1, dtype=torch.int32) * count
        rows = batch if starts is None else batch * count
        memory = torch.zeros(rows * 2 * group * 128 + 8, dtype=torch.bfloat16)
        query = memory[memory.data_ptr() % 16 // 2 :][: rows * 2 * group * 128].view(rows, 2 * group, 128)
        bound.decode(
            query, cache, torch.zeros(batch, width, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32), starts,
            max_query_len=count, return_lse=rng.random() < 0.5, sinks=torch.zeros(2 * group) if sinks else None,
        )  # fmt: skip
    assert {name for name, _, _ in keys} >= {"prepare_kernel", "wide_kernel", "reduce_kernel"}
    assert "decode_kernel" in {name for name, _, _ in keys}  # at least for short contexts
    assert keys <= warm, f"not compiled by warm-up: {sorted(keys - warm)}"


def test_which_plans_a_range_needs(monkeypatch):
    """Wide tiles for much work, others for little: an empty block table is little work as well."""
    monkeypatch.setattr(ops, "target_kind", lambda vendor: "cuda")
    decision = Decision(
        layer_spec(128, 8, 8, "bf16"), get_target("sm_90"), get_preset("4bit_nc"), 16, "triton_soa", "soa"
    )
    needed = bind(decision, checks="off").ops._contexts
    assert needed(1, 1 << 15, 1, 132) == [(False, 1 << 15)], "8 columns"
    assert needed(1, 2048, 4, 132) == [(True, 2048)]
    assert needed(1, 1 << 15, 4, 132) == [(False, 1 << 15), (True, 3056)]
    assert needed(1, 1 << 15, 2, 132) == [(False, 1 << 15), (True, 6128)]
    assert needed(1000, 4096, 4, 132) == [(False, 4096), (True, 0)]


@pytest.mark.parametrize("group", [1, 3, 5, 16])
@pytest.mark.parametrize(
    ("kernels_of", "preset"),
    [("triton_prod", "prod_k3v2"), ("triton_rotated", "3bit_nc+rotated_values"), ("triton_soa", "4bit_nc")],
)
def test_no_shape_in_the_range_needs_more_scratch_memory(kernels_of, preset, group, keys, monkeypatch):
    """Query lengths that fill a tile need most, and they are no powers of two."""
    for module in (one_pass, ops):
        monkeypatch.setattr(module, "_compute_units", lambda device: 132)
    layer = layer_spec(64, 2, group, "bf16")
    decision = Decision(layer, get_target("sm_90"), get_preset(preset), 16, kernels_of, "soa")
    bound, space = bind(decision, checks="off"), Workspace("cpu")
    cache, blocks = bound.allocate(4, "cpu"), 2048
    bound.warmup(5, blocks * 16, 7, device="cpu", workspace=space)
    reserved = space.nbytes
    needed = []
    for batch in range(1, 6):
        for count in range(1, 8):
            fresh = Workspace("cpu")
            for workspace in (space, fresh):
                bound.decode(
                    torch.zeros(batch * count, 2 * group, 64, dtype=torch.bfloat16), cache,
                    torch.zeros(batch, blocks, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32),
                    torch.arange(batch + 1, dtype=torch.int32) * count, max_query_len=count, workspace=workspace,
                )  # fmt: skip
            needed.append(fresh.nbytes)
    assert space.nbytes == reserved == max(needed)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_size", "most_batch", "context", "most_queries", "cuts"),
    [
        (8, 8, 128, 8, 1 << 17, 1, True),  # full at 4,096 tokens, two waves at 131,072
        (8, 8, 128, 2, 1 << 18, 4, True),
        (1, 8, 128, 9, 1 << 17, 4, True),  # three query tokens each need more scratch memory than four
        (1, 8, 128, 35, 1 << 17, 1, True),
        (1, 8, 128, 3, 1 << 18, 1, False),  # cut or not, whatever the width
        (1, 16, 128, 2, 1 << 17, 1, False),
        (1, 4, 128, 2, 1 << 17, 4, True),
        (2, 7, 128, 3, 1 << 17, 6, True),
        (16, 8, 256, 3, 1 << 16, 1, True),
        (8, 8, 64, 70, 1 << 13, 1, True),
    ],
)
def test_every_launch_of_a_range(
    kv_heads, group, head_size, most_batch, context, most_queries, cuts, monkeypatch
):
    """On an H200: widths of the block table inside the range choose other kernels, and query lengths other splits."""
    monkeypatch.setattr(ops, "_compute_units", lambda device: 132)
    layer = layer_spec(head_size, kv_heads, group, "bf16")
    decision = Decision(layer, get_target("sm_90"), get_preset("4bit_nc"), 16, "triton_soa", "soa")
    layer_ops = bind(decision, checks="off").ops
    compiled = []

    def compile_(kernel, constants, dtypes):
        compiled.append((kernel, dict(constants)))
        return (object(),)

    monkeypatch.setattr(layer_ops, "_compile", compile_)
    space, cpu = Workspace("cpu"), torch.device("cpu")
    layer_ops.warmup(most_batch, context, most_queries, device=cpu, workspace=space)
    warm = {(kernel, repr(sorted(constants.items()))) for kernel, constants in compiled}
    widths = {1 << k for k in range(6, context.bit_length())}
    widths = sorted({context, *widths, *(3 * width // 4 for width in widths)})
    cut = set()
    for batch in range(1, most_batch + 1):
        for count in range(1, most_queries + 1):
            for width in widths:
                for single in {count == 1, False}:
                    shape = (batch, width // 16)
                    launch = layer_ops._make_launch(
                        batch * count, shape, count, single, True, True, True, cpu
                    )
                    for kernel in (launch.prepare, launch.decode, launch.reduce):
                        if kernel is not None:
                            key = (kernel._kernel, repr(sorted(kernel._constants.items())))
                            assert key in warm, (kernel._kernel.__name__, batch, count, width)
                    needed = space.needed(*launch.scratch)
                    assert needed <= space.nbytes, (batch, count, width)
                    cut.add(launch.pieces > 0)
    assert cut == {False, cuts}
