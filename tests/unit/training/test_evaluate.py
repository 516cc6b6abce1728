"""Word errors of generated text."""

import pytest

from torchmm.training.validation import GeneratedText, word_error_rate


def texts(*pairs: tuple[str, str]) -> list[GeneratedText]:
    return [GeneratedText("s", i, "", truth, written) for i, (truth, written) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("truth", "written", "errors"),
    [
        ("Un perro grande.", "un Perro grande", 0),
        ("un perro grande", "un gato grande", 1),
        ("un perro grande", "un perro", 1),
        ("un perro", "un perro muy grande", 2),
        ("un perro", "", 2),
        ("a b c d", "b c d e", 2),
        ("¡Hola!", "hola ,", 1),
    ],
)
def test_errors_are_changes_of_words(truth: str, written: str, errors: int) -> None:
    assert word_error_rate(texts((truth, written))) == errors / len(truth.split())


def test_long_truths_weigh_more() -> None:
    assert word_error_rate(texts(("a", "b"), ("a b c", "a b c"))) == 0.25


def test_truths_need_words() -> None:
    with pytest.raises(ValueError, match="no words in the truths of 1 texts"):
        word_error_rate(texts(("...", "a")))
