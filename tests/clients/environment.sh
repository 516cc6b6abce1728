#!/usr/bin/env bash
# Makes .clients, an environment of programs that open our exports (vLLM, TRL, PEFT, transformers with all of
# its processors), or reuses it. It is apart from .venv, as vLLM wants another version of transformers; torch is
# the CPU's build. Ends with 3 where a package registry, or what it has to have, is not reached.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
pinned=tests/clients/requirements.txt stamp=.clients/.installed
torch=2.13.0+cpu # vLLM's wheel is built for this one, and nothing here needs CUDA's libraries

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
# Versions were found together once; pip may not add to them what they would bring (CUDA's libraries).
install --no-deps --requirement "$pinned" || unreached "no registry here has the packages of $pinned"
# The registry has torchvision's build for CUDA alone. Its compiled operators do not load beside the CPU build of
# torch, and without their names it does not import; resizing pictures, which is all that is wanted, is plain torch.
packages=$(.clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp tests/clients/programs/torchvision_names.py "$packages"
sed -i '1i import torchvision_names  # of operators that are not there' "$packages/torchvision/__init__.py"
touch "$stamp"
