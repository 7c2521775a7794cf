"""Reads the configuration of 8-bit weights: one table row for each published format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxfp8.checkpoint._errors import CheckpointError
from jaxfp8.checkpoint._scheme import Format, Scheme

_READ = "load a version of the model in one of them, or `jaxfp8.checkpoint.quantize` the float one"
_PUBLISHED = "load a version of the model in 8 bits, or `jaxfp8.checkpoint.quantize` the float one"
_AGAIN = "fetch config.json again"

BY_TENSORS = "by its tensors"
_UNSTATED = Format(name=BY_TENSORS, schemes=(Scheme(zero_point=True),))
_SKIP_KEYS = (
    "ignore",
    "modules_to_not_convert",
    "ignored_layers",
    "exclude_modules",
    "llm_int8_skip_modules",
)


def read(config: Mapping[str, Any] | None, path: str) -> Format:
    """The format in a `quantization_config`; without one, the tensors decide.

    Raises:
      CheckpointError: the format is unknown, packs several weights in a byte, or has a key of
        unknown meaning.
    """
    if config is None:
        return _UNSTATED
    config = _flat(config)
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if method is None and "quant_algo" in config:
        method = "modelopt"
    if method is None and "qformat_weight" in config:
        method = "mistral"
    if method is None and config.keys() >= {"bits", "group_size"}:
        method = "mlx"
    name = str(method).lower()
    if name not in _METHODS:
        other = f", the format of {_OTHERS[name]}" if name in _OTHERS else ""
        got = f"the quantization_config has quant_method {method!r}{other}"
        raise CheckpointError(path, "", got, f"one of {', '.join(_METHODS)} is read", _READ)
    row, keys = _METHODS[name]
    _check_keys(config, (*_COMMON_KEYS, *_SKIP_KEYS, *keys), path, name)
    skipped, key = _skip_list(config, path)
    form = row(config, path)
    return dataclasses.replace(form, skipped=skipped, skip_key=key, cache=_cache(config))


def _cache(config: Mapping[str, Any]) -> Mapping[str, Any] | str | None:
    """The form of attention's cache. ModelOpt names it, or leaves out what servers ask for."""
    said, name = config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")
    if said or str(name).upper() == "FP8":
        return {**_FP8_CACHE, **_dict(said)}
    return str(name) if name else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration; ModelOpt's own file has most of it one level deeper."""
    inner = config.get("quantization")
    rest = {key: value for key, value in config.items() if key != "quantization"}
    return {**rest, **inner} if isinstance(inner, Mapping) else dict(config)


def _check_keys(config: Mapping[str, Any], known: tuple[str, ...], path: str, where: str) -> None:
    """Refuses a key of unknown meaning: it may change what the stored numbers mean."""
    for key, value in config.items():
        if key not in known and value not in (None, False, "") and value != [] and value != {}:
            got = f"the quantization_config ({where}) has {key} = {str(value)[:60]!r}"
            needs = "it is unknown whether that changes a weight"
            remedy = "remove the key from the file if it does not; else update jaxfp8"
            raise CheckpointError(path, "", got, needs, remedy)


def _skip_list(config: Mapping[str, Any], path: str) -> tuple[tuple[str, ...], str]:
    key = next((key for key in _SKIP_KEYS if config.get(key)), _SKIP_KEYS[0])
    names = config.get(key) or ()
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
    if not isinstance(groups, dict) or not (groups or config.get("kv_cache_scheme")):
        raise CheckpointError(
            path, "", f"config_groups is {groups!r}", "config_groups are needed", _AGAIN
        )
    schemes = [
        _group(name, group, path)
        for name, group in groups.items()
        # A group without weights is for the cache of attention.
        if not isinstance(group, dict) or group.get("weights") is not None
    ]
    name = f"compressed-tensors, {form} (llm-compressor)"
    return Format(name=name, schemes=tuple(schemes))


