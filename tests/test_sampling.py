"""The part of the suite that `--one-case` runs."""

import sampling

CASES = [f"test[{dtype}-{rows}]" for dtype in ("e4m3", "int8") for rows in range(20)]


def test_the_choice_does_not_depend_on_the_order_of_the_cases():
    assert sampling.chosen(CASES) == sampling.chosen(reversed(CASES))


def test_each_test_has_a_choice_of_its_own():
    places = {
        CASES.index(sampling.chosen(f"{n}{case}" for case in CASES).lstrip("0123456789"))
        for n in range(8)
    }
    assert len(places) > 4


def test_each_file_keeps_its_share_and_at_least_one():
    names = [f"test_{n}" for n in range(9)]
    assert len(sampling.part(names, 2)) == 5
    assert sampling.part(names, 2) == sampling.part(reversed(names), 2)
    assert sampling.part(names[:1], 4) == {names[0]}


def test_a_fifth_of_drawn_examples_remains(monkeypatch):
    assert sampling.examples(50) == 50 or sampling.one_case
    monkeypatch.setattr(sampling, "one_case", True)
    assert [sampling.examples(count) for count in (50, 6, 1)] == [10, 2, 1]
