#!/usr/bin/env bash
# Create or reuse .clients_4, an environment with transformers 4. Other packages are those of .venv, whose path
# follows that of this environment. Exit with 3 if no package registry has the packages.
set -euo pipefail
exec 9< "$0"
flock 9 # several test processes can start at the same time
cd "$(dirname "$0")/../.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
stamp=.clients_4/.installed

if [ -e "$stamp" ] && [ ! "$0" -nt "$stamp" ]; then
    exit 0
fi
.venv/bin/python -m venv --clear --without-pip .clients_4
if ! .venv/bin/python -m pip --python .clients_4/bin/python install --quiet --no-deps \
    transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.2; then
    echo "no registry here has transformers 4.57.6" >&2
    exit 3
fi
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$purelib" > "$(.clients_4/bin/python -c "$purelib")/venv.pth"
touch "$stamp"
