#!/usr/bin/env bash
# Run one leg of configs/ci_matrix.yaml on this machine: ci/run.sh LEG [options]. `ci/run.sh --help` lists them.
#
# The interpreter is the first of these that has what the leg needs:
#   1. $TURBOQUANT_CI_PYTHON, if set;
#   2. the Makefile's environment (.venv, or $VENV), if it was made for development;
#   3. python3 of this machine, if it can import torch, triton, pytest and the rest (a ROCm or CUDA image):
#      then nothing is installed, and no network is needed;
#   4. the Makefile's environment, made now (`make dev`, which reads TORCH, TORCH_INDEX and PYTHON).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

has_all() {
  command -v "$1" >/dev/null 2>&1 || return 1
  (cd / && "$1" - "$leg" <<'PROBE' >/dev/null 2>&1)
import sys
import hypothesis, numpy, pytest, torch, triton, yaml
if sys.argv[1] == "cpu-reference":  # its tests cover the commands that print tables
    import rich
sys.exit(sys.version_info < (3, 11))
PROBE
}

leg="${1:-}"
venv="${VENV:-.venv}"
if [[ -n "${TURBOQUANT_CI_PYTHON:-}" ]]; then
  python="$TURBOQUANT_CI_PYTHON"
elif [[ -e "$venv/.ready-to-develop" ]]; then
  make --no-print-directory dev >&2 # does nothing unless the constraints have changed
  python="$venv/bin/python"
elif has_all python3; then
  python=python3
else
  make --no-print-directory dev >&2
  python="$venv/bin/python"
fi
echo "ci/run.sh: $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')" >&2
PYTHONPATH=. exec "$python" -m ci.leg "$@"
