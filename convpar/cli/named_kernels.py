"""The kernels that have names, each with the source of its formula, and how a kernel is written on the command line.

All are written for cross-correlation, rows downwards and columns to the right: an
edge kernel is positive where the picture gets brighter in its direction.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["KERNELS", "LARGEST_SIDE", "KernelError", "NamedKernel", "parse"]

Weights = npt.NDArray[np.float64]

LARGEST_SIDE = 4095
"""Rows or columns of the largest kernel: beyond, a typing error is likelier than a wish."""


class KernelError(ValueError):
    """The text doesn't say a kernel."""


def _rows(*rows: tuple[float, ...]) -> Weights:
    return np.array(rows, dtype=np.float64)


def identity() -> Weights:
    """One weight of 1: the picture as it is."""
    return _rows((1,))


def sobel_x() -> Weights:
    """Change from left to right, smoothed by 1 2 1 across it.

    Sobel and Feldman 1968, printed in Duda and Hart, Pattern Classification and Scene Analysis, 1973, p. 271.
    """
    return _rows((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))


def sobel_y() -> Weights:
    """Change downwards: sobel-x on its side."""
    return sobel_x().T


def prewitt_x() -> Weights:
    """Change from left to right, the mean of three rows.

    Prewitt, Object Enhancement and Extraction, in Picture Processing and Psychopictorics, 1970.
    """
    return _rows((-1, 0, 1), (-1, 0, 1), (-1, 0, 1))


def prewitt_y() -> Weights:
    """Change downwards: prewitt-x on its side."""
    return prewitt_x().T


def scharr_x() -> Weights:
    """Change from left to right, with weights that err least about a slanted edge's direction.

    Scharr, Optimale Operatoren in der Digitalen Bildverarbeitung, dissertation, Heidelberg 2000.
    """
    return _rows((-3, 0, 3), (-10, 0, 10), (-3, 0, 3))


def scharr_y() -> Weights:
    """Change downwards: scharr-x on its side."""
    return scharr_x().T


def laplacian() -> Weights:
    """Second derivative, five points.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, 25.3.30.
    """
    return _rows((0, 1, 0), (1, -4, 1), (0, 1, 0))


def laplacian_8() -> Weights:
    """Second derivative with the diagonals: eight neighbours less eight times the middle.

    Gonzalez and Woods, Digital Image Processing, 4th edition, 2018, section 3.6.
    """
    return _rows((1, 1, 1), (1, -8, 1), (1, 1, 1))


def sharpen() -> Weights:
    """The picture less its Laplacian.

    Gonzalez and Woods, Digital Image Processing, 4th edition, 2018, section 3.6.
    """
    return _identity_like(laplacian()) - laplacian()


def emboss() -> Weights:
    """The picture plus its change from top left to bottom right: light seems to fall from the top left.

    Of image editors' making: the identity plus differences along the diagonal, the far one doubled.
    """
    return _rows((-2, -1, 0), (-1, 1, 1), (0, 1, 2))


def box(rows: int, columns: int | None = None) -> Weights:
    """Mean of ROWS x COLUMNS samples; of a square with one number."""
    columns = rows if columns is None else columns
    return np.full((rows, columns), 1 / (rows * columns))


def gaussian(sigma: float) -> Weights:
    """Blur by exp(-r^2 / (2 SIGMA^2)), cut at 4 SIGMA as scipy.ndimage cuts it, sum 1.

    The density of the normal distribution, sampled: Lindeberg, Scale-Space for Discrete Signals, IEEE
    Transactions on Pattern Analysis and Machine Intelligence 12, 1990, section III.
    """
    along = _bell(sigma)
    return along[:, None] * along


def log(sigma: float) -> Weights:
    """Laplacian of the Gaussian, (r^2 - 2 SIGMA^2) / SIGMA^4 times its weights, less its mean so that a
    flat picture gives 0.

    Marr and Hildreth, Theory of Edge Detection, Proc. R. Soc. B 207, 1980.
    """
    weights = gaussian(sigma)
    reach = weights.shape[0] // 2
    at = np.arange(-reach, reach + 1.0) ** 2
    curved: Weights = weights * ((at[:, None] + at) - 2 * sigma**2) / sigma**4
    curved -= curved.mean()
    return curved


def unsharp(sigma: float, amount: float = 1.0) -> Weights:
    """The picture plus AMOUNT times what gaussian:SIGMA takes from it.

    Unsharp masking: Gonzalez and Woods, Digital Image Processing, 4th edition, 2018, section 3.6.
    """
    blur = gaussian(sigma)
    return (1 + amount) * _identity_like(blur) - amount * blur


