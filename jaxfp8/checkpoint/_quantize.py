"""Makes an 8-bit checkpoint from a float one: a few rows of a tensor at a time, and resumable.

The headers of the new files depend on the source and the recipe alone, so they are written first,
and each finished tensor goes to its place. A journal lists the tensors safe on the disk. A second
run with the same source and recipe continues after the last of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.quantization import Quantization
from jaxfp8._recipes.recipes import Recipe, check_recipe
from jaxfp8._recipes.selection import Selection, Where
from jaxfp8._value import accuracy
from jaxfp8._value.changes import Change, Changes
from jaxfp8._value.progress import progress
from jaxfp8._value.qarray import QArray
from jaxfp8._value.spec import Shape, tile_counts
from jaxfp8._value.tables import size
from jaxfp8.checkpoint import (
    _dtypes,
    _folder,
    _formats,
    _gguf_names,
    _kept,
    _names,
    _save,
    _write,
)
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._file import File
from jaxfp8.checkpoint._folder import Folder
from jaxfp8.checkpoint._header import Entry
from jaxfp8.checkpoint._plan import plan
from jaxfp8.checkpoint._stored import on_host, stored

_OPERATION = "jaxfp8.checkpoint.quantize"
# Bytes of floats that are in work at once. Their errors, in float64, take eight times as many.
_CHUNK_BYTES = 4 << 20
_FLOATS = ("F32", "F16", "BF16")
# Weights in other forms. A copy would put the float model next to the new one.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot"}
_JOB, _JOURNAL = "job.json", "journal.jsonl"


def quantize(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    recipe: Recipe,
    *,
    where: Where = None,
    overwrite: bool = False,
) -> Changes:
    """Makes an 8-bit checkpoint of one in floats, in the memory of a few rows of a tensor.

    Codes and scales are those of `jaxfp8.quantize`. All other tensors and files are copied. The
    work lies in a folder next to `dst`, renamed to `dst` once all of it is safe on the disk. After
    an interruption, the same call continues from there.

    Args:
      src: a file or folder of safetensors in floats.
      dst: the folder to make.
      recipe: how weights are held; the configuration tells a server how to hold activations. No
        scale is calibrated here, so a static recipe is written as a dynamic one.
      where: which of the matrices named "....weight": a regular expression that is searched in the
        name, a collection of names, or a function of name and shape. None leaves embeddings, heads,
        norms, routers of experts and gates of one row in floats, by name and by shape.
      overwrite: whether to replace what is at `dst`.

    Returns:
      The error and the bytes of each weight, worst first, and what was left and why. Print it.

    Warns:
      FallbackWarning: `where` selects nothing. Nothing is written yet.

    Raises:
      CheckpointError: the source is damaged or in 8 bits already, `dst` is taken or has the source
        in it, or the work next to it is of another source or recipe.
      TypeError: `recipe` is not a recipe.
      ValueError: the recipe leaves weights in floats, or no format can describe its weights.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp()
      >>> jaxfp8.checkpoint.save(folder + "/float", {"up.weight": jnp.ones((300, 64))})
      >>> report = quantize(folder + "/float", folder + "/fp8", jaxfp8.FP8_BLOCK)
      >>> jaxfp8.checkpoint.load(folder + "/fp8")
      {'up.weight': QArray(float8_e4m3fn[300,64], scale=float32[3,1], tiles=(128, None))}
    """
    check_recipe(_OPERATION, recipe)
    if recipe.weight is None:
        text = f"`{_OPERATION}`: `recipe` leaves weights in floats, but 8 bits are"
        raise ValueError(f"{text} made here; use one such as `jaxfp8.FP8_DYNAMIC`.")
    place = pathlib.Path(dst)
    check_apart(pathlib.Path(src), place)
    _write.check_free(place, overwrite)
    with contextlib.closing(Folder(src)) as folder:
        job = _Job(folder, place, recipe, where)
        total = sum(entry.nbytes for entry in folder.entries.values())
        with progress("quantizing", total, size) as done:
            job.run(done)
        return job.finish()


def reasons(src: str | os.PathLike[str], where: Where) -> dict[str, str]:
    """By tensor, why `quantize` would leave it; "" for one to quantize.

    Raises:
      CheckpointError: as `quantize` does for the source.
    """
    with contextlib.closing(Folder(src)) as folder:
        return _reasons(_checked(folder), _selection(where))


def _selection(where: Where) -> Selection:
    return Selection(_OPERATION, "where", where, what="weights", of="shape")


class _Job:
    """One run: the plan, the folder of the work, and the finished tensors."""

    def __init__(self, folder: Folder, place: pathlib.Path, recipe: Recipe, where: Where) -> None:
        assert recipe.weight is not None
        self._folder, self._place, self._recipe = folder, place, recipe
        self._how = recipe.weight
        selects = _selection(where)
        self._reasons = _reasons(_checked(folder), selects)
        selects.tell()
        source = pathlib.Path(folder.path)
        self._said = folder.config() if source.is_dir() or folder.is_gguf else {}
        chosen = [e for e in folder.entries.values() if not self._reasons[e.name]]
        self._weights = {entry.name: _struct(entry, self._how) for entry in chosen}
        self._forms = _save.forms(self._weights, recipe)
        self._config = _save.quantization(_shapes(folder.entries), self._forms, recipe)
        self._work = place.parent / f".{place.name}.quantizing"
        self._rows = self._resume()

    def run(self, done: Callable[[int], None]) -> None:
        """Makes each file of the new checkpoint."""
        self._files: dict[str, list[Entry]] = {}
        with (self._work / _JOURNAL).open("a") as journal:
            for path, file in self._folder.files.items():
                name = pathlib.Path(path).name if len(self._folder.files) > 1 else _folder.SINGLE
                entries = self._make(self._work / name, file, journal, done)
                self._files[name] = list(entries.values())

    def finish(self) -> Changes:
        """Writes the configuration, copies what is no weight, and renames the folder."""
        source = pathlib.Path(self._folder.path)
        config = dict(self._said)
        copy_others(source, self._work)
        if self._config is not None:
            config[_folder.QUANTIZATION] = self._config
        if config:
            _write.write_json(self._work / _folder.CONFIG, config)
        if len(self._files) > 1:
            _write.write_index(self._work, self._files)
        rows = [self._rows[name] for name in self._folder.entries if name in self._rows]
        _write.put_in_place(self._work, self._place)
        for name in (_JOB, _JOURNAL):  # last: a run interrupted before this can still continue
            (self._place / name).unlink()
        return _changes(rows)

    def _resume(self) -> dict[str, Change]:
        """Rows of the tensors that an earlier run finished; a new folder where there was none."""
        job = {
            "files": [
                [path, os.stat(path).st_size, os.stat(path).st_mtime_ns]
                for path in map(os.path.abspath, self._folder.files)
            ],
            "recipe": repr(self._recipe),
            "format": self._config and self._config["format"],
            "weights": list(self._weights),
        }
        if not (self._work / _JOB).exists():
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir(parents=True)
            _write.write_json(self._work / _JOB, job)
            return {}
        if _folder.read_json(self._work / _JOB) != job:
            got = "there is unfinished work of another source, recipe or choice of weights"
            needs, remedy = "a run goes on with its own", "remove the folder to begin again"
            raise CheckpointError(self._work, "", got, needs, remedy)
        journal = self._work / _JOURNAL
        lines = journal.read_text().split("\n") if journal.exists() else [""]
        # A truncated last line has no end; its tensor is made again.
        journal.write_text("".join(f"{line}\n" for line in lines[:-1]))
        rows = [Change(**json.loads(line)) for line in lines[:-1]]
        return {row.path: dataclasses.replace(row, shape=tuple(row.shape)) for row in rows}

    def _make(
        self, path: pathlib.Path, file: File, journal: Any, done: Callable[[int], None]
    ) -> dict[str, Entry]:
        sources = [entry for entry in file.header.entries if not self._is_said(entry)]
        tensors = [part for entry in sources for part in self._tensors(entry)]
        first, entries = _write.layout(str(path), tensors)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _write.write_at(descriptor, 0, first)
            for entry in sources:
                if entry.name not in self._rows:
                    row = self._tensor(descriptor, file, entry, entries)
                    os.fsync(descriptor)
                    _note(journal, row)
                    self._rows[entry.name] = row
                done(entry.nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return entries

    def _is_said(self, entry: Entry) -> bool:
        """Whether config.json has the content of a tensor; no model of torch has a place for it."""
        return entry.name == _gguf_names.ROPE_FACTORS and "rope_scaling" in self._said

    def _tensors(self, entry: Entry) -> Iterator[tuple[str, str, Shape]]:
        """The new tensors for one of the source."""
        if entry.name not in self._weights:
            yield entry.name, entry.code, entry.shape
            return
        struct = self._weights[entry.name]
        for name, part in stored(entry.name, struct, self._forms[entry.name]).items():
            yield name, part.code, part.shape

    def _tensor(
        self, descriptor: int, file: File, entry: Entry, entries: dict[str, Entry]
    ) -> Change:
        if entry.name not in self._weights:
            at = entries[entry.name].start
            for values in file.chunks(entry, _CHUNK_BYTES):
                at += _write.write_at(descriptor, at, values)
            return _left(entry, self._reasons[entry.name])
        errors: list[accuracy.Error] = []
        scales: list[Any] = []
        zeros: list[Any] = []
        struct, form = self._weights[entry.name], self._forms[entry.name]
        codes, *others = stored(entry.name, struct, form)
        at = entries[codes].start
        for values, q in self._quantized(file, entry):
            rows = stored(entry.name, q, form)[codes].array
            at += _write.write_at(descriptor, at, on_host(rows))
            errors.append(accuracy.error(values, dequantize(q, jnp.float32)))
            scales.append(on_host(q.scale))
            zeros.append(None if q.zero_point is None else on_host(q.zero_point))
        is_one = math.prod(struct.scale.shape) == 1
        scale: Any = scales[0] if is_one else np.concatenate(scales)
        zero: Any = zeros[0] if is_one or zeros[0] is None else np.concatenate(zeros)
        whole = QArray(struct.qvalue, scale, zero, tiles=struct.tiles)
        parts = stored(entry.name, whole, form)
        for name in others:
            _write.write_at(descriptor, entries[name].start, on_host(parts[name].array))
        after = sum(entries[name].nbytes for name in parts)
        return dataclasses.replace(
            _left(entry, ""),
            after=np.dtype(self._how.dtype).name,
            recipe=self._recipe.name,
            bytes_after=after,
            sqnr=accuracy.pooled(errors).sqnr,
        )

    def _quantized(self, file: File, entry: Entry) -> Iterator[tuple[np.ndarray, QArray]]:
        """Rows of a weight, and the same in 8 bits."""
        extremes = None
        if self._how.granularity == "tensor":
            extremes = _extremes(file, entry)
        for values in file.chunks(entry, _CHUNK_BYTES, _rows_of_tile(self._how)):
            yield values, _quantize_rows(values, self._how, extremes)


def _quantize_rows(values: np.ndarray, how: Quantization, extremes: np.ndarray | None) -> QArray:
    """Some rows in 8 bits, with the scale of the whole weight.

    A common scale depends on the extreme values of all rows. Rows of these extremes are appended
    and dropped again, so the codes equal those of the whole weight.
    """
    if extremes is None:
        return how.quantize(jnp.asarray(values), contracting=(1,))
    behind = np.broadcast_to(extremes[:, None], (len(extremes), values.shape[1]))
    q = how.quantize(jnp.asarray(np.concatenate([values, behind])), contracting=(1,))
    return dataclasses.replace(q, qvalue=q.qvalue[: len(values)])


def _extremes(file: File, entry: Entry) -> np.ndarray:
    """The least and the largest finite value of a tensor, in its dtype."""
    least, most = math.inf, -math.inf
    for values in file.chunks(entry, _CHUNK_BYTES):
        finite = np.where(np.isfinite(values), values, 0).astype(np.float32)
        least = min(least, float(finite.min(initial=math.inf)))
        most = max(most, float(finite.max(initial=-math.inf)))
    return np.asarray([least, most], _dtypes.BY_CODE[entry.code])


def _rows_of_tile(how: Quantization) -> int:
    """Rows of [N, K] with a common scale, unless all rows share one."""
    if isinstance(how.granularity, tuple):
        return how.granularity[1] or 1 << 62
    return 1


def _struct(entry: Entry, how: Quantization) -> QArray:
    """Shapes and dtypes of a quantized weight; they depend on its shape alone."""
    sizes = how.tiles(entry.shape, contracting=(1,))
    tiles = tuple(sizes.get(axis, max(n, 1)) for axis, n in enumerate(entry.shape))
    counts = tile_counts(entry.shape, tiles)
    make: Any = jax.ShapeDtypeStruct
    zero = None if how.symmetric else make(counts, how.dtype)
    return QArray(make(entry.shape, how.dtype), make(counts, how.scale_dtype), zero, tiles=tiles)


def check_apart(source: pathlib.Path, place: pathlib.Path) -> None:
    """Refuses to replace the source, or a folder around it."""
    inner, outer = (pathlib.Path(os.path.realpath(path)) for path in (source, place))
    if inner == outer or outer in inner.parents:
        needs, remedy = "the source lies there", "name another path"
        kind = "folder" if os.path.isdir(place) else "file"
        got = f"the new checkpoint would replace that {kind}"
        raise CheckpointError(place, "", got, needs, remedy)


def _checked(folder: Folder) -> dict[str, Entry]:
    """The tensors of a source; refuses 8-bit ones."""
    planned = plan(folder, _formats.read(folder.quantization, folder.path))
    if planned.problems:
        raise planned.problems[0]
    for item in planned.items.values():
        if item.scale is not None:
            entry = item.value.entry
            needs, remedy = "a source is in floats", "quantize the float version of the model"
            raise CheckpointError(entry.file, entry.name, f"is {entry}", needs, remedy)
    return folder.entries


def _reasons(entries: Mapping[str, Entry], selects: Selection) -> dict[str, str]:
    """By name, why a tensor is not quantized; "" if it is."""
    kept = {} if selects.given is not None else _kept.reasons(_shapes(entries))
    return {name: _why_left(entry, selects, kept) for name, entry in entries.items()}


def _shapes(entries: Mapping[str, Entry]) -> dict[str, Shape]:
    return {name: entry.shape for name, entry in entries.items()}


def _why_left(entry: Entry, selects: Selection, kept: Mapping[str, str]) -> str:
    if entry.code not in _FLOATS:
        return f"its dtype is {entry.code}"
    if len(entry.shape) == 3 and "expert" in entry.name:
        return f"it is a stack of {entry.shape[0]} experts; servers read them in 8 bits one by one"
    if _names.last(entry.name) != "weight":
        return "it is not named weight"
    if len(entry.shape) != 2 or 0 in entry.shape:
        return f"its shape is {list(entry.shape)}, not [N, K]"
    if selects.given is not None:
        return "" if selects(entry.name, entry.shape) else "it is not chosen"
    why = kept.get(entry.name)
    return f"{why}; it stays in floats unless it is chosen" if why else ""


def _left(entry: Entry, reason: str) -> Change:
    """The row of a tensor that stays as it is."""
    dtype = str(_dtypes.BY_CODE.get(entry.code, entry.code))
    return Change(
        path=entry.name,
        kind="",
        shape=entry.shape,
        before=dtype,
        after=dtype,
        recipe="",
        reason=reason,
        bytes_before=entry.nbytes,
        bytes_after=entry.nbytes,
    )


def _changes(rows: list[Change]) -> Changes:
    """The rows, the worst weight first; vectors that stay are counted."""
    vectors = [row for row in rows if row.reason and len(row.shape) < 2]
    listed = [row for row in rows if not row.reason or len(row.shape) > 1]
    listed.sort(key=lambda row: (row.sqnr is None, row.sqnr or 0.0))
    size = sum(row.bytes_after for row in vectors)
    return Changes(rows=tuple(listed), others=len(vectors), other_bytes=size)


def _note(journal: Any, row: Change) -> None:
    """Says that a tensor is safe on the disk."""
    journal.write(json.dumps(dataclasses.asdict(row)) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def copy_others(source: pathlib.Path, to: pathlib.Path) -> None:
    """Copies the files of a folder that say nothing of weights, such as tokenizers."""
    for path in source.iterdir() if source.is_dir() else ():
        is_ours = path.name in (_folder.CONFIG, _folder.MODELOPT_CONFIG, _JOB, _JOURNAL)
        is_index = ".safetensors.index" in path.name
        if path.is_file() and not (is_ours or is_index) and path.suffix not in _OTHER_WEIGHTS:
            shutil.copyfile(path, to / path.name)
