"""Fixtures that more than one test file shares: the bundled model is loaded once, the tiny ones are made once."""

from __future__ import annotations

import pytest
import torch

from dropkv.models import Model, load_model
from tests import tiny


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of files called *_gpu.py are those that `-m gpu` picks, beside marked ones; all are skipped where there is no GPU."""
    for item in items:
        if item.path.stem.endswith("_gpu"):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The bundled model; read only."""
    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_llama() -> Model:
    return tiny.model("llama")


@pytest.fixture(scope="session")
def tiny_mistral() -> Model:
    return tiny.model("mistral")


@pytest.fixture(scope="session")
def tiny_qwen2() -> Model:
    return tiny.model("qwen2")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Model:
    return tiny.model("qwen3")


@pytest.fixture(scope="session", params=tiny.FAMILIES)
def tiny_model(request: pytest.FixtureRequest) -> Model:
    """Each tiny family in turn."""
    made: Model = request.getfixturevalue(f"tiny_{request.param}")
    return made
