"""The granularity of a scale in words, and its cost along a contracting axis.

A scale constant over a sum is applied once, to the sum. If it changes along a contracting axis, it
cannot be taken out of the sum.
"""

from __future__ import annotations

from jaxfp8._value.spec import Shape

# As `kShortSegment` of ffi/cpu: shorter segments have their scales multiplied into the values.
SHORT = 16


def words(tiles: Shape | None, shape: Shape, contracting: Shape) -> str:
    """The granularity of scales, by the axes of their operand."""
    if tiles is None:
        return "no scale"
    fine = _fine(tiles, shape)
    if not fine:
        return "per tensor"
    if any(tiles[axis] != 1 for axis in fine):
        return "blocks " + "x".join(map(str, tiles))
    summed = [axis for axis in fine if axis in contracting]
    kept = [axis for axis in fine if axis not in contracting]
    parts = [f"axis {_list(kept)}"] if kept else []
    parts += [f"contracted axis {_list(summed)}"] if summed else []
    return "per " + " and ".join(parts)


def note(
    side: str, tiles: Shape | None, shape: Shape, contracting: Shape, *, eight_bit: bool
) -> str:
    """The cost of the scale of the left or right operand of a call; "" if it is outside the sum."""
    if tiles is None:
        return ""
    fine = _fine(tiles, shape)
    summed = [axis for axis in fine if axis in contracting]
    if not summed:
        return ""
    axes = f"the contracted axis {_list(summed)} of the {side} operand"
    if any(tiles[axis] >= SHORT for axis in summed):
        each = "x".join(str(tiles[axis]) for axis in summed)
        return f"its scale has tiles of {each} along {axes}: sums are cut into pieces of {each}"
    if not eight_bit:
        return f"a scale that changes along {axes} is multiplied into its values"
    text = (
        f"its scale changes along {axes}, so it cannot be taken out of the sum: each value is "
        "scaled as it is decoded and summed in float32, several times slower where kernels have "
        "faster sums"
    )
    other = _elsewhere(shape, contracting) if fine == summed else ""
    return f"{text}; {other}" if other else text


def note_of_multiplied(side: str) -> str:
    """The note about a scale multiplied into the other operand."""
    other = {"left": "right", "right": "left"}[side]
    return (
        f"the {other} operand's scale changes along the sum; the {side} operand is multiplied by "
        "it first, in float32, and rounded to bfloat16 again"
    )


def _elsewhere(shape: Shape, contracting: Shape) -> str:
    """A hint: the shape of a scale along a free axis. The user may have meant that one.

    "" without a free axis.
    """
    free = [axis for axis, size in enumerate(shape) if axis not in contracting and size > 1]
    if not free:
        return ""
    wanted = [size if axis == free[-1] else 1 for axis, size in enumerate(shape)]
    return f"if it is meant for axis {free[-1]}, its shape is {wanted}"


def _fine(tiles: Shape, shape: Shape) -> list[int]:
    """The axes along which a scale of these tiles varies."""
    return [axis for axis, (t, size) in enumerate(zip(tiles, shape, strict=True)) if t < size]


def _list(axes: list[int]) -> str:
    return ", ".join(map(str, axes))
