"""Buffers through which the bytes of a file go to where they are wanted; each is used over and over.

Bytes are read into such a buffer, and hashed, decompressed and copied from there: the file is not mapped, since the pages of a
map change with the file, also after they were hashed, and touching one behind the end of a file that was cut kills the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Buffer:
    """Host memory that grows to the longest size asked for, and copies out of it that are done when `send` returns."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._bytes = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Its first `size` bytes, for new content, once nothing copies the old content any more."""
        self.wait()
        if self._memory is None or len(self._bytes) < size:
            self._memory, self._bytes = None, memoryview(b"")
            self._memory = self._allocate(size)
            self._bytes = self._memory.numpy().data
        return self._bytes[:size]

    def send(self, start: int, stop: int, dtype: torch.dtype, out: Tensor) -> None:
        """Copy the bytes [start, stop), which are numbers of `dtype`, to `out` [numbers], in its dtype and on its device."""
        assert self._memory is not None
        part = self._memory[start:stop]
        if start % dtype.itemsize:
            part = part.clone()
        self._copy(part.view(dtype), out)

    def sent(self) -> None:
        """All copies of this content have been started."""

    def wait(self) -> None:
        """Until all copies are done."""

    def _allocate(self, size: int) -> Tensor:
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def _copy(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part)


class PinnedBuffer(Buffer):
    """Page-locked memory: copies to GPUs go on while the next bytes are read into another buffer.

    streams: for each device the one that copies go in, whichever thread starts them.
    """

    def __init__(self, streams: Mapping[torch.device, torch.cuda.Stream]) -> None:
        super().__init__()
        self._streams = streams
        self._used: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def sent(self) -> None:
        self._events += [self._streams[device].record_event() for device in self._used]
        self._used.clear()

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self._events.clear()

    def _allocate(self, size: int) -> Tensor:
        import torch

        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copy(self, part: Tensor, out: Tensor) -> None:
        import torch

        if out.device not in self._streams:
            out.copy_(part)
            return
        self._used.add(out.device)
        with torch.cuda.stream(self._streams[out.device]):
            if part.dtype != out.dtype:  # the device turns one into the other: the host would need memory for it
                part = part.to(out.device, non_blocking=True)
            out.copy_(part, non_blocking=True)


class Buffers:
    """Pairs of buffers that several threads take and put back: one for bytes as they are stored, one for decompressed ones.

    None of them has memory before it is used.
    """

    def __init__(self, make: Callable[[], Buffer], count: int) -> None:
        self.count = count
        self._free = deque((make(), make()) for _ in range(count))

    @contextmanager
    def pair(self) -> Iterator[tuple[Buffer, Buffer]]:
        """The pair that was put back first, so that its copies have most likely ended; for `count` threads at most."""
        pair = self._free.popleft()
        try:
            yield pair
        finally:
            for buffer in pair:
                buffer.sent()
            self._free.append(pair)

    def wait(self) -> None:
        """Until all copies of all buffers are done. To be called when no thread has a pair."""
        for pair in self._free:
            for buffer in pair:
                buffer.wait()


@contextmanager
def staging(threads: int, devices: Iterable[torch.device] = ()) -> Iterator[Buffers]:
    """Buffers for so many threads that copy to these devices; at the end of the block everything has arrived."""
    streams = _streams(devices)
    buffers = Buffers(partial(PinnedBuffer, streams), 2 * threads) if streams else Buffers(Buffer, threads)
    try:
        yield buffers
    finally:
        buffers.wait()


def _streams(devices: Iterable[torch.device]) -> dict[torch.device, torch.cuda.Stream]:
    """The caller's stream on every GPU: what was allocated in it may be written in it without waiting."""
    gpus = {device for device in devices if device.type == "cuda"}
    if not gpus:
        return {}
    import torch

    indexed = {torch.device("cuda", torch.cuda.current_device() if gpu.index is None else gpu.index) for gpu in gpus}
    return {device: torch.cuda.current_stream(device) for device in indexed}
