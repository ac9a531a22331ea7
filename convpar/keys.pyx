# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""What every call asks about its NumPy arrays, in a fraction of the time that Python takes to ask.

A small convolution takes less time than looking its plan up by tuples of shapes, types and strides.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t

cimport numpy as cnp

cnp.import_array()

cdef enum:
    MOST_AXES = 64  # of a NumPy array
    ARRAYS = 4
    ADDED = 256  # the first number of a type that a package adds


def signature(x, w, bias, out):
    """Shapes, types, strides and alignments as bytes: arrays with equal ones are served by the same plan.

    `bias` and `out` may be None. None where another is no plain NumPy array, or one of a type that its number
    doesn't tell.
    """
    cdef int64_t facts[ARRAYS * (3 + 2 * MOST_AXES)]
    cdef int n = 0
    for a in (x, w, bias, out):
        n = _add(facts, n, a)
        if n < 0:
            return None
    return PyBytes_FromStringAndSize(<char*>facts, n * sizeof(int64_t))


cdef int _add(int64_t* facts, int n, a) noexcept:
    if a is None:
        facts[n] = -1
        return n + 1
    if type(a) is not cnp.ndarray:
        return -1
    cdef int number = cnp.PyArray_TYPE(<cnp.ndarray>a), axes = cnp.PyArray_NDIM(<cnp.ndarray>a), k
    # Numbers and types that a package adds, such as bfloat16.
    if not (0 <= number < cnp.NPY_OBJECT or number == cnp.NPY_FLOAT16 or number >= ADDED):
        return -1
    facts[n] = number
    facts[n + 1] = axes
    facts[n + 2] = 2 * cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>a) + cnp.PyArray_ISALIGNED(<cnp.ndarray>a)
    n += 3
    for k in range(axes):
        facts[n + 2 * k] = cnp.PyArray_DIM(<cnp.ndarray>a, k)
        facts[n + 2 * k + 1] = cnp.PyArray_STRIDE(<cnp.ndarray>a, k)
    return n + 2 * axes


def apart(x, w, out):
    """Whether `out` can be written, and each is a plain array that allocated its memory: they share none."""
    if out is x or out is w or not (_owns(x) and _owns(w) and _owns(out)):
        return False
    return bool(cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out))


cdef bint _owns(a) noexcept:
    return (
        type(a) is cnp.ndarray
        and cnp.PyArray_BASE(<cnp.ndarray>a) is NULL
        and cnp.PyArray_CHKFLAGS(<cnp.ndarray>a, cnp.NPY_ARRAY_OWNDATA)
    )
