"""`bench speed`: what its lines say, what is measured again, and what happens where memory runs out. No figure is compared with a clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dropkv.bench.report import render_report
from dropkv.bench.speed import compressed, machine, plain
from dropkv.bench.speed.machine import NoMemory, measured, medians, refuse
from dropkv.bench.speed.material import Material
from dropkv.bench.speed.plan import SpeedPlan
from dropkv.bench.speed.run import lines_of, open_results, run_speed
from dropkv.bench.speed.shapes import SHAPES, make_network
from dropkv.bench.speed.text import number, speed_tables
from dropkv.models import Model
from tests import tiny

PLAN = SpeedPlan(
    lengths=(96,),
    budgets=(0.5,),
    batch_sizes=(1, 3),
    methods=("adadropkv", "knorm", "full"),
    repeat=1,
    question_tokens=5,
    answer_tokens=4,
    chunk=32,
)
SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    """Looking through all objects of a test run takes longer than a cell."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.model()


@pytest.fixture(scope="module")
def lines(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    results = open_results(tmp_path_factory.mktemp("speed"))
    run_speed(model, PLAN, results)
    return lines_of(model, PLAN, results)


def test_every_cell_has_its_figures_and_ratios_of_one_run(model: Model, lines: list[dict[str, Any]]) -> None:
    compressing = [line for line in lines if line["side"] == "compress"]
    answering = [line for line in lines if line["side"] == "answer"]
    assert [(line["method"], line["observer"], line["budget"]) for line in compressing] == [
        ("transformers", "none", 1.0),
        ("adadropkv", "tail", 0.5),
        ("adadropkv", "replay", 0.5),
        ("knorm", "none", 0.5),
        ("full", "none", 1.0),
    ]
    assert [(line["method"], line["batch_size"]) for line in answering] == [
        (method, size) for size in (1, 3) for method in ("transformers", "adadropkv", "knorm", "full")
    ]
    for line in lines:
        assert (line["version"], line["kind"], line["model"], line["outcome"]) == (1, "speed", model.id, "measured")
        assert line["device"] and line["threads"] >= 1 and line["date"].count("-") == 2 and line["dtype"] == "float32"
        assert line["torch"] == torch.__version__ and line["transformers"] and line["random_weights"] is False
        assert line["peak_memory_bytes"] > 0
        reference = line["transformers_figures"]
        if line["method"] == "transformers":
            assert line["ratios"] == {} and reference is None
            continue
        names = ["seconds"] if line["side"] == "compress" else ["first_token_seconds", "step_seconds", "total_seconds"]
        assert set(line["ratios"]) == {*names, "peak_memory_bytes"}
        for name, ratio in line["ratios"].items():
            assert ratio > 0 and ratio == line[name] / reference[name]
    heads = sum(layer.kv_heads for layer in model.geometry)
    for line in lines:
        if line["method"] != "transformers":
            assert line["kept_entries"] == round(96 * line["budget"]) * heads
    for line in compressing[1:]:
        assert line["seconds"] == pytest.approx(line["prefill_seconds"] + line["score_seconds"])
        assert line["fidelity_seconds"] > 0 and line["expected_memory_bytes"] > 0
        alone = {name for name in line if name.startswith("layer_")}
        assert alone == ({"layer_score_seconds", "layer_keep_seconds"} if line["observer"] == "tail" else set())
        assert all(line[name] > 0 for name in alone)
    for line in answering:
        assert line["first_token_seconds"] < line["total_seconds"]
        assert line["tokens_per_second"] == pytest.approx(line["batch_size"] / line["step_seconds"])
    files = {line["method"]: line["file_bytes"] for line in answering if "file_bytes" in line}
    assert files["knorm"] < files["full"] < 1.1 * files["full"]


def test_only_what_is_missing_is_measured(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    few = SpeedPlan(**{**vars(PLAN), "methods": ("knorm",), "sides": ("compress",)})
    run_speed(model, few, open_results(tmp_path), said.append)
    assert [text.split(", ")[2].split(":")[0] for text in said] == ["transformers", "knorm"]
    run_speed(model, few, open_results(tmp_path), said.append)
    assert len(said) == 2
    more = SpeedPlan(**{**vars(few), "methods": ("knorm", "full")})
    run_speed(model, more, open_results(tmp_path), said.append)
    assert len(said) == 3 and "full" in said[2]  # transformers was measured again for the ratio, and has one line
    last = lines_of(model, more, open_results(tmp_path))[-1]
    assert last["ratios"]["seconds"] == last["seconds"] / last["transformers_figures"]["seconds"]
    monkeypatch.setattr("dropkv.bench.speed.machine._processor", lambda: "another one")
    run_speed(model, more, open_results(tmp_path), said.append)
    assert len(said) == 6  # figures of one machine say nothing of another


def test_out_of_memory_is_a_result(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_arguments: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(plain, "answer_plainly", lacking)
    plan = SpeedPlan(**{**vars(PLAN), "methods": ("knorm",), "sides": ("answer",), "batch_sizes": (2,)})
    results = open_results(tmp_path)
    run_speed(model, plan, results)
    theirs, ours = lines_of(model, plan, results)
    assert theirs["outcome"] == "out of memory" and "step_seconds" not in theirs
    assert ours["outcome"] == "measured" and ours["ratios"] == {} and ours["step_seconds"] > 0
    shown = speed_tables([theirs, ours])
    assert shown.count("out of memory") == 1
    assert "<td class=num>out of memory</td>" in render_report([theirs, ours])
    monkeypatch.setattr(compressed, "write", lacking)
    monkeypatch.setattr(compressed, "compress", lacking)
    both = SpeedPlan(**{**vars(plan), "sides": ("compress", "answer")})
    other = open_results(tmp_path / "other")
    run_speed(model, both, other)
    found = {(line["side"], line["method"]): line["outcome"] for line in lines_of(model, both, other)}
    assert found == {
        ("compress", "transformers"): "measured",
        ("compress", "knorm"): "out of memory",
        ("answer", "transformers"): "out of memory",
        ("answer", "knorm"): "out of memory",
    }


def test_a_cpu_is_not_driven_out_of_memory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "spare_memory", lambda device: 1000)
    refuse(model, 1000)
    with pytest.raises(NoMemory):
        refuse(model, 1001)
    assert measured(model, lambda: plain.read_plainly(model, range(3, 40)), 1) is None
    with pytest.raises(ZeroDivisionError):  # other failures are none of memory
        measured(model, lambda: {"seconds": 1 / 0}, 1)


def test_answers_of_transformers_see_the_document_once_for_all_rows(model: Model) -> None:
    """The batch over a repeated cache chooses what a plain call over the whole text chooses, and dropkv's attention is put back."""
    ids, question = list(range(3, 40)), [50, 51, 52]
    seen: list[list[int]] = []
    network = model.network
    original = network.forward

    def forward(*arguments: Any, **given: Any) -> Any:
        seen.append(given["input_ids"].tolist())
        return original(*arguments, **given)

    forward.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    network.forward = forward
    try:
        plain.answer_plainly(model, ids, [question, question], 4)
    finally:
        del network.forward
    assert network.config._attn_implementation == "dropkv"
    assert [len(rows) for rows in seen] == [1, 2, 2, 2, 2]
    text = [*ids, *question]
    with plain.plain_attention(model), torch.inference_mode():
        for rows in seen[2:]:
            wanted = int(network(input_ids=torch.tensor([text])).logits[0, -1].argmax())
            assert rows == [[wanted], [wanted]]
            text.append(wanted)


def test_shapes(tmp_path: Path) -> None:
    made = {
        name: make_network(name, shape | SMALL, torch.float32, torch.device("cpu")) for name, shape in SHAPES.items()
    }
    assert [one.max_positions for one in made.values()] == [524288, 131072, 1010000, 8192]
    assert made["smollm2-135m"].network.config.tie_word_embeddings
    assert made["llama-3.1-8b"].rope["rope_type"] == "llama3"
    qwen = made["qwen2.5-7b"]
    plan = SpeedPlan(**{**vars(PLAN), "methods": ("adadropkv",), "batch_sizes": (2,)})
    results = open_results(tmp_path)
    run_speed(qwen, plan, results)
    lines = lines_of(qwen, plan, results)
    assert len(lines) == 5 and all(line["random_weights"] and line["outcome"] == "measured" for line in lines)
    assert "qwen2.5-7b, random weights, float32" in speed_tables(lines)


def test_material_is_as_long_as_asked(model: Model) -> None:
    head = Material.of(model, 30).head_tokens
    for made in (
        Material.of(model, 5000),
        Material.of(make_network("s", SHAPES["mistral-7b"] | SMALL, torch.float32, torch.device("cpu")), 5000),
    ):
        assert len(made.ids) == 5000 and len(set(made.questions(7, 5))) == 7
        assert {len(one) for one in made.questions(7, 5)} == {5}
    assert Material.of(model, 5000).ids[:head] == Material.of(model, 30).ids[:head]


def test_medians_and_figures_as_shown() -> None:
    assert medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}
    assert [number(value) for value in (1234.5, 12.345, 1.0, 0.00123)] == ["1,234", "12.3", "1.00", "0.00123"]


def test_hostile_lines_are_escaped_in_the_report(lines: list[dict[str, Any]]) -> None:
    evil = "<script>alert(1)</script>"
    keys = ("model", "device", "torch", "date", "method", "observer", "repeat", "batch_size", "ratios", "step_seconds")
    page = render_report([line | dict.fromkeys(keys, evil) for line in lines])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
