#!/usr/bin/env bash
# Runs every check: lint, format, types, tests, random recipes (tests/fuzz). Arguments go to pytest;
# with `--all` before them long campaigns run too, and more recipes are drawn. Prints little unless
# something fails. A second run reuses the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
draws=20 selected=(-m "not campaign")
if [ "${1:-}" = --all ]; then
    draws=120 selected=()
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
check tests .venv/bin/python -m pytest --quiet -n 2 --dist loadfile "${selected[@]}" "$@"
tail -n 1 "$output"
[ $# -eq 0 ] || exit 0  # some tests were asked for, not everything
check "random recipes" .venv/bin/python tests/fuzz/run.py --seed 6 --draws "$draws" --tries 25
grep "draws: " "$output"