def _group(name: str, group: Any, path: str) -> Scheme:
    weights, inputs = (
        _dict(_dict(group).get("weights")),
        _dict(_dict(group).get("input_activations")),
    )
    kind, form = weights.get("type"), _dict(group).get("format") or "dense"
    if weights.get("num_bits") != 8 or kind not in ("int", "float") or form not in _COMPRESSED:
        got = f"{name} holds weights as {weights.get('num_bits')}-bit {kind} ({form})"
        raise CheckpointError(path, "", got, "8 bits, int or float, are needed", _PUBLISHED)
    _check_keys(group, _GROUP_KEYS, path, name)
    _check_keys(weights, _WEIGHT_KEYS, path, f"weights of {name}")
    strategy = _strategy(weights)
    if strategy not in ("tensor", "channel", "block", "group"):
        got = f"{name} has strategy {strategy!r}"
        needs = "tensor, channel, block or group is needed"
        raise CheckpointError(path, "", got, needs, _PUBLISHED)
    size = weights.get("block_structure") if strategy == "block" else [1, weights.get("group_size")]
    blocks = strategy in ("block", "group")
    static = bool(inputs) and inputs.get("dynamic") is False
    bits, numbers = inputs.get("num_bits", 8), inputs.get("type") or kind
    how = f"{'static' if static else 'dynamic'}, per {inputs.get('strategy')}"
    how += ", asymmetric" if inputs.get("symmetric") is False else ""
    how += f", in {bits}-bit {numbers}" if (bits, numbers) != (8, kind) else ""
    targets, classes = _targets(group.get("targets"), path)
    return Scheme(
        kind=str(kind),
        granularity="block" if blocks else str(strategy),
        block=_block(size, path) if blocks else None,
        zero_point=weights.get("symmetric") is False,
        # "weight" and "static" sorted columns before and put them back: groups are neighbours.
        ordered=weights.get("actorder") in (True, "group", "dynamic"),
        activations=how if inputs else "floats",
        inputs=json.dumps(inputs, sort_keys=True) if inputs else "",
        static=static,
        targets=targets,
        classes=classes,
    )


def _strategy(weights: Mapping[str, Any]) -> Any:
    """The strategy of a group; where it is missing, the size of a group decides."""
    size = weights.get("group_size")
    if weights.get("strategy") not in (None, "group"):
        return weights["strategy"]
    if size == -1:
        return "channel"
    return weights.get("strategy") or ("tensor" if size is None else "group")


def _targets(targets: Any, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Patterns of modules, or classes of layers."""
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(path, "", f"targets is {targets!r}", "names are needed", _AGAIN)
    classes = [target for target in targets if target.isidentifier() and target[:1].isupper()]
    return (() if classes else tuple(targets)), tuple(classes)


def _fp8(config: Mapping[str, Any], path: str) -> Format:
    """Of DeepSeek, Qwen and MiniMax, with blocks; of Mistral and AutoFP8, without."""
    size, scheme = config.get("weight_block_size"), config.get("activation_scheme")
    if scheme not in (None, "static", "dynamic"):
        needs = "static or dynamic is needed"
        raise CheckpointError(path, "", f"activation_scheme is {scheme!r}", needs, _AGAIN)
    static = scheme == "static"
    activations = "static, per tensor" if static else "dynamic"
    if size is not None:
        form = Scheme(
            kind="float", granularity="block", block=_block(size, path), activations=activations
        )
        return Format(name="fp8 in blocks (DeepSeek, Qwen)", schemes=(form,))
    form = Scheme(kind="float", granularity="row", activations=activations, static=static)
    return Format(name="fp8 (Mistral, AutoFP8)", schemes=(form,))


def _blockwise_int8(config: Mapping[str, Any], path: str) -> Format:
    block = _block(config.get("weight_block_size"), path)
    form = Scheme(kind="int", granularity="block", block=block, activations="dynamic")
    return Format(name="blockwise_int8 (SGLang)", schemes=(form,))


def _mistral(config: Mapping[str, Any], path: str) -> Format:
    """Of the params.json beside Mistral's own files."""
    form, act = config.get("qformat_weight"), config.get("qscheme_act")
    if form != "fp8_e4m3" or act not in (None, "TENSOR", "NO_SCALES"):
        got = f"params.json says qformat_weight {form!r} and qscheme_act {act!r}"
        raise CheckpointError(path, "", got, "fp8_e4m3 and TENSOR are read", _PUBLISHED)
    static = act == "TENSOR"
    activations = "static, per tensor" if static else "dynamic"
    scheme = Scheme(kind="float", granularity="row", activations=activations, static=static)
    return Format(name="fp8 (Mistral's params.json)", schemes=(scheme,))


def _modelopt(config: Mapping[str, Any], path: str) -> Format:
    algorithm = str(config.get("quant_algo")).upper()
    if config.get("pre_quant_scale"):
        got, needs = "pre_quant_scale is true", "inputs that are not smoothed are needed"
        raise CheckpointError(path, "", got, needs, _SMOOTHED)
    if config.get("quant_algo") is None:  # the cache of attention alone
        return Format(name="ModelOpt, weights in floats", schemes=())
    if algorithm != _MIXED:
        scheme = _of_algorithm("", algorithm, path)
        return Format(name=f"ModelOpt {algorithm}", schemes=(scheme,))
    layers = config.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        got, needs = f"quantized_layers is {layers!r}", "an algorithm for each layer is needed"
        raise CheckpointError(path, "", got, needs, "fetch hf_quant_config.json again")
    by_algorithm: dict[str, list[str]] = {}
    for layer, said in layers.items():
        by_algorithm.setdefault(str(_dict(said).get("quant_algo")).upper(), []).append(layer)
    schemes = tuple(
        dataclasses.replace(_of_algorithm(names[0], algorithm, path), targets=tuple(names))
        for algorithm, names in by_algorithm.items()
    )
    return Format(name=f"ModelOpt {_MIXED} of {', '.join(by_algorithm)}", schemes=schemes)


def _of_algorithm(layer: str, algorithm: str, path: str) -> Scheme:
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm]
    got = f"quant_algo{f' of {layer!r}' if layer else ''} is {algorithm}"
    needs = f"one of {', '.join(_MODELOPT)} is read"
    raise CheckpointError(path, "", got, needs, _PUBLISHED)


