#!/usr/bin/env bash
# Create or reuse .clients, an environment of programs that open our exports (vLLM, TRL, PEFT, transformers with
# all of its processors). It is separate from .venv, because vLLM requires another version of transformers; torch
# is the CPU build. Exit with 3 if a package registry or a required package is unavailable.
set -euo pipefail
exec 9< "$0"
flock 9 # several test processes can start at the same time
cd "$(dirname "$0")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
pinned=tests/clients/requirements.txt stamp=.clients/.installed
torch=2.13.0+cpu # the wheel of vLLM requires this version, and no program needs libraries of CUDA

if [ -e "$stamp" ] && [ ! "$pinned" -nt "$stamp" ]; then
    exit 0
fi
unreached() {
    echo "$1" >&2
    exit 3
}
.venv/bin/python -m venv --clear --without-pip .clients
install() { .venv/bin/python -m pip --python .clients/bin/python install --quiet "$@"; }
install "torch==$torch" || unreached "no registry here has torch $torch"
# The versions are resolved; --no-deps prevents pip from adding dependencies (libraries of CUDA).
install --no-deps --requirement "$pinned" || unreached "no registry here has the packages of $pinned"
# The registry has only the CUDA build of torchvision. Its compiled operators do not load with the CPU build of
# torch, and its import requires their names; resizing images, the only function in use, needs torch alone.
packages=$(.clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp tests/clients/programs/torchvision_names.py "$packages"
sed -i '1i import torchvision_names  # of missing operators' "$packages/torchvision/__init__.py"
touch "$stamp"
