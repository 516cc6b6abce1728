"""Tests of freed memory, which the process keeps."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource, sys
from torchmm.common.processes import set_malloc_retention
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    set_malloc_retention()

def use(size=40 << 20):
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(block, 1, size)
    libc.free(block)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="requires glibc")
def test_freed_block_is_reused_without_page_faults() -> None:
    keep, plain = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS, how], timeout=60))
        for how in ("keep", "plain")
    )
    assert keep < 100 < 5000 < plain
