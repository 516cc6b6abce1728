"""What processes leave alone while they plan."""

import gc

import pytest

from torchmm.common.processes import without_collection


def test_garbage_collection_pauses_and_goes_on():
    """Whether blocks are nested, or end with an error; and stays off where it was."""
    assert gc.isenabled()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="wrong"), without_collection():
        raise ValueError("wrong")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
