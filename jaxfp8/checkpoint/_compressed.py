"""Makes the compressed-tensors configuration for vLLM and transformers from `QArray`s."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxfp8._recipes.quantization import Quantization
from jaxfp8._value import dtypes
from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray
from jaxfp8.checkpoint import _names

_SAVE = "jaxfp8.checkpoint.save"
# Activations in a server: a form, or words of a configuration as JSON.
Inputs = Quantization | str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """The 8-bit form of a weight, in the terms of compressed-tensors.

    Attributes:
      dtype: of the codes.
      strategy: "tensor", "channel", "block" or "group".
      block: the sizes of a block; for a group, (1, values).
      symmetric: whether it has no zero point.
      exponents: whether scales are exponents.
      packed: whether four codes are one int32, as servers hold int8 beside floats.
    """

    dtype: np.dtype
    strategy: str
    block: tuple[int, int] | None
    symmetric: bool
    exponents: bool
    packed: bool = False

    @property
    def kind(self) -> str:
        """The type of the codes: "float" or "int"."""
        return "float" if dtypes.is_float8(self.dtype) else "int"

    @property
    def is_mx(self) -> bool:
        """Whether it is MXFP8: exponents, stored as bytes, of groups of 32."""
        is_group = self.strategy == "group" and self.block == (1, 32)
        return self.exponents and is_group and self.dtype == dtypes.FLOAT8[0]


def forms(weights: Mapping[str, QArray], block: tuple[int, int] | None = None) -> dict[str, Held]:
    """The 8-bit form of each weight, by name.

    A weight smaller than the block of the others is a weight of one partial block: that is the
    shape of the scale that servers expect.

    Args:
      weights: by name.
      block: that of the recipe; by default, the blocks of the weights themselves.

    Raises:
      ValueError: the format has no words for one.
    """
    forms = {name: _form(name, q) for name, q in weights.items()}
    blocks = {form.block for form in forms.values() if form.strategy == "block"}
    wanted = sorted(filter(None, {block, *blocks}), reverse=True)
    return {
        name: next((_as_block(form, b) for b in wanted if _fits(weights[name], b)), form)
        for name, form in forms.items()
    }


def _form(name: str, q: QArray) -> Held:
    strategy, block = _strategy(name, q)
    return Held(
        dtype=np.dtype(q.qvalue.dtype),
        strategy=strategy,
        block=block,
        symmetric=q.zero_point is None,
        exponents=np.dtype(q.scale.dtype) == dtypes.E8M0,
    )


def _as_block(form: Held, block: tuple[int, int]) -> Held:
    return dataclasses.replace(form, strategy="block", block=block)


def _fits(q: QArray, block: tuple[int, int]) -> bool:
    """Whether the tiles of a weight are such blocks, cut at its sizes."""
    if q.ndim < 2 or any(tile != 1 for tile in q.tile_sizes[:-2]):
        return False
    cut = tuple(min(max(n, 1), size) for n, size in zip(q.shape[-2:], block, strict=True))
    return q.tile_sizes[-2:] == cut


def _strategy(name: str, q: QArray) -> tuple[str, tuple[int, int] | None]:
    """The granularity of the scale; all strategies are for [N, K]."""
    tiles, shape = q.tile_sizes, q.shape
    whole = tuple(max(size, 1) for size in shape)
    if tiles == whole and 0 not in q.scale.shape:
        return "tensor", None
    if q.ndim >= 2 and all(tile == 1 for tile in tiles[:-2]):
        rows, depth = tiles[-2:]
        if (rows, depth) == (1, whole[-1]):
            return "channel", None
        if rows == 1 and q.scale.shape[-1:] != (1,):
            return "group", (1, depth)
        if (rows, depth) != (whole[-2], 1):
            return "block", (rows, depth)
        if q.ndim > 2:  # experts as [K, N]
            return "channel", None
    got = f"of shape {shape} has a scale of shape {tuple(q.scale.shape)}"
    if any(tile != 1 for tile in tiles[:-2]):
        axes = dict(enumerate((*(1,) * (q.ndim - 2), *tiles[-2:])))
        got = f"of shape {shape} has tiles {tiles}, across matrices of the stack"
        needs = "files have scales for each matrix"
        remedy = f"quantize it again with `tiled_axes={axes}`"
        raise _refused(name, got, needs, remedy)
    needs = "weights are saved as [N, K] with a scale per tensor, row, block or group of a row"
    raise _refused(name, got, needs, "save the transposed weight, of [N, K]")


def config(
    weights: Mapping[str, Held],
    wide: Iterable[str],
    activations: Mapping[str, Inputs | None],
    static: Iterable[str] = (),
) -> dict[str, Any]:
    """The quantization_config.

    Args:
      weights: the form of each 8-bit weight, by name.
      wide: names of the modules kept in floats.
      activations: the form of each one's activations in a server, or its words as JSON; None keeps
        floats.
      static: modules with a static scale of their input.
    """
    kinds: dict[tuple[Held, Inputs | None], list[str]] = {}
    for name, how in weights.items():
        kinds.setdefault((how, activations[name]), []).append(_names.module_of(name))
    wide = set(wide)
    exact = _exactly({*wide, *map(_names.module_of, weights)}, map(_names.module_of, weights))
    # A single form applies to all layers not ignored; with several forms, each lists its layers.
    is_static = bool(list(static))
    groups = {
        f"group_{place}": {
            "targets": ["Linear"] if len(kinds) == 1 else sorted(map(exact, modules)),
            "weights": _weights(how),
            "input_activations": _activations(activation, is_static),
            "output_activations": None,
            "format": format_of(how),
        }
        for place, ((how, activation), modules) in enumerate(kinds.items())
    }
    formats = {format_of(how) for how, _ in kinds} or {"dense"}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(map(exact, wide)),
        "kv_cache_scheme": None,
    }


def _exactly(names: set[str], modules: Iterable[str]) -> Callable[[str], str]:
    """Gives a name as it is, or as a pattern of it alone if readers would take others for it.

    Some readers take the name of a module for all that ends with it or lies below it.
    """
    unclear = set()
    for module in modules:
        parts = module.split(".")
        ends = itertools.combinations(range(len(parts) + 1), 2)
        inner = {".".join(parts[start:stop]) for start, stop in ends}
        unclear |= inner & names - {module}
    return lambda name: f"re:^{re.escape(name)}$" if name in unclear else name


def format_of(how: Held) -> str:
    """The name of a form's format."""
    if how.is_mx or how.packed:
        return "mxfp8-quantized" if how.is_mx else "pack-quantized"
    # Servers have no words for other codes, and refuse the format by its name.
    usual = {dtypes.FLOAT8[0]: "float", dtypes.EIGHT_BIT_INTS[0]: "int"}
    return f"{usual.get(how.dtype, how.dtype.name)}-quantized"


