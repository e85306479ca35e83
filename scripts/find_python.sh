# For scripts that make an environment: finds a Python 3.12.

# Lists every place a Python 3.12 may be. A python3.12 on the PATH may be a pyenv
# shim that refuses to run, and hide a good one behind it: so all of them are listed.
python_candidates() {
    [ -z "${PYTHON:-}" ] || type -P "$PYTHON" || true
    type -aP python3.12 python3 python || true
    ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python 2>/dev/null || true
    ! type -P uv >/dev/null || uv python find --no-python-downloads 3.12 2>/dev/null || true
}

# Prints the interpreter of one of them; or says what to do, for the command that is $1, and fails.
find_python() {
    local candidate
    while IFS= read -r candidate; do
        # Prints the interpreter itself, where the candidate is a shim or inside a venv.
        "$candidate" -c 'import sys; sys.version_info[:2] == (3, 12) or sys.exit(1); print(sys._base_executable)' \
            2>/dev/null && return
    done < <(python_candidates)
    printf "$(basename "$0" .sh): %s\n" "Python 3.12 is needed, and none was found (PATH, pyenv and uv were searched)." \
        "Get it with one of: 'uv python install 3.12', 'pyenv install 3.12'," \
        "'apt-get install python3.12 python3.12-venv'. Or name one: PYTHON=/path/to/python3.12 $1" >&2
    return 1
}
