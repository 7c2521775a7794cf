"""The report: one row for each dot that 8-bit data reached."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jaxfp8._rewrite.report import html, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a dot, as the report tells it.

    Attributes:
      dtype: dtype of the 8-bit data, or of the array where there is none.
      shape: shape of the operand as the dot has it; a symbolic size is a string.
      scale: what scales the data: "none", "per tensor", "per axis 0", "per contracted axis 1",
        "blocks 128x128", ...
      zero_point: whether it has a zero point.
      eight_bit: whether it is 8-bit data.
      quantized: where a rewritten dot's operand is quantised by the function itself, "one call" if
        that is computed so, else "as written"; otherwise "".
    """

    dtype: str
    shape: tuple[int | str, ...]
    scale: str
    zero_point: bool
    eight_bit: bool
    quantized: str = ""

    def __str__(self) -> str:
        zero = ", zero point" if self.zero_point else ""
        made = f", quantised in {self.quantized}" if self.quantized == "one call" else ""
        scale = f" ({self.scale}{zero}{made})" if self.eight_bit else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{scale}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One dot of the function.

    Attributes:
      file, line, function: the innermost frame of the user's own code.
      library: the innermost frame outside JAX, as "file:line function", where it is another.
      path: name stack of the equation, such as a module path; may be "".
      lhs, rhs: the operands.
      dims: sizes (batch, M, N, K); -1 for a symbolic one.
      rewritten: whether it became a scaled dot.
      already: whether it is one as it stands, and so a call of a kernel.
      reason: why not; "" for a rewritten one.
      remedy: what to change; "" for a rewritten one.
      note: what a rewritten one, or a call, pays for scales along a contracted axis; else "".
      mesh: how a rewritten one, or a call, is split over a mesh of explicit axes, and what it
        sends; "" elsewhere, where XLA decides.
      ended_by: the operation that stands between the 8-bit data and a scaled dot, as JAX names it;
        "dot_general" where it is the dot itself; "" for a rewritten one.
      ended_at: "file:line" of that operation; "" for a rewritten one.
      epilogue: what the scaled dot absorbed, such as "scale, bias, relu -> bfloat16".
      widened_bytes: size of the arrays that the function as written makes of the 8-bit data for
        this dot; a loop makes them in each turn, and one that something else reads is still made.
      platforms: for each platform, None where a kernel takes it, or why none does; {} for a missed
        one.
      kernels: for each platform on which a kernel takes it, the name of that kernel, as the
        platform's library tells; "" where only the device can tell.
    """

    file: str
    line: int
    function: str
    library: str
    path: str
    lhs: Operand
    rhs: Operand
    dims: tuple[int, int, int, int]
    rewritten: bool
    already: bool = False
    reason: str
    remedy: str
    ended_by: str
    ended_at: str
    epilogue: str
    note: str = ""
    mesh: str = ""
    widened_bytes: int
    platforms: dict[str, str | None]
    kernels: dict[str, str]

    @property
    def where(self) -> str:
        """The place in the user's code, as "file:line"."""
        return f"{self.file}:{self.line}"

    @property
    def status(self) -> str:
        """One of "rewritten", "missed" and "already"."""
        if self.already:
            return "already"
        return "rewritten" if self.rewritten else "missed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `rewrite` does to a function, dot by dot.

    It prints as a table that fits the terminal, and shows itself in notebooks.

    Attributes:
      name: name of the function.
      sites: one row for each dot that 8-bit data reached, in order.
      others: how many dots never had anything to do with 8-bit data.
      calls: a row for each scaled dot that is one already, as those of `jaxfp8.matmul` are.
    """

    name: str
    sites: tuple[Site, ...]
    others: int
    calls: tuple[Site, ...] = ()

    @property
    def scaled(self) -> int:
        """How many are scaled dots already."""
        return len(self.calls)

    @property
    def matched(self) -> tuple[Site, ...]:
        """The dots that become scaled dots."""
        return tuple(site for site in self.sites if site.rewritten)

    @property
    def missed(self) -> tuple[Site, ...]:
        """The dots that stay as they are, though 8-bit data reached them."""
        return tuple(site for site in self.sites if not site.rewritten)

    @property
    def widened_bytes(self) -> int:
        """Bytes of wide arrays that the rewritten dots no longer read."""
        return sum(site.widened_bytes for site in self.matched)

    @property
    def totals(self) -> dict[str, int]:
        """Numbers of dots, by what becomes of them, and bytes."""
        return {
            "matched": len(self.matched),
            "missed": len(self.missed),
            "others": self.others,
            "scaled": self.scaled,
            "widened_bytes": self.widened_bytes,
            "still_widened_bytes": sum(site.widened_bytes for site in self.missed),
        }

    def to_json(self, indent: int | None = None) -> str:
        """The rows and totals as JSON; docs/rewrite.md describes the fields."""
        rows, calls = (
            [{"status": s.status, **dataclasses.asdict(s)} for s in sites]
            for sites in (self.sites, self.calls)
        )
        named = {"schema": SCHEMA, "name": self.name, "totals": self.totals}
        whole = {**named, "sites": rows, "calls": calls}
        return json.dumps(whole, indent=indent, allow_nan=False)

    def to_html(self) -> str:
        """The rows and totals as an HTML page of its own, which loads nothing."""
        return html.page(self)

    def _repr_html_(self) -> str:
        return html.fragment(self)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield text.renderable(self, options.max_width)

    def __str__(self) -> str:
        return text.text(self)


# The fields of `to_json`: a new one keeps the number, a changed or missing one does not.
SCHEMA = "jaxfp8.report/1"
