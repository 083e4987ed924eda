"""LongBench's scoring, quirks included: each rule compares one prediction with one reference answer and gives 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec

from dropkv.errors import UsageError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def word_f1(prediction: str, answer: str) -> float:
    """F1 of the words, without case, punctuation and articles."""
    given, wanted = _words(prediction), _words(answer)
    shared = (Counter(given) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """F of ROUGE-L by the package rouge; 0 where it fails, as it does for an empty text."""
    from rouge import Rouge

    try:
        return float(Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
    except Exception:  # LongBench counts every failure as 0: empty texts, and sentences too long for its recursion
        return 0.0


def class_share(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 by the number of class names in the prediction when the right one is among them, else 0.

    A name that is part of the right one does not count, except right behind another such name: LongBench takes names
    off the list that it walks along, and so skips one.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if answer in named else 0.0


def number_share(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that are the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def paragraph_share(prediction: str, answer: str) -> float:
    """The same, where the answer reads "Paragraph NUMBER"."""
    wanted = re.search(r"Paragraph (\d+)", answer)
    return number_share(prediction, wanted.group(1)) if wanted else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Edit similarity by the package rapidfuzz, in whole per cent, of the first line that is neither comment nor fence."""
    from rapidfuzz.fuzz import ratio

    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(float(ratio(line, answer))) / 100


def first_line(prediction: str) -> str:
    """What is scored of an answer to a few-shot prompt, behind which a model writes further examples."""
    return prediction.lstrip("\n").split("\n")[0]


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def check_package(metric: object) -> None:
    """Raise UsageError where the package behind one of these metrics is missing."""
    package = PACKAGES.get(metric)
    if package is not None and find_spec(package) is None:
        raise UsageError(f"its scores need the package {package}, which is missing; pip install 'dropkv[bench]'")


PACKAGES: dict[object, str] = {rouge_l: "rouge", code_similarity: "rapidfuzz"}
