#!/usr/bin/env bash
# Resolves requirements/cpu.in into requirements/cpu.txt, with uv from the environment.
# Pins that still fit are kept; `scripts/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

header='# Made by `make lock` from cpu.in and overrides.txt. Do not edit.
# Complete for Linux x86-64 and Python 3.12, so install it with --no-deps:
# a resolver would go back to what overrides.txt leaves out.'

new=$(mktemp)
trap 'rm -f "$new"' EXIT
cp requirements/cpu.txt "$new" 2>/dev/null || true
# Run inside requirements/, so that the comments name no folder.
(cd requirements && ../.venv/bin/uv pip compile cpu.in --override overrides.txt --output-file "$new" \
    --python ../.venv/bin/python --system-certs --quiet "$@" \
    --no-header --no-emit-index-url --no-emit-find-links)
{ printf '%s\n' "$header"; cat "$new"; } > requirements/cpu.txt
