"""One line on the versions under test."""

import platform

import jax
import jaxlib
import numpy

print(
    f"==> Python {platform.python_version()}, jax {jax.__version__}, "
    f"jaxlib {jaxlib.__version__}, numpy {numpy.__version__}"
)
