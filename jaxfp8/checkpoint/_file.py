"""One safetensors file: its header, and the bytes of a slice of a tensor.

Slices are read, not mapped. If a mapped file is truncated during a read, the process dies, and
mapped pages count as its memory. A short read is an ordinary error with a message.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxfp8.checkpoint import _dtypes, _foreign
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._header import LENGTH_BYTES, Entry, Header, header_length, parse

Index = tuple[slice, ...]
# Shorter runs are cut out of whole rows: the disk reads pages of 4096 bytes anyway.
_SHORTEST_RUN = 4096
# Rows to read at once before cutting.
_MOST_ROWS_BYTES = 8 << 20
# Several threads read a run in parts of this many bytes. From the page cache to memory already in
# use, eight threads copied 44 GB/s on 16 cores, and one copied 7.
PART_BYTES = 4 << 20
_READERS = min(8, os.cpu_count() or 1)
# A buffer at such an address can become an array of the CPU without a copy.
_ALIGNMENT = 64


class File:
    """An open file; `close` it, or use it as a context.

    Attributes:
      path: its path.
      header: its tensors.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise _unreadable(path, error) from error
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            self.header = self._read_header()
            opened.pop_all()  # all is well: the caller closes it

    def close(self) -> None:
        """Close the file, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, entry: Entry, index: Index = ()) -> np.ndarray:
        """A slice of a tensor, in memory of its own; no other bytes are read.

        Args:
          entry: an entry of the header, with a dtype of JAX or numpy.
          index: a slice of step 1 for each axis; () for all of it.

        Raises:
          CheckpointError: the file lost bytes since it was opened.
        """
        dtype = _dtypes.BY_CODE[entry.code]
        bounds = bounds_of(entry.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        out = aligned(shape, dtype)
        if out.size:
            for start, row, cut, target in _runs(entry, dtype.itemsize, bounds):
                self._fill(entry, start, row, cut, out.reshape(-1).view(np.uint8)[target])
        return out

    def chunks(self, entry: Entry, nbytes: int, unit: int = 1) -> Iterator[np.ndarray]:
        """A tensor in order, some rows at a time.

        Args:
          entry: the tensor.
          nbytes: the most bytes at once, if `unit` rows are not more.
          unit: the number of rows is a multiple of it.
        """
        if not entry.shape or entry.nbytes <= nbytes:
            yield self.read(entry)
            return
        count = entry.shape[0]
        step = max(nbytes // max(entry.nbytes // count, 1) // unit, 1) * unit
        for start in range(0, count, step):
            yield self.read(entry, (slice(start, min(start + step, count)),))

    def _fill(
        self, entry: Entry, start: int, row: int, cut: slice | None, target: np.ndarray
    ) -> None:
        """Reads a run of bytes into `target`, or a part of each of several rows."""
        if cut is None:
            return self._read_into(entry, start, target)
        rows = np.empty((target.size // (cut.stop - cut.start), row), np.uint8)
        self._read_into(entry, start, rows.reshape(-1))
        target.reshape(len(rows), -1)[:] = rows[:, cut]

    def _read_into(self, entry: Entry, start: int, target: Any) -> None:
        view = memoryview(target)
        if len(view) <= PART_BYTES:
            return self._read_part(entry, start, view)
        places = range(0, len(view), PART_BYTES)
        readers = _readers_of(os.getpid())
        parts = [view[place : place + PART_BYTES] for place in places]
        reads = [
            readers.submit(self._read_part, entry, start + place, part)
            for place, part in zip(places, parts, strict=True)
        ]
        concurrent.futures.wait(reads)  # nobody writes to `target` after an error
        for read in reads:
            read.result()

    def _read_part(self, entry: Entry, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if count == 0:
                got, needs = f"ends at byte {start + done}", f"it has {entry.nbytes} bytes"
                remedy = "the file was cut short while it was read: fetch it again"
                raise CheckpointError(self.path, entry.name, got, needs, remedy)
            done += count

    def _read_header(self) -> Header:
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, _foreign.HEAD_BYTES, 0)
        _foreign.check(self.path, head)
        length = header_length(self.path, head, size)
        text = bytearray()
        while len(text) < length:
            part = os.pread(self._descriptor, length - len(text), LENGTH_BYTES + len(text))
            if not part:
                needs, remedy = f"the header has {length}", "fetch the file again"
                got = f"the file ends after {len(text)} bytes of its header"
                raise CheckpointError(self.path, "", got, needs, remedy)
            text += part
        return parse(self.path, bytes(text), size)


@functools.cache
def _readers_of(process: int) -> concurrent.futures.Executor:
    """The threads that read, for all files of a process; a child of it has none of them."""
    return concurrent.futures.ThreadPoolExecutor(_READERS, f"jaxfp8-read-{process}")


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at an address XLA can take without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % _ALIGNMENT
    return room[skip : skip + nbytes].view(dtype).reshape(shape)


def bounds_of(shape: tuple[int, ...], index: Index) -> list[tuple[int, int]]:
    """First and last index on each axis; an axis missing from the index is taken whole."""
    whole = (slice(None),) * (len(shape) - len(index))
    pairs = zip(shape, index + whole, strict=True)
    return [part.indices(size)[:2] for size, part in pairs]


def _runs(
    entry: Entry, itemsize: int, bounds: list[tuple[int, int]]
) -> Iterator[tuple[int, int, slice | None, slice]]:
    """The reads that gather a slice.

    Yields:
      For each read: its start in the file; the bytes of a row; the wanted bytes of each row, or
      None for all; and the bytes of the result to fill.
    """
    split = _last_cut(entry.shape, bounds)
    row = math.prod(entry.shape[split:]) * itemsize
    if split == len(entry.shape):  # nothing is cut
        yield entry.start, entry.nbytes, None, slice(0, entry.nbytes)
        return
    inner = math.prod(entry.shape[split + 1 :]) * itemsize
    start, stop = (bound * inner for bound in bounds[split])
    run = stop - start
    leading = bounds[:split]
    if run >= _SHORTEST_RUN or not leading or run == row:
        for place, at in enumerate(_starts(entry.shape, leading)):
            yield entry.start + at * row + start, run, None, slice(place * run, (place + 1) * run)
        return
    most = max(_MOST_ROWS_BYTES // row, 1)
    *outer, (low, high) = leading
    done = 0
    for at in _starts(entry.shape, [*outer, (low, low + 1)]):
        for first in range(0, high - low, most):
            count = min(most, high - low - first)
            target = slice(done * run, (done + count) * run)
            yield entry.start + (at + first) * row, row, slice(start, stop), target
            done += count


def _last_cut(shape: tuple[int, ...], bounds: list[tuple[int, int]]) -> int:
    """The last axis not taken whole; the number of axes if all are."""
    cut = [axis for axis, size in enumerate(shape) if bounds[axis] != (0, size)]
    return cut[-1] if cut else len(shape)


def _starts(shape: tuple[int, ...], leading: list[tuple[int, int]]) -> Iterator[int]:
    """Flat positions, counted in rows, of all indices of the leading axes."""
    for index in itertools.product(*(range(*bound) for bound in leading)):
        place = 0
        for size, i in zip(shape, index, strict=False):
            place = place * size + i
        yield place


def _unreadable(path: str, error: OSError) -> CheckpointError:
    if error.errno == errno.EBADF:
        got, needs = "the checkpoint is closed", "its bytes are needed"
        return CheckpointError(path, "", got, needs, "open it again, and read before it is closed")
    got = f"the file cannot be read ({error.strerror or error})"
    return CheckpointError(path, "", got, "its bytes are needed", "check the path and its rights")
