"""From a folder to a server: no float of a weight that is in 8 bits is ever allocated."""

from __future__ import annotations

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
from llama.config import read
from llama.model import Decoder
from llama.names import name_of, unused
from llama.sampling import Sampling
from llama.serve import Server, compiled

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
) -> tuple[Decoder, jaxfp8.typing.Changes]:
    """The decoder of a folder in nnx, and what became of each of its weights.

    Args:
      folder: config.json and safetensors, in 8 bits or in floats.
      dtype: of what flows between layers.
      over: a mesh to split it over.
      wide: whether weights are held as floats of that dtype, to compare with.
    """
    config = read(folder)
    made = nnx.eval_shape(lambda: Decoder(config, dtype, rngs=nnx.Rngs(0)))
    with jaxfp8.checkpoint.open(folder, sharding=sharding(over)) as tensors:
        given = Floats(tensors, dtype) if wide else tensors
        changes = jaxfp8.nnx.load(
            made, given, lambda path: name_of(config, path), ignore=unused(config)
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
) -> Server:
    """A server of the same decoder as plain functions.

    Args:
      folder, dtype, over, wide: as for `model`.
      cache, how, prefill_in_8_bits: as for `llama.serve.server`.
    """
    config = read(folder)
    with jaxfp8.checkpoint.open(folder, sharding=sharding(over)) as tensors:
        given = Floats(tensors, dtype) if wide else tensors
        params = functional.parameters(config, given, stacked=not wide)

    def run(inputs_in_8_bits: bool) -> Any:
        def decoder(params: Any, *args: Any, span: int) -> Any:
            return functional.decoder(
                config, params, *args, span=span, dtype=dtype, inputs_in_8_bits=inputs_in_8_bits
            )

        return decoder

    programs = run(prefill_in_8_bits), run(False)
    return compiled(config, params, *programs, cache, how or Sampling(), stacked=True)


class Floats(Mapping[str, Any]):
    """The tensors of a checkpoint with 8-bit weights as the floats that they stand for."""

    def __init__(self, tensors: jaxfp8.typing.Checkpoint, dtype: Any) -> None:
        self.tensors, self.dtype = tensors, dtype

    def __getitem__(self, name: str) -> jax.Array:
        tensor = self.tensors[name]
        if isinstance(tensor, jaxfp8.QArray):
            return jaxfp8.dequantize(tensor, self.dtype)
        return tensor.astype(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shape(self, name: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a tensor, which `jaxfp8.nnx.load` asks for before it reads any."""
        return jax.ShapeDtypeStruct(self.tensors.shape(name).shape, self.dtype)
