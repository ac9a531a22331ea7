"""Bad input and its errors: every message names the argument, what was given and what is allowed.

``python tests/test_bad_input.py`` prints the table as Markdown; docs/bad-input.md is that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import convpar
from convpar import ArraySpec, Unsupported, conv2d, explain, plan, set_num_threads
from convpar.signal import convolve2d, correlate2d

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "bad-input.md"


class Bad(NamedTuple):
    """A call in Python, the error it raises, and words of its message."""

    call: str
    error: type[Exception]
    words: tuple[str, ...]


# What the calls use; `picture` is a uint8 picture with three channels last.
NAMES = {
    "np": np, "ArraySpec": ArraySpec, "conv2d": conv2d, "plan": plan, "explain": explain,
    "set_num_threads": set_num_threads, "register": convpar.register, "unregister": convpar.unregister,
    "convolve2d": convolve2d, "correlate2d": correlate2d,
    "x": np.arange(48, dtype=np.float32).reshape(6, 8),
    "w": np.ones((3, 3), np.float32),
    "u": np.arange(48, dtype=np.uint8).reshape(6, 8),
    "k": np.ones((3, 3), np.uint8),
    "c": np.zeros((3, 6, 8), np.float32),
    "f": np.ones((4, 3, 3, 3), np.float32),
    "out": np.zeros((4, 6), np.float32),
}  # fmt: skip

SECTIONS: dict[str, list[Bad]] = {
    "Shapes": [
        Bad("conv2d(x[0], w)", ValueError, ("x must", "(N, C, H, W)", "(8,)")),
        Bad("conv2d(x[None, None, None], w)", ValueError, ("x must", "(H, W)", "(1, 1, 1, 6, 8)")),
        Bad("conv2d(x, w, channel_axis=-1)", ValueError,
            ("x must", "(H, W, C)", "channel_axis=-1", "(6, 8)")),
        Bad("conv2d(c, w, channel_axis=0)", ValueError, ("channel_axis must", "None or -1", "0")),
        Bad("conv2d(c, w, channel_axis=True)", ValueError, ("channel_axis must", "None or -1", "True")),
        Bad("conv2d(c, w, channel_axis='last')", ValueError, ("channel_axis must", "None or -1", "'last'")),
        Bad("conv2d(x, w[0])", ValueError, ("w must", "(KH, KW)", "(OC, C/groups, KH, KW)", "(3,)")),
        Bad("conv2d(c, f[0])", ValueError, ("w must", "(OC, C/groups, KH, KW)", "(3, 3, 3)")),
        Bad("conv2d(x, f)", ValueError, ("w must", "(1, 1, KH, KW)", "2-D x", "(4, 3, 3, 3)")),
        Bad("conv2d(c, f[:, :2])", ValueError, ("w must", "C/groups = 3/1 = 3", "not 2")),
        Bad("conv2d(x, w[:0])", ValueError, ("w must", "at least one row", "0 x 3")),
        Bad("conv2d(x[:2], w)", ValueError, ("w is larger than the padded x", "rows span 3", "x has 2")),
        Bad("conv2d(x, w, dilation=(1, 4))", ValueError, ("w is larger", "columns span 9", "x has 8")),
        Bad("conv2d(x[:0], w)", ValueError, ("w is larger", "rows span 3", "x has 0")),
        Bad("conv2d(x[:0], w, padding='same', boundary='wrap')", ValueError,
            ("boundary 'wrap'", "sample to repeat", "no rows")),
    ],
    "Arrays and their types": [
        Bad("conv2d(None, w)", TypeError, ("x must", "array of numbers", "NoneType")),
        Bad("conv2d('picture.png', w)", TypeError, ("x must", "array of numbers", "str")),
        Bad("conv2d([[1, 2], [3]], w)", TypeError, ("x can't be seen as an array", "inhomogeneous")),
        Bad("conv2d([['a']], w)", TypeError, ("x must", "array of numbers", "<U1")),
        Bad("conv2d(x.astype(object), w)", TypeError, ("x must be bool, an integer, floating", "object")),
        Bad("conv2d(x, w.astype('m8[s]'))", TypeError, ("w must be bool, an integer", "timedelta64[s]")),
        Bad("conv2d(np.ma.masked_less(x, 9), w)", TypeError, ("x is a masked array", "fill it first")),
        Bad("conv2d(x > 3, w > 0)", TypeError, ("result would be bool", "dtype=")),
        Bad("conv2d(x, w, dtype=bool)", TypeError, ("result would be bool", "dtype=")),
        Bad("conv2d(x, w, dtype='float33')", TypeError, ("dtype must be a NumPy dtype", "'float33'")),
        Bad("conv2d(x, w, dtype='f4,(')", TypeError, ("dtype must be a NumPy dtype", "'f4,('")),
        Bad("conv2d(x, w, dtype=[('a', 'f4'), ('a', 'f4')])", TypeError,
            ("dtype must be a NumPy dtype", "[('a', 'f4'), ('a', 'f4')]")),
        Bad("conv2d(x, w, dtype=3)", TypeError, ("dtype must be a NumPy dtype", "not 3")),
        Bad("conv2d(x, w, dtype=object)", TypeError, ("dtype must be bool, an integer", "object")),
        Bad("conv2d(x + 1j, w, dtype='float32')", TypeError,
            ("dtype is float32", "complex64", "complex dtype")),
    ],
    "Groups, stride, dilation, padding, boundary": [
        Bad("conv2d(c, f, groups=2)", ValueError, ("groups must divide", "(3)", "(4)", "2 doesn't")),
        Bad("conv2d(c, f, groups=0)", ValueError, ("groups must", "at least 1", "0")),
        Bad("conv2d(c, f, groups=1.0)", TypeError, ("groups must be an integer", "1.0")),
        Bad("conv2d(c, w, groups=3)", ValueError, ("groups must be 1", "2-D w", "3")),
        Bad("conv2d(x, w, stride=0)", ValueError, ("stride must", "at least 1", "0")),
        Bad("conv2d(x, w, stride=True)", TypeError, ("stride must be an integer", "True")),
        Bad("conv2d(x, w, stride=1.0)", TypeError, ("stride must be an integer or a pair", "1.0")),
        Bad("conv2d(x, w, stride=(1, 2.0))", TypeError, ("each stride must be an integer", "2.0")),
        Bad("conv2d(x, w, stride=(1, 2, 3))", ValueError,
            ("stride must", "(vertical, horizontal)", "(1, 2, 3)")),
        Bad("conv2d(x, w, stride={2, 1})", TypeError, ("stride must", "(vertical, horizontal)", "{1, 2}")),
        Bad("conv2d(x, w, stride=2**64)", ValueError, ("stride must", "at most", "18446744073709551616")),
        Bad("conv2d(x, w, stride=10**5000)", ValueError,
            ("stride must", "at most", "an integer of about 5001 digits")),
        Bad("conv2d(x, w, stride=(1, 2, 10**5000))", ValueError,
            ("stride must be an integer or a pair", "a tuple with an integer of more than 4300 digits")),
        Bad("conv2d(x, w, padding=-10**5000)", ValueError,
            ("padding must be at least 0", "an integer of about 5001 digits")),
        Bad("conv2d(c, f, groups=10**5000)", ValueError,
            ("groups must be at most", "an integer of about 5001 digits")),
        Bad("conv2d(x, w, dilation=-1)", ValueError, ("dilation must", "at least 1", "-1")),
        Bad("conv2d(x, w, padding=-1)", ValueError, ("padding must", "at least 0", "-1")),
        Bad("conv2d(x, w, padding=(1, -2))", ValueError, ("each side of padding must", "at least 0", "-2")),
        Bad("conv2d(x, w, padding=(1, 2, 3))", ValueError,
            ("padding must", "'same'", "(top, bottom, left, right)", "(1, 2, 3)")),
        Bad("conv2d(x, w, padding=((1, 1), (2, 2)))", TypeError,
            ("each side of padding", "integer", "(1, 1)")),
        Bad("conv2d(x, w, padding='SAME')", ValueError,
            ("padding must", "'valid', 'same', 'full'", "'SAME'")),
        Bad("conv2d(x, w, padding=1.5)", TypeError, ("padding must", "an integer", "1.5")),
        Bad("conv2d(x, w, padding=2**40)", ValueError,
            ("padding may be 16777216 on a side", "1099511627776")),
        Bad("conv2d(x, w, boundary='reflect')", ValueError,
            ("'reflect' means two things", "'symm'", "d c b a | a b c d", "'mirror'", "d c b | a b c d")),
        Bad("conv2d(x, w, boundary='edge')", ValueError,
            ("boundary must be one of fill", "nearest", "'edge'")),
        Bad("conv2d(x, w, boundary=['wrap', 'symm'])", ValueError,
            ("boundary must be one of fill", "['wrap'")),
        Bad("conv2d(x, w, boundary=np.array(['wrap', 'symm']))", ValueError,
            ("boundary must be one", "array([")),
        Bad("conv2d(x, w, flip=1)", TypeError, ("flip must be True or False", "1")),
    ],
    "Fill values": [
        Bad("conv2d(u, k, padding=1, fillvalue=300)", ValueError,
            ("fillvalue must fit uint8", "0 to 255", "300")),
        Bad("conv2d(u, k, padding=1, fillvalue=-1)", ValueError,
            ("fillvalue must fit uint8", "0 to 255", "-1")),
        Bad("conv2d(u, k, padding=1, fillvalue=2**70)", ValueError, ("fillvalue must fit uint8", "0 to 255")),
        Bad("conv2d(u, k, padding=1, fillvalue=10**5000)", ValueError,
            ("fillvalue must fit uint8", "0 to 255", "5001 digits")),
        Bad("conv2d(u, k, padding=1, fillvalue=np.nan)", ValueError, ("fillvalue must fit uint8", "nan")),
        Bad("conv2d(x, w, padding=1, fillvalue=1j)", ValueError, ("fillvalue 1j is complex", "float32")),
        Bad("conv2d(x, w, padding=1, fillvalue=10**400)", ValueError,
            ("fillvalue must fit float32", "too large")),
        Bad("conv2d(x, w, padding=1, fillvalue='0')", TypeError, ("fillvalue must be a number", "'0'")),
        Bad("conv2d(x, w, padding=1, fillvalue=np.ma.masked)", TypeError,
            ("fillvalue must be a number", "masked")),
        Bad("conv2d(x, w, padding=1, fillvalue=None)", TypeError, ("fillvalue must be a number", "None")),
        Bad("conv2d(x, w, padding=1, fillvalue=[1, 2])", ValueError,
            ("fillvalue must be one number", "(2,)")),
    ],
    "Bias": [
        Bad("conv2d(c, f, [1, 2])", ValueError, ("bias must be a scalar or have the shape (4,)", "(2,)")),
        Bad("conv2d(c, f, [1])", ValueError, ("bias must be a scalar or have the shape (4,)", "(1,)")),
        Bad("conv2d(x, w, [[1]])", ValueError, ("bias must be a scalar or have the shape (1,)", "(1, 1)")),
        Bad("conv2d(x, w, 1j)", TypeError, ("bias is complex128", "float32, the type of the sum")),
        Bad("conv2d(u, k, 0.5)", TypeError, ("bias is float64", "uint8, the type of the sum")),
        Bad("conv2d(u, k, -1)", TypeError, ("bias is int8", "uint8, the type of the sum")),
        Bad("conv2d(x, w, 2**64)", ValueError, ("bias must", "64 bits", "18446744073709551616")),
        Bad("conv2d(x, w, 10**5000)", ValueError, ("bias must", "64 bits", "5001 digits")),
        Bad("conv2d(x, w, 'one')", TypeError, ("bias must be an array of numbers", "str")),
    ],
    "Overflow": [
        Bad("conv2d(u, k, overflow='clip')", ValueError,
            ("overflow must be one of wrap, saturate, raise", "'clip'")),
        Bad("conv2d(u, k, overflow='raise')", OverflowError,
            ("doesn't fit uint8", "first place is (0, 0, 2, 4) (n, oc, row, column)")),
        Bad("conv2d(x * np.nan, w, dtype=int, overflow='raise')", OverflowError,
            ("doesn't fit int64", "(0, 0, 0, 0)")),
        Bad("conv2d(u.astype(int), k, overflow='saturate')", Unsupported,
            ("overflow='saturate'", "64 bits", "int64")),
    ],
    "out": [
        Bad("conv2d(x, w, out=out[:3])", ValueError, ("out must have the shape (4, 6)", "(3, 6)")),
        Bad("conv2d(x, w, out=out[None])", ValueError, ("out must have the shape (4, 6)", "(1, 4, 6)")),
        Bad("conv2d(x, w, out=out.astype('f8'))", TypeError, ("out must have the dtype float32", "float64")),
        Bad("conv2d(x, w, out=np.broadcast_to(out[0], (4, 6)))", ValueError, ("out is read-only",)),
        Bad("conv2d(x, w, out=np.lib.stride_tricks.as_strided(out, (4, 6), (4, 4)))", ValueError,
            ("out has elements that share memory", "strides (4, 4)")),
        Bad("conv2d(x, w, out=x[:4, :6])", ValueError, ("out shares memory with x",)),
        Bad("conv2d(out, w[:1, :1], out=out)", ValueError, ("out shares memory with x",)),
        Bad("conv2d(x, x[:3, :3], out=x[2:, 2:])", ValueError, ("out shares memory with x",)),
        Bad("conv2d(x, w, out=out.tolist())", TypeError, ("out must", "written in place", "list")),
        Bad("conv2d(x, w, out=np.ma.array(out))", TypeError, ("out is a masked array",)),
        Bad("conv2d(x, w, out='result')", TypeError, ("out must be an array", "str")),
        Bad("conv2d(x, w, out=ArraySpec((4, 6)))", TypeError,
            ("out must be an array of numbers", "ArraySpec")),
        Bad("plan(x, w, out=ArraySpec((4, 6), device='gpu'))", TypeError,
            ("out lives on gpu:0 and x on cpu", "one device")),
    ],
    "Backend, config, accuracy, threads": [
        Bad("conv2d(x, w, backend='cuda')", ValueError,
            ("backend 'cuda' is unknown", "known: auto, cpu", "numpy")),
        Bad("conv2d(x, w, backend=10**5000)", TypeError,
            ("backend must be a name", "an integer of about 5001 digits", "known: auto")),
        Bad("conv2d(x, w, backend=None)", TypeError, ("backend must be a name", "None", "known: auto")),
        Bad("conv2d(x, w[:2, :2], backend='cpu-unrolled')", Unsupported,
            ("cpu-unrolled can't do this", "the filter is 2x2", "only")),
        Bad("conv2d(x, w, config={'tile': (8, 8)})", ValueError, ("config", "one rung", "chooser 'auto'")),
        Bad("conv2d(x, w, backend='cpu-private', config={'tiles': (8, 8)})", ValueError,
            ("config has no key 'tiles'", "cpu-private", "its options: tile")),
        Bad("conv2d(x, w, backend='cpu-private', config={'tile': 8})", ValueError,
            ("config['tile'] must be a pair of positive integers", "8")),
        Bad("conv2d(x, w, backend='cpu-private', config={'block': 0})", ValueError,
            ("config['block'] must be a positive integer", "0")),
        Bad("conv2d(x, w, backend='cpu-private', config={'block': 10**5000})", ValueError,
            ("config['block'] must be a positive integer up to", "5001 digits")),
        Bad("conv2d(x, w, backend='cpu-private', config='fast')", TypeError,
            ("config must be a mapping", "'fast'")),
        Bad("conv2d(x, w, accuracy='exact')", ValueError,
            ("accuracy must be None, 'elementwise', 'normwise' or a positive number", "'exact'")),
        Bad("conv2d(x, w, accuracy=0)", ValueError, ("accuracy must", "a positive number", "0")),
        Bad("conv2d(x, w, accuracy=np.inf)", ValueError, ("accuracy must", "a positive number", "inf")),
        Bad("conv2d(x, w, accuracy=10**5000)", ValueError,
            ("accuracy must", "a positive number", "5001 digits")),
        Bad("conv2d(x, w, accuracy=1e-30, backend='numpy')", Unsupported,
            ("numpy can't do this", "1e-30", "elementwise")),
        Bad("conv2d(x, w, tune=1)", TypeError, ("tune must be True or False", "1")),
        Bad("conv2d(x, w, num_threads=0)", ValueError, ("num_threads must", "at least 1", "0")),
        Bad("conv2d(x, w, num_threads=2.0)", TypeError, ("num_threads must be an integer", "2.0")),
        Bad("conv2d(x, w, num_threads=10**6)", ValueError, ("num_threads must", "at most 1024", "1000000")),
        Bad("conv2d(x, w, num_threads=10**5000)", ValueError,
            ("num_threads must", "at most 1024", "5001 digits")),
        Bad("set_num_threads(0)", ValueError, ("num_threads must", "at least 1", "0")),
        Bad("set_num_threads('all')", TypeError, ("num_threads must be an integer", "'all'")),
        Bad("conv2d(x, w, strides=2)", TypeError, ("unexpected keyword argument 'strides'",)),
    ],
    "plan, explain, register": [
        Bad("plan(x, w, strides=2)", TypeError, ("unknown keyword 'strides'", "allowed are stride, padding")),
        Bad("explain(x, w, num_threads=0)", ValueError, ("num_threads must", "at least 1", "0")),
        Bad("plan(ArraySpec(6), w)", TypeError, ("shape of x must be a tuple of integers", "6")),
        Bad("plan(ArraySpec((6, 8.0)), w)", TypeError, ("each axis of x must be an integer", "8.0")),
        Bad("plan(ArraySpec((6, -8)), w)", ValueError, ("each axis of x must be at least 0", "-8")),
        Bad("plan(x, ArraySpec((3, 3), 'float33'))", TypeError,
            ("dtype of w must be a NumPy dtype", "'float33'")),
        Bad("plan(x, ArraySpec((3, 3), None))", TypeError, ("dtype of w must be a NumPy dtype", "None")),
        Bad("plan(x, ArraySpec((3, 3), device='cpu:1'))", ValueError,
            ("device must be 'cpu', 'gpu' or 'gpu:1'", "'cpu:1'")),
        Bad("plan(x, ArraySpec((3, 3), device='tpu'))", ValueError,
            ("device must be 'cpu', 'gpu' or 'gpu:1'", "'tpu'")),
        Bad("plan(ArraySpec((2**30, 2**30)), w)", ValueError,
            ("x and its padding", "more than 281474976710656")),
        Bad("plan(ArraySpec((6, 8)), w, tune=True)", ValueError, ("tune=True", "arrays, not ArraySpec")),
        Bad("plan(x, w)(x[1:], w)", ValueError, ("x must have the planned shape (6, 8)", "(5, 8)")),
        Bad("plan(x, w)(x, w.astype('f8'))", TypeError, ("w must have the planned dtype float32", "float64")),
        Bad("plan(x, w)(x, w, 1)", ValueError, ("bias must be left out",)),
        Bad("plan(x, w, 1)(x, w)", ValueError, ("bias must be given", "shape ()")),
        Bad("plan(x, w, 1)(x, w, 1000)", ValueError, ("bias must fit the planned dtype uint8", "1000")),
        Bad("plan(x, w, 1)(x, w, 0.5)", TypeError, ("bias must have the planned dtype uint8", "float64")),
        Bad("plan(x, w).workspace_bytes(0)", ValueError, ("num_threads must", "at least 1", "0")),
        Bad("register('cpu')", TypeError, ("backend 'cpu' lacks contract, name", "convpar.backend.Backend")),
        Bad("unregister('numpy')", ValueError,
            ("no backend named 'numpy' was registered", "there are: none")),
    ],
    "convpar.signal": [
        Bad("convolve2d(x[0], w)", ValueError, ("convolve2d inputs must both be 2-D", "1 and 2")),
        Bad("convolve2d(x, w, 'center')", ValueError, ("mode must be one of full, valid, same", "'center'")),
        Bad("convolve2d(x, w, 10**5000)", ValueError,
            ("mode must be one of full, valid, same", "an integer of about 5001 digits")),
        Bad("convolve2d(x, w, boundary='mirror')", ValueError,
            ("boundary must be one of fill, pad", "'mirror'")),
        Bad("correlate2d(x[:2], w[:, :2], 'valid')", ValueError,
            ("mode 'valid'", "at least as large", "(2, 8) and (3, 2)")),
        Bad("convolve2d(u, k, fillvalue=300)", ValueError, ("fillvalue must fit uint8", "0 to 255", "300")),
        Bad("correlate2d(x > 3, w > 0)", ValueError, ("not available", "bool", "conv2d may be")),
        Bad("convolve2d(x[:0], w, boundary='symm')", ValueError,
            ("boundary 'symm'", "sample to repeat", "(0, 8)")),
        Bad("convolve2d(x[:0], w[:0])", ValueError, ("shape (-1, 10)", "both inputs are empty")),
    ],
}  # fmt: skip
TABLE = [bad for rows in SECTIONS.values() for bad in rows]


def message(bad: Bad) -> str:
    """The message of the error that the call raises."""
    with pytest.raises(bad.error) as caught:
        eval(bad.call, dict(NAMES))
    assert caught.type is bad.error
    return str(caught.value)


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.call)
def test_bad_input(bad: Bad) -> None:
    text = message(bad)
    for words in bad.words:
        assert words in text
    assert "\n" not in text
    # What is given is cut short; the names of all backends are as long as they are.
    assert len(text.partition("; known: ")[0]) < 400


def test_no_call_stands_twice() -> None:
    assert len({bad.call for bad in TABLE}) == len(TABLE) >= 100


def test_nothing_bad_is_remembered() -> None:
    """A call that was refused is refused again, and a right one after it is right."""
    for _ in range(2):
        with pytest.raises(TypeError):
            conv2d(NAMES["x"], NAMES["w"], stride=True)
        assert conv2d(NAMES["x"], NAMES["w"], stride=1).shape == (4, 6)
        with pytest.raises(TypeError):
            conv2d(NAMES["x"], NAMES["w"], stride=1.0)


def document() -> str:
    """The table as Markdown. Names of backends differ from one machine to the next and are left out."""
    lines = [
        "# Bad input",
        "",
        "What convpar answers to arguments that are wrong. Made by `python tests/test_bad_input.py`; the same",
        "table is a test. `x` is a float32 image of shape (6, 8), `w` a 3x3 filter of ones, `u` and `k` the same",
        "in uint8, `c` an image with three channels of shape (3, 6, 8), `f` filters of shape (4, 3, 3, 3), and",
        "`out` a result of shape (4, 6).",
    ]
    for title, rows in SECTIONS.items():
        lines += ["", f"## {title}", "", "| call | error | message |", "|---|---|---|"]
        for bad in rows:
            text = re.sub(r"known: .*", "known: ...", message(bad)).replace("|", "\\|")
            lines.append(f"| `{bad.call}` | {bad.error.__name__} | {text} |")
    return "\n".join(lines) + "\n"


def test_the_document_is_current() -> None:
    if not DOCUMENT.exists():
        pytest.skip("docs/ isn't part of this checkout")
    assert DOCUMENT.read_text(encoding="utf-8") == document(), (
        "run: python tests/test_bad_input.py > docs/bad-input.md"
    )


if __name__ == "__main__":
    print(document(), end="")
