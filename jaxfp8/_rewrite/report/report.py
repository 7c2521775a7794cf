"""The report: its rows, and the ways to show them."""

from __future__ import annotations

import dataclasses

from jaxfp8._rewrite.report import rows
from jaxfp8._rewrite.report.model import Findings
from jaxfp8._value import tables

# The version of the fields of `to_json`. A new field keeps it; a changed or missing one does not.
SCHEMA = "jaxfp8.report/2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Findings):
    """What `rewrite` does to a function, dot by dot.

    It prints as a table that fits the terminal, and shows itself in notebooks. In a file or a pipe
    a row is one line; the variable `COLUMNS` sets a width there.

    Attributes:
      name: name of the function.
      sites: one row for each dot that 8-bit data reached, in order.
      others: how many dots 8-bit data never reached.
      calls: a row for each scaled dot that the function holds already, such as `jaxfp8.matmul`.
      encodings: the values of FP8 training that are made and encoded in one call; () if JAX's
        default backend is not a GPU.
      attentions: attention over a cache in floats that is one call. Its dots count as `others`.
    """

    def to_json(self, indent: int | None = None) -> str:
        """The rows and totals as JSON; docs/rewrite.md describes the fields."""
        own, calls = (
            [{"status": s.status, **dataclasses.asdict(s)} for s in sites]
            for sites in (self.sites, self.calls)
        )
        named = {"schema": SCHEMA, "name": self.name, "totals": self.totals}
        encodings = [dataclasses.asdict(one) for one in self.encodings]
        attentions = [dataclasses.asdict(one) for one in self.attentions]
        whole = {**named, "sites": own, "calls": calls, "encodings": encodings}
        return tables.json({**whole, "attentions": attentions}, indent)

    def to_html(self) -> str:
        """The rows and totals as an HTML page, which loads nothing."""
        return tables.page(f"jaxfp8: {self.name}", self._repr_html_())

    def _repr_html_(self) -> str:
        return tables.html(*self._table())

    def __str__(self) -> str:
        return tables.text(*self._table())

    def _table(self) -> tuple[str, tables.Row, list[tables.Row], list[str]]:
        return rows.headline(self), rows.HEAD, rows.rows(self), rows.footer(self)
