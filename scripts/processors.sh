#!/usr/bin/env bash
# The default test suite with the kernels of other processors, and with two threads; a summary of all at the end.
#
#   scripts/processors.sh [--only NAME]... [PYTEST ARGUMENTS]
#
# Libraries choose kernels by what the processor can, and these settings have them choose those of others, which sum up
# in another order. Nothing stops it: logs are in out/processors, and it fails at the end if any run has failed. All of
# them take as many times as long as `make test`. No emulation has bfloat16 in hardware where this machine has none.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

names=(own default avx2 onednn mkl oldest threads)
declare -A settings=(
    [own]=""
    [default]="ATEN_CPU_CAPABILITY=default"
    [avx2]="ATEN_CPU_CAPABILITY=avx2"
    [onednn]="ONEDNN_MAX_CPU_ISA=AVX2"
    [mkl]="MKL_CBWR=COMPATIBLE"
    [oldest]="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE"
    [threads]="OMP_NUM_THREADS=2"
)

only=()
while [[ ${1:-} == --only ]]; do
    if [[ ! -v settings[${2:-}] ]]; then
        echo "--only is '${2:-}', expected one of: ${names[*]}" >&2
        exit 2
    fi
    only+=("$2")
    shift 2
done

logs=out/processors
mkdir -p "$logs"
summary=()
failed=0
export PYTHONDONTWRITEBYTECODE=
for name in "${only[@]:-${names[@]}}"; do
    echo "== $name: ${settings[$name]:-the kernels of this machine} ($logs/$name.log)"
    # The settings are words of their own.
    # shellcheck disable=SC2086
    env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 ${settings[$name]} \
        .venv/bin/python -m pytest -q -n "${WORKERS:-2}" --dist loadscope --no-loadscope-reorder "$@" >"$logs/$name.log" 2>&1 ||
        failed=1
    summary+=("$(printf '%-8s %s' "$name" "$(tail -n 1 "$logs/$name.log")")")
    summary+=("$(grep -E '^(FAILED|ERROR) ' "$logs/$name.log" | sed 's/^/         /')")
done

echo
printf '%s\n' "${summary[@]}" | grep -v '^$'
exit "$failed"
