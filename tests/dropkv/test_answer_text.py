"""Answers that end inside a character: its first bytes are left out, everywhere; U+FFFD that the model wrote stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import dropkv
from dropkv.answer_text import AnswerText
from dropkv.generate import Session
from dropkv.settings import Sampling
from tests import tiny

TEXT = "The harbour master kept the ledger in a locked drawer. The code is 4711, and the ship is Evergreen. " * 4
BULB = "\U0001f4a1"


def byte_fallback() -> PreTrainedTokenizerFast:
    """In the manner of Llama-2: a few words, and a token for each byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "\ufffd"]
    backend = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )  # fmt: skip
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def spelled(tokenizer: PreTrainedTokenizerFast, raw: bytes) -> list[int]:
    """A token for each byte."""
    first = "<0x{:02X}>" if "<0x00>" in tokenizer.get_vocab() else None
    if first:
        return [tokenizer.convert_tokens_to_ids(first.format(byte)) for byte in raw]
    from dropkv.answer_text import LETTERS

    letters = {byte: letter for letter, byte in LETTERS.items()}
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in raw]


@pytest.fixture(params=["letters", "fallback"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tiny.tokenizer() if request.param == "letters" else byte_fallback()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\xf0", "a"),
        (b"a\xf0\x9f", "a"),
        (b"a\xf0\x9f\x92", "a"),
        (BULB.encode(), BULB),
        (BULB.encode() + b"\xe2\x82", BULB),  # a whole one before it is not spoilt
        (b"\xf0\x9f\x92", ""),
        (b"a\xef\xbf\xbd", "a\ufffd"),  # U+FFFD itself, in the middle and at the end
        (b"a\xef\xbf\xbdb\xc3", "a\ufffdb"),
        (b"a\xef\xbf", "a"),
        (b"", ""),
    ],
)
def test_only_an_unfinished_end_is_left_out(tokenizer: PreTrainedTokenizerFast, raw: bytes, text: str) -> None:
    assert AnswerText(tokenizer, frozenset())(spelled(tokenizer, raw)) == text


@pytest.mark.parametrize(("raw", "text"), [(b"a\xff", "a\ufffd"), (b"a\x80", "a\ufffd"), (b"a\xf0b", "a\ufffdb")])
def test_bytes_that_can_never_be_a_character_are_shown_as_such(raw: bytes, text: str) -> None:
    assert AnswerText(tiny.tokenizer(), frozenset())(spelled(tiny.tokenizer(), raw)) == text


def test_text_that_has_been_shown_is_never_taken_back(tokenizer: PreTrainedTokenizerFast) -> None:
    whole = f"na\u00efve {BULB} \ufffd \u4f60\u597d said 's , . n't"
    tokens = spelled(tokenizer, whole.encode())
    decode = AnswerText(tokenizer, frozenset())
    shown = [decode(tokens[:count]) for count in range(len(tokens) + 1)]
    assert shown[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


def test_tokens_that_are_no_text_are_left_out_before_the_end_is_looked_at() -> None:
    tokenizer = tiny.tokenizer()
    end = tokenizer.eos_token_id
    decode = AnswerText(tokenizer, frozenset([end]))
    assert decode([*spelled(tokenizer, b"a\xf0\x9f"), end]) == "a"
    assert decode([*spelled(tokenizer, b"a"), end]) == "a"


def test_a_decoder_that_shows_no_bytes_has_its_marks_taken_off() -> None:
    class Opaque:
        def __call__(self, text: str, **options: object) -> Opaque:
            return self

        input_ids = (0,)

        def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
            return ["x"] * len(ids)

        def decode(self, ids: Sequence[int], **options: object) -> str:
            return "\ufffda" + "\ufffd" * (len(ids) - 1)

    assert AnswerText(Opaque(), frozenset())([1, 2, 3]) == "\ufffda"


class Script(torch.nn.Module):
    """In the place of a network's last layer: it says the tokens of a list, one a call."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = iter(tokens)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], tiny.VOCABULARY)
        logits[..., next(self.tokens)] = 1.0
        return logits


@pytest.fixture
def session() -> Session:
    made = dropkv.compress(TEXT, model=tiny.model("llama"), budget=0.5, observe="tail", fidelity=False)
    return made.session()


def say(session: Session, raw: bytes) -> tuple[list[str], dropkv.Answer]:
    """The pieces and the answer of a model that says these bytes and is cut off there."""
    tokens = spelled(session.model.tokenizer, raw)
    session.model.network.lm_head = Script(tokens)
    stream = session.stream("Who?", Sampling(max_new_tokens=len(tokens)))
    pieces = list(stream)
    assert stream.answer is not None and stream.answer.generated_tokens == len(tokens)
    return pieces, stream.answer


def test_an_answer_that_is_cut_inside_a_character(session: Session) -> None:
    pieces, answer = say(session, f"ok {BULB}".encode()[:-1])
    assert (pieces, answer.text) == (["o", "k", " "], "ok")
    pieces, answer = say(session, f"\ufffd{BULB}".encode())
    assert (pieces, answer.text) == (["\ufffd", BULB], f"\ufffd{BULB}")


def test_a_conversation_keeps_the_tokens_and_saves_the_text(session: Session, tmp_path: Path) -> None:
    from dropkv.transcripts import save_turns

    made = dropkv.compress(TEXT, model=session.model, budget=0.5, observe="tail", fidelity=False)
    tokens = spelled(session.model.tokenizer, f"ok{BULB}".encode()[:-2])
    session.model.network.lm_head = Script(tokens)
    chat = session.chat()
    assert chat.ask("Who?", Sampling(max_new_tokens=len(tokens))).text == "ok"
    assert chat.turns[0].tokens == tokens  # what the model has said is what it goes on from
    save_turns(tmp_path / "a.jsonl", chat.turns, session, made.metadata)
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["answer"] == "ok"


def test_ids_that_the_tokenizer_does_not_know_are_no_text_and_break_no_character(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = AnswerText(tokenizer, frozenset())
    a, *bulb = spelled(tokenizer, b"a" + BULB.encode())
    unknown = len(tokenizer) + 3
    assert text([a, unknown, bulb[0], unknown]) == "a"
    assert text([a, bulb[0], unknown, *bulb[1:], unknown]) == "a" + BULB
