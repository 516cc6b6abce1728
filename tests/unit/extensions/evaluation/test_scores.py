"""Text metrics, compared with manually computed values and with reference programs.

The values of pycocoevalcap 1.2 (CiderScorer on lowercase words without punctuation) and of
lmms-eval 0.7.3 (EvalAIAnswerProcessor) were computed on 25 November 2026.
"""

import math

import pytest

from torchmm.extensions.evaluation.scores import Answer, score, vqa_normalize

CAPTIONS = [
    Answer("A dog runs over the hill.", ("a dog runs over a green hill", "the dog is running")),
    Answer("two cats", ("Two cats sleep", "cats on a bed", "two small cats")),
    Answer("a red house near a tree", ("a big red house",)),
]


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
def test_word_error_rate_counts_word_edits(truth, written, errors):
    actual = score("word_error_rate", [Answer(written, (truth,))])
    assert actual == errors / len(truth.split())


def test_long_references_have_larger_weight():
    answers = [Answer("b", ("a",)), Answer("a b c", ("a b c",))]
    assert score("word_error_rate", answers) == 0.25


def test_nearest_reference_is_used():
    assert score("word_error_rate", [Answer("a b", ("x y z", "a c", "q"))]) == 0.5


def test_metrics_require_samples_and_words():
    with pytest.raises(ValueError, match="the references of 1 samples contain no words"):
        score("word_error_rate", [Answer("a", ("...",))])
    with pytest.raises(ValueError, match="cider requires at least one sample"):
        score("cider", [])


@pytest.mark.parametrize(
    ("written", "references", "right"),
    [
        ("A cat.", ("a dog", "a cat"), True),
        (" a  cat\n", ("A CAT!",), True),
        ("cat", ("a cat",), False),
        ("3.5", ("3.5",), True),
        ("35", ("3.5",), False),
        ("", ("a",), False),
    ],
)
def test_exact_match_ignores_case_and_punctuation(written, references, right):
    assert score("exact_match", [Answer(written, references)]) == right


@pytest.mark.parametrize(
    ("people", "accuracy"),
    # If n of ten people agree, leaving out each person leaves n - 1 or n agreeing answers.
    [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)],
)
def test_vqa_accuracy_averages_over_ten_people(people, accuracy):
    answer = Answer("Two!", ("2",) * people + ("dog",) * (10 - people))
    assert score("vqa_accuracy", [answer]) == pytest.approx(accuracy)


def test_vqa_accuracy_accepts_few_answers():
    answers = [Answer("two", ("2",)), Answer("two", ("dog", "2", "cat")), Answer("two", ("dog",))]
    assert score("vqa_accuracy", answers) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("A dog.", "dog"),
        ("None, really?", "0 really"),
        ("It's the dont-know", "it 's don't know"),
        ("7,000", "7000"),
        ("red/blue", "red blue"),
        ("red/ blue", "red blue"),
        ("U.S. 3.5", "us 3.5"),
        ("t-shirt (left)", "t shirt left"),
        ("youdve an\ttwas", "you'd've 'twas"),
    ],
)
def test_vqa_normalization_matches_reference(text, normalized):
    assert vqa_normalize(text) == normalized


def test_cider_matches_pycocoevalcap():
    assert score("cider", CAPTIONS) == pytest.approx(2.4394649425328923, rel=1e-12)


def test_cider_matches_manual_values():
    """Check correct captions of one word: one of four n-gram lengths agrees."""
    answers = [Answer("cat", ("cat",)), Answer("dog", ("dog",))]
    assert score("cider", answers) == pytest.approx(10 / 4)
    swapped = [Answer("dog", ("cat",)), Answer("cat", ("dog",))]
    assert score("cider", swapped) == 0.0
    # One additional word costs exp(-1 / 72), and half of the weights are of unknown words.
    longer = [Answer("cat sat", ("cat",)), Answer("dog", ("dog",))]
    first_score = 10 / 4 * math.exp(-1 / 72) / math.sqrt(2)
    assert score("cider", longer) == pytest.approx((first_score + 10 / 4) / 2)


def test_metrics_are_independent_of_sample_order():
    for name in ("cider", "vqa_accuracy", "exact_match", "word_error_rate"):
        assert score(name, CAPTIONS) == pytest.approx(score(name, CAPTIONS[::-1]))
