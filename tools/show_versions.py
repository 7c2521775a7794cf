"""One line that says what the tests are about to run on."""

import platform

import jax
import jaxlib
import numpy

print(
    f"==> Python {platform.python_version()}, jax {jax.__version__}, "
    f"jaxlib {jaxlib.__version__}, numpy {numpy.__version__}"
)