def _bitsandbytes(config: Mapping[str, Any], path: str) -> Format:
    if config.get("load_in_4bit") or config.get("_load_in_4bit"):
        got, needs = "load_in_4bit is true", "weights of LLM.int8 are read"
        raise CheckpointError(path, "", got, needs, _PUBLISHED)
    scheme = Scheme(kind="int", granularity="channel", activations="dynamic, per token")
    return Format(name="bitsandbytes LLM.int8", schemes=(scheme,))


def _quanto(config: Mapping[str, Any], path: str) -> Format:
    said = config.get("weights", config.get("weights_dtype"))  # the latter by diffusers
    kind = {"int8": "int", "float8": "float"}.get(str(said))
    if kind is None:
        got = f"weights are {said!r}"
        raise CheckpointError(path, "", got, "int8 or float8 is read", _PUBLISHED)
    activations = str(config.get("activations") or "floats")
    scheme = Scheme(kind=kind, granularity="row", activations=activations)
    return Format(name="optimum-quanto", schemes=(scheme,))


def _plain(name: str, scheme: Scheme) -> Callable[[Mapping[str, Any], str], Format]:
    """The reader of a method with one form."""
    return lambda config, path: Format(name=name, schemes=(scheme,))


def _gguf(config: Mapping[str, Any], path: str) -> Format:
    scheme = Scheme(kind="int", granularity="block", block=(1, 32), activations="floats")
    return Format(name=f"GGUF of {config.get('family')}", schemes=(scheme,))


