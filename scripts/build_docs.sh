#!/usr/bin/env bash
# Makes .venv-docs with what requirements/docs.txt pins, and the site of docs/ in site/. Warnings are errors.
# Needs Python 3.12 and, the first time, a package registry; the site itself loads nothing from the network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 NO_MKDOCS_2_WARNING=1

. scripts/find_python.sh
venv=.venv-docs
done=$venv/.pins-done # written last: all pins are in

if ! cmp -s requirements/docs.txt "$done"; then
    python=$(find_python "make docs")
    "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps -r requirements/docs.txt
    cp requirements/docs.txt "$done"
fi
PYTHONPATH="$PWD:$PWD/src:$PWD/recipes" "$venv/bin/python" -m mkdocs build --strict --quiet --clean
echo "the site is in site/: open site/index.html; its search needs a server: $venv/bin/python -m http.server -d site"
