"""How a rewritten function behaves as a function: caching, arguments, transformations."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rewrite.support import BF16, F32, Data, count, left_alone

import jaxfp8


def product(x: Any, q: Any, s: Any) -> Any:
    return x @ (q.astype(F32) * s)


def _args() -> tuple[jax.Array, jax.Array, jax.Array]:
    data = Data()
    return data.normal(5, 32), data.bits8(32, 24), data.scale(24)


def _close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_function_is_traced_once_for_each_shape() -> None:
    traces = []

    def f(x: Any, q: Any, s: Any) -> Any:
        traces.append(x.shape)
        return product(x, q, s)

    rewritten = jaxfp8.rewrite(f)
    x, q, s = _args()
    for rows in (5, 5, 3, 5):
        rewritten(x[:rows], q, s)
    assert traces == [(5, 32), (3, 32)]


def test_function_without_a_match_is_called_itself() -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(type(x))
        return x + 1

    rewritten = jaxfp8.rewrite(f)
    x = np.ones(3)
    rewritten(x)
    rewritten(x)
    assert calls[1:] == [np.ndarray, np.ndarray]


def curved(x: Any, q: Any) -> Any:
    return x @ jnp.sin(q.astype(F32))


def test_rewrite_that_captures_nothing_warns_at_the_call_and_once() -> None:
    x, q, _ = _args()
    rewritten = jaxfp8.rewrite(curved)
    with pytest.warns(jaxfp8.FallbackWarning, match="none of the 1 8-bit dots of `curved`") as told:
        rewritten(x, q)
    assert [(w.filename, "explain(curved)" in str(w.message)) for w in told] == [(__file__, True)]
    rewritten(x, q)
    rewritten(x[:1], q)
    jax.vmap(rewritten, (0, None))(x[None], q)
    jax.grad(lambda x: rewritten(x, q).sum())(x)


@pytest.mark.parametrize(
    "transform",
    [jax.grad, jax.vmap, lambda f: jax.jit(jax.grad(f))],
    ids=["grad", "vmap", "jit of grad"],
)
def test_the_warning_points_at_the_caller_of_a_transformed_function(transform: Any) -> None:
    x, q, _ = _args()
    with pytest.warns(jaxfp8.FallbackWarning) as told:
        transform(jaxfp8.rewrite(lambda x: jnp.sum(curved(x, q))))(x)
    assert [w.filename for w in told] == [__file__]


def test_rewrite_that_captures_something_or_has_no_8_bit_data_does_not_warn() -> None:
    x, q, s = _args()
    jaxfp8.rewrite(lambda x, q: (curved(x, q), product(x, q, s)))(x, q)
    jaxfp8.rewrite(lambda x, q: x @ x.T)(x, q)
    jax.grad(jaxfp8.rewrite(lambda s: product(x, q, s).sum()))(s)


def test_leaves_that_are_no_arrays_stay_python_values() -> None:
    def f(x: Any, q: Any, s: Any, power: int, mode: str, flag: bool = True) -> Any:
        assert type(power) is int
        assert type(flag) is bool
        y = product(x, q, s)
        return {"y": y**power if flag else y, "mode": len(mode)}

    args = _args()
    rewritten = jaxfp8.rewrite(f)
    _close(rewritten(*args, 2, "ab", flag=True)["y"], product(*args) ** 2)
    _close(rewritten(*args, 3, "ab", flag=True)["y"], product(*args) ** 3)
    assert rewritten(*args, 2, mode="abc")["mode"] == 3


def test_pytrees_and_keywords_keep_their_structure() -> None:
    def f(params: dict[str, Any], *, x: Any) -> Any:
        return {"out": [product(x, params["q"], params["s"]), None]}

    x, q, s = _args()
    out = jaxfp8.rewrite(f)({"q": q, "s": s}, x=x)
    _close(out["out"][0], product(x, q, s))
    assert out["out"][1] is None


def test_methods_and_partials_can_be_rewritten() -> None:
    x, q, s = _args()

    class Layer:
        def __call__(self, x: Any) -> Any:
            return product(x, q, s)

    _close(jaxfp8.rewrite(Layer().__call__)(x), product(x, q, s))
    assert count(jaxfp8.rewrite(functools.partial(product, x)), q, s) == 1


def test_captured_constants_are_matched_too() -> None:
    x, q, s = _args()
    assert count(jaxfp8.rewrite(lambda x: product(x, q, s)), x) == 1


def test_jitted_function_keeps_its_static_arguments() -> None:
    @functools.partial(jax.jit, static_argnums=3, static_argnames="mode")
    def f(x: Any, q: Any, s: Any, n: int, mode: str = "a") -> Any:
        return product(x, q, s) * (n if mode == "a" else -n)

    args = _args()
    _close(jaxfp8.rewrite(f)(*args, 3, mode="b"), -3 * product(*args))
    assert count(jaxfp8.rewrite(lambda *a: f(*a, 3)), *args) == 1


def test_jitted_function_keeps_its_donation() -> None:
    def f(x: Any, q: Any, s: Any) -> Any:
        return product(x, q, s) @ jnp.ones((24, 32)) + x

    jitted = jax.jit(f, donate_argnums=0)
    x, q, s = _args()
    rewritten = jaxfp8.rewrite(jitted)
    equation = jax.make_jaxpr(rewritten)(x, q, s).eqns[0]
    text = str(equation)
    assert "donated_invars=(True, False, False)" in text
    assert "scaled_dot" in text
    _close(rewritten(x, q, s), f(*_args()))


def test_rewrite_inside_and_outside_jit_agree() -> None:
    args = _args()
    _close(jax.jit(jaxfp8.rewrite(product))(*args), jaxfp8.rewrite(jax.jit(product))(*args))


def test_vmap_of_the_rewrite_keeps_the_shared_weight_single() -> None:
    x, q, s = _args()
    many = jnp.stack([x, -x])
    mapped = jax.vmap(jaxfp8.rewrite(product), (0, None, None))
    _close(mapped(many, q, s), jax.vmap(product, (0, None, None))(many, q, s))
    assert "f8_e4m3fn[2," not in str(jax.make_jaxpr(mapped)(many, q, s))


def test_rewrite_in_a_scan_body_sees_tracers_from_outside() -> None:
    x = _args()[0]
    square = Data(1).bits8(32, 32)

    def run(rewrite: Any) -> Any:
        def outer(s: Any) -> Any:
            step = rewrite(lambda x: jnp.tanh(x @ (square.astype(F32) * s)))
            return jax.lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]

        return jax.jit(outer)(jnp.asarray(0.1, F32))

    _close(run(jaxfp8.rewrite), run(lambda f: f))


def test_effects_keep_their_order() -> None:
    seen: list[str] = []

    def f(x: Any, q: Any, s: Any) -> Any:
        jax.debug.callback(lambda v: seen.append("before"), x[0, 0], ordered=True)
        y = product(x, q, s)
        jax.debug.callback(lambda v: seen.append("after"), y[0, 0], ordered=True)
        return x

    jaxfp8.rewrite(f)(*_args())
    jax.effects_barrier()
    assert seen == ["before", "after"]


def test_unhashable_leaf_is_traced_at_each_call() -> None:
    class Box:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, factor: float) -> None:
            self.factor = factor

    rewritten = jaxfp8.rewrite(lambda x, q, s, box: product(x, q, s) * box.factor)
    args = _args()
    _close(rewritten(*args, Box(2.0)), 2 * product(*args))
    _close(rewritten(*args, Box(3.0)), 3 * product(*args))


def test_wide_weight_is_not_in_the_program() -> None:
    args = _args()
    assert "f32[32,24]" not in str(jax.make_jaxpr(jaxfp8.rewrite(product))(*args))


def test_fp8_argument_goes_into_the_call_as_it_came() -> None:
    assert "bitcast" not in str(jax.make_jaxpr(jaxfp8.rewrite(product))(*_args()))


def test_moved_fp8_data_is_moved_as_bytes() -> None:
    data = Data()
    stack, x = data.bits8(3, 32, 24), data.normal(5, 32)

    def f(x: Any, stack: Any, i: Any) -> Any:
        return x @ (stack[i].astype(F32) * 0.5)

    text = str(jax.make_jaxpr(jaxfp8.rewrite(f))(x, stack, jnp.int32(1)))
    assert "u8[1,32,24] = dynamic_slice" in text
    assert "f8_e4m3fn[1,32,24]" not in text


def test_optimised_program_of_a_layer_scan_holds_no_wide_stack() -> None:
    data = Data()
    stack, scales = data.bits8(4, 64, 64), data.scale(4, 64)

    def f(x: Any, stack: Any, scales: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, stack.astype(BF16) * scales[:, None].astype(BF16))[0]

    x = data.normal(5, 64, dtype=BF16)
    text = jax.jit(jaxfp8.rewrite(f)).lower(x, stack, scales).compile().as_text()
    for wide in ("f16", "bf16", "f32"):
        assert f"{wide}[4,64,64]" not in text


@left_alone
def test_platform_without_kernels_is_left_alone() -> None:
    tpu = jaxfp8.Target("tpu")
    report = jaxfp8.explain(product, target=tpu)(*_args())
    assert report.missed[0].reason == "there are no TPU kernels"
    assert count(jaxfp8.rewrite(product, target=tpu), *_args()) == 0


@left_alone
def test_without_the_library_code_is_left_alone_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "jaxfp8._call.library.ffi.why_unavailable", lambda platform: "the library is missing"
    )
    assert count(jaxfp8.rewrite(product), *_args()) == 0
    with pytest.raises(ValueError, match="the library is missing"):
        jaxfp8.rewrite(product, strict=True)(*_args())
