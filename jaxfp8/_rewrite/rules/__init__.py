"""Rules: what each primitive makes of the facts about its inputs.

How to add a rule:

1. Find the file of its kind, or add one and import it below: `conversions` (casts), `scales`,
   `zero_points`, `views`, `gathers`, `zeros` (pad, select), `joins` (concatenate, split),
   `collectives`, `dot` and `scaled_products`, `unserved` (products without a kernel), `epilogue`
   (what follows a dot).
2. Write a function of the walk (a `Context`: what is known of each value) and the op:

       @rule("cummax")  # the name of the JAX primitive
       def cumulative_max(walk: Context, op: Op) -> Fact | None:
           ...

   It returns the fact about the output: `Scaled` for dequantised data, `Scales` for what scales
   it, a longer `Product` behind a dot. It returns None where nothing is known, and
   `lost(op, reason, remedy)` where it ends a fact and the user can change something.
   `views.moved` does all that a view needs. `@outputs_rule` is for several outputs.
3. Add three tests in `tests/rewrite`: a program in `programs/` that is captured and computes the
   same; a near miss in `negatives.py` or `test_misses.py` that is left alone, with its reason; and,
   where the rule is differentiated, one in `test_derivatives.py`.

Loops, branches and calls have rules of the same form: see `jaxfp8._rewrite.regions`. A new
activation is a row of `_SMOOTH` in `curves`.
"""

from jaxfp8._rewrite.rules import (
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
    zeros,
)
from jaxfp8._rewrite.rules.registry import OUTPUTS_RULES, RULES

__all__ = [
    "OUTPUTS_RULES",
    "RULES",
    "collectives",
    "conversions",
    "dot",
    "epilogue",
    "gathers",
    "joins",
    "scaled_products",
    "scales",
    "unserved",
    "views",
    "zero_points",
    "zeros",
]
