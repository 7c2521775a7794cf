"""`jaxfp8.solve`: factored in few bits, corrected until float32 or float64 is reached."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8._ops import solve as solving

pytestmark = pytest.mark.any_jax

SIZE = 64


@pytest.fixture(autouse=True)
def small_panels(monkeypatch):
    """Two panels, and so a product between them, in small matrices."""
    monkeypatch.setattr(solving, "_BLOCK", 32)


def system(condition, dtype=np.float32, columns=2, size=SIZE, seed=0):
    """A matrix whose singular values are in geometric progression, and right sides."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
    a = left * np.geomspace(1, 1 / condition, size) @ right
    return a.astype(dtype), rng.standard_normal((size, columns)).astype(dtype)


def exact(a, b):
    """The solution, by float64 and residuals of more bits."""
    wide = a.astype(np.float64)
    x = np.linalg.solve(wide, b.astype(np.float64))
    for _ in range(3):
        r = b.astype(np.longdouble) - a.astype(np.longdouble) @ x.astype(np.longdouble)
        x = x + np.linalg.solve(wide, r.astype(np.float64))
    return x


def worst(a, b):
    """The bound of the docstring, and the powers of two by which solutions are scaled in it."""
    balanced, _, columns = solving._balance(jnp.asarray(a))
    wide = np.asarray(balanced, np.float64)
    norm, inverse = (np.abs(matrix).sum(1).max() for matrix in (wide, np.linalg.inv(wide)))
    lines = a.shape[0] + b.shape[1]
    bound = 2.0**-22 + 2.0**-28 * (1 + lines / 10) * inverse * max(16, norm)
    return bound, 2.0 ** -np.asarray(columns, np.float64)[:, None]


