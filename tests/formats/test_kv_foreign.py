"""Whatever else is given instead of a KV file is recognised and named."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from formats import FormatError, NotAKVFile, UnreadableFile, read_file, read_header, verify_file

OPENINGS = {
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "git-LFS pointer.*git lfs pull",
    ),
    "web page": (b"\n<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
    "web page without doctype": (b"<html><head></head></html>", "web page"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(100), "GGUF model"),
    "llama.cpp session": ((0x6767736E).to_bytes(4, "little") + bytes(100), r"llama\.cpp session"),
    "llama.cpp slot": ((0x67677371).to_bytes(4, "little") + bytes(100), r"llama\.cpp sequence state"),
    "PDF": (b"%PDF-1.7\n" + bytes(100), "PDF document.*pdftotext"),
    "gzip": (b"\x1f\x8b\x08\0" + bytes(100), "gzip data"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(100), "zstd data"),
    "pickle": (pickle.dumps(list(range(100))), "Python pickle"),
    "EPUB": (b"PK\x03\x04" + bytes(26) + b"mimetypeapplication/epub+zip", "EPUB book"),
    "empty": (b"", r"empty \(0 bytes\)"),
    "short": (b"\x01\x02\x03", r"too short \(3 bytes\)"),
    "eight bytes": (bytes(8), r"too short \(8 bytes\)"),
    "text": ("Ein Text über Züge. ".encode() * 300, "is text.*dropkv compress"),
    "text cut in a character": (b"a" * 4095 + "ü".encode() * 10, "is text"),
    "noise": (bytes(range(128, 256)) * 10, "not a KV file"),
}


@pytest.mark.parametrize("case", OPENINGS)
def test_foreign_file_is_named(tmp_path, case):
    data, match = OPENINGS[case]
    path = tmp_path / "what.kv"
    path.write_bytes(data)
    for read in (read_header, read_file, verify_file):
        with pytest.raises(NotAKVFile, match=match) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: is ")


def test_torch_and_zip_files(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "cache.pt")
    with pytest.raises(NotAKVFile, match=r"torch \.pt file"):
        read_header(tmp_path / "cache.pt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(NotAKVFile, match="zip archive"):
        read_header(tmp_path / "a.zip")


@pytest.mark.parametrize(
    ("names", "metadata", "match"),
    [
        (["0.0", "0.1"], {"0.0.0": "1", "1.model": "m", "2.0": "KVCache"}, "mlx-lm prompt cache"),
        (["model.layers.0.mlp.weight"], {"format": "pt"}, "holds model weights.*--model"),
        (["x"], None, "safetensors file without a dropkv entry"),
        (["x"], {"dropkw": "{}"}, "safetensors file without a dropkv entry"),
    ],
)
def test_other_safetensors_files(tmp_path, names, metadata, match):
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "other.kv", metadata=metadata)
    with pytest.raises(NotAKVFile, match=match):
        read_file(tmp_path / "other.kv")


def test_a_header_too_long_for_a_kv_file_is_refused_by_a_foreign_file_too(tmp_path):
    path = tmp_path / "other.kv"
    path.write_bytes((5 << 20).to_bytes(8, "little") + b'{"a":1}' + b" " * (5 << 20))
    with pytest.raises(FormatError, match="longer than a file of"):
        read_header(path)


def test_what_is_no_file_at_all(tmp_path):
    os.mkfifo(tmp_path / "pipe.kv")
    (tmp_path / "loop.kv").symlink_to("loop.kv")
    (tmp_path / "folder.kv").mkdir()
    cases = {
        "pipe.kv": "is a pipe, not a file",
        "loop.kv": "cannot be opened: Too many levels",
        "folder.kv": "is a folder, not a file",
        "missing.kv": "no such file; check the name",
        "folder.kv/../missing/x.kv": "no such file",
        "nul\0.kv": "cannot be opened",
    }
    for name, match in cases.items():
        for read in (read_header, read_file, verify_file):
            with pytest.raises(UnreadableFile, match=match):
                read(f"{tmp_path}/{name}")
    with pytest.raises(UnreadableFile, match="is a device"):
        read_header("/dev/null")


def test_a_symbolic_link_is_followed(tmp_path, kv):
    (tmp_path / "link.kv").symlink_to(kv)
    assert read_header(tmp_path / "link.kv") == read_header(str(kv))
