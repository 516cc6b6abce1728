#!/usr/bin/env bash
# Runs every check: lint, format, types, tests. Arguments go to pytest; `--all` in front of them
# draws more random recipes (tests/fuzz). Prints little unless something fails. A second run reuses
# the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = --all ]; then
    export TEST_ALL=1
    shift
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT

check() { # check NAME COMMAND...: shows the command's output only if it fails
    local name=$1
    shift
    "$@" >"$output" 2>&1 || { cat "$output"; echo "$name failed"; exit 1; }
}
check lint .venv/bin/ruff check .
check format .venv/bin/ruff format --check .
check types .venv/bin/mypy
# Real images and captions; where no package registry is reached, tests that need them are skipped.
if ! .venv/bin/python scripts/prepare_data.py tuxpaint_stamps >"$output" 2>&1; then
    cat "$output"
    [ -z "${CI:-}" ] || { echo "data failed"; exit 1; }
    echo "no real data: tests that need it are skipped"
fi
check tests .venv/bin/python -m pytest --quiet -n 2 --dist loadfile "$@"
tail -n 1 "$output"
