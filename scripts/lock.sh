#!/usr/bin/env bash
# Resolves requirements/cpu.in into requirements/cpu.txt, and cuda.in beside it into cuda.txt, with uv from the
# environment; and docs.in by itself into docs.txt. Pins that still fit are kept; `scripts/lock.sh --upgrade` takes the
# newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

header='# Made by `make lock` from cpu.in and overrides.txt. Do not edit.
# Complete for Linux x86-64 and Python 3.12, so install it with --no-deps:
# a resolver would go back to what overrides.txt leaves out.'

new=$(mktemp)
trap 'rm -f "$new"' EXIT

# Run inside requirements/, so that the comments name no folder. The first argument is a NAME.in; pins of NAME.txt are kept.
compile() {
    cp "requirements/${1%.in}.txt" "$new" 2>/dev/null || true
    (cd requirements && ../.venv/bin/uv pip compile "$@" --output-file "$new" \
        --python ../.venv/bin/python --system-certs --quiet \
        --no-header --no-emit-index-url --no-emit-find-links)
}

compile cpu.in --override overrides.txt "$@"
{ printf '%s\n' "$header"; cat "$new"; } > requirements/cpu.txt

compile cuda.in --constraint cpu.txt --no-annotate "$@"
{
    echo '# Made by `make lock` from cuda.in and cpu.txt. Do not edit. On top of cpu.txt; README.md says how to install it.'
    grep -vxFf <(grep -v '^ *#' requirements/cpu.txt) "$new"
} > requirements/cuda.txt

compile docs.in --no-annotate "$@"
{ echo '# Made by `make lock` from docs.in. Do not edit.'; cat "$new"; } > requirements/docs.txt
