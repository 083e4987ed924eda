"""A copy without token ids is the file that a writer told to leave them out would have written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formats import CorruptFile, ExistingFile, copy_without_tokens, read_file, read_header, verify_file


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_copy_is_byte_for_byte_the_file_written_without_tokens(tmp_path, make_sample, dtype):
    make_sample(dtype).write(tmp_path / "with.kv", block_bytes=4096)
    replace(make_sample(dtype), tokens=None).write(tmp_path / "without.kv", block_bytes=4096)
    size = copy_without_tokens(tmp_path / "with.kv", tmp_path / "copy.kv")
    assert (tmp_path / "copy.kv").read_bytes() == (tmp_path / "without.kv").read_bytes()
    assert size == (tmp_path / "copy.kv").stat().st_size == read_header(tmp_path / "copy.kv").file_bytes
    assert read_file(tmp_path / "copy.kv").tokens is None
    assert verify_file(tmp_path / "copy.kv").tensors == verify_file(tmp_path / "with.kv").tensors - 1


def test_a_file_without_tokens_is_copied_as_it_is(tmp_path, make_sample):
    make_sample(with_tokens=False).write(tmp_path / "book.kv")
    copy_without_tokens(tmp_path / "book.kv", tmp_path / "copy.kv")
    assert (tmp_path / "copy.kv").read_bytes() == (tmp_path / "book.kv").read_bytes()


def test_a_damaged_file_is_not_copied_and_an_existing_one_not_replaced(tmp_path, make_sample):
    make_sample().write(tmp_path / "book.kv")
    data = bytearray((tmp_path / "book.kv").read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad.kv").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"bad\.kv: layers\.2\.values, block 0"):
        copy_without_tokens(tmp_path / "bad.kv", tmp_path / "copy.kv")
    with pytest.raises(ExistingFile, match=r"book\.kv: exists already"):
        copy_without_tokens(tmp_path / "book.kv", tmp_path / "book.kv")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.kv", "book.kv"]
