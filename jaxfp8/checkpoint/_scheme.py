"""The 8-bit form of weights, as a configuration says it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxfp8.checkpoint import _names
from jaxfp8.checkpoint._patterns import Patterns


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scheme:
    """The 8-bit form of some weights.

    Attributes:
      kind: "float" or "int"; "" if the dtype of the tensor decides.
      granularity: "tensor", "channel" or "block"; "row" for tensor or channel; "" if the shape of
        the scale decides.
      block: sizes of a block of [N, K]; None without blocks.
      columns: whether experts are [E, K, N] with a scale for each of N, however it is shaped.
      zero_point: whether there may be zero points.
      ordered: whether groups along K need a tensor with their order.
      activations: the treatment of activations in a server, in words.
      inputs: the configuration of activations in the words of compressed-tensors, as JSON; "" for
        other writers.
      static: whether a static scale of the activations is required.
      targets: modules with this form, as patterns; () for all.
      classes: classes of layers with this form. Tensors do not tell their class, so each such form
        is tried.
    """

    kind: str = ""
    granularity: str = ""
    block: tuple[int, int] | None = None
    columns: bool = False
    zero_point: bool = False
    ordered: bool = False
    activations: str = ""
    inputs: str = ""
    static: bool = False
    targets: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The configuration of a checkpoint's weights.

    Attributes:
      name: the name of the format.
      schemes: forms of weights. Those with the module among their targets come before the others.
      skipped: modules kept in floats, as patterns.
      skip_key: the key of this list in the configuration.
      cache: the form of attention's cache in the words of compressed-tensors, or the name of a form
        without such words; None for floats.
    """

    name: str
    schemes: tuple[Scheme, ...]
    skipped: tuple[str, ...] = ()
    skip_key: str = "ignore"
    cache: Mapping[str, Any] | str | None = None

    @functools.cached_property
    def _targeted(self) -> list[tuple[Patterns, Scheme]]:
        return [(Patterns(scheme.targets), scheme) for scheme in self.schemes if scheme.targets]

    @functools.cached_property
    def _general(self) -> dict[bool, tuple[Scheme, ...]]:
        """Schemes for a table of embeddings, and for another layer, the likeliest first."""
        general = [scheme for scheme in self.schemes if not scheme.targets]

        def ordered(is_table: bool) -> tuple[Scheme, ...]:
            return tuple(sorted(general, key=lambda s: ("Embedding" in s.classes) != is_table))

        return {is_table: ordered(is_table) for is_table in (False, True)}

    @functools.cached_property
    def _has_tables(self) -> bool:
        return any("Embedding" in scheme.classes for scheme in self.schemes)

    @functools.cached_property
    def _skips(self) -> Patterns:
        return Patterns(self.skipped)

    def forms(self, module: str) -> tuple[Scheme, ...]:
        """The possible forms of a module's weight, the likeliest first; () if it has none."""
        for patterns, scheme in self._targeted:
            if patterns.first(module) is not None:
                return (scheme,)
        return self._general[self._has_tables and _names.is_table(module)]

    def skips(self, module: str) -> str | None:
        """The entry of the skip list for a module, or None."""
        return self._skips.first(module)
