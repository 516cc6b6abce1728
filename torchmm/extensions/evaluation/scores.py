"""How well texts answer: exact match, VQA accuracy, CIDEr, word error rate. Pure functions.

    score("vqa_accuracy", [Answer("2", ("two", "2", "two", "three"))])

Rejected: pycocoevalcap for CIDEr, whose last release is of 2020 and brings 100 MB of Java programs
for other metrics; jiwer, for ten lines of edit distance. Values of CIDEr and of VQA's normalisation
are compared with those of pycocoevalcap and lmms-eval in tests/unit/extensions/evaluation.
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
"""In words: how much of CIDEr a caption keeps whose length differs from a reference's."""
VQA_AGREEING = 3
"""People who have to have given an answer for it to be right."""


class Answer(NamedTuple):
    """What was written, and what people have written; at least one."""

    written: str
    references: tuple[str, ...]


def score(name: Score, answers: Sequence[Answer]) -> float:
    """Of all answers together; see the functions below.

    Raises:
        ValueError: there is none, or the references of a word error rate have no words.
    """
    if not answers:
        raise ValueError(f"{name} of no answers")
    return _SCORES[name](answers)


def exact_match(answers: Sequence[Answer]) -> float:
    """Share of answers, 0 to 1, with the words of a reference; case and punctuation at words' ends
    do not count."""
    right = (_words(a.written) in [_words(r) for r in a.references] for a in answers)
    return sum(right) / len(answers)


def vqa_accuracy(answers: Sequence[Answer]) -> float:
    """Mean accuracy, 0 to 1, as VQA v2 defines it: min(1, people who say so / 3), averaged over all
    choices of all people but one. Where fewer than four were asked, with whom that could not be 1,
    an answer is right if one has given it."""
    return sum(map(_vqa_accuracy, answers)) / len(answers)


def word_error_rate(answers: Sequence[Answer]) -> float:
    """Words to be changed, added or taken away, as a share of the words of the references, of each
    answer those of the nearest one; above 1 where too much was written. Case and punctuation at
    words' ends do not count.

    Raises:
        ValueError: the references have no words.
    """
    errors = total = 0
    for answer in answers:
        written = _words(answer.written)
        found = [(_edits(written, words), len(words)) for words in map(_words, answer.references)]
        edits, length = min(found, key=lambda pair: (pair[0] / max(1, pair[1]), -pair[1]))
        errors, total = errors + edits, total + length
    if not total:
        raise ValueError(f"no words in the references of {len(answers)} answers")
    return errors / total


def cider(answers: Sequence[Answer]) -> float:
    """Mean CIDEr-D, 0 to 10 (Vedantam et al., arXiv 1411.5726): how much n-grams of 1 to 4 words
    agree with the references', weighted by how rare they are in the references of all answers. So
    it needs many answers: of one alone it is 0.

    Words are in lower case, punctuation is left out, which the original leaves to a Java program;
    "don't" is one word here and two there.
    """
    references = [[_n_grams(r) for r in a.references] for a in answers]
    seen = Counter(gram for own in references for gram in set().union(*own))
    rarity = {gram: log(len(answers)) - log(count) for gram, count in seen.items()}
    unseen = log(len(answers))
    total = 0.0
    for answer, own in zip(answers, references, strict=True):
        written = _Weighed(_n_grams(answer.written), rarity, unseen)
        total += sum(written.similarity(_Weighed(r, rarity, unseen)) for r in own) / len(own)
    return 10 * total / len(answers)


_SCORES: dict[Score, Callable[[Sequence[Answer]], float]] = {
    "exact_match": exact_match,
    "vqa_accuracy": vqa_accuracy,
    "cider": cider,
    "word_error_rate": word_error_rate,
}


def _words(text: str) -> list[str]:
    stripped = (word.strip(".,;:!?\"'()") for word in text.lower().split())
    return [word for word in stripped if word]


def _edits(written: Sequence[str], truth: Sequence[str]) -> int:
    """Levenshtein distance."""
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


class _Weighed:
    """n-grams of a text by their number and rarity."""

    def __init__(self, grams: _Grams, rarity: dict[tuple[str, ...], float], unseen: float) -> None:
        self._weights: list[dict[tuple[str, ...], float]] = [{} for _ in range(N_GRAMS)]
        for gram, count in grams.items():
            self._weights[len(gram) - 1][gram] = count * rarity.get(gram, unseen)
        self._norms = [sqrt(sum(w * w for w in own.values())) for own in self._weights]
        # Of pairs of words, as in the original program.
        self._length = sum(count for gram, count in grams.items() if len(gram) == 2)

    def similarity(self, reference: _Weighed) -> float:
        """To a reference, 0 to 1: more of an n-gram than the reference has counts for nothing."""
        total = 0.0
        for n in range(N_GRAMS):
            theirs = reference._weights[n]
            common = sum(
                min(w, theirs.get(g, 0.0)) * theirs.get(g, 0.0) for g, w in self._weights[n].items()
            )
            norms = self._norms[n] * reference._norms[n]
            total += common / norms if norms else 0.0
        apart = self._length - reference._length
        return total / N_GRAMS * exp(-(apart**2) / (2 * LENGTH_SIGMA**2))


def _vqa_accuracy(answer: Answer) -> float:
    written = vqa_normalised(answer.written)
    same = [vqa_normalised(r) == written for r in answer.references]
    if len(same) <= VQA_AGREEING:
        return float(any(same))
    agreeing = sum(same)
    return sum(min(1.0, (agreeing - own) / VQA_AGREEING) for own in same) / len(same)


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
"""Written without apostrophes they mean the same; these are the ones that VQA's program knows."""


def _without_apostrophes(word: str) -> set[str]:
    """The word without one apostrophe or more of it."""
    parts = word.split("'")
    joints = product(("", "'"), repeat=len(parts) - 1)
    return {"".join(map("".join, zip(parts, (*j, ""), strict=True))) for j in joints} - {word}


_MEANT = {
    form: word for word in re.findall(r"\S+", _CONTRACTIONS) for form in _without_apostrophes(word)
}
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(number) for number, word in enumerate(_DIGITS)}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"(?<=\d),+(?=\d)")


def vqa_normalised(text: str) -> str:
    """As the program of VQA's server compares answers: lower case, no articles, numbers in digits,
    apostrophes where they were forgotten. Punctuation goes, and leaves a space only where it stands
    between letters."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    text = " ".join(text.split("\n")).replace("\t", " ").strip()
    bare = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        bare = bare.replace(mark, "" if beside_space or _COMMA_IN_NUMBER.search(text) else " ")
    bare = re.sub(r"\.(?!\d)", "", bare)
    words = (_NUMBERS.get(word, word) for word in bare.split())
    return " ".join(_MEANT.get(word, word) for word in words if word not in ("a", "an", "the"))
