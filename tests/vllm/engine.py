"""One run of the real vLLM engine, in a process of its own: a job as JSON on standard input, results in a file.

    {"model": folder, "options": {of vllm.LLM}, "packed_rows": n, "kept": {"tokens": n, "file": name},
     "batches": [{"prompts": [[ids]], "max_tokens": n, "score": bool, "forget": bool}]}

"packed_rows": chunks of up to so many tokens read everything packed, first ones too; vLLM's own number is one, and
more with speculative tokens. "kept": where to write what the packed layers give back of a sequence of so many tokens,
{layer: (key [tokens, Hk, D], value [tokens, Hk, Dv])} by torch.save. Prompts of a batch are given together; "forget"
empties the prefix cache before. The result of each batch is {"outputs": [...], "routes": [...]}. Per prompt: the
generated tokens, their logprobs, how many tokens a prefix hit saved, and with "score" minus the logprobs of the
prompt's own tokens. Per step of the engine: the routes that the first packed layer took, as [route, query tokens,
history].
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

routes: list[list[list[Any]]] = []


def _watch_routes() -> None:
    """Note what the first packed layer does in every step, where it is done."""
    from turboquant_rocm.continuation import prefill_rows
    from turboquant_rocm.integrations.vllm import backend

    first: list[Any] = []
    forward = backend.TurboQuantImpl.forward

    def watched(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if attn_metadata is not None and kv_cache.numel():
            first[:] = first or [self]
            if self is first[0]:
                parts = attn_metadata.split
                step = []
                if parts.decode_rows:
                    lens = attn_metadata.query_start_loc[: parts.decodes + 1].diff().tolist()
                    totals = attn_metadata.seq_lens[: parts.decodes].tolist()
                    step += [["decode", q, t - q] for q, t in zip(lens, totals, strict=True)]
                rest = prefill_rows(parts.query_lens, attn_metadata.rest_totals, backend.MAX_DECODE_ROWS)
                step += [[w.route, w.queries, w.history] for w in rest]
                routes.append(step)
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    backend.TurboQuantImpl.forward = watched


def _keep(tokens: int, found: dict[int, Any]) -> None:
    """Note what every packed layer gives back of the first sequence of ``tokens`` tokens that runs alone."""
    from turboquant_rocm.integrations.vllm import backend

    forward = backend.TurboQuantImpl.forward

    def watched(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if attn_metadata is not None and kv_cache.numel() and attn_metadata.seq_lens.tolist() == [tokens]:
            index = int(re.search(r"layers\.(\d+)\.", layer.layer_name)[1])
            if index not in found:
                read = self.bound.dequantize(self._cache, attn_metadata.block_table, attn_metadata.seq_lens)
                found[index] = (read.key, read.value)
        return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    backend.TurboQuantImpl.forward = watched


def _pack_rows(count: int) -> None:
    """Decode chunks of up to ``count`` tokens, as if so many were speculative."""
    from turboquant_rocm.integrations.vllm import backend

    backend.TurboQuantBuilder.threshold = property(lambda self: count)


def _facts(llm: Any) -> dict[str, Any]:
    """Which class every attention layer really runs, and where the server put its cache."""
    config = llm.llm_engine.vllm_config
    layers = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        bound = getattr(layer.impl, "bound", None)
        layers[name] = {
            "dtype": layer.kv_cache_dtype,
            "impl": f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}",
            "backend": bound and bound.backend,
            "bytes_per_token": layer.kv_cache.nbytes / (layer.kv_cache.shape[0] * layer.kv_cache.shape[2]),
        }
    return {"layers": layers, "layout": config.cache_config.kv_cache_layout}


def main(result: str) -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    if job.get("packed_rows"):
        _pack_rows(job["packed_rows"])
    llm = LLM(job["model"], enforce_eager=True, **job["options"])
    inside = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    if inside:
        _watch_routes()
    kept: dict[int, Any] = {}
    if job.get("kept"):
        _keep(job["kept"]["tokens"], kept)
    answers = []
    for batch in job["batches"]:
        if batch.get("forget"):
            assert llm.reset_prefix_cache()
        routes.clear()
        asked = SamplingParams(
            temperature=0,
            max_tokens=batch["max_tokens"],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if batch.get("score") else None,
        )
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        outputs = []
        for ids, found in zip(batch["prompts"], llm.generate(prompts, asked, use_tqdm=False), strict=True):
            tokens = list(found.outputs[0].token_ids)
            entry = {
                "tokens": tokens,
                "logprobs": [d[t].logprob for d, t in zip(found.outputs[0].logprobs, tokens, strict=True)],
                "cached": found.num_cached_tokens,
            }
            if batch.get("score"):
                pairs = zip(found.prompt_logprobs[1:], ids[1:], strict=True)
                entry["nll"] = [-d[t].logprob for d, t in pairs]
            outputs.append(entry)
        answers.append({"outputs": outputs, "routes": list(routes)})
    if kept:
        import torch

        torch.save(kept, job["kept"]["file"])
    Path(result).write_text(json.dumps({"batches": answers, **(_facts(llm) if inside else {})}))


if __name__ == "__main__":
    main(sys.argv[1])
