"""vLLM's real attention layers over our backend, driven as its runner drives them, without its engine.

    python -P classes.py cpu     a CPU that plays a GPU of CUDA, with the torch reference
    python -P classes.py cuda    this machine's GPU, with what the dispatcher chooses, and graphs
    python -P classes.py left    with TURBOQUANT_ROCM_VLLM=off: which classes are built, and what they log

vLLM's Python files and this checkout must be on PYTHONPATH. Prints one JSON line: by case, relative errors against
exact attention over what each route may read. Layers, metadata, builders, groups and specs are vLLM's own; its engine
is not here. More arguments: only these layers and presets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))
from selectors_033 import pretend, stand_in

BLOCK, BLOCKS, DEVICE_HEADS = 32, 64, (8, 2)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"per_layer_sliding_window": 40},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": True},
}
# (query tokens, tokens with them) of every sequence: decodes first, then in any order
BATCHES: dict[str, list[tuple[int, int]]] = {
    "decodes": [(1, 5), (1, 77), (1, 300)],
    "first chunks": [(70, 70), (33, 33)],
    "a first chunk and a shorter prefix hit": [(60, 100), (200, 200)],
    "everything": [(1, 90), (40, 140), (150, 290), (64, 64)],
}
"""By route: decode; first; decode and first; decode, decode, chunks, first."""


def main(where: str, *only: str) -> None:
    if where == "cuda":
        stand_in("cuda")
    else:
        pretend("cuda")
    from vllm import _custom_ops

    for name in vars(_custom_ops):
        if name.startswith("cutlass_") and "support" in name:  # what no stand-in can answer
            setattr(_custom_ops, name, lambda *_: False)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec

    from turboquant_rocm.continuation import prefill_rows
    from turboquant_rocm.integrations.vllm import register

    register()
    if where == "left":
        print(json.dumps(_left_in_charge()))
        return
    device = torch.device("cuda:0" if where == "cuda" else "cpu")
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)

    heads, kv_heads = DEVICE_HEADS
    found: dict[str, Any] = {"errors": {}, "backends": {}, "graphs": {}}
    for preset, size, layout in (
        ("turboquant_4bit_nc", 128, "LBNHC"),
        ("turboquant_k8v4", 64, "LBHNC"),
        ("turboquant_3bit_nc", 128, "BLHNC"),
    ):
        if set(only) - set(LAYERS) and preset not in only:
            continue
        config = _config(preset, size)
        made: dict[str, Any] = {}
        with set_current_vllm_config(config):
            for i, (name, more) in enumerate(LAYERS.items()):
                if set(only) & set(LAYERS) and name not in only:
                    continue
                if more.get("sinks"):
                    more = {"sinks": random(heads)}
                shape = (heads, size, size**-0.5, kv_heads)
                prefix = f"model.layers.{i}.attn"
                made[name] = Attention(*shape, cache_config=config.cache_config, prefix=prefix, **more)
            specs = {
                n: customize_attention_spec(a.get_attn_backend(), a.get_kv_cache_spec(config))
                for n, a in made.items()
            }
        slot = next(iter(specs.values())).state_content_size_bytes
        sizes = {"L": len(made), "B": BLOCKS, "N": BLOCK, "H": kv_heads, "C": slot}
        strides, step = {}, 1
        for letter in reversed(layout):
            strides[letter], step = step, step * sizes[letter]
        pool = torch.full((step,), 0xCD, dtype=torch.uint8, device=device)
        for i, (name, layer) in enumerate(made.items()):
            layer.process_weights_after_loading(torch.bfloat16)
            layer.bind_kv_cache(
                pool.as_strided([sizes[x] for x in "BHNC"], [strides[x] for x in "BHNC"], i * strides["L"])
            )
            layer.to(device)
            group = AttentionGroup(layer.get_attn_backend(), [layer.layer_name], specs[name], 0)
            with set_current_vllm_config(config):
                group.create_metadata_builders(config, device, BLOCK)
            builder = group.get_metadata_builder()
            for case, lens in BATCHES.items():
                found["errors"][f"{preset}, {name}, {case}"] = _case(
                    lens, layer, builder, random, device, CommonAttentionMetadata, prefill_rows
                )
            found["backends"][f"{preset}, {name}"] = layer.impl.bound.backend
            if where == "cuda":
                found["graphs"][f"{preset}, {name}"] = _graph(
                    layer, builder, random, device, CommonAttentionMetadata
                )
    print(json.dumps(found))


def _config(preset: str, size: int) -> Any:
    """A VllmConfig for blocks of BLOCK tokens, around a made-up model."""
    import torch
    from vllm.config import CacheConfig, VllmConfig

    config = VllmConfig(cache_config=CacheConfig(cache_dtype=preset, block_size=BLOCK))
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, is_mm_prefix_lm=False, rswa_window=None, max_model_len=BLOCK * 16, model="classes",
        get_head_size=lambda: size, get_num_attention_heads=lambda _: DEVICE_HEADS[0],
    )  # fmt: skip
    config.speculative_config = None
    config.scheduler_config.max_num_seqs = 8
    return config


def _left_in_charge() -> dict[str, Any]:
    """Build a layer and its metadata builder as registered, for a GPU that is not here."""
    import logging

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec

    from turboquant_rocm.integrations.vllm import serving
    from turboquant_rocm.target import get_target

    serving.serving_target = lambda _: get_target("sm_90")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    serving.logger().addHandler(handler)
    serving.logger().setLevel(logging.INFO)
    config = _config("turboquant_4bit_nc", 128)
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model
    with set_current_vllm_config(config):
        layer = Attention(
            *DEVICE_HEADS[:1],
            128,
            128**-0.5,
            DEVICE_HEADS[1],
            cache_config=config.cache_config,
            prefix="layers.0.attn",
        )
        spec = customize_attention_spec(layer.get_attn_backend(), layer.get_kv_cache_spec(config))
        group = AttentionGroup(layer.get_attn_backend(), [layer.layer_name], spec, 0)
        group.create_metadata_builders(config, torch.device("cpu"), BLOCK)
    classes = [type(layer.impl), type(group.get_metadata_builder())]
    return {"log": lines, "classes": [f"{c.__module__}.{c.__qualname__}" for c in classes]}


def _common(kind: Any, lens: list[tuple[int, int]], table: Any, slots: Any, device: Any) -> Any:
    import torch

    starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).to(torch.int32)
    totals = torch.tensor([t for _, t in lens], dtype=torch.int32)
    return kind(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=totals.to(device),
        num_reqs=len(lens),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(q for q, _ in lens),
        max_seq_len=max(t for _, t in lens),
        block_table_tensor=table,
        slot_mapping=slots,
        seq_lens_cpu_upper_bound=totals,
    )


def _case(
    lens: Any, layer: Any, builder: Any, random: Any, device: Any, kind: Any, prefill_rows: Any
) -> float:
    """Store and attend as the runner does, history first; the worst relative error of any sequence and head."""
    import torch

    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    width = -(-max(t for _, t in lens) // BLOCK)
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))[: len(lens) * width]
    table = blocks.view(len(lens), width).to(torch.int32).to(device)
    keys, values = ([random(t, kv_heads, size) for _, t in lens] for _ in range(2))
    positions = [torch.arange(t, device=device) for _, t in lens]
    slots = [table[i].long()[p // BLOCK] * BLOCK + p % BLOCK for i, p in enumerate(positions)]

    def part(rows: list[Any], new: bool) -> Any:
        return torch.cat([x[t - q :] if new else x[: t - q] for x, (q, t) in zip(rows, lens, strict=True)])

    meta = builder.build(0, _common(kind, lens, table, part(slots, True), device))
    for new in (False, True):
        layer.impl.do_kv_cache_update(
            layer, part(keys, new), part(values, new), layer.kv_cache, part(slots, new)
        )
    query = random(sum(q for q, _ in lens), heads, size)
    out = torch.full_like(query, float("nan"))
    layer.impl.forward(layer, query, part(keys, True), part(values, True), layer.kv_cache, meta, out)

    bound, cache = layer.impl.bound, layer.impl._cache
    totals = torch.tensor([t for _, t in lens], dtype=torch.int32, device=device)
    packed = bound.dequantize(cache, table, totals, dtype=torch.bfloat16)
    routes = dict.fromkeys(range(meta.split.decodes), "decode")
    for w in prefill_rows(meta.split.query_lens, meta.rest_totals, 128):
        routes[meta.split.decodes + w.sequence] = w.route
    worst, row = 0.0, 0
    for i, (q, t) in enumerate(lens):
        raw = 0 if routes[i] == "decode" else q
        k = packed.key[int(packed.cu_lens[i]) : int(packed.cu_lens[i + 1])].clone()
        v = packed.value[int(packed.cu_lens[i]) : int(packed.cu_lens[i + 1])].clone()
        if raw:
            k[t - raw :], v[t - raw :] = keys[i][t - raw :], values[i][t - raw :]
        want = _exact(layer, query[row : row + q], k, v)
        got = out[row : row + q].double()
        error = (got - want).flatten(2).norm(dim=(0, 2)) / want.norm(dim=(0, 2))
        assert bool(torch.isfinite(got).all())
        worst, row = max(worst, float(error.max())), row + q
    return worst


def _exact(layer: Any, query: Any, key: Any, value: Any) -> Any:
    """fp64 attention [q, Hq, D] of the last q of t tokens, with the layer's window, soft cap and sinks."""
    import torch

    q, t, groups = len(query), len(key), layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    score = torch.einsum("qhd,thd->hqt", query.double(), k) * layer.impl.scale
    if layer.impl.soft_cap:
        score = layer.impl.soft_cap * torch.tanh(score / layer.impl.soft_cap)
    at = torch.arange(t - q, t, device=query.device)[:, None]
    token = torch.arange(t, device=query.device)[None]
    hidden = token > at
    if layer.sliding_window:
        hidden |= token <= at - layer.sliding_window
    score = score.masked_fill(hidden, float("-inf"))
    if layer.impl.sinks is not None:
        sink = layer.impl.sinks.double()[:, None, None].expand(-1, q, 1)
        return torch.einsum("hqt,thd->qhd", torch.cat([score, sink], -1).softmax(-1)[..., :t], v)
    return torch.einsum("hqt,thd->qhd", score.softmax(-1), v)


