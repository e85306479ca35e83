#!/usr/bin/env bash
# A check of everything that needs a GPU; docs/gpu_check.md says how and what.
#     scripts/gpu_check.sh pack                          where .venv is
#     scripts/gpu_check.sh run [--only parity] [--continue]   on a machine with a GPU, torch and no network
# PYTHON names the interpreter; by default that of .venv to pack, and python3 to run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if [ "${1:-}" = pack ] && [ -z "${PYTHON:-}" ]; then
    python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m scripts.gpu_check "$@"
