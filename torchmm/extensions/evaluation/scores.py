"""Scores of generated text: exact match, VQA accuracy, CIDEr, word error rate.

    score("vqa_accuracy", [Answer("2", ("two", "2", "two", "three"))])

pycocoevalcap is not used for CIDEr, because its last release is from 2020 and requires 100 MB of
Java programs for other metrics. jiwer is not used for ten lines of edit distance.
tests/unit/extensions/evaluation compares CIDEr and VQA normalization with pycocoevalcap and
lmms-eval.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from math import exp, log, sqrt
from typing import NamedTuple

from torchmm.recipe.data_section import Score

N_GRAMS = 4
LENGTH_SIGMA = 6.0
"""Standard deviation, in words, of the length penalty of CIDEr-D."""
VQA_AGREEING = 3
"""Number of equal references with which a response is correct."""


class Answer(NamedTuple):
    """Generated text and its references, at least one."""

    written: str
    references: tuple[str, ...]


def score(name: Score, answers: Sequence[Answer]) -> float:
    """Return the score of all responses.

    Raises:
        ValueError: `answers` is empty, or the references of a word error rate have no words.
    """
    if not answers:
        raise ValueError(f"{name} requires at least one sample")
    return _SCORES[name](answers)


def exact_match(answers: Sequence[Answer]) -> float:
    """Return the fraction of responses, 0 to 1, with the words of a reference.

    Case and punctuation at the ends of words are ignored.
    """
    right = (
        _normalize_words(a.written) in [_normalize_words(r) for r in a.references] for a in answers
    )
    return sum(right) / len(answers)


def vqa_accuracy(answers: Sequence[Answer]) -> float:
    """Return the mean accuracy, 0 to 1, of VQA v2.

    The accuracy of a response is min(1, equal references / 3), averaged over all subsets that omit
    one reference. With at most three references, for which this value cannot be 1, a response is
    correct if it equals a reference.
    """
    total = 0.0
    for answer in answers:
        written = vqa_normalize(answer.written)
        same = [vqa_normalize(r) == written for r in answer.references]
        if len(same) <= VQA_AGREEING:
            total += any(same)
        else:
            agreeing = sum(same)
            total += sum(
                min(1.0, (agreeing - other_matches) / VQA_AGREEING) for other_matches in same
            ) / len(same)
    return total / len(answers)


def word_error_rate(answers: Sequence[Answer]) -> float:
    """Return the word edits relative to the number of words of the nearest references.

    The result can be above 1. Case and punctuation at the ends of words are ignored.

    Raises:
        ValueError: The references have no words.
    """
    errors = total = 0
    for answer in answers:
        written = _normalize_words(answer.written)
        edits_and_lengths = [
            (_edits(written, words_of_reference), len(words_of_reference))
            for words_of_reference in map(_normalize_words, answer.references)
        ]
        edits, length = min(
            edits_and_lengths, key=lambda pair: (pair[0] / max(1, pair[1]), -pair[1])
        )
        errors, total = errors + edits, total + length
    if not total:
        raise ValueError(f"the references of {len(answers)} samples contain no words")
    return errors / total


def cider(answers: Sequence[Answer]) -> float:
    """Return the mean CIDEr-D, 0 to 10 (Vedantam et al., arXiv 1411.5726).

    It compares n-grams of 1 to 4 words with those of the references, weighted by their rarity in
    the references of all responses. It therefore requires many responses, and is 0 for a single
    response.

    Words are in lower case without punctuation. The original uses a Java tokenizer, which splits
    "don't" into two words.
    """
    references = [[_n_grams(r) for r in a.references] for a in answers]
    document_counts = Counter(
        gram for grams_of_references in references for gram in set().union(*grams_of_references)
    )
    rarity = {gram: log(len(answers)) - log(count) for gram, count in document_counts.items()}
    unseen = log(len(answers))
    total = 0.0
    for answer, grams_of_references in zip(answers, references, strict=True):
        written = _TfIdfVector(_n_grams(answer.written), rarity, unseen)
        total += sum(
            written.similarity(_TfIdfVector(r, rarity, unseen)) for r in grams_of_references
        ) / len(grams_of_references)
    return 10 * total / len(answers)


_SCORES: dict[Score, Callable[[Sequence[Answer]], float]] = {
    "exact_match": exact_match,
    "vqa_accuracy": vqa_accuracy,
    "cider": cider,
    "word_error_rate": word_error_rate,
}


def _normalize_words(text: str) -> list[str]:
    stripped = (word.strip(".,;:!?\"'()") for word in text.lower().split())
    return [word for word in stripped if word]


def _edits(written: Sequence[str], truth: Sequence[str]) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(truth) + 1))
    for i, word in enumerate(written, 1):
        diagonal, row[0] = row[0], i
        for j, expected in enumerate(truth, 1):
            changed = diagonal + (word != expected)
            diagonal, row[j] = row[j], min(changed, row[j] + 1, row[j - 1] + 1)
    return row[-1]


_Grams = Counter[tuple[str, ...]]


def _n_grams(text: str) -> _Grams:
    words = re.findall(r"\w+(?:['.-]\w+)*", text.lower())
    return Counter(
        tuple(words[i : i + n]) for n in range(1, N_GRAMS + 1) for i in range(len(words) - n + 1)
    )


class _TfIdfVector:
    """Weights of the n-grams of a text: frequency times rarity."""

    def __init__(self, grams: _Grams, rarity: dict[tuple[str, ...], float], unseen: float) -> None:
        self._weights: list[dict[tuple[str, ...], float]] = [{} for _ in range(N_GRAMS)]
        for gram, count in grams.items():
            self._weights[len(gram) - 1][gram] = count * rarity.get(gram, unseen)
        self._norms = [sqrt(sum(w * w for w in weights.values())) for weights in self._weights]
        # The length is the number of word pairs, as in the original implementation.
        self._length = sum(count for gram, count in grams.items() if len(gram) == 2)

    def similarity(self, reference: _TfIdfVector) -> float:
        """Return the similarity to a reference, 0 to 1.

        N-grams that are more frequent than in the reference are clipped.
        """
        total = 0.0
        for n in range(N_GRAMS):
            reference_weights = reference._weights[n]
            common = sum(
                min(w, reference_weights.get(g, 0.0)) * reference_weights.get(g, 0.0)
                for g, w in self._weights[n].items()
            )
            norms = self._norms[n] * reference._norms[n]
            total += common / norms if norms else 0.0
        length_difference = self._length - reference._length
        return total / N_GRAMS * exp(-(length_difference**2) / (2 * LENGTH_SIGMA**2))


_CONTRACTIONS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
    haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've
    might've mustn't must've needn't not've o'clock oughtn't shan't she'd've should've shouldn't
    shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's
    something'd something'd've something'll that's there'd there'd've there're there's they'd
    they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
    what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's
    won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're
    you've
"""
"""Contractions of the VQA evaluation program, which may lack their apostrophes."""


