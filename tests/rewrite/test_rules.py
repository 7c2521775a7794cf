"""A file of rules is used as soon as its package names it."""

from __future__ import annotations

import pathlib
import re
from types import ModuleType

import pytest

from jaxfp8._rewrite import regions, rules

REGISTERS = re.compile(r"^@(rule|region)\(", re.MULTILINE)


@pytest.mark.parametrize("package", [rules, regions], ids=["rules", "regions"])
def test_every_file_that_registers_a_rule_is_imported_by_its_package(package: ModuleType) -> None:
    files = pathlib.Path(package.__path__[0]).glob("*.py")
    registering = {file.stem for file in files if REGISTERS.search(file.read_text())}
    assert registering and registering <= set(vars(package))
