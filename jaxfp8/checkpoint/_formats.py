"""Reads the configuration of 8-bit weights: one table row for each published format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxfp8.checkpoint import _names
from jaxfp8.checkpoint._errors import CheckpointError

_PUBLISHED = "load a version of the model in 8 bits, or `jaxfp8.checkpoint.quantize` the float one"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """The 8-bit form of some weights.

    Attributes:
      kind: "float" or "int"; "" if the dtype of the tensor decides.
      granularity: "tensor", "channel" or "block"; "" if the shape of the scale decides.
      block: sizes of a block of [N, K]; None without blocks.
      zero_point: whether there may be zero points.
      activations: the treatment of activations in a server, in words.
      static: whether a static scale of the activations is required.
      targets: modules with this form, as patterns; () for all.
    """

    kind: str = ""
    granularity: str = ""
    block: tuple[int, int] | None = None
    zero_point: bool = False
    activations: str = ""
    static: bool = False
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The configuration of a checkpoint's weights.

    Attributes:
      name: the name of the format.
      schemes: forms of weights; the first one with the module among its targets counts.
      skipped: modules kept in floats, as patterns.
      skip_key: the key of this list in the configuration.
    """

    name: str
    schemes: tuple[Scheme, ...]
    skipped: tuple[str, ...] = ()
    skip_key: str = "ignore"

    def scheme(self, module: str) -> Scheme | None:
        """The form of a module's weight; None if no scheme applies."""
        ordered = sorted(self.schemes, key=lambda scheme: not scheme.targets)
        for scheme in ordered:
            named = [t for t in scheme.targets if _names.matches(t, module)]
            if not scheme.targets or named:
                return scheme
        return None

    def skips(self, module: str) -> str | None:
        """The entry of the skip list for a module, or None."""
        found = (pattern for pattern in self.skipped if _names.matches(pattern, module))
        return next(found, None)


_UNSTATED = Format(name="by its tensors", schemes=(Scheme(zero_point=True),))
_SKIP_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def read(config: Mapping[str, Any] | None, path: str) -> Format:
    """The format in a `quantization_config`; without one, the tensors decide.

    Raises:
      CheckpointError: the format is unknown, or packs several weights in a byte.
    """
    if config is None:
        return _UNSTATED
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if method is None and "quant_algo" in {**config, **_dict(config.get("quantization"))}:
        method = "modelopt"
    row = _METHODS.get(str(method).lower())
    if row is None:
        found = f"the quantization_config has quant_method {method!r}"
        raise CheckpointError(path, "", found, f"one of {', '.join(_METHODS)} is read", _PUBLISHED)
    skipped, key = _skip_list(config, path)
    return dataclasses.replace(row(config, path), skipped=skipped, skip_key=key)


def _skip_list(config: Mapping[str, Any], path: str) -> tuple[tuple[str, ...], str]:
    inner = {**config, **_dict(config.get("quantization"))}
    key = next((key for key in _SKIP_KEYS if inner.get(key)), _SKIP_KEYS[0])
    names = inner.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            path, "", f"{key} is {names!r}", "names are needed", "mend the config"
        )
    return tuple(names), key


# Each format


def _compressed_tensors(config: Mapping[str, Any], path: str) -> Format:
    form = config.get("format") or "dense"
    if form not in _COMPRESSED:
        needs = f"one of {', '.join(_COMPRESSED)} is read"
        raise CheckpointError(path, "", f"the weights are in format {form!r}", needs, _PUBLISHED)
    sparsity = _dict(config.get("sparsity_config")).get("format", "dense")
    if sparsity != "dense":
        needs = "weights that are not sparse are read"
        raise CheckpointError(path, "", f"the weights are {sparsity!r}", needs, _PUBLISHED)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        needs, remedy = "config_groups are needed", "fetch config.json again"
        raise CheckpointError(path, "", f"config_groups is {groups!r}", needs, remedy)
    schemes = tuple(_group(name, _dict(group), path) for name, group in groups.items())
    return Format(name=f"compressed-tensors, {form}", schemes=schemes)


