# Functions for the other scripts. prepare_environment installs torchmm in .venv, or reuses .venv.
# shellcheck shell=bash

# prepare_environment [EXTRA]: needs Python >= 3.11 with pip (another one: PYTHON=/path/to/python).
# LOCKED=requirements/torch-2.13-test.txt: these versions and hashes, instead of the newest that fit.
prepare_environment() {
    local extra=${1:-} python=${PYTHON:-python3} stamp=.venv/.installed${1:+-$1}
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.version_info >= (3, 11) or sys.exit(
            f"Python >= 3.11 is needed, this is {sys.version.split()[0]}; set PYTHON")'
        echo "making a virtual environment in .venv"
        # Debian packages venv without ensurepip. The pip of $python is used instead.
        "$python" -m venv .venv >/dev/null 2>&1 || {
            "$python" -m venv --clear --without-pip .venv
            "$python" -m pip --python .venv/bin/python install --quiet pip
        }
    fi
    if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "installing torchmm${extra:+ with extra \"$extra\"} (minutes the first time)"
        if [ -n "${LOCKED:-}" ]; then
            install_locked "$LOCKED"
        else
            # Some indexes have torch 2.14 only with several gigabytes of CUDA libraries.
            telling "installing torch" .venv/bin/python -m pip install --quiet 'torch>=2.11,<2.14'
            telling "installing torchmm's other packages" \
                .venv/bin/python -m pip install --quiet --editable ".${extra:+[$extra]}"
        fi
        touch "$stamp"
    fi
}

# install_locked FILE: installs the versions of a lock file. pip chooses the build of torch (CPU or
# CUDA) for this machine. CPU builds do not need the packages with CUDA libraries.
install_locked() {
    local torch
    torch=$(grep -o '^torch==[0-9.]*' "$1")
    telling "installing $torch" .venv/bin/python -m pip install --quiet "$torch"
    awk '/^[a-z0-9]/ { kept = !/^(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==/ } kept' "$1" |
        telling "installing the locked packages" \
            .venv/bin/python -m pip install --quiet --no-deps --require-hashes --requirement /dev/stdin
    .venv/bin/python -m pip install --quiet --no-deps --editable .
}

# telling WHAT COMMAND...: runs it, and says every few seconds that it still does.
telling() {
    local what=$1 began=$SECONDS status=0 teller
    shift
    while sleep "${TELL_S:-4}" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        echo "$what: $((SECONDS - began)) s"
    done &
    teller=$!
    "$@" || status=$?
    kill "$teller" 2>/dev/null || true
    wait "$teller" 2>/dev/null || true
    return "$status"
}
