"""A copy of a KV file without the document's token ids: the entries stay byte for byte what they were."""

from __future__ import annotations

import os
from dataclasses import replace

from formats import header as headers
from formats.blocks import read_blocks
from formats.errors import naming
from formats.hashing import run_bytes, spans
from formats.reader import read_index
from formats.source import Place, open_source
from formats.temporary import replacing
from formats.writer import write_all

TOKENS = "tokens"


def copy_without_tokens(place: Place, target: str | os.PathLike[str], *, overwrite: bool = False) -> int:
    """Write the file to `target` without its tensor of token ids, and return the size of the copy in bytes.

    Every byte is checked on its way. A file that holds no token ids gives the same bytes again. Memory: the index
    tensors and a buffer of at most 4 MiB. Raises what read_file raises, ExistingFile or WriteFailed.
    """
    with naming(place), open_source(place) as source:
        header = headers.parse(source)
        read_index(source, header)
        kept = [info for name, info in header.tensors.items() if name != TOKENS]
        gone = kept[0].start  # tokens stand first
        moved = [replace(info, start=info.start - gone, stop=info.stop - gone) for info in kept]
        hashes = {info.name: info.blocks for info in kept}
        front = headers.build(header.metadata, moved, hashes, header.block_bytes)
        with naming(target), replacing(target, overwrite=overwrite) as fd:
            write_all(fd, memoryview(front))
            buffer = memoryview(bytearray(run_bytes(header.block_bytes)))
            for info in kept:
                for low, high in spans(0, info.size, len(buffer)):
                    with naming(place):
                        read_blocks(source, header, info, low, buffer[: high - low])
                    write_all(fd, buffer[: high - low])
        return len(front) + moved[-1].stop
