#!/bin/sh
# Prepare benchmarks/one_gpu.py for a GPU machine without a network, and print its commands.
#
#     scripts/gpu_one.sh [--dry]
#
# Downloads the wheels that such a machine lacks (Python 3.12, torch 2.11 and transformers are
# installed there) to build/wheels, checks their size, and prints the command for ten minutes and
# the one for 150 seconds. With --dry, only prints what it would download, and the commands.
set -eu
cd "$(dirname "$0")/.."

FOLDER=build/wheels
LIMIT_MIB=60
# The environment of torchmm, whose versions are sent.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
# torchmm's own dependencies, then the programs that it is compared with.
PACKAGES="pydantic pydantic-core annotated-types typing-inspection datasets dill multiprocess
tomli tomli-w
liger-kernel==0.8.5 trl==1.16.0 torchao==0.18.0"

# Versions of this environment, as pydantic needs one version of its core.
pinned() {
    for package in $PACKAGES; do
        case $package in
            *==*) echo "$package" ;;
            *) "$PYTHON" -c "import importlib.metadata as m; print('$package==' + m.version('$package'))" ;;
        esac
    done
}

if ! "$PYTHON" -c "import datasets, pydantic" 2> /dev/null; then
    echo "$PYTHON does not have the packages of torchmm; set PYTHON to the Python of its environment" >&2
    exit 1
fi
REQUIRED=$(pinned)
if [ "${1:-}" = --dry ]; then
    echo "would download to $FOLDER:"
    echo "$REQUIRED"
else
    mkdir -p "$FOLDER"
    rm -f "$FOLDER"/*.whl
    for package in $REQUIRED; do
        "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
            --implementation cp --abi cp312 --abi abi3 --abi none \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
            --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any \
            -d "$FOLDER" "$package"
    done
    SIZE_KIB=$(du -sk "$FOLDER" | cut -f1)
    echo "$(ls "$FOLDER" | wc -l) wheels in $FOLDER, $((SIZE_KIB / 1024)) MiB"
    if [ "$SIZE_KIB" -gt $((LIMIT_MIB * 1024)) ]; then
        echo "$FOLDER has $((SIZE_KIB / 1024)) MiB; at most $LIMIT_MIB MiB can be sent" >&2
        exit 1
    fi
fi

SETUP='python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site build/wheels/*.whl && export PYTHONPATH=$PWD:/tmp/site PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR=/tmp/compiled || exit'
UNPACK='mkdir -p /tmp/compiled; [ ! -f build/compiled.tgz ] || tar -xzf build/compiled.tgz -C /tmp/compiled'
PACK='timeout 10 tar -czf $OUT/compiled.tgz -C /tmp/compiled . ; [ $(stat -c %s $OUT/compiled.tgz) -lt 16000000 ] || rm -f $OUT/compiled.tgz'

cat <<END

Ten minutes (timeout_s 600; carry build/wheels, and build/compiled.tgz if there is one):

$SETUP; $UNPACK; timeout -k 3 572 python3 benchmarks/one_gpu.py --out \$OUT --seconds 540 > \$OUT/log.txt 2>&1; tail -c 6000 \$OUT/log.txt; $PACK

Keep the compiled code for the next command: cp compiled.tgz of the results to build/.

The second command (timeout_s 190; carry the same):

$SETUP; $UNPACK; timeout -k 3 175 python3 benchmarks/one_gpu.py --parts start second --out \$OUT --seconds 150 > \$OUT/log.txt 2>&1; tail -c 6000 \$OUT/log.txt

One part again, for example after a fix:

$SETUP; $UNPACK; timeout -k 3 175 python3 benchmarks/one_gpu.py --parts small --out \$OUT --seconds 150 > \$OUT/log.txt 2>&1; tail -c 6000 \$OUT/log.txt
END
