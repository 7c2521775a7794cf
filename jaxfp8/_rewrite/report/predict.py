"""What the products of a report would take on a device, from a few numbers measured there.

A product takes the time that its bytes need at the rate of a copy, or its operations at the rate of
its kind, whichever is longer, and a constant for each call. `devices.json` has the numbers, and
where they come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxfp8._call.gpu import xla_products
from jaxfp8._call.gpu.weight_only import FEW_FLOAT8_ROWS
from jaxfp8._value import tables
from jaxfp8._value.dtypes import EIGHT_BIT, FLOAT8, SIXTEEN_BIT_FLOATS
from jaxfp8._value.errors import message

if TYPE_CHECKING:
    from jaxfp8._rewrite.report.model import Operand, Report, Site

_TABLE = pathlib.Path(__file__).with_name("devices.json")
_HEAD = ("product", "M x N x K", "kind", "bytes", "time", "limit", "bf16", "speed")
_FEW_ROWS = "FP8 of few rows"
# Kinds by the kernel of another one, whose numbers they have.
_SAME_KERNEL = {_FEW_ROWS: "W8A16"}
_CAVEAT = (
    "a roofline and a constant for each call, within 15 % of the products measured there;",
    "what lies between products is not in it",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One product of a function on a device.

    Attributes:
      path: the place in the model, or in the code.
      sizes: "M x N x K".
      kind: "W8A16", "W8A16 by XLA" for a small weight, "FP8", "FP8 of few rows", which the kernel
        of W8A16 decodes, "FP8 in blocks" or "INT8".
      nbytes: what it reads and writes, activations quantised in front of it included.
      seconds: what it takes; None where no number is known for it.
      limit: "memory", "operations" or "launch", whichever takes most of that.
      bf16_seconds: what the same product of bfloat16 arrays takes.
      reason: why nothing is predicted, or "".
    """

    path: str
    sizes: str
    kind: str = ""
    nbytes: int = 0
    seconds: float | None = None
    limit: str = ""
    bf16_seconds: float | None = None
    reason: str = ""

    @property
    def speed(self) -> float | None:
        """How many times faster than bfloat16 it is; below 1, 8 bits lose."""
        if self.seconds is None or self.bf16_seconds is None:
            return None
        return self.bf16_seconds / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the products of a function would take on a device. It prints as a table.

    Attributes:
      name: of the function.
      device: of the device.
      source: where its numbers come from.
      products: a row for each product that 8-bit data reached.
    """

    name: str
    device: str
    source: str
    products: tuple[Product, ...]

    @property
    def losing(self) -> tuple[Product, ...]:
        """The products that would be faster in bfloat16."""
        return tuple(p for p in self.products if p.speed is not None and p.speed < 1)

    @property
    def seconds(self) -> float:
        """Of all products for which there are numbers."""
        return sum(p.seconds for p in self.products if p.seconds is not None)

    @property
    def bf16_seconds(self) -> float:
        """Of the same products in bfloat16."""
        return sum(p.bf16_seconds for p in self.products if p.bf16_seconds is not None)

    def to_json(self, indent: int | None = None) -> str:
        """The rows and totals as JSON."""
        whole = {**dataclasses.asdict(self), "seconds": self.seconds}
        whole["bf16_seconds"] = self.bf16_seconds
        return json.dumps(whole, indent=indent, allow_nan=False)

    def _table(self) -> tuple[str, Any, Any, list[str]]:
        known = sum(p.seconds is not None for p in self.products)
        title = f"{self.name} on {self.device}: {known} of {len(self.products)} products predicted"
        if known:
            speed = self.bf16_seconds / self.seconds
            title += f", {_micro(self.seconds)} together, {speed:.2f}x as fast as bfloat16"
        rows = [_cells(group) for group in tables.alike(self.products)]
        return title, _HEAD, rows, [*self._notes(), f"numbers: {self.source}", *_CAVEAT]

    def _notes(self) -> Iterator[str]:
        """What 8 bits lose, and why nothing is predicted."""
        if self.losing:
            yield f"8 bits lose in {len(self.losing)} of them: those of a speed below 1"
        whys = [product.reason for product in self.products if product.reason]
        yield from (f"{whys.count(why)} not predicted: {why}" for why in dict.fromkeys(whys))

    def _repr_html_(self) -> str:
        return tables.html(*self._table())

    def __str__(self) -> str:
        return tables.text(*self._table())


def predict(report: Report, device: str) -> Prediction:
    """The prediction for a report; `Report.predict` describes it."""
    known = _devices()
    name = next((n for n in known if isinstance(device, str) and n in device.lower()), None)
    if name is None:
        got, needs = f"is {device!r}", f"numbers are known of {', '.join(known)}"
        remedy = "name one of these; `python -m jaxfp8 bench --step` measures any other"
        raise ValueError(message("jaxfp8.typing.Report.predict", "`device`", got, needs, remedy))
    numbers = known[name]
    products = tuple(_product(site, numbers) for site in (*report.sites, *report.calls))
    return Prediction(
        name=report.name, device=numbers["device"], source=numbers["source"], products=products
    )


@functools.cache
def _devices() -> dict[str, Any]:
    return json.loads(_TABLE.read_text(encoding="utf-8"))


def _product(site: Site, numbers: dict[str, Any]) -> Product:
    path = site.path or site.where
    kind, reason = _kind(site)
    if reason:
        return Product(path=path, sizes=_sizes(site.dims), reason=reason)
    _, m, n, k = _folded(site)
    sides = (site.lhs, site.rhs)
    nbytes = sum(map(_nbytes, sides)) + m * n * _out_itemsize(site)
    rows, columns = (n, m) if kind == _FEW_ROWS and n < m else (m, n)
    time = _Time.of(numbers, kind, rows, nbytes, k * columns)
    if made := sum(_nbytes(side) for side in sides if side.quantized):
        how, moved = numbers["quantize"], 3 * made  # reads bfloat16, writes codes
        time = time.after(moved / (how["share"] * numbers["copy"]), how["overhead"])
        nbytes += moved
    bf16 = _Time.of(numbers, "bf16", m, 2 * (k * n + m * k + m * n), k * n)
    return Product(
        path=path,
        sizes=_sizes((1, m, n, k)),
        kind=kind,
        nbytes=nbytes,
        seconds=time.seconds,
        limit=time.limit,
        bf16_seconds=bf16.seconds,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Time:
    """Seconds of one product, by what takes them.

    Attributes:
      memory, operations: side by side.
      before: a pass through memory before it.
      launch: for its calls.
      least: what the smallest product takes.
    """

    memory: float
    operations: float
    launch: float
    least: float
    before: float = 0.0

    @classmethod
    def of(cls, numbers: dict[str, Any], kind: str, m: int, nbytes: int, weight: int) -> _Time:
        """Of a product of a kind with M rows and a weight of so many values."""
        own = numbers["kinds"][_SAME_KERNEL.get(kind, kind)]
        rate = next(rate for rows, rate in reversed(own["rates"]) if m >= rows)
        return cls(
            memory=nbytes / numbers["copy"],
            operations=2 * m * weight / rate,
            launch=own["overhead"],
            least=own["least"],
        )

    def after(self, seconds: float, launch: float) -> _Time:
        """The same after a pass through memory, which is a call of its own."""
        before, calls = self.before + seconds, self.launch + launch
        return dataclasses.replace(self, before=before, launch=calls)

    @property
    def seconds(self) -> float:
        """Of the whole."""
        return max(self.least, self._work + self.launch)

    @property
    def limit(self) -> str:
        """What takes most of it."""
        if self.seconds > 2 * self._work:
            return "launch"
        return "memory" if self.memory + self.before >= self.operations else "operations"

    @property
    def _work(self) -> float:
        return self.before + max(self.memory, self.operations)


def _folded(site: Site) -> tuple[int, int, int, int]:
    """Batch, M, N and K, with the weight right and a batch that it lacks among the rows."""
    batch, m, n, k = site.dims
    left, right = (math.prod(map(int, side.shape)) for side in (site.lhs, site.rhs))
    if right == n * k:
        batch, m = 1, batch * m
    elif left == m * k:
        batch, n = 1, batch * n
    is_left = site.lhs.eight_bit and not site.rhs.eight_bit
    return (batch, n, m, k) if is_left else (batch, m, n, k)


def _kind(site: Site) -> tuple[str, str]:
    """What kind of product it is, and why there are no numbers for it, or ""."""
    if min(site.dims) < 0:
        return "", "a size is a symbol"
    if min(site.dims) == 0:
        return "", "it is empty"
    if _folded(site)[0] > 1:
        return "", "products in batches were not measured"
    if not (site.rewritten or site.already):
        return "", "missed, so XLA widens the data and multiplies floats"
    dtypes = [jnp.dtype(side.dtype) for side in (site.lhs, site.rhs)]
    wide = [dtype for dtype in dtypes if dtype not in EIGHT_BIT]
    if len(wide) == 2:
        return "", "int8 terms were not measured"
    if wide:
        if wide[0] not in SIXTEEN_BIT_FLOATS:
            return "", f"{wide[0]} times 8 bits was not measured"
        return "W8A16 by XLA" if _is_left_to_xla(site) else "W8A16", ""
    if dtypes[0] in FLOAT8 and dtypes[1] in FLOAT8:
        if any(map(_is_in_blocks, (site.lhs, site.rhs))):
            return "FP8 in blocks", ""
        return _FEW_ROWS if _are_few_rows(site) else "FP8", ""
    mixed = dtypes[0] in FLOAT8 or dtypes[1] in FLOAT8
    return ("", "FP8 times int8 was not measured") if mixed else ("INT8", "")


def _is_in_blocks(side: Operand) -> bool:
    """Whether one scale belongs to several entries of an axis, but not to all of them."""
    pairs = zip(side.tiles or (), side.shape, strict=False)
    return any(1 < tile < int(size) for tile, size in pairs)


def _are_few_rows(site: Site) -> bool:
    """Whether rows of e4m3 are so few that the kernel of 16-bit activations multiplies them."""
    _, m, n, _ = _folded(site)
    rows = site.rhs if n < m else site.lhs
    varies = site.lhs.is_scaled_inside or site.rhs.is_scaled_inside
    return min(m, n) <= FEW_FLOAT8_ROWS and rows.dtype == "float8_e4m3fn" and not varies


def _is_left_to_xla(site: Site) -> bool:
    """Whether a Hopper GPU gets the product as a dot; a square weight counts as [K, N]."""
    _, m, n, k = _folded(site)
    weights = site.lhs if site.lhs.eight_bit else site.rhs
    return xla_products.takes_weights(n * k, m, last=n != k and weights.shape[-1] == k)


def _nbytes(side: Operand) -> int:
    return math.prod(map(int, side.shape)) * jnp.dtype(side.dtype).itemsize


def _out_itemsize(site: Site) -> int:
    return jnp.dtype(site.out_dtype).itemsize


def _sizes(dims: Sequence[int]) -> str:
    batch, *matrix = ("?" if size < 0 else str(size) for size in dims)
    return ("" if batch == "1" else f"{batch} of ") + " x ".join(matrix)


def _cells(group: Sequence[Product]) -> tuple[str, ...]:
    one = group[0]
    count = f"{len(group)} x " if len(group) > 1 else ""
    head = count + tables.starred({product.path for product in group}), one.sizes
    if one.seconds is None or one.bf16_seconds is None or one.speed is None:
        return *head, "", "", "", "", "", ""
    times = _micro(one.seconds), one.limit, _micro(one.bf16_seconds), f"{one.speed:.2f}x"
    return *head, one.kind, tables.size(one.nbytes), *times


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
