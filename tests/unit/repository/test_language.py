"""Tests of the language of the repository: word list, docstrings, test names and spelling."""

import json
from collections import Counter

import language
import pytest
from language import LIMITS, Hit, all_hits

SHOWN = 12


pytest.importorskip("codespell_lib")


@pytest.fixture(scope="module")
def hits() -> dict[str, list[Hit]]:
    return all_hits()


def test_language_counts_stay_below_limits(hits):
    """Print the words above the limits with their replacements."""
    limits = Counter(json.loads(LIMITS.read_text()))
    exceeded = {name: found for name, found in hits.items() if len(found) > limits[name]}
    message = [
        f"{name}: {len(found)} findings, {limits[name]} are allowed\n"
        + "\n".join(f"  {hit.place}: {hit.found!r}: {hit.advice}" for hit in found[-SHOWN:])
        for name, found in exceeded.items()
    ]
    assert not exceeded, "\n".join(message)


def test_limits_follow_lower_counts(hits):
    """Check that limits are close to the counts, so that words cannot return."""
    limits = json.loads(LIMITS.read_text())
    loose = {n: limit for n, limit in limits.items() if limit > 1.1 * len(hits.get(n, [])) + 5}
    assert not loose, "run python tests/helpers/language.py --write"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The path is no directory.", ["is no"]),
        ("Use `beside` to plot it.", []),
        ("A processor resizes clips.", ["clips"]),
        ("A rank tells the others.", ["tells"]),
        ("The setting clips gradients to a norm of 1.", []),
        ("Use gradient clipping with CLIP.", []),
        ("Training data are handed over by whoever reads.", ["whoever", "handed"]),
        ("The loader returns the whole number of samples.", []),
    ],
)
def test_word_list_finds_private_words(text, words, tmp_path, monkeypatch):
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert [hit.found for _, hit in language.word_hits("page.md")] == words


def test_docstring_check_finds_fragments(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(
        'def a():\n    """By rank."""\n\n\ndef b():\n    """Return a rank."""\n\n\n'
        'def c():\n    """The rank."""\n\n\n@property\ndef d():\n    """The rank."""\n\n\n'
        "def test_a_rank_that_is_lost_is_found_by_all_others():\n    pass\n"
    )
    found = [(check, hit.place) for check, hit in language.docstring_hits("module.py")]
    assert found == [
        ("verbs", "module.py:1"),
        ("verbs", "module.py:9"),
        ("fragments", "module.py:1"),
        ("test names", "module.py:18"),
    ]
