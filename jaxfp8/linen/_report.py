"""The errors of a linen model in 8 bits, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from jaxfp8._ops import einsum
from jaxfp8._ops.quantize import dequantize
from jaxfp8._recipes.accuracy_comparison import (
    check_alone,
    check_reference,
    check_some,
    compared,
    recording,
    rounds_activations,
)
from jaxfp8._recipes.accuracy_recorder import Call, Recorder
from jaxfp8._recipes.accuracy_report import AccuracyReport
from jaxfp8._recipes.recipes import Recipe, TrainingRecipe
from jaxfp8._recipes.rules import Rule, as_rules, choose
from jaxfp8._recipes.selection import Selection, Where, tell, unmatched_rules
from jaxfp8._value.errors import message
from jaxfp8._value.prepared import is_held
from jaxfp8._value.spec import DimensionNumbers, Shape
from jaxfp8.linen import _layers
from jaxfp8.linen._changes import applied, check_call
from jaxfp8.linen._kernel import INPUT_SCALE, PARAMS
from jaxfp8.linen._moe import GroupedDense
from jaxfp8.linen._training import PRODUCTS, scaling_of, training_recipe

_OPERATION = "jaxfp8.linen.report"
_OURS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dense: _layers.Dense,
    nn.DenseGeneral: _layers.DenseGeneral,
    nn.Einsum: _layers.Einsum,
    nn.Embed: _layers.Embed,
    GroupedDense: GroupedDense,
}
_FLAX = {ours: theirs for theirs, ours in _OURS.items()}
_METHODS = ("__call__", "attend")
# Beside an 8-bit parameter, the name of the float one. So `nn.scan` slices both.
_IN_FLOATS = "{} in floats"
# Outputs of layers: the floats, the floats after dequantizing weights, the 8-bit layer's output.
_EXACT, _WIDE, _NARROW = "exact", "wide", "narrow"


def report(
    model: nn.Module,
    variables: Any,
    *args: Any,
    recipe: Recipe | Rule | Sequence[Any] | None = None,
    reference: Any = None,
    where: Where = None,
    **kwargs: Any,
) -> AccuracyReport:
    """Measures the error of each layer of a model in 8 bits, and of its outputs, on a sample.

    Each layer gets its input of the float model and is computed in floats and in 8 bits. So its
    error is its own, without errors of the layers before it. It measures:

    - a model of Flax's layers with a `recipe`: the errors of that recipe.
    - a model of `jaxfp8.linen`'s layers with its former float variables: its errors. These are
      `variables`, or `reference` beside 8-bit `variables`.
    - such a model with 8-bit variables alone: the errors from rounding activations, against the
      dequantized weights. The rounding of weights is not in them, as the float ones are unknown.
    - a model in FP8 training with all its variables: the errors of its forward products. With a
      `recipe`: the errors of that recipe. Both are relative to the float model.

    The error of the outputs is the whole one. Its parts follow if a layer rounds both operands.
    A terminal shows a bar meanwhile.

    Args:
      model: the model.
      variables: its variables; not changed, even if a forward pass changes some.
      *args, **kwargs: the sample: arguments of `model.apply`.
      recipe: as for `jaxfp8.nnx.quantize`, paths being those of modules.
      reference: the float variables before they became the 8-bit `variables`.
      where: which layers: a regular expression to search in the path, a collection of paths, or a
        function of path and module. By default all. The others stay in floats.

    Returns:
      The report: layers worst first, and the ones to keep wide.

    Warns:
      UserWarning: 8-bit variables are measured without their `reference`.
      FallbackWarning: `where` or a rule selects no layer.

    Raises:
      ValueError: there is nothing to compare: no recipe and no 8-bit layer, or 8-bit weights alone
        without a `reference`; both a recipe and a reference are given; the reference lacks the
        floats of an 8-bit parameter.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxfp8, jaxfp8.linen
      >>> model, x = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]), jnp.ones((2, 64))
      >>> variables = model.init(jax.random.key(0), x)
      >>> report = jaxfp8.linen.report(model, variables, x, recipe=jaxfp8.INT8_DYNAMIC)
      >>> sorted(row.path for row in report.rows)
      ['layers_0', 'layers_2']
    """
    check_call(_OPERATION, model, variables, kwargs)
    check_reference(_OPERATION, recipe, reference)
    rules = as_rules(recipe, _OPERATION) if recipe is not None else ()
    selects = Selection(_OPERATION, "where", where)
    given = variables if reference is None else _beside(variables, reference)
    with recording(_layers_in(variables[PARAMS])) as recorder:
        watch = _Watch(rules, selects, recorder)
        exact = watch.run(_EXACT, model, given, args, kwargs)
    selects.tell()
    tell(*unmatched_rules(_OPERATION, rules, watch.paths))
    check_some(_OPERATION, watch.paths)
    if watch.unknown:
        check_alone(_OPERATION, "variables", watch.rounds)

    def run(what: str) -> Any:
        return watch.run(what, model, variables, args, kwargs)

    wide = None if watch.trains else lambda: run(_WIDE)
    is_whole = not watch.unknown
    return compared(_OPERATION, watch.recorder, exact, run(_NARROW), wide, is_whole=is_whole)


def _layers_in(params: Any) -> int:
    """About how many layers have a row."""
    if not isinstance(params, Mapping):
        return 0
    own = any(name in params for name in ("kernel", "embedding"))
    return own + sum(_layers_in(value) for value in params.values())


def _beside(variables: Any, reference: Any) -> Any:
    """The float variables, and beside them each 8-bit parameter, and missing floats."""
    if not isinstance(reference, Mapping) or PARAMS not in reference:
        got, needs = f"is of type {type(reference).__name__}", f"it has no collection {PARAMS!r}"
        remedy = "give all float variables, as `model.init` makes them"
        raise ValueError(message(_OPERATION, "`reference`", got, needs, remedy))
    params = _merged(variables[PARAMS], reference[PARAMS], "")
    return {**variables, **reference, PARAMS: params}


def _merged(own: Any, floats: Any, path: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name, value in own.items():
        known, here = floats.get(name), f"{path}{name}"
        if isinstance(value, Mapping):
            merged[name] = _merged(value, known if isinstance(known, Mapping) else {}, f"{here}/")
        elif is_held(value):
            _check_floats(here, value, known)
            merged |= {name: value, _IN_FLOATS.format(name): known}
        else:
            merged[name] = value if known is None else known
    return merged


def _check_floats(path: str, held: Any, floats: Any) -> None:
    """Refuses a reference without the floats of an 8-bit parameter."""
    value, shape = meta.unbox(floats), tuple(meta.unbox(held).shape)
    if value is None or is_held(value) or getattr(value, "shape", None) != shape:
        has = "nothing" if value is None else value if is_held(value) else f"{value.shape}"
        got, needs = f"has {has} at `{path}`", f"floats of {shape} are needed"
        remedy = "give the variables that the 8-bit ones were made from"
        raise ValueError(message(_OPERATION, "`reference`", got, needs, remedy))


class _Watch:
    """An interceptor of calls: it computes each chosen layer in floats and in 8 bits.

    Attributes:
      recorder: the measurements.
      paths: of the compared layers.
      unknown: whether the float weights of a layer were unknown.
      rounds: whether a layer rounds more than its weight.
      trains: whether a layer trains in FP8, with no recipe for it.
      is_inside: whether a layer is being compared; layers inside it are not.
    """

    def __init__(self, rules: tuple[Rule, ...], selects: Selection, recorder: Recorder) -> None:
        self.rules, self.selects, self.recorder = rules, selects, recorder
        self.paths: set[str] = set()
        self.unknown = self.rounds = self.trains = self.is_inside = False
        self.what = _EXACT

    def run(self, what: str, model: nn.Module, variables: Any, args: Any, kwargs: Any) -> Any:
        """Applies the model, its layers' output being `what`; measures them if it is the floats."""
        self.what = what
        with nn.intercept_methods(self._intercept):
            # Parameters may change: 8-bit layers quantize float ones.
            return applied(model, variables, args, kwargs)[0]

    def _intercept(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if self.is_inside or context.method_name not in _METHODS:
            return call(*args, **kwargs)
        module, path = context.module, "/".join(context.module.path)
        known = type(module) in _FLAX or type(module) in _OURS
        recipe = self._recipe(path, module) if known else None
        if recipe is not None and not self.selects(path, module):
            recipe = None
        is_layer = isinstance(module, tuple(_OURS))
        is_narrow = type(module) in _FLAX or (is_layer and training_recipe(context.module))
        if recipe is None and not is_narrow:
            return call(*args, **kwargs)
        compared = _Call(module, recipe, args, kwargs, context.method_name)
        self.is_inside = True
        try:
            return self._compare(path, compared, call)
        finally:
            self.is_inside = False

    def _compare(self, path: str, compared: _Call, call: Any) -> Any:
        """The output of a layer; measures it if that is the floats."""
        if compared.recipe is None:
            return compared.floats(compared.wide)
        if isinstance(compared.recipe, Recipe):
            held, y8 = compared.in_8_bits()
        else:
            held, y8 = compared.own, call(*compared.args, **compared.kwargs)
        if self.what == _NARROW:
            return y8
        if self.what == _WIDE:
            return compared.floats({name: _widened(value) for name, value in held.items()})
        self.trains |= not isinstance(compared.recipe, Recipe)
        self.rounds |= rounds_activations(compared.recipe)
        self.unknown |= compared.unknown
        y = compared.floats(compared.wide)
        return self.recorder.layer_of(compared.measured(path, held), exact=y, got=y8)

    def _recipe(self, path: str, module: nn.Module) -> Recipe | TrainingRecipe | None:
        if type(module) in _FLAX and module.recipe is not None:  # type: ignore[attr-defined]
            self.paths.add(path)
            return module.recipe  # type: ignore[attr-defined]
        training = training_recipe(module)
        if training is None and any(getattr(module, name, None) is not None for name in PRODUCTS):
            return None  # a product of its own
        if self.rules or training is not None:
            self.paths.add(path)
        return choose(self.rules, path) if self.rules else training


class _Call:
    """One call of a layer, and its parameters.

    Attributes:
      own: its parameters, in 8 bits or not.
      wide: the float ones; dequantized if they are unknown.
      unknown: whether one is.
    """

    def __init__(
        self,
        module: nn.Module,
        recipe: Recipe | TrainingRecipe | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str,
    ) -> None:
        self.module, self.recipe, self.method = module, recipe, method
        self.args, self.kwargs = args, kwargs
        params = meta.unbox(module.variables[PARAMS])
        others = {_IN_FLOATS.format(name) for name in params}
        self.own = {name: value for name, value in params.items() if name not in others}
        known = {name: params.get(_IN_FLOATS.format(name), self.own[name]) for name in self.own}
        self.unknown = any(map(is_held, known.values()))
        self.wide = {name: _widened(value) for name, value in known.items()}

    def floats(self, params: Any) -> Any:
        """The output of Flax's layer with these parameters."""
        layer = _as_flax(self.module)
        return layer.apply({PARAMS: params}, *self.args, **self.kwargs, method=self.method)

    def in_8_bits(self) -> tuple[Any, Any]:
        """The parameters of the 8-bit layer, and its output."""
        kind = _OURS.get(type(self.module), type(self.module))
        ours = _like(self.module, kind, **_usual(kind), recipe=self.recipe)
        kwargs = {**self.kwargs, "method": self.method}
        if any(map(is_held, self.own.values())):  # static scales stay as they were calibrated
            return self.own, ours.apply({PARAMS: self.own}, *self.args, **kwargs)
        y, changed = applied(ours, {PARAMS: self.own}, self.args, kwargs)
        return changed[PARAMS], y

    def measured(self, path: str, held: Any) -> Call:
        """The call for its row; `held` are the parameters of the 8-bit layer."""
        assert self.recipe is not None
        name, x = "embedding" if "embedding" in self.own else "kernel", jnp.asarray(self.args[0])
        wide, is_lookup = self.wide[name], name == "embedding" and self.method == "__call__"
        return Call(
            path=path,
            kind=type(self.module).__name__,
            recipe=self.recipe,
            wide=wide,
            held=held[name],
            is_known=not self.unknown,
            x=x,
            numbers=None if is_lookup else _numbers(self.module, x, wide.shape),
            scale=held.get(INPUT_SCALE),
            state=(scaling_of(self.module, "input"), scaling_of(self.module, "kernel")),
        )


def _widened(value: Any) -> Any:
    return dequantize(value, jnp.float32) if is_held(value) else value


def _as_flax(module: nn.Module) -> nn.Module:
    """The layer of Flax, in floats."""
    kind = _FLAX.get(type(module), type(module))
    fields = {"recipe": None} if hasattr(kind, "recipe") else {}
    return _like(module, kind, **_usual(kind), **fields)


def _usual(kind: type[nn.Module]) -> dict[str, None]:
    """The arguments that give a layer its usual product."""
    return {name: None for name in PRODUCTS if hasattr(kind, name)}


def _like(module: nn.Module, kind: type[nn.Module], **fields: Any) -> nn.Module:
    """A module of another class with the fields of both."""
    names = {f.name for f in dataclasses.fields(kind) if f.init} - {"parent", "name", *fields}
    shared = {name: getattr(module, name) for name in names if hasattr(module, name)}
    return kind(**shared, **fields, parent=None)


def _numbers(module: Any, x: jax.Array, kernel: Shape) -> DimensionNumbers:
    """Dimension numbers of the product of a layer with an input."""
    if isinstance(module, nn.DenseGeneral | _layers.DenseGeneral):
        axes, batch = (_positive(given, x) for given in (module.axis, module.batch_dims))
        first = len(batch)
        return (axes, tuple(range(first, first + len(axes)))), (batch, tuple(range(first)))
    if isinstance(module, nn.Einsum | _layers.Einsum) and module.einsum_str:
        return einsum.parse(_OPERATION, module.einsum_str, x.shape, kernel).numbers
    if isinstance(module, GroupedDense):
        return ((x.ndim - 1,), (1,)), ((), (0,))
    axis = 1 if isinstance(module, nn.Embed | _layers.Embed) else 0
    return ((x.ndim - 1,), (axis,)), ((), ())


def _positive(axes: Any, x: jax.Array) -> Shape:
    return tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))
