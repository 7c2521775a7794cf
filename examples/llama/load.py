"""From a folder to a server: no float of a weight that is in 8 bits is ever allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8
import jaxfp8.nnx
from llama import functional
from llama.config import Config, read
from llama.model import Decoder
from llama.names import name_of, unused
from llama.sampling import Sampling
from llama.serve import Server, compiled, nbytes
from llama.tensors import Floats, HeadIn8Bits

# How a head may be held: as the checkpoint has it, or in FP8 with a scale for each token.
HEADS = ("bf16", "W8A16")
# How tensors [N, K] are split over the devices of a mesh: the columns of what makes heads and
# hidden values, then the rows of what sums over them; others are whole everywhere.
RULES = (
    (
        r"(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|w1|w3|embed_tokens|lm_head)\.weight$",
        P("model", None),
    ),
    (r"(q_proj|k_proj|v_proj)\.bias$", P("model")),
    (r"(o_proj|down_proj|w2)\.weight$", P(None, "model")),
)


def mesh(devices: int) -> Mesh:
    """A mesh of the first devices."""
    kinds = (AxisType.Auto,)
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=jax.devices()[:devices])


def sharding(mesh: Mesh | None) -> Any:
    """Where each tensor goes, as `jaxfp8.checkpoint.open` asks; each device reads its slice."""
    if mesh is None:
        return None

    def place(name: str, x: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = next((spec for end, spec in RULES if re.search(end, name)), P())
        cut = [i for i, axis in enumerate(spec) if axis and x.shape[i] % mesh.size]
        return NamedSharding(mesh, P() if cut else spec)

    return place


def model(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    over: Mesh | None = None,
    wide: bool = False,
    head_in_8_bits: bool = False,
) -> tuple[Decoder, jaxfp8.typing.Changes]:
    """The decoder of a folder in nnx, and what became of each of its weights.

    Args:
      folder: config.json and safetensors, in 8 bits or in floats.
      dtype: of what flows between layers.
      over: a mesh to split it over.
      wide: whether weights are held as floats of that dtype, to compare with.
      head_in_8_bits: whether the head is held in FP8, with a scale for each token.
    """
    with _opened(folder, over, dtype if wide else None, head_in_8_bits) as (config, tensors):
        return filled(config, tensors, dtype)


def filled(
    config: Config, tensors: Mapping[str, Any], dtype: Any
) -> tuple[Decoder, jaxfp8.typing.Changes]:
    """The decoder in nnx of tensors under the names of Hugging Face."""
    made = nnx.eval_shape(lambda: Decoder(config, dtype, rngs=nnx.Rngs(0)))
    changes = jaxfp8.nnx.load(
        made, tensors, lambda path: name_of(config, path), ignore=unused(config)
    )
    return made, changes


def functions(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    over: Mesh | None = None,
    cache: str = "fp8",
    how: Sampling | None = None,
    prefill_in_8_bits: bool = True,
    wide: bool = False,
    head_in_8_bits: bool = False,
) -> Server:
    """A server of the same decoder as plain functions.

    Args:
      folder, dtype, over, wide, head_in_8_bits: as for `model`.
      cache, how, prefill_in_8_bits: as for `llama.serve.server`.
    """
    with _opened(folder, over, dtype if wide else None, head_in_8_bits) as (config, tensors):
        params = functional.parameters(config, tensors, stacked=not wide)
    return served(config, params, dtype, cache, how or Sampling(), prefill_in_8_bits)


def served(
    config: Config,
    params: functional.Params,
    dtype: Any,
    cache: str,
    how: Sampling,
    prefill_in_8_bits: bool,
) -> Server:
    """A server of parameters in a tree of arrays."""

    def run(inputs_in_8_bits: bool) -> Any:
        def decoder(params: Any, *args: Any, span: int) -> Any:
            return functional.decoder(
                config, params, *args, span=span, dtype=dtype, inputs_in_8_bits=inputs_in_8_bits
            )

        return decoder

    programs = run(prefill_in_8_bits), run(False)
    looked_up = 0 if params["head"] is params["embed"] else nbytes(params["embed"])
    return compiled(config, params, *programs, cache, how, stacked=True, looked_up=looked_up)


@contextlib.contextmanager
def _opened(
    folder: str | os.PathLike[str], over: Mesh | None, wide: Any, head_in_8_bits: bool
) -> Iterator[tuple[Config, Mapping[str, Any]]]:
    """Sizes and tensors of a folder; as floats of the dtype `wide`, if it is given."""
    config = read(folder)
    with jaxfp8.checkpoint.open(folder, sharding=sharding(over)) as tensors:
        given = tensors if wide is None else Floats(tensors, wide)
        yield with_head_in_8_bits(config, given) if head_in_8_bits else (config, given)


def with_head_in_8_bits(
    config: Config, tensors: Mapping[str, Any]
) -> tuple[Config, Mapping[str, Any]]:
    """Sizes and tensors of the same decoder with its head in FP8, and tied no more."""
    return dataclasses.replace(config, tied=False), HeadIn8Bits(tensors, config.tied)
