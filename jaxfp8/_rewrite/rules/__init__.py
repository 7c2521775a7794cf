"""Rules: from the facts about a primitive's inputs to the fact about its output.

How to add a rule:

1. Find the file of its kind, or add one and import it below: `conversions` (casts), `scales`,
  `zero_points`, `views`, `gathers`, `choices` (select, pad), `joins` (concatenate, split),
  `collectives`, `dot` (with `groups`) and `scaled_products`, `unserved` (products without a
  kernel), `epilogue` (steps after a dot).
2. Write a function of the walk (a `Context`: the fact about each value) and the op:

       @rule("cummax")  # the name of the JAX primitive
       def cumulative_max(walk: Context, op: Op) -> Fact | None:
           ...

   It returns the fact about the output: `Scaled` for dequantized data, `Scales` for its scales, a
   longer `Product` after a dot. It returns None if nothing is known, and `lost(op, reason, remedy)`
   if it ends a fact and the user can change something. A view needs only `views.moved`.
   With several outputs it returns a sequence.
3. Add three tests in `tests/rewrite`: a captured program in `programs/` with equal results; a near
  miss in `negatives.py` or `test_misses.py`, left alone with its reason; and one in
  `test_derivatives.py` if the rule is differentiated.

Loops, branches and calls have rules of the same form: see `jaxfp8._rewrite.regions`. A new
activation is a row of `_SMOOTH` in `curves`.
"""

from jaxfp8._rewrite.rules import (  # noqa: F401 (each fills the table)
    choices,
    collectives,
    conversions,
    dot,
    epilogue,
    gathers,
    joins,
    scaled_products,
    scales,
    unserved,
    views,
    zero_points,
)
from jaxfp8._rewrite.rules.registry import RULES

__all__ = ["RULES"]
