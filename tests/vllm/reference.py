"""The same perplexity without an engine: turboquant_rocm.evaluation in a process with its own transformers.

A job as JSON on standard input, {"model": folder, "windows": [[ids]], "protect": n, "preset": name, "kept": file};
on standard output one line of JSON. "exact", "free" and "kept" are lists of negative logprobs of every window's
ids[1:], "kept" of the first window's only:

exact: with the unquantised cache.
free: with the preset, whose codes are those of this process.
kept: with the preset and with the codes that an engine has stored in ``file``, of engine.py. What this process would
have stored for the same keys and values is compared with that: "parted" is the share of vectors that differ.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PARTED = 2e-3
"""Relative difference from which a vector read back is another one: a step of a 16-bit norm is at most half of it, and
another code in one of 64 dims at least five times."""


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForCausalLM

    from turboquant_rocm.evaluation.compare import compare
    from turboquant_rocm.evaluation.schemes import ReadBack, Scheme, preset_scheme
    from turboquant_rocm.evaluation.tasks import Passage

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    free = preset_scheme(
        model.config, job["preset"], name="free", backend="torch_reference", target="cpu", dtype="fp32",
        protect=job["protect"],
    )  # fmt: skip
    parted: list[torch.Tensor] = []

    def of_engine(own: ReadBack, stored: tuple[Any, Any]) -> ReadBack:
        def read_back(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            theirs = [x[: key.shape[2]].transpose(0, 1)[None] for x in stored]
            for a, b in zip(own(key, value), theirs, strict=True):
                parted.append(((a - b).norm(dim=-1) > PARTED * b.norm(dim=-1)).flatten())
            return theirs[0], theirs[1]

        return read_back

    stored = torch.load(job["kept"])
    assert stored.keys() == free.layers.keys()
    layers = {i: of_engine(own, stored[i]) for i, own in free.layers.items()}
    first, *rest = (Passage(tuple(ids)) for ids in job["windows"])
    found = compare(model, [first], [free, Scheme("kept", layers, free.bytes_per_token)])
    found += compare(model, rest, [free])
    answer = {
        "exact": [c.exact.nll.tolist() for c in found],
        "free": [c.schemes["free"].nll.tolist() for c in found],
        "kept": found[0].schemes["kept"].nll.tolist(),
        "parted": float(torch.cat(parted).double().mean()),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
