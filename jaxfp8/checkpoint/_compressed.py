"""Makes the compressed-tensors configuration for vLLM and transformers from `QArray`s."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxfp8._recipes.quantization import Quantization
from jaxfp8._value import dtypes
from jaxfp8._value.errors import message
from jaxfp8._value.qarray import QArray
from jaxfp8.checkpoint import _names

_SAVE = "jaxfp8.checkpoint.save"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """The 8-bit form of a weight, in the terms of compressed-tensors.

    Attributes:
      kind: "float" or "int".
      strategy: "tensor", "channel", "block" or "group".
      block: the sizes of a block; for a group, (1, values).
      symmetric: whether it has no zero point.
      is_mx: whether scales are exponents.
    """

    kind: str
    strategy: str
    block: tuple[int, int] | None
    symmetric: bool
    is_mx: bool


def held(name: str, q: QArray) -> Held:
    """The 8-bit form of a weight.

    Raises:
      ValueError: the format has no words for it.
    """
    dtype, scale = np.dtype(q.qvalue.dtype), np.dtype(q.scale.dtype)
    if dtype not in (dtypes.FLOAT8[0], dtypes.EIGHT_BIT_INTS[0]):
        needs, remedy = "float8_e4m3fn and int8 are saved", "quantise it to one of these"
        raise _refused(name, f"has dtype {dtype.name}", needs, remedy)
    strategy, block = _strategy(name, q)
    is_mx = scale == dtypes.E8M0
    if is_mx and block != (1, 32):
        needs, remedy = "exponents serve 32 values of a row", "use tiles of (1, 32)"
        raise _refused(name, f"has a scale of {scale.name} per {strategy}", needs, remedy)
    return Held(
        kind="float" if dtypes.is_float8(dtype) else "int",
        strategy=strategy,
        block=block,
        symmetric=q.zero_point is None,
        is_mx=is_mx,
    )


def _strategy(name: str, q: QArray) -> tuple[str, tuple[int, int] | None]:
    """The granularity of the scale; all strategies are for [N, K]."""
    tiles, shape = q.tile_sizes, q.shape
    whole = tuple(max(size, 1) for size in shape)
    if tiles == whole:
        return "tensor", None
    if q.ndim >= 2 and all(tile == 1 for tile in tiles[:-2]):
        rows, depth = tiles[-2:]
        if (rows, depth) == (1, whole[-1]):
            return "channel", None
        if rows == 1 and q.scale.shape[-1:] != (1,):
            return "group", (1, depth)
        if (rows, depth) != (whole[-2], 1):
            return "block", (rows, depth)
    found = f"of shape {shape} has a scale of shape {tuple(q.scale.shape)}"
    needs = "weights are saved as [N, K] with a scale per tensor, row, block or group of a row"
    raise _refused(name, found, needs, "save the transposed weight, of [N, K]")


def config(
    weights: Mapping[str, Held],
    wide: Iterable[str],
    activation: Quantization | None,
    static: Iterable[str] = (),
) -> dict[str, Any]:
    """The quantization_config.

    Args:
      weights: the form of each 8-bit weight, by name.
      wide: names of the modules kept in floats.
      activation: the form of activations in a server; None keeps floats.
      static: modules with a static scale of their input.
    """
    kinds: dict[Held, list[str]] = {}
    for name, how in weights.items():
        kinds.setdefault(how, []).append(_names.module_of(name))
    # A single form applies to all layers not ignored; with several forms, each lists its layers.
    inputs = _activations(activation, bool(list(static)))
    groups = {
        f"group_{place}": {
            "targets": ["Linear"] if len(kinds) == 1 else sorted(modules),
            "weights": _weights(how),
            "input_activations": inputs,
            "output_activations": None,
            "format": _format(how),
        }
        for place, (how, modules) in enumerate(kinds.items())
    }
    formats = {_format(how) for how in kinds}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(wide)),
        "kv_cache_scheme": None,
    }


def _format(how: Held) -> str:
    if how.is_mx:
        return "mxfp8-quantized"
    return f"{how.kind}-quantized"


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
        **({"scale_dtype": "torch.uint8"} if how.is_mx else {}),
    }


def _activations(activation: Quantization | None, static: bool) -> dict[str, Any] | None:
    if activation is None:
        return None
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
