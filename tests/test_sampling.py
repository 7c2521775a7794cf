"""The part of the tests that `--every` runs."""

import itertools

import pytest
import sampling

KERNELS = [f"kernel{i}" for i in range(11)]
GRIDS = {
    "as many values as are left out": {"activation": list("abcde"), "kernel": KERNELS},
    "three parameters": {"rows": [1, 3, 17], "dtype": list("xyz"), "kernel": KERNELS},
    "one parameter": {"seed": list(range(40))},
    "one value": {"dtype": ["e4m3"], "size": list(range(7))},
}


def cases_of(grid):
    return {
        "-".join(map(str, values)): list(zip(grid, map(str, values), strict=True))
        for values in itertools.product(*grid.values())
    }


@pytest.mark.parametrize("every", [2, 3, 5, 8])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_value_that_several_cases_share_survives(grid, every):
    cases = cases_of(GRIDS[grid])
    names = sampling.chosen(cases, every)
    kept = {pair for name in names for pair in cases[name]}
    pairs = [pair for own in cases.values() for pair in own]
    assert {pair for pair in pairs if pairs.count(pair) > 1} <= kept


@pytest.mark.parametrize("every", [3, 5])
@pytest.mark.parametrize("grid", ["three parameters", "one parameter"])
def test_it_is_a_part(grid, every):
    cases = cases_of(GRIDS[grid])
    assert len(sampling.chosen(cases, every)) < 1.5 * len(cases) / every


def test_it_does_not_depend_on_the_order_of_the_cases():
    cases = cases_of(GRIDS["three parameters"])
    backwards = dict(reversed(cases.items()))
    assert sampling.chosen(cases, 5) == sampling.chosen(backwards, 5)


def test_each_test_has_a_choice_of_its_own():
    cases = cases_of(GRIDS["one parameter"])
    other = {f"other-{name}": pairs for name, pairs in cases.items()}
    assert {f"other-{name}" for name in sampling.chosen(cases, 5)} != sampling.chosen(other, 5)


@pytest.mark.parametrize(("count", "remain"), [(1, 1), (2, 2), (3, 2), (5, 2), (11, 3)])
def test_two_cases_remain_at_least(count, remain):
    cases = cases_of({"dtype": list("abcdefghijk"[:count])})
    assert len(sampling.chosen(cases, 5)) == remain


def test_all_cases_remain_without_it():
    cases = cases_of(GRIDS["three parameters"])
    assert sampling.chosen(cases, 1) == set(cases)


def test_of_drawn_examples_one_in_n_remains(monkeypatch):
    monkeypatch.setattr(sampling, "every_nth", 5)
    assert [sampling.examples(count) for count in (50, 6, 1)] == [10, 2, 1]
