"""Programs whose numbers two compilations share to the last bit, or nearly.

The suite has XLA optimise nothing. Then it computes the same expression in different ways, by what
is fused with it, and a value between two codes, or between two whole numbers, goes to either.
"""

import functools

import jax

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