def off(x, want):
    return np.linalg.norm(np.asarray(x, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("condition", [10, 1e3, 1e5])
def test_float32_solution_has_the_error_that_the_docstring_states(condition):
    a, b = system(condition)
    found, want = jaxfp8.solve(a, b), exact(a, b)
    bound, scale = worst(a, b)
    error = np.abs(scale * (np.asarray(found.x, np.float64) - want)).max(0)
    assert (error <= bound * np.abs(scale * want).max(0)).all()
    assert off(found.x, want) < off(jnp.linalg.solve(a, b), want) / 4
    assert found.x.dtype == jnp.float32 and found.converged


@pytest.mark.parametrize(
    ("condition", "how"),
    [
        (3, {"terms": 1}),
        (30, {"dtype": jnp.bfloat16}),
        (1e3, {"terms": 2}),
        (1e6, {"terms": 3}),
    ],
    ids=str,
)
def test_float64_solution_is_as_accurate_as_a_direct_one(condition, how):
    a, b = system(condition, np.float64)
    want = exact(a, b)
    with jax.enable_x64(True):
        found = jaxfp8.solve(a, b, **how)
        assert found.x.dtype == jnp.float64 and found.converged
        assert off(found.x, want) < 2 * off(np.linalg.solve(a, b), want)
        residual = b - a @ np.asarray(found.x)
        rounding = 1e-14 * np.abs(found.x).max()
        np.testing.assert_allclose(found.residual, residual, atol=rounding)
        assert found.backward_error < 1e-15


def test_factors_of_several_panels_multiply_to_the_matrix():
    a, _ = system(10)
    factored = jax.jit(solving._factored, static_argnums=(1, 2))
    lu, order = map(np.asarray, factored(a, np.dtype(np.float32), 20))
    lower, upper = np.tril(lu, -1).astype(np.float64) + np.eye(SIZE), np.triu(lu)
    np.testing.assert_allclose(lower @ upper, a[order], atol=1e-6)
    assert sorted(order) == list(range(SIZE)) and np.abs(lower).max() <= 1


def test_fewer_bits_take_more_corrections():
    a, b = system(3, np.float64)
    with jax.enable_x64(True):
        steps = [int(jaxfp8.solve(a, b, terms=terms).steps) for terms in (1, 2, 3)]
    assert steps[0] > steps[1] >= steps[2] > 1


def test_most_of_the_work_is_products_of_terms(monkeypatch):
    sizes, product = [], solving.split_dot

    def counted(x, y, **asked):
        sizes.append((asked["terms"], 2 * x.shape[0] * x.shape[1] * y.shape[1]))
        return product(x, y, **asked)

    monkeypatch.setattr(solving, "split_dot", counted)
    monkeypatch.setattr(solving, "_BLOCK", 16)
    a, b = system(10, size=80, columns=1)
    jax.eval_shape(lambda: jaxfp8.solve(a, b, terms=2))
    in_factors = sum(work for terms, work in sizes if terms == 2)
    assert in_factors > 0.7 * 2 / 3 * 80**3


@pytest.mark.parametrize(("terms", "condition"), [(1, 1e6), (2, 1e10)])
def test_too_few_bits_for_the_condition_number_are_an_error(terms, condition):
    a, b = system(condition, np.float64)
    with (
        jax.enable_x64(True),
        pytest.raises(np.linalg.LinAlgError, match=r"`a` is too ill-conditioned .* more `terms`"),
    ):
        jaxfp8.solve(a, b, terms=terms)


def test_rows_that_depend_on_each_other_are_an_error():
    a, b = system(10)
    a[-1] = a[0] + a[1]
    with pytest.raises(np.linalg.LinAlgError, match="too ill-conditioned"):
        jaxfp8.solve(a, b)


def test_a_singular_matrix_is_an_error_and_inside_jit_a_flag():
    a, b = np.ones((8, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(np.linalg.LinAlgError, match="`a` is singular: a pivot is 0"):
        jaxfp8.solve(a, b)
    assert not jax.jit(jaxfp8.solve)(a, b).converged


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["a", "b"])
def test_numbers_that_are_not_finite_are_an_error(which, bad):
    operands = system(10)
    operands[which][3, 1] = bad
    with pytest.raises(np.linalg.LinAlgError, match="hold NaN or infinities"):
        jaxfp8.solve(*operands)


def test_badly_scaled_rows_and_columns_cost_nothing():
    a, b = system(10)
    want = jaxfp8.solve(a, b).x
    rows, columns = (2.0 ** np.linspace(low, -low, SIZE).round() for low in (-60, 40))
    scaled = (a * rows[:, None] * columns).astype(np.float32)
    got = jaxfp8.solve(scaled, (b * rows[:, None]).astype(np.float32)).x
    assert off(got * columns[:, None], np.asarray(want, np.float64)) < 1e-6


def test_right_side_may_be_a_vector_zero_or_of_16_bits():
    a, b = system(10)
    vector = jaxfp8.solve(a, b[:, 0])
    assert vector.x.shape == vector.residual.shape == (SIZE,)
    assert off(vector.x, exact(a, b)[:, 0]) < 1e-6
    nothing = jaxfp8.solve(a, 0 * b)
    assert not nothing.x.any() and nothing.backward_error == 0
    narrow = jaxfp8.solve(jnp.asarray(a, jnp.bfloat16), jnp.asarray(b, jnp.bfloat16))
    rounded = (np.asarray(jnp.asarray(v, jnp.bfloat16), np.float32) for v in (a, b))
    assert narrow.x.dtype == jnp.float32 and off(narrow.x, exact(*rounded)) < 1e-6


def test_columns_are_solved_each_to_its_own_accuracy():
    a, b = system(10)
    tall = b * np.array([1e-20, 1e20], np.float32)
    got, want = jaxfp8.solve(a, tall).x, exact(a, tall)
    assert all(off(got[:, i], want[:, i]) < 1e-6 for i in range(2))


def test_a_looser_tolerance_and_a_limit_are_obeyed():
    a, b = system(10, np.float64)
    with jax.enable_x64(True):
        with pytest.raises(np.linalg.LinAlgError, match="after 2 corrections"):
            jaxfp8.solve(a, b, terms=2, max_steps=2)
        assert jaxfp8.solve(a, b, terms=2, max_steps=2, tol=1e-4).steps == 2


def test_derivatives_are_those_of_the_solution():
    a, b = system(10, columns=1, size=24)

    def loss(solution, a, b):
        return jnp.sum(jnp.sin(solution(a, b)))

    ours = jax.grad(loss, (1, 2))(lambda a, b: jaxfp8.solve(a, b).x, a, b)
    want = jax.grad(loss, (1, 2))(jnp.linalg.solve, a, b)
    assert all(off(g, np.asarray(w, np.float64)) < 1e-4 for g, w in zip(ours, want, strict=True))
    tangent = jax.jvp(lambda b: jaxfp8.solve(a, b).x, (b,), (b,))[1]
    assert off(tangent, exact(a, b)) < 1e-5


def test_vmap_solves_several_systems():
    pairs = [system(10, seed=seed, size=24) for seed in (1, 2)]
    a, b = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    found = jax.vmap(jaxfp8.solve)(a, b)
    assert found.converged.all()
    assert all(off(found.x[i], exact(a[i], b[i])) < 1e-6 for i in range(2))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda a, b: jaxfp8.solve(a[:, :3], b), ValueError, "a square matrix is needed"),
        (lambda a, b: jaxfp8.solve(a[None], b), ValueError, "use `jax.vmap` for several"),
        (lambda a, b: jaxfp8.solve(a, b[:3]), ValueError, r"\(64,\) or \(64, K\) is needed"),
        (lambda a, b: jaxfp8.solve(a.astype(int), b), TypeError, "`a` is int"),
        (lambda a, b: jaxfp8.solve(a, b.astype(np.complex64)), TypeError, "`b` is complex64"),
        (lambda a, b: jaxfp8.solve(a, b, terms=5), ValueError, "1 to 4 terms"),
        (lambda a, b: jaxfp8.solve(a, b, dtype=jnp.int8), TypeError, "`dtype` is int8"),
        (lambda a, b: jaxfp8.solve(a, b, tol=0), ValueError, "between 0 and 1"),
        (lambda a, b: jaxfp8.solve(a, b, max_steps=1), ValueError, "two corrections at least"),
        (lambda a, b: jaxfp8.solve(a[:0, :0], b[:0]), ValueError, "nothing to solve"),
    ],
    ids=["wide", "batch", "rows", "int", "complex", "terms", "dtype", "tol", "steps", "empty"],
)
def test_bad_input_says_what_is_needed(call, error, text):
    with pytest.raises(error, match=text):
        call(*system(10))
