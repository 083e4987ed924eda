"""A KV file names the model it was made with, but never a folder of the machine that reads it."""

from __future__ import annotations

import pytest

from dropkv.checkpoints import BUNDLED, find_checkpoint, name_in_file
from dropkv.errors import ModelError


def test_names_that_are_loaded() -> None:
    assert name_in_file(BUNDLED, "bundled", None) == BUNDLED
    assert name_in_file("owner/name-1.5", "hub", "0123abc" * 5) == "owner/name-1.5"
    assert name_in_file("owner/name", "hub", None) == "owner/name"


@pytest.mark.parametrize(
    "name",
    ["/etc", "../../etc", "a/../../etc", "owner/..", "../name", "./a", "", ".", "~/x", "x" * 5000, "a/b\x1b[2J\n", "a"],
)
def test_a_file_from_the_hub_cannot_name_a_folder(name: str) -> None:
    with pytest.raises(ModelError, match="which is no Hub id: name the model with --model") as caught:
        name_in_file(name, "hub", None)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["/etc", "owner/name", "other"])
def test_the_bundled_model_has_one_name(name: str) -> None:
    with pytest.raises(ModelError, match="no Hub id"):
        name_in_file(name, "bundled", None)


@pytest.mark.parametrize("revision", ["../../x", "", "a/b", "/etc", "x\ny"])
def test_a_revision_is_no_path(revision: str) -> None:
    with pytest.raises(ModelError, match=r"names the revision .* name one with --revision"):
        name_in_file("owner/name", "hub", revision)


def test_a_folder_is_asked_for() -> None:
    with pytest.raises(ModelError, match=r"the local model folder 'mine': name it with --model FOLDER"):
        name_in_file("mine", "folder", None)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "/" + "x" * 300])
def test_names_that_no_file_system_takes(name: str) -> None:
    with pytest.raises(ModelError, match="no such alias or folder"):
        find_checkpoint(name)