def _identity_like(weights: Weights) -> Weights:
    """The identity, as large as `weights` (whose sides are odd)."""
    middle = np.zeros_like(weights)
    middle[weights.shape[0] // 2, weights.shape[1] // 2] = 1
    return middle


def _bell(sigma: float) -> Weights:
    reach = int(4 * sigma + 0.5)
    weights: Weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights /= weights.sum()
    return weights


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= LARGEST_SIDE:
        raise KernelError(f"must be a whole number from 1 to {LARGEST_SIDE}, not {text!r}")
    return int(text)


def _sigma(text: str) -> float:
    most = LARGEST_SIDE // 8
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not 0.1 <= sigma <= most:
        raise KernelError(f"must be a number of pixels from 0.1 to {most}, not {text!r}")
    return sigma


def _real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise KernelError(f"must be a number, not {text!r}")
    return number


@dataclass(frozen=True)
class NamedKernel:
    """A kernel with a name.

    Attributes
    ----------
    make : callable
        Takes what the parameters give; its docstring has the formula's source.
    parameters : tuple of (str, callable)
        Name of each and what reads it from text.
    required : int
        How many of them must be given.
    """

    make: Callable[..., Weights]
    parameters: tuple[tuple[str, Callable[[str], float]], ...] = ()
    required: int = 0

    @property
    def summary(self) -> str:
        """The first paragraph of the formula's docstring, in one line."""
        return " ".join((self.make.__doc__ or "").split("\n\n")[0].split())

    def usage(self, name: str) -> str:
        """How it is written: ``unsharp:SIGMA[,AMOUNT]``."""
        must = ",".join(p for p, _ in self.parameters[: self.required])
        may = "".join(f"[,{p}]" for p, _ in self.parameters[self.required :])
        return f"{name}:{must}{may}" if self.parameters else name


KERNELS: dict[str, NamedKernel] = {
    "identity": NamedKernel(identity),
    "box": NamedKernel(box, (("ROWS", _count), ("COLUMNS", _count)), 1),
    "gaussian": NamedKernel(gaussian, (("SIGMA", _sigma),), 1),
    "sharpen": NamedKernel(sharpen),
    "unsharp": NamedKernel(unsharp, (("SIGMA", _sigma), ("AMOUNT", _real)), 1),
    "sobel-x": NamedKernel(sobel_x),
    "sobel-y": NamedKernel(sobel_y),
    "prewitt-x": NamedKernel(prewitt_x),
    "prewitt-y": NamedKernel(prewitt_y),
    "scharr-x": NamedKernel(scharr_x),
    "scharr-y": NamedKernel(scharr_y),
    "laplacian": NamedKernel(laplacian),
    "laplacian-8": NamedKernel(laplacian_8),
    "log": NamedKernel(log, (("SIGMA", _sigma),), 1),
    "emboss": NamedKernel(emboss),
}


def parse(text: str) -> Weights:
    """The kernel that `text` says.

    Parameters
    ----------
    text : str
        A name from `KERNELS` with its parameters (``gaussian:1.5``), a matrix with ``;`` between
        rows and blanks or commas between weights (``1 2 1; 2 4 2; 1 2 1``), or a ``.npy`` file
        with a matrix.

    Returns
    -------
    ndarray of float64, shape (KH, KW)

    Raises
    ------
    KernelError
        It says none of them, or a weight isn't finite.
    """
    name, colon, rest = text.strip().partition(":")
    if name in KERNELS:
        weights = _named(name, rest.split(",") if colon else [])
    elif text.endswith(".npy"):
        weights = _load(text)
    elif re.match(r"^[\s\d.+\-;]", text):
        weights = _matrix(text)
    else:
        usages = ", ".join(kernel.usage(name) for name, kernel in KERNELS.items())
        raise KernelError(
            f"{text!r} is no kernel; say {usages}, a file.npy or a matrix such as '1 2 1; 2 4 2; 1 2 1'"
        )
    if max(weights.shape) > LARGEST_SIDE:
        raise KernelError(f"{text!r} has {weights.shape[0]} x {weights.shape[1]} weights; {LARGEST_SIDE} "
                          "rows and columns are the most")  # fmt: skip
    return weights


def _named(name: str, given: list[str]) -> Weights:
    kernel = KERNELS[name]
    if not kernel.required <= len(given) <= len(kernel.parameters):
        raise KernelError(
            f"{name} is written {kernel.usage(name)}, not {':'.join([name, ','.join(given)])!r}"
        )
    values = []
    for (parameter, read), text in zip(kernel.parameters, given, strict=False):
        try:
            values.append(read(text))
        except KernelError as e:
            raise KernelError(f"{parameter} of {name} {e}") from None
    return kernel.make(*values)


def _matrix(text: str) -> Weights:
    rows = [row.replace(",", " ").split() for row in text.strip().rstrip(";").split(";")]
    if not rows[0] or any(len(row) != len(rows[0]) for row in rows):
        raise KernelError(
            f"the kernel's rows must be of one length, not {', '.join(str(len(r)) for r in rows)}"
        )
    try:
        weights = np.array([[float(item) for item in row] for row in rows])
    except ValueError as e:
        raise KernelError(f"the kernel {text!r} holds something that is no number: {e}") from None
    return _finite(weights, "the kernel")


def _load(path: str) -> Weights:
    if not os.path.isfile(path):
        raise KernelError(f"there is no file {path}")
    try:
        # Pickled objects would run code from the file.
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise KernelError(f"{path} can't be read as an array: {e}") from None
    if (
        not isinstance(loaded, np.ndarray)
        or loaded.ndim != 2
        or not loaded.size
        or loaded.dtype.kind not in "biuf"
    ):
        what = f"{loaded.dtype} of shape {loaded.shape}" if isinstance(loaded, np.ndarray) else "an archive"
        raise KernelError(f"{path} must hold a matrix of real numbers, not {what}")
    return _finite(loaded.astype(np.float64), path)


def _finite(weights: Weights, what: str) -> Weights:
    if not np.isfinite(weights).all():
        raise KernelError(f"{what} holds weights that aren't finite")
    return weights
