"""The choice of the next token in examples/llama, against a sorted vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama import sampling
from llama.sampling import Sampling, counted, sample

HOWS = [
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=50),
    Sampling(temperature=1.0, top_k=5000),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_k=40, top_p=0.95),
    Sampling(temperature=1.0, top_k=3, top_p=0.4),
]


def name(how):
    return f"k{how.top_k}-p{how.top_p}"


def logits(kind, rows):
    drawn = np.random.default_rng(7).normal(size=(rows, 1000)) * 3
    if kind == "ties":
        drawn = np.round(drawn)
    if kind == "negative":
        drawn -= 100
    if kind == "masked":
        drawn[:, ::2] = -np.inf
    return drawn.astype(np.float32)


def counted_by_sorting(how, row):
    """Which tokens count, bool [vocabulary], by ranks in float64."""
    row = row.astype(np.float64)
    if how.top_k:
        row = np.where(row >= np.sort(row)[::-1][min(how.top_k, row.size) - 1], row, -np.inf)
    share = np.exp(row - row.max())
    share /= share.sum()
    order = np.argsort(-row, kind="stable")
    before = np.concatenate([[0], np.cumsum(share[order])[:-1]])
    least = row[order][np.sum(before < how.top_p) - 1]
    return (row >= least) & np.isfinite(row)


@pytest.mark.parametrize("how", HOWS, ids=name)
@pytest.mark.parametrize("kind", ["normal", "ties", "negative", "masked"])
@pytest.mark.parametrize("platform", sampling.BITS)
def test_tokens_that_count_are_those_of_a_sorted_vocabulary(monkeypatch, platform, kind, how):
    monkeypatch.setitem(sampling.BITS, "cpu", sampling.BITS[platform])
    rows = logits(kind, 12)
    got = np.isfinite(counted(how, jnp.asarray(rows)))
    np.testing.assert_array_equal(got, [counted_by_sorting(how, row) for row in rows])


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(temperature=1.5, top_k=6),
        Sampling(temperature=1.2, top_k=9, top_p=0.9),
    ],
    ids=name,
)
def test_many_seeds_draw_the_documented_distribution(how):
    """Pearson's statistic stays below its 99.99th percentile, which is bounded for 20 tokens."""
    row = np.random.default_rng(3).normal(size=20).astype(np.float32) * 1.5
    scaled = row / np.float32(how.temperature)
    wanted = np.where(counted_by_sorting(how, scaled), np.exp(scaled.astype(np.float64)), 0)
    wanted /= wanted.sum()
    keys = jax.random.split(jax.random.key(1), 20000)
    drawn = jax.vmap(lambda key: sample(how, jnp.asarray(row)[None], key)[0])(keys)
    seen = np.bincount(drawn, minlength=20)
    assert seen[wanted == 0].sum() == 0
    kept = wanted > 0
    expected = wanted[kept] * keys.size
    assert np.sum((seen[kept] - expected) ** 2 / expected) < 53


def test_sampling_takes_likely_tokens_alone():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]).repeat(200, 0))
    key = jax.random.key(0)
    for how, allowed in [
        (Sampling(), {0}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_k=9), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_p=0.6), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.01), {0}),
        (Sampling(temperature=2.0), {0, 1, 2, 3}),
    ]:
        assert set(sample(how, logits, key).tolist()) == allowed


def test_both_zeros_are_equal_tokens():
    got = counted(HOWS[0], jnp.array([[0.0, -0.0, -1.0], [-0.0, 0.0, -1.0]]))
    np.testing.assert_array_equal(np.isfinite(got), [[True, True, False]] * 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("how", [Sampling(temperature=0.7), *HOWS[4:6]], ids=name)
def test_logits_of_16_bits_are_those_in_float32(how, dtype):
    rows, key = jnp.asarray(logits("normal", 12), dtype), jax.random.key(5)
    wanted = sample(how, rows.astype(jnp.float32), key)
    np.testing.assert_array_equal(sample(how, rows, key), wanted)


@pytest.mark.parametrize("how", [Sampling(), HOWS[5]], ids=["greedy", "drawn"])
def test_no_program_sorts_a_vocabulary(how):
    text = sample.lower(how, jnp.zeros((2, 1000)), jax.random.key(0)).as_text()
    assert "sort" not in text and "top_k" not in text and "topk" not in text.lower()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give 0 or more"),
        ({"top_k": -1}, "top_k is -1; give 1 or more, or 0 for all"),
        ({"top_p": 0.0}, "top_p is 0.0; give more than 0, and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5; give more than 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_choice_out_of_range_is_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        Sampling(**wrong)
