#!/usr/bin/env bash
# Makes .venv with what requirements/cpu.txt pins and the project itself, editable; and in it, but not on Python's path,
# a folder each with what requirements/fla.txt and requirements/transformers.txt pin.
# Does nothing when that is there already. Needs Python 3.12 and a package registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1

venv=.venv
owned=$venv/.made-by-setup_env # written first: this script may delete the folder
pins_done=$venv/.pins-done     # written last: all pins are in
project_done=$venv/.project-done

fail() {
    printf 'setup_env: %s\n' "$@" >&2
    exit 1
}

. scripts/find_python.sh

# uv takes a fifth of pip's time, but knows nothing of pip's settings (mirrors,
# certificates). Where it can't reach the registry, pip does the same work.
install_requirements() {
    "$venv/bin/uv" pip install --python "$venv" --system-certs --quiet --no-deps -r requirements/cpu.txt && return
    echo "setup_env: uv did not manage; trying pip, which takes some minutes" >&2
    "$venv/bin/python" -m pip install --quiet --no-deps -r requirements/cpu.txt
}

# What has to be unchanged for the pins to count as installed. The folder is part
# of it, because an environment does not survive being moved.
pins_wanted() {
    pwd
    grep -v '^ *#' requirements/cpu.txt
}

install_pins() {
    if [ -e "$venv" ] && [ ! -e "$owned" ]; then
        fail "$venv exists, but this script did not make it. Move it away, then try again."
    fi
    local python start=$SECONDS
    python=$(find_python "make env")
    echo "setup_env: making $venv with $("$python" -V), about 6 GB; a download of 3 GB where nothing is cached"
    mkdir -p "$venv"
    touch "$owned"
    # From nothing each time: what an interrupted run left behind can look installed.
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$owned" -exec rm -rf {} +
    "$python" -m venv "$venv" || fail "'$python -m venv' failed. Debian and Ubuntu keep it in the package python3.12-venv."
    "$venv/bin/python" -m pip install --quiet --no-deps "$(grep '^uv==' requirements/cpu.txt)"
    install_requirements
    pins_wanted >"$pins_done"
    echo "setup_env: $venv made in $((SECONDS - start)) s"
}

# Two set-ups at once would delete each other's work.
exec 9>.setup_env.lock
! type -P flock >/dev/null || flock 9

pins_wanted | cmp -s - "$pins_done" || install_pins
if ! cmp -s pyproject.toml "$project_done"; then
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
    cp pyproject.toml "$project_done"
fi
for beside in fla transformers; do
    done=$venv/.$beside-done
    cmp -s "requirements/$beside.txt" "$done" && continue
    rm -rf "${venv:?}/$beside"
    "$venv/bin/python" -m pip install --quiet --no-deps --target "$venv/$beside" -r "requirements/$beside.txt"
    cp "requirements/$beside.txt" "$done"
done
