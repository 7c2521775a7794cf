"""Reading a checkpoint: all of it, or lazily."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxfp8._recipes.selection import Selection, Where, tell, unknown_names
from jaxfp8._value.errors import message
from jaxfp8._value.progress import progress
from jaxfp8._value.qarray import QArray
from jaxfp8._value.tables import size
from jaxfp8.checkpoint import _collector, _formats
from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._folder import Folder
from jaxfp8.checkpoint._inspect import CheckpointSummary, summary
from jaxfp8.checkpoint._items import Item
from jaxfp8.checkpoint._plan import plan
from jaxfp8.checkpoint._read import Shardings, Transfers, read
from jaxfp8.checkpoint._scheme import Format


class Checkpoint(Mapping[str, "jax.Array | QArray"]):
    """An open checkpoint: a mapping from names to arrays, each read at look-up.

    Each look-up reads the file again; nothing is kept. Close it, or use it as a context.
    Of a checkpoint that contradicts itself, `raw` and `summary` alone work.

    Attributes:
      path: the opened file or folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sharding: Shardings = None,
        dtype: DTypeLike | None = None,
        unscaled: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self._sharding, self._dtype = sharding, dtype
        with _collector.paused(), contextlib.ExitStack() as opened:
            self._folder = Folder(path)
            opened.callback(self.close)
            self._format = _formats.read(self._folder.quantization, self.path)
            self._plan = plan(self._folder, self._format, unscaled=unscaled)
            opened.pop_all()  # all is well: `close` closes it
        items = self._plan.items
        tell(*unknown_names("jaxfp8.checkpoint", "sharding", sharding, items, "arrays"))
        # The host never holds more than the largest tensor.
        self._transfers = Transfers(max((item.nbytes for item in items.values()), default=0))

    @property
    def _items(self) -> dict[str, Item]:
        if self._plan.problems:
            raise _all(self._plan.problems)
        return self._plan.items

    def close(self) -> None:
        """Close the files."""
        self._folder.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> jax.Array | QArray:
        item, files = self._items[name], self._folder.files
        return read(files, item, self._sharding, self._dtype, self._transfers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __repr__(self) -> str:
        count = len(self._plan.items)
        return f"Checkpoint({self.path!r}, {self._format.name}, {count} arrays)"

    def shape(self, name: str) -> jax.ShapeDtypeStruct | QArray:
        """Shape and dtype of the entry under a name; no values are read."""
        return self._items[name].struct()

    def config(self) -> dict[str, Any]:
        """The model's config.json; of a GGUF file, what its metadata say in the same words.

        {} without one, and for families of GGUF models without a table of names.

        Raises:
          CheckpointError: it cannot be read.
        """
        return self._folder.config()

    @property
    def format(self) -> Format:
        """The configuration of 8-bit weights."""
        return self._format

    @property
    def is_gguf(self) -> bool:
        """Whether the files are GGUF."""
        return self._folder.is_gguf

    def nbytes(self, name: str) -> int:
        """Bytes in the files of the entry under a name, its scale included."""
        return self._items[name].nbytes

    def item(self, name: str) -> Item:
        """The tensors of the file under a name, and their meaning."""
        return self._items[name]

    def raw(self, name: str) -> np.ndarray:
        """The values of a tensor as the file has them, on the host; `name` is the file's."""
        return self._folder.files[self._folder.entries[name].file].read(self._folder.entries[name])

    def summary(self, *, values: bool = False) -> CheckpointSummary:
        """What the checkpoint holds, as `inspect` says it; no header is read again."""
        return summary(self.path, self._folder, self._format, self._plan, values=values)


def load(
    path: str | os.PathLike[str],
    *,
    sharding: Shardings = None,
    where: Where = None,
    dtype: DTypeLike | None = None,
    unscaled: bool = False,
) -> dict[str, jax.Array | QArray]:
    """Reads a checkpoint; weights in 8 bits become `QArray`s and are never widened.

    Everything is checked before the first tensor is read: headers, the index, the configuration and
    the shapes of weights and scales. A bad checkpoint is never loaded in part. A weight is [N, K],
    as the file has it: `jaxfp8.einsum("mk,nk->mn", x, w)` multiplies by it. Static scales of
    activations are arrays of their own, named `....input_scale`. Zero points that are all 0 are
    left out.

    Args:
      path: a safetensors or GGUF file, or a folder with one, or with several and an index.
      sharding: where arrays go. A `Sharding` for all (an array takes as many axes of it as it
        has), one by name, or a function of the name and a `jax.ShapeDtypeStruct`; None, and names
        that are not mentioned, are the default device. Each device reads its own slice. A scale is
        split as its weight where that divides its entries, and is whole otherwise.
      where: which arrays to read: a regular expression that is searched in the name, a collection
        of names, or a function of the name and a `jax.ShapeDtypeStruct`. None reads all.
      dtype: float32, bfloat16 or float16, for floats that belong to no 8-bit weight; None leaves
        them as the file has them.
      unscaled: whether FP8 tensors without a scale are values as they are, of a model that was cast
        to FP8. Weights of two axes and more become `QArray`s with the scale 1, and vectors arrays,
        which `dtype` converts. By default such tensors are refused.

    Returns:
      Arrays and `QArray`s by name.

    Warns:
      FallbackWarning: `where` or a name in `sharding` selects nothing.

    Raises:
      CheckpointError: the checkpoint is damaged, or contradicts itself or its configuration.
      KeyError: there is nothing of a name in `where`.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> w = jaxfp8.quantize(jnp.ones((300, 64)), tiled_axes={0: 128, 1: 32})
      >>> jaxfp8.checkpoint.save(folder, {"layer.weight": w})
      >>> load(folder)
      {'layer.weight': QArray(float8_e4m3fn[300,64], scale=float32[3,2], tiles=(128, None))}
    """
    with Checkpoint(path, sharding=sharding, dtype=dtype, unscaled=unscaled) as checkpoint:
        wanted = _wanted(checkpoint, where)
        total = sum(checkpoint.nbytes(name) for name in wanted)
        loaded = {}
        with progress("loading", total, size) as done:
            for name in wanted:
                loaded[name] = checkpoint[name]
                done(checkpoint.nbytes(name))
            return jax.block_until_ready(loaded)


def open(
    path: str | os.PathLike[str],
    *,
    sharding: Shardings = None,
    dtype: DTypeLike | None = None,
    unscaled: bool = False,
) -> Checkpoint:
    """Opens a checkpoint as a mapping; each array is read at look-up.

    All is checked before the first array is read. The first use of the mapping raises for a bad
    checkpoint; `raw(name)` still reads the bytes of a tensor.

    Args:
      path, sharding, dtype, unscaled: as for `load`.

    Returns:
      A `Checkpoint`.

    Raises:
      CheckpointError: as for `load`.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> jaxfp8.checkpoint.save(folder, {"layer.weight": jaxfp8.quantize(jnp.ones((8, 4)))})
      >>> with open(folder) as checkpoint:
      ...     print(list(checkpoint), checkpoint.nbytes("layer.weight"))
      ['layer.weight'] 36
    """
    return Checkpoint(path, sharding=sharding, dtype=dtype, unscaled=unscaled)


def inspect(
    path: str | os.PathLike[str] | Checkpoint, *, unscaled: bool = False, values: bool = False
) -> CheckpointSummary:
    """What a checkpoint holds and how it would load.

    It reads headers, the configuration and zero points. All-zero zero points are left out.

    Args:
      path: as for `load`; or an open checkpoint, of which no header is read again.
      unscaled: as for `load`; of an open checkpoint, `open` was told.
      values: whether to read all scales too. `load` refuses a NaN or infinite one.

    Returns:
      A `CheckpointSummary`, which prints as a table. What contradicts itself is in its `problems`.

    Raises:
      CheckpointError: a header, the index or the configuration cannot be read.
      ValueError: `unscaled` is passed with an open checkpoint.

    Example:
      >>> import tempfile, jax.numpy as jnp, jaxfp8
      >>> folder = tempfile.mkdtemp() + "/model"
      >>> jaxfp8.checkpoint.save(folder, {"layer.weight": jaxfp8.quantize(jnp.ones((8, 4)))})
      >>> inspect(folder).rows[0].scale
      'tensor, float32'
    """
    if isinstance(path, Checkpoint):
        if unscaled:
            needs, remedy = "its tensors have their meaning already", "pass it to `open` instead"
            got = "is passed with an open checkpoint"
            raise ValueError(message("jaxfp8.checkpoint.inspect", "`unscaled`", got, needs, remedy))
        return path.summary(values=values)
    with Checkpoint(path, unscaled=unscaled) as checkpoint:
        return checkpoint.summary(values=values)


def _wanted(checkpoint: Checkpoint, where: Where) -> list[str]:
    selects = Selection("jaxfp8.checkpoint.load", "where", where, what="arrays", of="shape")
    for name in selects.paths:
        if name not in checkpoint:
            raise KeyError(f"`jaxfp8.checkpoint.load`: {name!r} is not in {checkpoint!r}")
    chosen = [name for name in checkpoint if selects(name, checkpoint.shape(name))]
    selects.tell()
    return chosen


def _all(problems: tuple[CheckpointError, ...]) -> CheckpointError:
    """The first problem, with the number of the others."""
    first, others = problems[0], len(problems) - 1
    if not others:
        return first
    more = f"{first.remedy} ({others} more: `python -m jaxfp8 inspect` lists them)"
    return CheckpointError(first.file, first.tensor, first.got, first.needs, more)
