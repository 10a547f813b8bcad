#!/bin/sh
# Makes .venv what pyproject.toml and constraints.txt say. Two steps, because make tells the one error of the first:
#
#   setup.sh find          prints what to start from: "ready" or "update" (.venv can be used), the path of a Python,
#                          or "uv:PYTHON" when only uv can make an environment. Prints nothing when there is none.
#   setup.sh make START    does the rest.
#
# PYTHON names an interpreter to prefer; EXTRAS are the extras to install.
set -u
cd "$(dirname "$0")/.." || exit 1
venv=.venv/bin/python
extras=${EXTRAS:-test}
# The file is there from before an environment is made until all is installed: an interrupted one is made anew.
unfinished=.venv/unfinished

# A name on PATH may be a shim without a Python behind it, so each candidate is run.
fits() {
    "$1" -c 'import sys
gil = getattr(sys, "_is_gil_enabled", lambda: True)()
sys.exit(not ((3, 12) <= sys.version_info[:2] <= (3, 14) and sys.implementation.name == "cpython" and gil))' \
        </dev/null >/dev/null 2>&1
}

# Debian ships Python without these two unless python3-venv is installed.
makes_environments() {
    "$1" -c 'import venv, ensurepip' </dev/null >/dev/null 2>&1
}

find_uv() {
    for uv in uv "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv"; do
        if "$uv" --version </dev/null >/dev/null 2>&1; then
            echo "$uv"
            return
        fi
    done
}

find_python() {
    uv=$(find_uv)
    set --
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; fi
    # The version that the constraints were made with comes first.
    for version in 3.13 3.14 3.12; do
        set -- "$@" "python$version"
        for found in "/usr/local/bin/python$version" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version"*/bin/python \
            "${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python/cpython-$version"*/bin/python3; do
            if [ -x "$found" ]; then set -- "$@" "$found"; fi
        done
    done
    set -- "$@" python3 python
    for found in "${HOME:-}/miniconda3" "${HOME:-}/miniforge3" /opt/conda; do
        if [ -x "$found/bin/python" ]; then set -- "$@" "$found/bin/python"; fi
    done
    if [ -n "$uv" ]; then
        managed=$("$uv" python find --system '>=3.12,<3.15' 2>/dev/null </dev/null)
        if [ -n "$managed" ]; then set -- "$@" "$managed"; fi
    fi
    bare=
    for candidate in "$@"; do
        if fits "$candidate"; then
            # The Python of an active environment, which may be the one about to be removed, leads to the one behind it.
            candidate=$("$candidate" -c 'import sys; print(sys._base_executable or sys.executable)')
            if makes_environments "$candidate"; then
                echo "$candidate"
                return
            fi
            bare=${bare:-$candidate}
        fi
    done
    # With nothing found at all, uv fetches a Python of its own.
    if [ -n "$uv" ]; then echo "uv:${bare:-3.13}"; fi
}

find_start() {
    if [ ! -e "$unfinished" ]; then
        if "$venv" scripts/environment.py "$extras" </dev/null >/dev/null 2>&1; then
            echo ready
            return
        fi
        if fits "$venv" && "$venv" -m pip --version </dev/null >/dev/null 2>&1; then
            echo update
            return
        fi
    fi
    find_python
}

build() {
    rm -rf .venv && mkdir .venv && : >"$unfinished" || return 1
    case $1 in
    uv:*) "$(find_uv)" venv --quiet --seed --allow-existing --python "${1#uv:}" .venv ;;
    *) "$1" -m venv .venv ;;
    esac
}

install() {
    : >"$unfinished"
    # Some builders warn at length that an editable installation is one.
    PYTHONWARNINGS=ignore "$venv" -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e ".[$extras]"
}

seal() {
    "$venv" scripts/environment.py "$extras" --seal && rm -f "$unfinished"
}

make_environment() {
    if [ "$1" = update ]; then
        echo "Bringing .venv up to date"
        if ! install; then
            rm -f "$unfinished"
            echo ".venv could not be brought up to date and was left as it is; to start afresh, remove it" >&2
            return 1
        fi
        seal 2>/dev/null && return
        set -- "$(find_python)"
    fi
    echo "Making .venv: some 400 MB are fetched, once"
    build "$1" && install && seal
}

case ${1:-} in
find) find_start ;;
make)
    [ "$2" = ready ] && exit
    # Two at a time would install over each other. What the one before did may be all there is to do.
    if command -v flock >/dev/null 2>&1; then
        mkdir -p .cache
        exec 9>.cache/setup.lock
        flock 9
        start=$(find_start)
    else
        start=$2
    fi
    [ "$start" = ready ] || make_environment "$start"
    ;;
*)
    echo "usage: setup.sh find | setup.sh make START" >&2
    exit 2
    ;;
esac
