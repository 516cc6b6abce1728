#!/usr/bin/env bash
# Writes requirements/: every package that torchmm needs, directly or not, at one version and with the
# hashes of its files, for each supported torch, any system, and Python 3.11 and later. They have what
# training takes and all that recipes may ask for; `torch-2.13-test.txt` has tests and linters too.
#
#     ./scripts/lock.sh              # with the newest versions that fit
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
prepare_environment lock

tested=2.13  # by CI
extras=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z0-9]*\) = \[.*/\1/p' pyproject.toml |
    grep -vx -e test -e lock -e docs)
mapfile -t training < <(printf -- '--extra\n%s\n' $extras)

lock() { # lock TORCH NAME [OPTION...]: which packages uv finds for a version of torch
    local torch=$1 file=requirements/$2.txt
    shift 2
    .venv/bin/uv pip compile pyproject.toml "${training[@]}" "$@" --quiet --upgrade --universal \
        --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
        --constraints <(echo "torch==$torch.*") --output-file "$file" >/dev/null
    sed -i '1i # Written by scripts/lock.sh. On a machine with GPUs: pip install --require-hashes -r '"$file" "$file"
    echo "$file: $(grep -c '==' "$file") packages"
}

mkdir -p requirements
for torch in 2.11 2.12 2.13 2.14; do
    lock "$torch" "torch-$torch"
done
lock $tested "torch-$tested-test" --extra test