def _graph(layer: Any, builder: Any, random: Any, device: Any, kind: Any) -> float:
    """Capture store and decode of 8 sequences, replay with other lengths and padded rows; largest |difference|."""
    import torch

    batch, width = 8, BLOCKS // 8
    table = (
        torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(4)).view(batch, width).int().to(device)
    )
    key, value = (
        random(batch, layer.num_kv_heads, layer.head_size),
        random(batch, layer.num_kv_heads, layer.head_size),
    )
    query = random(batch, layer.num_heads, layer.head_size)
    out = torch.zeros_like(query)
    history = [random(BLOCKS * BLOCK, layer.num_kv_heads, layer.head_size) for _ in range(2)]
    everywhere = torch.arange(BLOCKS * BLOCK, device=device)
    layer.impl.do_kv_cache_update(layer, *history, layer.kv_cache, everywhere)
    slots = torch.full((batch,), -1, dtype=torch.long, device=device)
    common = _common(kind, [(1, 1)] * batch, table, slots, device)
    meta = builder.build_for_cudagraph_capture(common)

    def step() -> None:
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, meta, out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    worst = 0.0
    for lens in ([5, 77, 200, 31, 32, 33, 1, 256], [64, 1, 2, 250, 0, 0, 0, 0]):
        real = sum(n > 0 for n in lens)
        common.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        place = [
            int(table[i, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK if n else -1 for i, n in enumerate(lens)
        ]
        slots.copy_(torch.tensor(place))
        query.copy_(random(*query.shape)), key.copy_(random(*key.shape)), value.copy_(random(*value.shape))
        kept = table.clone()
        table[real:] = -1  # padded rows must not be read
        graph.replay()
        got = out[:real].clone()
        table.copy_(kept)
        again = builder.build(
            0, _common(kind, [(1, n) for n in lens[:real]], table[:real], slots[:real], device)
        )
        want = torch.full_like(got, float("nan"))
        layer.impl.forward(layer, query[:real], key[:real], value[:real], layer.kv_cache, again, want)
        worst = max(worst, float((got - want).abs().max()))
    return worst


if __name__ == "__main__":
    main(*sys.argv[1:])
