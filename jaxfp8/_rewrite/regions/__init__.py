"""Regions: loops, branches and calls. Facts pass into them and out of them.

The rule of a region takes the walk and the op, as every rule does. It returns the outputs, or None
to leave the op as it is. `@region("primitive_name")` registers it.
"""

from jaxfp8._rewrite.regions import branches, functions, loops
from jaxfp8._rewrite.regions.functions import JITS
from jaxfp8._rewrite.regions.registry import REGIONS, Region

__all__ = ["JITS", "REGIONS", "Region", "branches", "functions", "loops"]
