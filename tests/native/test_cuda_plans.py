"""The switches of cuBLASLt's plans, from Python: asks no GPU."""

import pytest

from jaxfp8._call.library import ffi

pytestmark = pytest.mark.cuda_library


@pytest.fixture
def no_plans_kept():
    yield
    ffi.keep_plans(None)


@pytest.mark.usefixtures("no_plans_kept")
def test_a_file_for_plans_is_made_where_there_is_none(tmp_path):
    ffi.keep_plans(tmp_path / "plans.txt")
    assert (tmp_path / "plans.txt").is_file()


@pytest.mark.usefixtures("no_plans_kept")
def test_a_file_for_plans_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OSError, match="missing/plans"):
        ffi.keep_plans(tmp_path / "missing" / "plans.txt")
