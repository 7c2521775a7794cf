"""The rows of a report: one for each dot that 8-bit data reached."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a dot.

    Attributes:
      dtype: dtype of the 8-bit data, or of the array where there is none.
      shape: shape of the operand as the dot has it; a symbolic size is a string.
      scale: what scales the data: "none", "per tensor", "per axis 0", "per contracted axis 1",
        "blocks 128x128", ...
      zero_point: whether it has a zero point.
      eight_bit: whether it is 8-bit data.
      quantized: for an operand of a rewritten dot that the function quantizes itself, "one call"
        or "as written"; otherwise "".
      producer: on a GPU, what is computed in that call beside the codes ("RMSNorm", "silu and a
        factor"), or why there is none; otherwise "".
      contracted: the axes that the product sums over.
      tiles: for each axis the number of entries that share a scale; None without a scale.
    """

    dtype: str
    shape: tuple[int | str, ...]
    scale: str
    zero_point: bool
    eight_bit: bool
    quantized: str = ""
    producer: str = ""
    contracted: tuple[int, ...] = ()
    tiles: tuple[int, ...] | None = None

    def __str__(self) -> str:
        zero = ", zero point" if self.zero_point else ""
        beside = f" with {self.producer}" if self.producer else ""
        made = f", quantized in one call{beside}" if self.quantized == "one call" else ""
        scale = f" ({self.scale}{zero}{made})" if self.eight_bit else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{scale}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Located:
    """Something in the user's code.

    Attributes:
      file, line, function: the innermost frame of the user's own code.
    """

    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        """The place in the user's code, as "file:line"."""
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site(Located):
    """One dot of the function.

    Attributes:
      file, line, function: the innermost frame of the user's own code.
      library: the innermost frame outside JAX, as "file:line function", if it is not the user's.
      path: the name stack of the equation, such as a module path; may be "".
      lhs, rhs: the operands.
      dims: sizes (batch, M, N, K); -1 for a symbolic one.
      rewritten: whether it became a scaled dot, or products of int8 terms.
      already: whether the function holds it as a scaled dot, and so as a call of a kernel.
      reason: why not; "" for a rewritten one.
      remedy: what to change; "" for a rewritten one.
      note: what scales along a contracting axis cost, and a second rounding to int8, for a scaled
        dot; else "".
      ended_by: the operation that keeps the 8-bit data from a scaled dot, as JAX names it. It is
        "dot_general" for the dot itself, and "" for a rewritten one.
      ended_at: "file:line" of that operation; "" for a rewritten one.
      epilogue: what the scaled dot computes as well, such as "scale, bias, relu -> bfloat16".
      out_dtype: dtype of the output, after the epilogue.
      widened_bytes: the size of the wide arrays that the function as written makes of the 8-bit
        data for this dot. A loop makes them in each turn. One that has other readers is still made.
      platforms: for each platform why no kernel takes it, or None if one does; {} for a missed one.
      kernels: for each platform with a kernel that takes it, the name of the kernel; "" where only
        the device can tell.
    """

    library: str
    path: str
    lhs: Operand
    rhs: Operand
    dims: tuple[int, int, int, int]
    rewritten: bool
    already: bool = False
    reason: str = ""
    remedy: str = ""
    ended_by: str = ""
    ended_at: str = ""
    epilogue: str
    out_dtype: str
    note: str = ""
    widened_bytes: int = 0
    platforms: dict[str, str | None]
    kernels: dict[str, str]

    @property
    def status(self) -> str:
        """One of "rewritten", "missed" and "already"."""
        if self.already:
            return "already"
        return "rewritten" if self.rewritten else "missed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedValue(Located):
    """A value of FP8 training that is made and encoded in one call, on a GPU.

    Attributes:
      file, line, function: the innermost frame of the user's own code.
      producer: what makes the value: "RMSNorm", "silu and a factor", "rounding", ...
      dtype: of the codes.
      shape: of the value.
      scales: how many scales it is encoded with.
    """

    producer: str
    dtype: str
    shape: tuple[int, ...]
    scales: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatAttention(Located):
    """Attention over a float cache: two dots and the softmax between them are one call, on a GPU.

    Attributes:
      file, line, function: the innermost frame of the user's own code, for the second dot.
      dtype, shape: of the keys as they are stored.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The rows of a report as data, and their totals. `Report` describes the fields."""

    name: str
    sites: tuple[Site, ...]
    others: int
    calls: tuple[Site, ...] = ()
    encodings: tuple[EncodedValue, ...] = ()
    attentions: tuple[FloatAttention, ...] = ()

    @property
    def scaled(self) -> int:
        """How many scaled dots the function holds already."""
        return len(self.calls)

    @property
    def matched(self) -> tuple[Site, ...]:
        """The dots that become scaled dots."""
        return tuple(site for site in self.sites if site.rewritten)

    @property
    def missed(self) -> tuple[Site, ...]:
        """The dots that stay as they are although 8-bit data reached them."""
        return tuple(site for site in self.sites if not site.rewritten)

    @property
    def widened_bytes(self) -> int:
        """Bytes of wide arrays that the rewritten dots no longer read."""
        return sum(site.widened_bytes for site in self.matched)

    @property
    def totals(self) -> dict[str, int]:
        """The numbers of dots by what becomes of them, and bytes."""
        return {
            "matched": len(self.matched),
            "missed": len(self.missed),
            "others": self.others,
            "scaled": self.scaled,
            "widened_bytes": self.widened_bytes,
            "still_widened_bytes": sum(site.widened_bytes for site in self.missed),
        }
