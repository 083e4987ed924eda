"""A server asked by the real client of OpenAI's API: answers of `ask`, errors in its shape, rows that are given back."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dropkv
from dropkv.decode.batch import Batch
from dropkv.library import KVFile
from dropkv.memory import STATUS, _status
from dropkv.models import Model
from dropkv.settings import Sampling
from tests import tiny
from tests.serving import Served, serving, until

openai = pytest.importorskip("openai", reason="pip install 'dropkv[test]'")


TEXTS = {
    "harbour": "The harbour master kept the ledger in a locked drawer. The code is 4711. The ship is Evergreen. " * 3,
    "lamp": "A lighthouse stands on the cliff, and its lamp was dark for twenty minutes. Who put it out? " * 3,
}
LONG = 2000  # tokens: an answer that is not done before anybody looks


def opened(model: Model, text: str) -> KVFile:
    made = dropkv.compress(text, model=model, method="adadropkv", budget=0.5, chunk=40, fidelity=False)
    return KVFile(made.session(), made.metadata, 0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.model("llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def files(model: Model) -> dict[str, KVFile]:
    return {name: opened(model, text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def served(files: dict[str, KVFile]) -> Iterator[Served]:
    with serving(files) as started:
        yield started
        assert started.failures == []


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_models_are_the_files(served: Served, files: dict[str, KVFile]) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["harbour", "lamp"]
    found = client.models.retrieve("lamp").model_dump()
    kv = files["lamp"]
    assert (found["object"], found["owned_by"], found["document"]) == ("model", "dropkv", "text")
    assert (found["document_tokens"], found["most_tokens"]) == (kv.document_tokens, 8192 - kv.document_tokens)
    with pytest.raises(openai.NotFoundError, match="there is no model 'sea': use one of harbour, lamp"):
        client.models.retrieve("sea")


@pytest.mark.parametrize("name", list(TEXTS))
def test_an_answer_is_that_of_ask(served: Served, files: dict[str, KVFile], name: str) -> None:
    want = files[name].ask("Which ship?", Sampling(max_new_tokens=12))
    found = served.client().chat.completions.create(model=name, messages=user("Which ship?"), max_tokens=12)
    choice = found.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (want.text, "assistant", "length")
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    prompt = want.document_tokens + want.prefilled_tokens
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (prompt, want.generated_tokens)
    assert found.usage.prompt_tokens_details.cached_tokens == want.document_tokens
    assert found.model == name and found.object == "chat.completion" and found.id.startswith("chatcmpl-")


def test_a_stream_gives_the_same_in_pieces(served: Served, files: dict[str, KVFile]) -> None:
    want = files["lamp"].ask("Which ship?", Sampling(max_new_tokens=30))
    stream = served.client().chat.completions.create(
        model="lamp",
        messages=user("Which ship?"),
        max_completion_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *parts, end, costs = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == want.text
    assert len(parts) > 5 and parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in [*parts, end]] == [None] * len(parts) + ["length"]
    assert costs.choices == [] and costs.usage is not None and costs.usage.completion_tokens == want.generated_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_samples_are_those_of_ask_with_the_same_seed(served: Served, files: dict[str, KVFile]) -> None:
    texts = []
    for seed in (1, 2):
        found = served.client().chat.completions.create(
            model="lamp", messages=user("Who?"), max_tokens=12, temperature=1.5, top_p=0.9, seed=seed
        )
        texts.append(found.choices[0].message.content)
        assert texts[-1] == files["lamp"].ask("Who?", Sampling(12, 1.5, 0.9, seed)).text
    assert texts[0] != texts[1]


def test_a_stop_string_ends_the_answer_and_frees_the_row(served: Served, files: dict[str, KVFile]) -> None:
    want = files["lamp"].ask("Who?", Sampling(max_new_tokens=40)).text
    stop = want[10:12]
    found = served.client().chat.completions.create(
        model="lamp", messages=user("Who?"), max_tokens=LONG, stop=[stop, "never said"]
    )
    assert found.choices[0].message.content == want[: want.index(stop)].strip()
    assert found.choices[0].finish_reason == "stop" and found.usage is not None and found.usage.completion_tokens < 40
    until(lambda: served.idle)


def test_a_conversation_goes_on_from_turn_to_turn(served: Served, files: dict[str, KVFile]) -> None:
    messages = [*user("Who?"), {"role": "assistant", "content": "The master."}, *user("Why?")]
    found = served.client().chat.completions.create(model="harbour", messages=messages, max_tokens=12)
    session = files["harbour"].session
    chat = session.chat()
    chat.resume([dropkv.generate.Turn("Who?", session.seam.answer_ids("The master."))])
    assert found.choices[0].message.content == chat.ask("Why?", Sampling(max_new_tokens=12)).text
    assert found.choices[0].message.content != files["harbour"].ask("Why?", Sampling(max_new_tokens=12)).text


def test_many_clients_over_two_files_get_their_own_answers(served: Served, files: dict[str, KVFile]) -> None:
    questions = [f"Who kept the {word} {number}?" for word in ("ledger", "ship") for number in range(10)]
    want = {
        (name, question): kv.ask(question, Sampling(max_new_tokens=6 + len(question) % 5)).text
        for name, kv in files.items()
        for question in questions
    }
    assert len(set(want.values())) > 20

    def ask_ten(number: int) -> list[tuple[tuple[str, str], str]]:
        client, found = served.client(), []
        for turn in range(10):
            name, question = list(TEXTS)[(number + turn) % 2], questions[(3 * number + 7 * turn) % 20]
            options = {"model": name, "messages": user(question), "max_tokens": 6 + len(question) % 5}
            if (number + turn) % 3:
                text = client.chat.completions.create(**options).choices[0].message.content
            else:
                stream = client.chat.completions.create(**options, stream=True)
                text = "".join(part.choices[0].delta.content or "" for part in stream)
            found.append(((name, question), text))
        client.close()
        return found

    buffers = [part.data_ptr() for part in served.server.engine._short.batch.tails.keys]  # type: ignore[union-attr]
    before = len(served.reports)
    with ThreadPoolExecutor(20) as clients:
        found = [pair for pairs in clients.map(ask_ten, range(20)) for pair in pairs]
    assert len(found) == 200 and all(want[asked] == text for asked, text in found)
    until(lambda: served.idle)
    assert len(served.reports) - before == 200
    assert buffers == [part.data_ptr() for part in served.server.engine._short.batch.tails.keys]  # type: ignore[union-attr]


def test_memory_stays_as_it_is(served: Served) -> None:
    client = served.client()
    held = []
    for _ in range(3):
        for number in range(15):
            client.chat.completions.create(model="lamp", messages=user(f"Who {number}?"), max_tokens=6)
        held.append(_status("VmRSS"))
    if STATUS.exists():
        assert held[2] - held[1] < 4 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_who_goes_away_frees_the_row(model: Model, stream: bool) -> None:
    with serving({"lamp": opened(model, TEXTS["lamp"])}, rows=1) as one:
        # longer than the next question needs, and answered by the same single row
        options: dict[str, Any] = {"model": "lamp", "messages": user("Who?"), "max_tokens": LONG}
        if stream:
            pieces = one.client().chat.completions.create(**options, stream=True)
            next(iter(pieces))
            waiting = threading.Thread(target=one.client().chat.completions.create, kwargs=options | {"max_tokens": 5})
            waiting.start()
            pieces.close()
            waiting.join(20)
            assert not waiting.is_alive()
        else:
            with pytest.raises(openai.APITimeoutError):
                one.client(timeout=0.3).chat.completions.create(**options)
        until(lambda: one.idle and one.reports)
        assert one.reports[0].outcome == "gone" and one.reports[0].usage.answer < LONG - 1
        found = one.client().chat.completions.create(**options | {"max_tokens": 5})
        assert found.usage is not None and found.usage.completion_tokens == 5 and one.failures == []


def test_a_question_longer_than_a_row_is_answered_beside_the_others(
    files: dict[str, KVFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropkv.serve.shelf.ROW", 64)
    with serving(files, rows=2) as small:
        assert small.server.engine.capacity == 64
        long = "Who kept the ledger and the code of the ship? " * 8
        want = files["harbour"].ask(long, Sampling(max_new_tokens=9)).text
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(
                    small.client().chat.completions.create, model="harbour", messages=user(text), max_tokens=9
                )
                for text in (long, "Who?", long, "Who?")
            ]
        texts = [one.result().choices[0].message.content for one in asked]
        assert texts == [want, files["harbour"].ask("Who?", Sampling(max_new_tokens=9)).text] * 2
        assert small.server.engine._long.batch is None


@pytest.mark.parametrize(
    ("fields", "error", "param", "code"),
    [
        ({"model": "sea"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": user("code " * 9000)}, openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"messages": user(" ")}, openai.BadRequestError, "messages[0]", None),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, *user("Who?")]},
            openai.BadRequestError,
            "messages[0]",
            "system_message_differs",
        ),
        ({"stop": 5}, openai.BadRequestError, "stop", None),
        ({"n": 3}, openai.BadRequestError, "n", "unsupported_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_alone(
    served: Served,
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    code: str | None,
    stream: bool,
) -> None:
    with pytest.raises(error) as refused:
        served.client().chat.completions.create(
            **{"model": "lamp", "messages": user("Who?"), "stream": stream} | fields
        )
    body: Any = refused.value.body
    assert (body["type"], body["param"], body["code"]) == ("invalid_request_error", param, code)
    assert body["message"] and served.idle


def fetch(address: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a reply."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=body, headers=headers), timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "word"),
    [
        ("/v1/chat/completions", b"{", {}, 400, "no JSON"),
        ("/v1/chat/completions", b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', {}, 404, "no model"),
        ("/v1/chat/completions", b"x" * (5 << 20), {}, 413, "4,194,304 bytes"),
        ("/v1/chat/completions", None, {}, 405, "is not used so"),
        ("/v1/completions", b"{}", {}, 404, "there are /v1/models"),
        ("/health", None, {"Host": "evil.example"}, 403, "use its address in numbers"),
        ("/health", None, {"Origin": "http://evil.example"}, 403, "may not use this server"),
        ("/health", None, {"Origin": "null"}, 403, "may not use this server"),
    ],
)  # fmt: skip
def test_what_no_client_sends_is_refused_in_the_same_shape(
    served: Served, path: str, body: bytes | None, headers: dict[str, str], status: int, word: str
) -> None:
    found, error = fetch(served.address + path, body, **headers)
    assert found == status and set(error["error"]) == {"message", "type", "param", "code"}
    assert word in error["error"]["message"]


def test_health_and_the_page(served: Served) -> None:
    until(lambda: served.idle)
    status, health = fetch(served.address + "/health", Host="localhost:1")
    assert status == 200
    wanted = {"status": "ok", "rows": 8, "answering": 0, "waiting": 0, "files": ["harbour", "lamp"]}
    assert {name: health[name] for name in wanted} == wanted
    with urllib.request.urlopen(served.address + "/") as reply:
        page = reply.read().decode()
        policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "/v1/chat/completions" in page and "http://" not in page and "https://" not in page


def test_an_answer_that_fails_fails_alone(files: dict[str, KVFile], monkeypatch: pytest.MonkeyPatch) -> None:
    admit, step = Batch.admit, Batch.step

    def failing(batch: Batch, rows: Any) -> None:
        if any(len(row.asked.ids) > 60 for row in rows):
            raise RuntimeError("a long one")
        admit(batch, rows)

    with serving(files, rows=2) as one:
        client = one.client()
        monkeypatch.setattr(Batch, "admit", failing)
        options: dict[str, Any] = {"model": "lamp", "max_tokens": 80}
        with ThreadPoolExecutor(1) as other:
            good = other.submit(client.chat.completions.create, messages=user("Who?"), **options)
            until(lambda: one.server.engine.running)
            with pytest.raises(openai.InternalServerError, match="RuntimeError"):
                client.chat.completions.create(messages=user("Who was it? " * 20), **options)
            want = files["lamp"].ask("Who?", Sampling(max_new_tokens=80)).text
            assert good.result().choices[0].message.content == want
        monkeypatch.setattr(Batch, "step", lambda batch: 1 / 0)
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(client.chat.completions.create(messages=user("Who?"), stream=True, **options))
        monkeypatch.setattr(Batch, "step", step)
        assert client.chat.completions.create(messages=user("Who?"), **options).choices[0].message.content == want
        assert [type(error) for error in one.failures] == [RuntimeError, ZeroDivisionError] and one.idle


def test_too_many_are_told_to_come_again(files: dict[str, KVFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropkv.serve.engine.MOST_WAITING", 0)
    with serving(files, rows=1) as full, pytest.raises(openai.RateLimitError, match="ask again later"):
        full.client().chat.completions.create(model="lamp", messages=user("Who?"))


@pytest.mark.slow
def test_the_small_model_answers_and_goes_on(smollm2: Model) -> None:
    text = Path(__file__).parents[2].joinpath("examples/observatory.md").read_text()
    kv = opened(smollm2, text)
    with serving({"observatory": kv}) as one:
        client = one.client()
        options: dict[str, Any] = {"model": "observatory", "max_tokens": 24}
        chat, messages = kv.chat(), []
        for question in ("What is the password of the alarm?", "Who knows it?"):
            messages += user(question)
            found = client.chat.completions.create(messages=messages, **options).choices[0].message.content
            assert found == chat.ask(question, Sampling(max_new_tokens=24)).text
            messages.append({"role": "assistant", "content": found})
        assert "opper" in messages[1]["content"]
