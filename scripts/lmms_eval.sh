#!/usr/bin/env bash
# Makes .lmms-eval, in which lmms-eval answers its tasks (scripts/evaluate.py --tasks, [validation.benchmarks]),
# or reuses it. It sees the packages of .venv, torch and transformers among them, and has before them what is in
# scripts/lmms_eval.txt; lmms-eval's own list would replace wandb and PyAV by older ones, and bring gigabytes
# for models that are not used. A task that misses a package names it: add it with
#     .venv/bin/python -m pip --python .lmms-eval/bin/python install --no-deps NAME
# Ends with 3 where no package registry is reached.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
pinned=scripts/lmms_eval.txt stamp=.lmms-eval/.installed

if [ -e "$stamp" ] && [ ! "$pinned" -nt "$stamp" ]; then
    exit 0
fi
.venv/bin/python -m venv --clear --without-pip .lmms-eval
.venv/bin/python - <<'PYTHON'
import pathlib, sysconfig

theirs = sysconfig.get_path("purelib", vars={"base": ".lmms-eval"})
pathlib.Path(theirs, "torchmm.pth").write_text(sysconfig.get_path("purelib") + "\n")
PYTHON
.venv/bin/python -m pip --python .lmms-eval/bin/python install --quiet --no-deps --requirement "$pinned" || {
    echo "no registry here has the packages of $pinned" >&2
    exit 3
}
touch "$stamp"
