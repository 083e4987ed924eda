"""Means with 95 % intervals, and paired differences, for scores of questions that share documents.

A score belongs to a task, a sample (one document) and a question. The mean is that of the tasks' means, each over all its questions. Questions
of one document are not independent, so documents are what is resampled:

* "Wilson": the score interval of a share, where it holds: every score 0 or 1, one question a document, one task. Also where all scores are 0
  or all are 1, with documents as the count, and where the documents of each task are all alike, as far as a share of them could still differ:
  a bootstrap would claim certainty there.
* "bootstrap": the percentile interval of RESAMPLES resamplings of the documents inside each task, seeded.
* "none": one document says nothing about others; the interval is all that is possible.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054  # the normal distribution's 97.5 % point
RESAMPLES = 2000

Key = tuple[str, Hashable, int]  # task, sample, question
Scores = Mapping[Key, float]
How = Literal["Wilson", "bootstrap", "none"]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; how the interval was made; how many questions and samples (documents) it rests on."""

    mean: float
    low: float
    high: float
    how: How
    questions: int
    samples: int


def wilson(successes: float, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share of n trials."""
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return (centre - half if successes > 0 else 0.0), (centre + half if successes < n else 1.0)  # exact at both ends


def estimate(scores: Scores, *, seed: int = 0) -> Estimate:
    """Mean and interval of scores in [0, 1]; at least one."""
    mean, tasks, samples = _collect(scores)
    values = set(scores.values())
    if samples == 1:
        return Estimate(mean, 0.0, 1.0, "none", len(scores), 1)
    if values in ({0.0}, {1.0}) or (values <= {0.0, 1.0} and len(tasks) == 1 and samples == len(scores)):
        low, high = wilson(mean * samples, samples)
        return Estimate(mean, low, high, "Wilson", len(scores), samples)
    if _alike(tasks):
        unseen = wilson(0, samples)[1]
        return Estimate(mean, max(0.0, mean - unseen), min(1.0, mean + unseen), "Wilson", len(scores), samples)
    low, high = _bootstrap(tasks, seed)
    return Estimate(mean, low, high, "bootstrap", len(scores), samples)


def difference(scores: Scores, first: Scores, *, seed: int = 0) -> Estimate | None:
    """Mean and interval of score - first over the questions that both answered; None when there is none.

    Where every difference is 0, the interval is how large a share of documents could still differ: Wilson's for none of them.
    """
    paired = {key: score - first[key] for key, score in scores.items() if key in first}
    if not paired:
        return None
    mean, tasks, samples = _collect(paired)
    values = set(paired.values())
    if samples == 1:
        return Estimate(mean, -1.0, 1.0, "none", len(paired), 1)
    if values in ({1.0}, {-1.0}):
        least = wilson(samples, samples)[0]
        low, high = (least, 1.0) if mean > 0 else (-1.0, -least)
        return Estimate(mean, low, high, "Wilson", len(paired), samples)
    if _alike(tasks):
        unseen = wilson(0, samples)[1]
        return Estimate(mean, max(-1.0, mean - unseen), min(1.0, mean + unseen), "Wilson", len(paired), samples)
    low, high = _bootstrap(tasks, seed)
    return Estimate(mean, low, high, "bootstrap", len(paired), samples)


def _collect(scores: Scores) -> tuple[float, dict[str, tuple[Array, Array]], int]:
    """The mean of task means, per task the documents' sums and counts, and the number of documents."""
    if not scores:
        raise ValueError("no scores")
    sums: dict[str, dict[Hashable, list[float]]] = {}
    for (task, sample, _), score in scores.items():
        sums.setdefault(task, {}).setdefault(sample, []).append(score)
    tasks = {
        task: (
            np.array([math.fsum(values) for values in documents.values()]),
            np.array([float(len(values)) for values in documents.values()]),
        )
        for task, documents in sums.items()
    }
    mean = math.fsum(float(total.sum() / count.sum()) for total, count in tasks.values()) / len(tasks)
    return mean, tasks, sum(len(documents) for documents in sums.values())


def _alike(tasks: Mapping[str, tuple[Array, Array]]) -> bool:
    """Whether every document of a task has the same mean."""
    return all(np.ptp(sums / counts) < 1e-12 for sums, counts in tasks.values())


def _bootstrap(tasks: Mapping[str, tuple[Array, Array]], seed: int) -> tuple[float, float]:
    means = np.zeros(RESAMPLES)
    for task, (sums, counts) in tasks.items():
        weights = _resampled(len(sums), seed, task)
        means += (weights @ sums) / (weights @ counts)
    low, high = np.percentile(means / len(tasks), [2.5, 97.5])
    return float(low), float(high)


@lru_cache(maxsize=64)
def _resampled(documents: int, seed: int, task: str) -> Array:
    """How often each document is drawn, [RESAMPLES, documents]; tasks are drawn independently of each other."""
    generator = np.random.default_rng([seed, documents, zlib.crc32(task.encode("utf-8", "surrogatepass"))])
    drawn: Array = generator.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES).astype(
        np.float64
    )
    return drawn
