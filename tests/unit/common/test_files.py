"""Tests of file names that are read from untrusted files."""

import pytest

from torchmm.common.files import UnsafeNameError, check_relative_name


@pytest.mark.parametrize(
    "name", ["model.safetensors", "unet/model-00001-of-2.safetensors", "..a", "a..b", "猫 1.png"]
)
def test_relative_name_inside_directory_is_returned(name):
    assert check_relative_name(name, "index.json") == name


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "a/../../x", "..", "/etc/passwd", "", ".", "./x", "a//b", "a/"),
        *("..\\x", "C:x", "c:/x", "a\0b", "a\nb", "\x7f", "\ud800"),
        *(None, 3, ["x"], {"x": 1}, b"x"),
    ],
    ids=ascii,
)
def test_relative_name_outside_directory_is_rejected(name):
    with pytest.raises(UnsafeNameError, match=r"index\.json names the file"):
        check_relative_name(name, "index.json")
