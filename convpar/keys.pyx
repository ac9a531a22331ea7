# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""What every call asks about its arrays and keywords, in a fraction of the time that Python takes to ask.

A small convolution takes less time than looking its plan up by tuples of shapes, types and strides.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t
from libc.string cimport memcpy

cimport numpy as cnp

cnp.import_array()

cdef enum:
    MOST_AXES = 64  # of a NumPy array
    ARRAYS = 4
    ADDED = 256  # the first number of a type that a package adds
    MOST_OBJECTS = 64  # keywords and items of those that are tuples


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


def identities(tuple objects):
    """Where the objects lie, as bytes: equal for the same ones as long as these live.

    Floats count by their bits, tuples by where their items lie: they are often made anew. None of too many.
    """
    cdef int64_t facts[MOST_OBJECTS]
    cdef Py_ssize_t n = 0
    cdef double value
    for a in objects:
        if n > MOST_OBJECTS - 2:
            return None
        # Nothing lies at these addresses.
        if type(a) is float:
            facts[n] = 1
            value = <double>a
            memcpy(&facts[n + 1], &value, sizeof(double))
            n += 2
        elif type(a) is tuple:
            if len(<tuple>a) > MOST_OBJECTS - 2 - n:
                return None
            facts[n] = 2
            facts[n + 1] = len(<tuple>a)
            n += 2
            for item in <tuple>a:
                facts[n] = <int64_t><void*>item
                n += 1
        else:
            facts[n] = <int64_t><void*>a
            n += 1
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
    """Whether all are plain NumPy arrays and `out` can be written and shares no memory with the others."""
    cdef char *first, *last, *other_first, *other_last
    if not _extent(out, &first, &last) or not cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out):
        return False
    for a in (x, w):
        if not _extent(a, &other_first, &other_last) or (first < other_last and other_first < last):
            return False
    return True


cdef bint _extent(a, char** first, char** last) noexcept:
    """The first byte of an array, and the one behind its last; false for what is no plain array."""
    if type(a) is not cnp.ndarray:
        return False
    cdef int k
    cdef cnp.npy_intp reach
    first[0] = <char*>cnp.PyArray_DATA(<cnp.ndarray>a)
    last[0] = first[0] + cnp.PyArray_ITEMSIZE(<cnp.ndarray>a)
    for k in range(cnp.PyArray_NDIM(<cnp.ndarray>a)):
        reach = (cnp.PyArray_DIM(<cnp.ndarray>a, k) - 1) * cnp.PyArray_STRIDE(<cnp.ndarray>a, k)
        if reach < 0:
            first[0] += reach
        else:
            last[0] += reach
    return True