def _group(name: str, group: Mapping[str, Any], path: str) -> Scheme:
    weights, inputs = _dict(group.get("weights")), _dict(group.get("input_activations"))
    kind, strategy = weights.get("type"), weights.get("strategy")
    form = group.get("format") or "dense"
    if weights.get("num_bits") != 8 or kind not in ("int", "float") or form not in _COMPRESSED:
        found = f"{name} holds weights as {weights.get('num_bits')}-bit {kind} ({form})"
        raise CheckpointError(path, "", found, "8 bits, int or float, are needed", _PUBLISHED)
    if strategy not in ("tensor", "channel", "block", "group"):
        found = f"{name} has strategy {strategy!r}"
        needs = "tensor, channel, block or group is needed"
        raise CheckpointError(path, "", found, needs, _PUBLISHED)
    size = weights.get("block_structure") if strategy == "block" else [1, weights.get("group_size")]
    blocks = strategy in ("block", "group")
    static = bool(inputs) and inputs.get("dynamic") is False
    how = f"{'static' if static else 'dynamic'}, per {inputs.get('strategy')}"
    return Scheme(
        kind=str(kind),
        granularity="block" if blocks else str(strategy),
        block=_block(size, path) if blocks else None,
        zero_point=weights.get("symmetric") is False,
        activations=how if inputs else "floats",
        static=static,
        targets=_targets(group.get("targets"), path),
    )


def _targets(targets: Any, path: str) -> tuple[str, ...]:
    """Patterns of modules; a class name stands for all, because tensors do not tell their class."""
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        needs = "names are needed"
        raise CheckpointError(path, "", f"targets is {targets!r}", needs, "fetch config.json again")
    if any(target.isidentifier() and target[:1].isupper() for target in targets):
        return ()
    return tuple(targets)


def _fp8(config: Mapping[str, Any], path: str) -> Format:
    """Of DeepSeek and Qwen, with blocks; without, one scale for each tensor."""
    size = config.get("weight_block_size")
    static = config.get("activation_scheme") == "static"
    activations = "static, per tensor" if static else "dynamic"
    if size is not None:
        scheme = Scheme(
            kind="float", granularity="block", block=_block(size, path), activations=activations
        )
        return Format(name="fp8 in blocks (DeepSeek)", schemes=(scheme,))
    return Format(
        name="fp8", schemes=(Scheme(kind="float", activations=activations, static=static),)
    )


def _modelopt(config: Mapping[str, Any], path: str) -> Format:
    inner = {**config, **_dict(config.get("quantization"))}
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm not in _MODELOPT:
        found, needs = f"quant_algo is {algorithm}", f"one of {', '.join(_MODELOPT)} is read"
        raise CheckpointError(path, "", found, needs, _PUBLISHED)
    return Format(name=f"ModelOpt {algorithm}", schemes=(_MODELOPT[algorithm],))


def _fbgemm(config: Mapping[str, Any], path: str) -> Format:
    scheme = Scheme(kind="float", granularity="channel", activations="dynamic, per token")
    return Format(name="fbgemm_fp8", schemes=(scheme,))


def _torchao(config: Mapping[str, Any], path: str) -> Format:
    return Format(name="torchao", schemes=(Scheme(zero_point=True),))


def _mxfp8(config: Mapping[str, Any], path: str) -> Format:
    return Format(name="mxfp8", schemes=(_MX,))


def _block(size: Any, path: str) -> tuple[int, int]:
    if isinstance(size, str):  # "128x128", in old configurations
        parts = size.lower().split("x")
        size = [int(part) for part in parts] if all(p.isdigit() for p in parts) else size
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if is_pair and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    found, needs = f"the size of a block is {size!r}", "two sizes, of [N, K], are needed"
    raise CheckpointError(path, "", found, needs, "fetch config.json again")


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_MX = Scheme(kind="float", granularity="block", block=(1, 32), activations="dynamic, per 32")
_MODELOPT = {
    "FP8": Scheme(kind="float", granularity="tensor", activations="per tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(
        kind="float", granularity="channel", activations="dynamic, per token"
    ),
    "FP8_PB_WO": Scheme(kind="float", granularity="block", block=(128, 128), activations="floats"),
    "MXFP8": _MX,
}
_COMPRESSED = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_METHODS: dict[str, Callable[[Mapping[str, Any], str], Format]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
    "torchao": _torchao,
    "mxfp8": _mxfp8,
}
