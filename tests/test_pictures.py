"""The pictures of docs/pictures/, which tools/pictures.py draws from recorded data."""

import json
import pathlib
import re

import pytest

pytestmark = pytest.mark.any_jax

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_in_a_page(picture):
    assert any(f"pictures/{picture.name}" in page.read_text() for page in DOCS.glob("*.md"))


def test_the_picture_of_decoding_steps_shows_the_times_of_its_data():
    run = json.loads((DOCS / "measurements" / "h100_decode.json").read_text())
    times = [c["seconds"] * 1e3 for case in run["cases"] for c in case["contenders"]]
    drawn = re.findall(r"<text [^>]*>(\d\.\d\d)</text>", (DOCS / "pictures/decode.svg").read_text())
    assert sorted(drawn) == sorted(f"{time:.2f}" for time in times)