def _without_apostrophes(word: str) -> set[str]:
    """Return the word without one or more of its apostrophes."""
    parts = word.split("'")
    joints = product(("", "'"), repeat=len(parts) - 1)
    return {"".join(map("".join, zip(parts, (*j, ""), strict=True))) for j in joints} - {word}


_CONTRACTION_BY_TYPO = {
    form: word for word in re.findall(r"\S+", _CONTRACTIONS) for form in _without_apostrophes(word)
}
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_DIGITS)}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"(?<=\d),+(?=\d)")


def vqa_normalize(text: str) -> str:
    """Return a text as the VQA evaluation program normalizes it.

    The text has lower case, no articles, digits for numbers and apostrophes of contractions.
    Punctuation is removed. Between letters, it is replaced by a space.
    """
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    text = " ".join(text.split("\n")).replace("\t", " ").strip()
    bare = text
    for punctuation in _PUNCTUATION:
        beside_space = f"{punctuation} " in text or f" {punctuation}" in text
        bare = bare.replace(
            punctuation, "" if beside_space or _COMMA_IN_NUMBER.search(text) else " "
        )
    bare = re.sub(r"\.(?!\d)", "", bare)
    words = (_NUMBERS.get(word, word) for word in bare.split())
    return " ".join(
        _CONTRACTION_BY_TYPO.get(word, word) for word in words if word not in ("a", "an", "the")
    )