def _weights(how: Held) -> dict[str, Any]:
    is_block = how.strategy == "block"
    return {
        "num_bits": 8,
        "type": how.kind,
        "symmetric": how.symmetric,
        "strategy": how.strategy,
        "block_structure": list(how.block) if is_block and how.block else None,
        "group_size": how.block[1] if how.strategy == "group" and how.block else None,
        "dynamic": False,
        "observer": "minmax",
        **({"scale_dtype": _scale_dtype(how)} if how.exponents else {}),
    }


def _scale_dtype(how: Held) -> str:
    return "torch.uint8" if how.is_mx else f"torch.{dtypes.E8M0.name}"


def _activations(activation: Inputs | None, static: bool) -> dict[str, Any] | None:
    if activation is None or isinstance(activation, str):
        return None if activation is None else json.loads(activation)
    strategy, size = str(activation.granularity), None
    if isinstance(activation.granularity, tuple):
        strategy, size = "group", activation.granularity[0]
    strategy = "token" if strategy == "channel" else strategy
    return {
        "num_bits": 8,
        "type": "float" if dtypes.is_float8(activation.dtype) else "int",
        "symmetric": activation.symmetric,
        "strategy": strategy,
        "group_size": size,
        # A static recipe without calibrated scales lets the server choose them.
        "dynamic": not (activation.static and static),
    }


def _refused(name: str, got: str, needs: str, remedy: str) -> ValueError:
    return ValueError(message(_SAVE, f"`{name}`", got, needs, remedy))
