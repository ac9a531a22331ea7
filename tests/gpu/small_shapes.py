"""Small shapes through every rung and option of the GPU family, for tools that watch a GPU's memory.

``compute-sanitizer --tool memcheck python tests/gpu/small_shapes.py 'gpu-tiled*'``, with convpar installed or on the
PYTHONPATH. Every array has an allocation of its own, so that an access past its end is one. Results must equal
those of the ``numpy`` backend.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
import numpy as np

import convpar
from convpar.backend import Backend, Option
from convpar.backends.gpu import executors

Array = np.ndarray[Any, Any]


class Shape(NamedTuple):
    """A problem: shapes, the image's type and the keywords of `convpar.conv2d`."""

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    dtype: str = "float32"
    rules: Mapping[str, Any] = {}
    bias: bool = False


SHAPES = (
    # The studies' two layers, cut down: more than one tile each way, and a smaller last one.
    Shape((2, 1, 28, 41), (4, 1, 7, 7)),
    Shape((2, 4, 22, 25), (16, 4, 7, 7)),
    # Every rule that moves an index.
    Shape((1, 2, 19, 23), (3, 2, 3, 3), rules={"padding": 2}, bias=True),
    Shape((1, 2, 19, 23), (3, 2, 5, 4), rules={"padding": "same", "boundary": "mirror"}),
    Shape((1, 1, 9, 7), (1, 1, 5, 5), rules={"padding": "full", "boundary": "wrap"}),
    Shape((2, 3, 20, 31), (2, 3, 3, 3), rules={"stride": (2, 3), "padding": 1}),
    Shape((1, 2, 21, 33), (2, 2, 3, 3), rules={"dilation": (3, 2)}),
    Shape((2, 6, 18, 18), (9, 2, 3, 3), rules={"groups": 3}),
    Shape((1, 1, 30, 35), (1, 1, 13, 9), rules={"flip": True}),
    # One output; a filter of one tap; more channels than a stage or a slab holds.
    Shape((1, 1, 7, 7), (1, 1, 7, 7)),
    Shape((1, 5, 17, 16), (33, 5, 1, 1)),
    Shape((1, 40, 12, 18), (17, 40, 3, 3)),
    # Other types.
    Shape((1, 2, 20, 37), (2, 2, 3, 3), "int32"),
    Shape((1, 1, 20, 37), (1, 1, 3, 3), "uint8", {"dtype": "uint8", "overflow": "saturate"}),
    Shape((1, 1, 20, 37), (1, 1, 3, 3), "int16", {"dtype": "int8", "overflow": "saturate"}),
    Shape((1, 2, 20, 37), (2, 2, 3, 3), "float16"),
    Shape((1, 2, 20, 37), (2, 2, 3, 3), "float64"),
    Shape((1, 2, 20, 37), (2, 2, 3, 3), "complex64"),
)

WITH_OPTIONS = SHAPES[:3]
"""What every option is tried on."""

TILES = ((8, 8), (4, 32), (17, 17))


def configs(rung: Backend) -> Iterator[dict[str, Any]]:
    """The defaults, and each option's other values by themselves."""
    yield {}
    for name, option in rung.options.items():
        for value in _values(name, option):
            if value != option.default:
                yield {name: value}


def _values(name: str, option: Option) -> tuple[Any, ...]:
    if option.allowed is not None:
        return option.allowed
    return TILES if name == "tile" else {"slice": (1,), "streams": (1,)}.get(name, ())


def arrays(shape: Shape) -> tuple[Array, Array, Array | None]:
    """Image, filter and bias: whole numbers so small that every order and type of sum gives the same."""
    rng = np.random.default_rng(0)
    low = 0 if np.dtype(shape.dtype).kind == "u" else -2

    def draw(size: tuple[int, ...]) -> Array:
        return np.asarray(rng.integers(low, 3, size)).astype(shape.dtype)

    return draw(shape.x), draw(shape.w), draw(shape.w[:1]) if shape.bias else None


def on_gpu() -> bool:
    """Whether arrays can be put on a GPU; with the emulator they stay on the host."""
    return not executors.emulating()


def run(rung: Backend, shape: Shape, config: Mapping[str, Any], *, device: bool) -> str:
    """Empty if the result is right or refused, else what is wrong with it."""
    given = arrays(shape)
    right = convpar.conv2d(*given, backend="numpy", **shape.rules)
    out = np.empty_like(right)
    out.view(np.uint8)[...] = 0x5B  # no right result
    if device:
        import cupy

        given = tuple(None if a is None else cupy.asarray(a) for a in given)  # type: ignore[assignment]
        out = cupy.asarray(out)
    try:
        convpar.conv2d(*given, out=out, backend=rung.name, config=config, **shape.rules)
    except convpar.Unsupported:
        return "refused"
    got = out.get() if device else out
    return (
        ""
        if np.array_equal(got, right)
        else f"{int((got != right).sum())} of {right.size} elements are wrong"
    )


@click.command()
@click.argument("patterns", nargs=-1)
def main(patterns: tuple[str, ...]) -> None:
    """Run the rungs that match PATTERNS, all of them by default; exit code 1 if a result is wrong."""
    if on_gpu():
        import cupy

        cupy.cuda.set_allocator(None)
    wrong = 0
    for rung in convpar.list_backends():
        if rung.capabilities.device != "gpu" or not any(
            fnmatch.fnmatchcase(rung.name, p) for p in patterns or ("*",)
        ):
            continue
        found = {"": 0, "refused": 0}
        for config in configs(rung):
            for shape in WITH_OPTIONS if config else SHAPES:
                for device in (True, False) if on_gpu() else (False,):
                    said = run(rung, shape, config, device=device)
                    found[said] = found.get(said, 0) + 1
                    if said not in ("", "refused"):
                        click.echo(f"{rung.name} {config} {shape}: {said}")
        bad = sum(found.values()) - found[""] - found["refused"]
        wrong += bad
        click.echo(f"{rung.name}: {found['']} right, {found['refused']} refused, {bad} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