def _block(size: Any, path: str) -> tuple[int, int]:
    if isinstance(size, str):  # "128x128", in old configurations
        parts = size.lower().split("x")
        size = [int(part) for part in parts] if all(p.isdigit() for p in parts) else size
    is_pair = isinstance(size, list | tuple) and len(size) == 2
    if is_pair and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    got, needs = f"the size of a block is {size!r}", "two sizes, of [N, K], are needed"
    raise CheckpointError(path, "", got, needs, _AGAIN)


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
_SMOOTHED = "load an export without SmoothQuant or AWQ, such as ModelOpt's FP8 or W8A16"
_MIXED = "MIXED_PRECISION"
_MX = Scheme(kind="float", granularity="block", block=(1, 32), activations="dynamic, per 32")
_FP8_CHANNEL = Scheme(kind="float", granularity="channel", activations="dynamic, per token")
_INT8_CHANNEL = dataclasses.replace(_FP8_CHANNEL, kind="int")
# transformers stores the experts of Llama 4 as [E, K, N], and scales as [E, 1, N] or [E, N, 1].
_FBGEMM = dataclasses.replace(_FP8_CHANNEL, columns=True)
_FP8_BLOCK = Scheme(kind="float", granularity="block", block=(128, 128), activations="floats")
_MODELOPT = {
    "FP8": Scheme(kind="float", granularity="tensor", activations="per tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_CHANNEL,
    "FP8_PB_WO": _FP8_BLOCK,
    "FP8_PB_REAL": _FP8_BLOCK,
    "MXFP8": _MX,
    "W8A16": Scheme(kind="int", granularity="channel", activations="floats"),
    "W8A8_SQ_PER_CHANNEL": Scheme(kind="int", granularity="channel", activations="per tensor"),
}
_COMPRESSED = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mxfp8-quantized",
    "float8_e5m2-quantized",  # what `save` calls codes that servers cannot hold
    "uint8-quantized",
    "mixed-precision",
    "dense",
)
# Keys that say how a program computes, loads or made the file, or that are read elsewhere.
_COMMON_KEYS = (
    "quant_method",
    "kv_cache_scheme",
    "kv_cache_quant_algo",
    "packed_modules_mapping",
    "dequantize",
    "run_compressed",
    "use_optimized_inference",
    "version",
    "producer",
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_WEIGHT_KEYS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
# The reader of each method, and its keys.
_METHODS: dict[str, tuple[Callable[[Mapping[str, Any], str], Format], tuple[str, ...]]] = {
    "compressed-tensors": (
        _compressed_tensors,
        (
            "format",
            "config_groups",
            "quantization_status",
            "global_compression_ratio",
            "sparsity_config",
        ),
    ),
    "fp8": (
        _fp8,
        (
            "fmt",
            "scale_fmt",
            "activation_scheme",
            "weight_block_size",
            "modules_to_convert",
            "expert_dtype",
        ),
    ),
    "mistral": (_mistral, ("qformat_weight", "qscheme_act")),
    "modelopt": (
        _modelopt,
        (
            "quant_algo",
            "quantized_layers",
            "config_groups",
            "group_size",
            "pre_quant_scale",
            "weights",
            "input_activations",
        ),
    ),
    "fbgemm_fp8": (_plain("fbgemm_fp8", _FBGEMM), ("activation_scale_ub",)),
    "w8a8_int8": (_plain("w8a8_int8 (SGLang)", _INT8_CHANNEL), ("activation_scheme", "is_dynamic")),
    "w8a8_fp8": (_plain("w8a8_fp8 (SGLang)", _FP8_CHANNEL), ("activation_scheme", "is_dynamic")),
    "blockwise_int8": (_blockwise_int8, ("weight_block_size", "activation_scheme")),
    "torchao": (
        _plain("torchao", Scheme(zero_point=True)),
        (
            "quant_type",
            "quant_type_kwargs",
            "include_input_output_embeddings",
            "untie_embedding_weights",
        ),
    ),
    "mxfp8": (_plain("mxfp8", _MX), ("weight_block_size", "fmt", "scale_fmt", "activation_scheme")),
    "bitsandbytes": (
        _bitsandbytes,
        (
            "load_in_8bit",
            "_load_in_8bit",
            "llm_int8_threshold",
            "llm_int8_enable_fp32_cpu_offload",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_quant_type",
            "bnb_4bit_quant_storage",
            "bnb_4bit_use_double_quant",
            "llm_int8_has_fp16_weight",
        ),
    ),
    "quanto": (_quanto, ("weights", "weights_dtype", "activations")),
    "gguf": (_gguf, ("family",)),
}
# Formats that are not read, and their writers.
_OTHERS = {
    "gptq": "GPTQ (GPTQModel, AutoGPTQ)",
    "awq": "AWQ (AutoAWQ)",
    "auto-round": "AutoRound of Intel",
    "intel/auto-round": "AutoRound of Intel",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "quark": "AMD Quark",
    "mxfp4": "gpt-oss, of 4 bits",
    "nvfp4": "NVFP4, of 4 bits",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "fp_quant": "FP-Quant",
    "bitnet": "BitNet",
    "metal": "MLX",
    "mlx": "MLX",
    "sinq": "SINQ",
    "sdnq": "SDNQ of SD.Next",
}
