"""The machine for which a program is decided: the one at hand, or one that the user names."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

from jaxfp8._call.library import ffi
from jaxfp8._value import errors

_NAMES = {"gpu": "cuda"}
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine for `jaxfp8.explain` and `jaxfp8.rewrite` to decide for. It need not be here.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu"; "gpu" is "cuda".
      capability: compute capability of an NVIDIA GPU as 10 * major + minor, such as 90 for an
        H100; None for a GPU that is not known yet.

    Raises:
      ValueError: the platform is unknown, or `capability` is no positive int of a GPU.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8
      >>> x, q = jnp.ones((16, 1024), jnp.bfloat16), jnp.ones((1024, 512), jnp.float8_e4m3fn)
      >>> f = lambda x, q: x @ (q.astype(x.dtype) * jnp.bfloat16(0.5))
      >>> report = jaxfp8.explain(f, target=jaxfp8.Target("cuda", 90))(x, q)
      >>> report.matched[0].kernels["cuda"]
      'xla'
    """

    platform: str
    capability: int | None = None

    def __post_init__(self) -> None:
        platform = _NAMES.get(self.platform, self.platform)
        if platform not in _PLATFORMS:
            got, needs = f"is {self.platform!r}", f"needs to be one of {', '.join(_PLATFORMS)}"
            remedy = 'use `jaxfp8.Target("cuda", 90)` for an H100'
            raise ValueError(errors.message("jaxfp8.Target", "`platform`", got, needs, remedy))
        number, is_cuda = self.capability, platform == "cuda"
        if number is not None and not (is_cuda and isinstance(number, int) and number > 0):
            got, needs = f"is {self.capability!r}", "needs to be a positive int, of a CUDA GPU"
            remedy = "give 10 * major + minor, such as 90 for 9.0, or leave it out"
            raise ValueError(errors.message("jaxfp8.Target", "`capability`", got, needs, remedy))
        object.__setattr__(self, "platform", platform)


_GIVEN: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def given() -> Target | None:
    """The target of the user; None for the machine at hand."""
    return _GIVEN.get()


@contextlib.contextmanager
def deciding_for(target: Target | None) -> Iterator[None]:
    """Decisions inside are for a target; None is the machine at hand. Compiling is no decision."""
    token = _GIVEN.set(target)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def platform() -> str:
    """The platform of the target, such as "cuda"; without one, of JAX's default device."""
    target = given()
    if target is not None:
        return target.platform
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined] # made at run time
    device = chosen or jax.default_backend()
    name = getattr(device, "platform", device)
    return _NAMES.get(name, name)


def compute_capability() -> int | None:
    """10 * major + minor of the target's GPU; None without one, or where it is not known."""
    target = given()
    return ffi.compute_capability() if target is None else target.capability
