"""Cached machine code when several processes compile a kernel at the same time."""

import pytest
from numba.core.caching import IndexDataCacheFile

from torchmm.balance.numba_utils import KernelFiles, next_random

CLASSES = [(KernelFiles, True), (IndexDataCacheFile, False)]
"""Classes, and whether processes load the code they ask for. Numba's is the negative control."""


@pytest.mark.parametrize(("files", "correct"), CLASSES)
def test_concurrent_signatures_have_separate_code(tmp_path, files, correct):
    first, second, reader = (files(str(tmp_path), "kernel", "stamp") for _ in range(3))
    save_data = first._save_data

    def save_after_second(name, data):
        second._load_index = dict  # it read the empty index before the first process wrote it
        second.save("int64", "code for int64")
        del second._load_index
        save_data(name, data)

    first._save_data = save_after_second
    first.save("float64", "code for float64")
    assert (reader.load("int64") in (None, "code for int64")) == correct
    second.save("int64", "code for int64")
    assert reader.load("int64") == "code for int64"


@pytest.mark.parametrize(("files", "correct"), CLASSES)
def test_code_of_changed_source_is_not_loaded(tmp_path, files, correct):
    old, new, reader = (files(str(tmp_path), "kernel", s) for s in ("old", "new", "new"))
    old.save("float64", "old code")
    save_data, loaded = new._save_data, []

    def save_after_reader(name, data):
        loaded.append(reader.load("float64"))
        save_data(name, data)

    new._save_data = save_after_reader
    new.save("float64", "new code")
    assert (loaded == [None]) == correct
    assert reader.load("float64") == "new code"


def test_kernels_use_separate_files():
    assert isinstance(next_random._cache._cache_file, KernelFiles)
