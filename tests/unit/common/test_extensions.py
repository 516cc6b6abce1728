"""Tests of extension entries in the tables of the core."""

from __future__ import annotations

import sys

import pytest

from torchmm.common import extensions
from torchmm.common.extensions import Entry, extension_names, find_entries, find_entry
from torchmm.recipe import section as section_module
from torchmm.recipe.section import Section, with_extensions
from torchmm.training.hooks.registry import HOOKS, order_hooks

EXTENSION = """
from torchmm.common.extensions import Entry

ENTRIES = {"hooks": [Entry("probe", "math:pi", after="recording")]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Replace the extensions of torchmm by a package with test extensions."""
    for name, text in (
        ("probes/__init__.py", ""),
        ("probes/one/__init__.py", ""),
        ("probes/one/extension.py", EXTENSION),
        ("probes/plain/__init__.py", ""),
        ("probes/two/__init__.py", ""),
        ("probes/two/extension.py", 'REQUIRES = ("probes.plain",)\nENTRIES = {}'),
        ("probes/three/__init__.py", ""),
        ("probes/three/extension.py", 'REQUIRES = ("probes.missing",)\nENTRIES = {}'),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extensions, "FOLDERS", ("probes", "torchmm.missing"))
    for function in (extension_names, find_entries):
        function.cache_clear()
    yield
    for function in (extension_names, find_entries):
        function.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "probes"]:
        del sys.modules[name]


@pytest.mark.usefixtures("folder")
def test_entries_of_installed_extensions_are_found():
    assert extension_names() == ("probes.one", "probes.two")
    (entry,) = find_entries("hooks")
    assert entry.name == "probe" and entry.load() == pytest.approx(3.14159, 1e-5)
    assert find_entries("planners") == ()
    assert find_entry("hooks", "probe") == entry
    assert find_entry("hooks", "other") is None


def test_added_hook_follows_the_named_hook():
    added = [Entry("probe", "math:pi", after="recording"), Entry("first", "math:e")]
    names = [entry.name for entry in order_hooks(HOOKS, added)]
    core = [entry.name for entry in HOOKS]
    assert names == ["first", "validation", "recording", "probe", *core[2:]]
    with pytest.raises(ValueError, match="missing"):
        order_hooks(HOOKS, [Entry("probe", "math:pi", after="missing")])


class Added(Section):
    """Section of an extension."""

    value: int = 3
    """Value of the extension."""


def test_extension_section_becomes_a_key(monkeypatch):
    entry = Entry("Plain.added", f"{__name__}:Added")
    monkeypatch.setattr(section_module, "find_entries", lambda table: (entry,))

    @with_extensions
    class Plain(Section):
        """Section of the core."""

        name: str = "x"

    plain = Plain.model_validate({"added": {"value": 4}})
    assert Added.from_parent(plain).value == 4
    assert Added.from_parent(Plain()).value == 3
    with pytest.raises(ValueError, match=r"added.value"):
        Plain.model_validate({"added": {"value": "four"}})


def test_extension_keys_join_the_section(monkeypatch):
    entry = Entry("Plain.*", f"{__name__}:Added")
    monkeypatch.setattr(section_module, "find_entries", lambda table: (entry,))

    @with_extensions
    class Plain(Section):
        """Section of the core."""

        name: str = "x"

    plain = Plain.model_validate({"value": 4})
    assert Added.from_parent(plain).value == 4
    assert list(plain.model_dump()) == ["name", "value"]
    with pytest.raises(ValueError, match="extra"):
        Plain.model_validate({"other": 1})
