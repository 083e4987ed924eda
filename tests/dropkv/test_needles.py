"""The real small model: a planted fact is still answered from a quarter of the cache, with every default, without the question known."""

from __future__ import annotations

import pytest

from benchmarks.needles import needles
from dropkv import CompressSettings, Document, Sampling
from dropkv.compression import compress_document


@pytest.mark.slow
@pytest.mark.parametrize("kind,least", [("repeated", 9), ("prose", 6)])
def test_planted_facts_survive_a_quarter_budget(smollm2, kind, least):
    right = 0
    for needle in needles(smollm2.tokenizer, kind, 1400, 10, seed=20):
        made = compress_document(smollm2, Document.of(needle.text, kind), CompressSettings(budget=0.25))
        assert 1350 <= made.report.document_tokens <= 1460
        assert made.report.kept_entries * 4 <= made.report.full_entries + 1
        right += needle.answer in made.session().ask(needle.question, Sampling(max_new_tokens=32)).text
    assert right >= least
