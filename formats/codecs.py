"""The codec "zstd": each block becomes one zstd frame, after its bytes were sorted by their place in an element.

Nothing a frame says of itself is believed: the raw length of a block follows from the tensor's shape, and a frame that
announces another one, a wide window, a dictionary or a second frame is refused before it is decompressed.
"""

from __future__ import annotations

from formats.errors import CorruptFile

LEVELS = (1, 22)  # of zstd; those below 1 save too little to matter here
SAVING = 64  # a tensor is compressed when that saves at least one 64th of it
EXPANSION = 64  # all raw bytes of a file are at most so many times the file's length,
ALLOWANCE = 64 << 20  # and so many bytes


def worthwhile(raw: int, stored: int) -> bool:
    """Whether a tensor of `raw` bytes is compressed when that makes `stored` bytes of it."""
    return stored <= raw - -(-raw // SAVING)


def most_stored(raw: int) -> int:
    """The longest frame of a block: zstd's own bound is below it."""
    return raw + raw // 256 + 128


def most_raw(file_bytes: int) -> int:
    """The raw bytes that all tensors of a file of this length may have together."""
    return EXPANSION * file_bytes + ALLOWANCE


def encode(raw: memoryview, item: int, level: int) -> bytes:
    """The frame of a block of elements of `item` bytes each. Releases the interpreter lock."""
    import zstandard

    return zstandard.ZstdCompressor(level=level, write_checksum=False).compress(_by_place(raw, item))


def decode(frame: memoryview, size: int, item: int) -> memoryview:
    """The `size` raw bytes of a block from its frame; allocates twice as much at most.

    Raises CorruptFile without a place for a frame that is not exactly one of so many bytes.
    """
    import numpy
    import zstandard

    try:
        about = zstandard.get_frame_parameters(frame)
        if about.content_size != size or about.window_size > max(size, 1024) or about.dict_id or about.has_checksum:
            raise CorruptFile(f"is not a zstd frame of {size} bytes as this format has them")
        decoder = zstandard.ZstdDecompressor(max_window_size=max(size, 1024))
        sorted_bytes = decoder.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptFile("is not a whole zstd frame") from error
    if len(sorted_bytes) != size:
        raise CorruptFile(f"is not a zstd frame of {size} bytes as this format has them")
    if item == 1:
        return memoryview(sorted_bytes)
    planes = numpy.frombuffer(sorted_bytes, numpy.uint8).reshape(item, -1)
    elements = planes[-1].astype(f"<u{item}")
    for plane in planes[-2::-1]:
        elements <<= 8
        elements |= plane
    return memoryview(elements.view(numpy.uint8).data)


def _by_place(raw: memoryview, item: int) -> memoryview:
    """The first byte of every element, then the second of every element, and so on."""
    import numpy

    if item == 1:
        return raw
    elements = numpy.frombuffer(raw, f"<u{item}")
    planes = numpy.empty((item, elements.size), numpy.uint8)
    for place, plane in enumerate(planes):
        numpy.right_shift(elements, 8 * place, out=plane, casting="unsafe")  # unsafe: the lowest byte is what is wanted
    return planes.reshape(-1).data
