"""The same perplexity without an engine: turboquant_rocm.evaluation in a process with its own transformers.

A job as JSON on standard input, {"model": folder, "ids": [...], "protect": n, "presets": [...]}; the negative logprobs
of ids[1:] by preset on standard output, "" being the unquantised cache.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    job = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForCausalLM

    from turboquant_rocm.evaluation.compare import compare
    from turboquant_rocm.evaluation.schemes import preset_scheme
    from turboquant_rocm.evaluation.tasks import Passage

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    schemes = [
        preset_scheme(
            model.config, name, name=name, backend="torch_reference", target="cpu", dtype="fp32",
            protect=job["protect"],
        )
        for name in job["presets"]
    ]  # fmt: skip
    (found,) = compare(model, [Passage(tuple(job["ids"]))], schemes)
    print(json.dumps({"": found.exact.nll.tolist(), **{n: s.nll.tolist() for n, s in found.schemes.items()}}))


if __name__ == "__main__":
    main()
