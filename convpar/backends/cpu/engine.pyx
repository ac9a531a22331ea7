# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""The engine of the CPU rungs: releases the GIL, spreads work items over threads, owns the workspace.

It checks nothing: `convpar.backends.cpu` decides and checks, the kernels compute.
"""

import time

from cython.parallel cimport prange
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

cimport numpy as cnp

import numpy as np

cnp.import_array()

cdef extern from "kernel.h" namespace "convpar" nogil:
    ctypedef int64_t index_t
    const index_t set_bytes
    enum Type:
        pass
    struct Axis:
        index_t n
        const index_t* before
        const index_t* after
    ctypedef void (*kernel_t)()
    struct Tiling:
        index_t rows, columns, out_rows, out_columns, products, emulated, signed_x, signed_w, parts
    struct Transform:
        void* elements
    struct OverEdge:
        index_t narrow
    struct Kernel:
        kernel_t inside
        kernel_t bordered
        index_t packing
        index_t dense
        void* factor
        Transform transform
        OverEdge over_edge
    kernel_t find_narrow(const Kernel& kernel, Type x, bint converts)
    struct Rung:
        Kernel (*find)(Type x, Type sum, index_t kh, index_t kw)
        const char* isa
    const Rung* find_rung(const char* name, const char* isa)
    const char* const* c_isa_levels "convpar::isa_levels"()
    bint c_intel "convpar::intel"()
    bint c_matrix_unit "convpar::matrix_unit"()
    bint c_word_unit "convpar::word_unit"()
    bint c_pair_unit "convpar::pair_unit"()
    index_t c_set_lines "convpar::set_lines"()

cdef extern from "convert.h" namespace "convpar" nogil:
    enum Overflow:
        pass
    struct Converters:
        pass
    const Converters* find_converters(const char* isa)

cdef extern from "items.h" namespace "convpar" nogil:
    struct Array:
        Type type
        index_t stride[4]
        bint swapped
    struct Run:
        pass
    struct CTask "convpar::Task":
        index_t n, c, h, w, oc, kh, kw, oh, ow, groups
        index_t sh, sw, dh, dw, top, left
        bint flip
        Overflow overflow
        Array x, filter, bias, y
        bint has_bias
        Type sum
        Axis rows, cols
        char fill[16]
        Kernel kernel
        kernel_t otherwise, otherwise_narrow
        index_t tile_rows, tile_cols, block, piece_rows, piece_cols, together
        Tiling tiling
        bint stage, convert, stream, off_core, far
        index_t set_lines
        bint zeros
        index_t* taps
        Run* runs
        index_t inner_top, inner_bottom, inner_left, inner_right
        index_t images, blocks, row_tiles, col_tiles, items
        unsigned paths
        bint factored, narrow, packs_late
        index_t packed_bytes, transformed_bytes, bias_bytes, factor_bytes
        index_t stage_bytes, scratch_bytes, sums_bytes
    cppclass Thread:
        index_t first_bad
        unsigned paths
    cppclass Team:
        Thread& operator[](index_t)
    bint complete(CTask& task, const Converters& converters)
    struct Prepared:
        char* filters
        char* transformed
        char* bias
        char* factors
        bint finite
        bint factored
        const char* given
        index_t first
    index_t prepare(const CTask& task, index_t part, index_t parts, const char* w, const char* b,
                    const Prepared& prepared)
    unsigned factor(const CTask& task, Prepared& prepared)
    index_t team_bytes(const CTask& task, index_t threads)
    Team deal(const CTask& task, char* first, index_t threads)
    void run_share(const CTask& task, const Team& team, index_t k, const char* x, const Prepared& prepared,
                   char* y)
    unsigned PATH_SERIAL
    unsigned PATH_PARALLEL

cdef extern from "memory.h" namespace "convpar" nogil:
    void* take_memory(index_t bytes)

cdef extern from "openmp.h" namespace "convpar" nogil:
    int openmp_version()
    void guard_fork()

cdef extern from "ceilings.h" namespace "convpar" nogil:
    enum Arithmetic:
        pass
    struct Ceilings:
        index_t (*burn)(Arithmetic kind, index_t rounds) noexcept nogil
        void (*cached)(char* to, const char* source, index_t size) noexcept nogil
        void (*streamed)(char* to, const char* source, index_t size) noexcept nogil
    const Ceilings* find_ceilings(const char* isa)

cdef extern from "spectra.h" namespace "convpar" nogil:
    struct Spectral:
        index_t groups, oc, cg, kh, apart, rows, strips, bins
        const void** x
        const void* w
        void* y
    struct Spectra:
        void (*f32)(const Spectral&) noexcept nogil
        void (*f64)(const Spectral&) noexcept nogil
    const Spectra* find_spectra(const char* isa)

cdef extern from *:
    """
    #ifdef __clang__
    #define CONVPAR_COMPILER "Clang " __clang_version__
    #else
    #define CONVPAR_COMPILER "GCC " __VERSION__
    #endif
    """
    const char* CONVPAR_COMPILER

TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
         "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""Names of the element types, in the order of C++'s `Type`."""

PATHS = ("inside", "border", "staged", "converted", "second row tile", "second column tile",
         "second block", "serial", "parallel", "streamed", "factored", "stolen")
"""Names of the paths, in the order of C++'s `Path` bits."""

OVERFLOW_RULES = ("wrap", "saturate", "raise")
SET_BYTES = set_bytes
"""Rows so many bytes apart share the lines of one set of the first cache."""
SET_LINES = c_set_lines()
"""Lines that such a set holds in this processor."""
INTEL = bool(c_intel())
"""Whether this processor is Intel's."""
COMPILER = CONVPAR_COMPILER.decode()
"""What compiled this module, and its version."""
OPENMP = openmp_version()
"""The date of the OpenMP specification that the build follows, 0 without OpenMP."""

cdef index_t LINE = 64
cdef index_t nothing_found = -2
cdef index_t SERIAL_PACKING = 1 << 16  # bytes of filters that one thread packs sooner than several wake


def isa_levels():
    """The ISA levels that were built and that this processor runs, best first."""
    cdef const char* const* level = c_isa_levels()
    names = []
    while level[0] != NULL:
        names.append((<bytes>level[0]).decode())
        level += 1
    return tuple(names)


def matrix_unit():
    """Whether this processor has a unit for products of matrices, and this process may use it."""
    return bool(c_matrix_unit())


def pair_unit():
    """Whether this processor multiplies pairs of 16 bits and adds them to a sum in one operation."""
    return bool(c_pair_unit())


def word_unit():
    """Whether this processor has instructions for products of 52 bits, and gains by them."""
    return bool(c_word_unit())


def compiled_for(str rung, str isa):
    """The ISA level whose instructions the compiler used for `rung` at level `isa`."""
    cdef const Rung* row = find_rung(rung.encode(), isa.encode())
    if row == NULL:
        raise LookupError(f"no rung {rung!r} at ISA level {isa!r}")
    return (<bytes>row.isa).decode()


cdef Type _type(name) except *:
    return <Type><int>TYPES.index(name)


cdef Array _array(layout) except *:
    """(type name, strides in bytes, swapped) as the C++ record."""
    cdef Array a
    memset(&a, 0, sizeof(a))
    name, strides, swapped = layout
    a.type = _type(name)
    for i, s in enumerate(strides):
        a.stride[i] = s
    a.swapped = swapped
    return a


cdef class Task:
    """One problem as the C++ side sees it, and the run of it."""

    cdef CTask task
    cdef object maps, columns  # keep the border maps and the table of columns alive
    cdef unsigned seen

    def __cinit__(self, *, str rung, builds_on, str isa, problem, x, w, bias, y, before_after, fill,
                  tile, block, piece, together, tiling, bint convert, bint stage, bint stream,
                  bint off_core, bint far, index_t set_lines):
        """`rung` and `builds_on`, None for the first one, are lines of rungs.inc.

        `problem` is a convpar Problem; `x`, `w`, `bias`, `y` are (type name, byte strides, swapped).

        `before_after` holds the border maps (rows before, rows after, columns before, columns after),
        `fill` the fill value as bytes of the sum's type. `stage` asks for input gathered tile by tile;
        a pair of types or a layout without a kernel is staged in any case. `convert` asks for sums
        converted tile by tile, `stream` for results stored past the caches where the rung can; `off_core`
        tells that input and output are too large for the caches of one core, `far` that they are for the
        shared one too, or that results go past them all.
        `piece` is how many rows and columns of outputs have their samples gathered at once, of a tile
        that is met in place unless a filter isn't finite.
        `together` is how many groups a work item takes, where the rung or what gathers for it takes several.
        `set_lines` is how many lines kernels take a set of the first cache to hold.
        `tiling` is the C++ record of its name as a tuple.
        """
        cdef CTask* t = &self.task
        cdef const Rung* row = find_rung(rung.encode(), isa.encode())
        cdef Kernel base
        cdef cnp.ndarray a
        cdef bytes value = fill
        if row == NULL:
            raise LookupError(f"no rung {rung!r} at ISA level {isa!r}")
        memset(t, 0, sizeof(t[0]))
        p = problem
        t.n, t.c, t.h, t.w = p.x_shape
        t.oc, t.kh, t.kw, t.groups = p.oc, p.kh, p.kw, p.groups
        t.oh, t.ow = p.oh, p.ow
        t.sh, t.sw = p.stride
        t.dh, t.dw = p.dilation
        t.top, t.left = p.padding[0], p.padding[2]
        t.flip = p.flip
        t.overflow = <Overflow><int>OVERFLOW_RULES.index(p.overflow)
        t.sum = _type(p.sum_dtype.name)
        t.x, t.filter, t.y = _array(x), _array(w), _array(y)
        t.has_bias = bias is not None
        if bias is not None:
            t.bias = _array(bias)
        self.maps = before_after
        t.rows.n, t.cols.n = t.h, t.w
        a = before_after[0]
        t.rows.before = <const index_t*>cnp.PyArray_DATA(a) + a.shape[0]
        a = before_after[1]
        t.rows.after = <const index_t*>cnp.PyArray_DATA(a)
        a = before_after[2]
        t.cols.before = <const index_t*>cnp.PyArray_DATA(a) + a.shape[0]
        a = before_after[3]
        t.cols.after = <const index_t*>cnp.PyArray_DATA(a)
        memcpy(t.fill, <const char*>value, len(value))
        t.stage = stage
        t.convert = convert
        t.stream = stream
        t.off_core = off_core
        t.far = far
        t.set_lines = set_lines
        t.zeros = p.boundary == "fill" and not any(value)
        columns = np.empty(t.kw * (2 * sizeof(index_t) + sizeof(Run)) // sizeof(index_t), np.int64)
        self.columns = a = columns
        t.taps = <index_t*>cnp.PyArray_DATA(a)
        t.runs = <Run*>(t.taps + 2 * t.kw)
        t.tile_rows, t.tile_cols = tile
        t.block = block
        t.piece_rows, t.piece_cols = piece
        t.together = together
        t.tiling.rows, t.tiling.columns, t.tiling.out_rows, t.tiling.out_columns = tiling[:4]
        t.tiling.products, t.tiling.emulated = tiling[4:6]
        t.tiling.signed_x, t.tiling.signed_w, t.tiling.parts = tiling[6:]
        t.kernel = row.find(t.sum if stage else t.x.type, t.sum, t.kh, t.kw)
        if t.kernel.inside == NULL:
            t.stage = True
            t.kernel = row.find(t.sum, t.sum, t.kh, t.kw)
        if builds_on is not None:
            # What the kernel has nothing for is left to the rung before.
            row = find_rung((<str>builds_on).encode(), isa.encode())
            base = row.find(t.sum if t.stage else t.x.type, t.sum, t.kh, t.kw)
            t.otherwise = base.inside
            t.otherwise_narrow = find_narrow(base, t.x.type, t.convert)
        if t.kernel.inside == NULL or not complete(t[0], find_converters(isa.encode())[0]):
            raise LookupError(f"rung {rung!r} has no kernel for {p}")
        guard_fork()

    @property
    def staged(self):
        """Whether the input is gathered tile by tile."""
        return bool(self.task.stage)

    @property
    def items(self):
        """Work items of a run."""
        return self.task.items

    @property
    def images(self):
        """Images of a work item."""
        return self.task.images

    @property
    def together(self):
        """Groups of a work item."""
        return self.task.together

    @property
    def inside(self):
        """Outputs of one image and channel whose window is inside the image."""
        cdef CTask* t = &self.task
        return (t.inner_bottom - t.inner_top) * (t.inner_right - t.inner_left)

    @property
    def tiles(self):
        """Tiles along (blocks of output channels, rows, columns)."""
        return self.task.blocks, self.task.row_tiles, self.task.col_tiles

    @property
    def converts(self):
        """Whether results aren't stored as the sums are."""
        return bool(self.task.convert)

    @property
    def converted(self):
        """Whether sums are converted, or only stored, tile by tile, if only those at the edges."""
        return self.task.sums_bytes > 0

    @property
    def in_registers(self):
        """Whether samples, and results that aren't sums, are converted in registers but at edges."""
        return bool(self.task.narrow)

    @property
    def streamed(self):
        """Whether results are stored past the caches, where rows of tiles are long enough."""
        return bool(self.task.stream)

    @property
    def far(self):
        """Whether input and output are too large for the caches."""
        return bool(self.task.far)

    @property
    def off_core(self):
        """Whether input and output are too large for the caches of one core."""
        return bool(self.task.off_core)

    @property
    def packing(self):
        """Output channels side by side in the packed filters."""
        return self.task.kernel.packing

    @property
    def lanes(self):
        """Lanes of the vectors of a kernel over vectors, 0 for another."""
        return self.task.kernel.dense

    @property
    def factored(self):
        """Whether the kernel looks at the filters' values; None if it never does."""
        return None if self.task.kernel.factor == NULL else bool(self.task.factored)

    @property
    def narrow(self):
        """Columns beyond which what is inside the image is left to the rung before; 0 if never."""
        return self.task.kernel.over_edge.narrow

    @property
    def paths(self):
        """Names of the paths that the tiles take."""
        return frozenset(name for i, name in enumerate(PATHS) if self.task.paths >> i & 1)

    def workspace_bytes(self, int threads):
        """Bytes that a run on `threads` threads needs."""
        return self._bytes(threads)

    cdef index_t _bytes(self, index_t threads) noexcept nogil:
        cdef CTask* t = &self.task
        # One line more, since a caller's array may begin anywhere.
        cdef index_t shared = t.packed_bytes + t.transformed_bytes + t.bias_bytes + t.factor_bytes
        return LINE + shared + team_bytes(t[0], threads)

    def run(self, cnp.ndarray x, cnp.ndarray w, bias, cnp.ndarray y, workspace, int threads,
            Task direct=None):
        """Fill `y`; the lowest index of an output that doesn't fit under "raise", or -1.

        If nothing is found in the filters' values, `direct` does it, if given.
        """
        cdef const char* px = <const char*>cnp.PyArray_DATA(x)
        cdef const char* pw = <const char*>cnp.PyArray_DATA(w)
        cdef const char* pb = NULL
        cdef char* py = <char*>cnp.PyArray_DATA(y)
        cdef char* scratch
        cdef bint own = workspace is None
        cdef bint leaves = direct is not None
        cdef index_t size
        cdef index_t bad
        if bias is not None:
            pb = <const char*>cnp.PyArray_DATA(<cnp.ndarray>bias)
        if self.task.items == 0:
            return -1
        if own:
            size = self._bytes(threads)
            if leaves and direct._bytes(threads) > size:
                size = direct._bytes(threads)
            scratch = <char*>take_memory(size)
            if scratch == NULL:
                raise MemoryError(f"no room for a workspace of {size} bytes")
        else:
            scratch = <char*>cnp.PyArray_DATA(<cnp.ndarray>workspace)
        with nogil:
            bad = self._run(px, pw, pb, py, scratch, threads, leaves)
            if bad == nothing_found:
                bad = direct._run(px, pw, pb, py, scratch, threads, False)
            if own:
                free(scratch)
        return bad

    cdef index_t _run(self, const char* x, const char* w, const char* b, char* y, char* scratch,
                      int threads, bint only_factored) noexcept nogil:
        cdef CTask* t = &self.task
        cdef index_t line = LINE
        cdef Prepared prepared
        prepared.given = w if t.packs_late else NULL
        prepared.first = 0
        prepared.filters = <char*>((<uintptr_t>scratch + line - 1) // line * line)
        prepared.transformed = prepared.filters + t.packed_bytes
        prepared.bias = prepared.transformed + t.transformed_bytes
        prepared.factors = prepared.bias + t.bias_bytes
        cdef Team team
        cdef index_t bad = -1
        cdef index_t infinite = 0
        cdef Thread* thread
        cdef unsigned paths = PATH_SERIAL if threads == 1 else PATH_PARALLEL
        cdef int k
        if threads > 1 and t.packed_bytes + t.transformed_bytes > SERIAL_PACKING:
            for k in prange(threads, num_threads=threads, schedule="static", chunksize=1):
                infinite += prepare(t[0], k, threads, w, b, prepared)
        else:
            infinite = prepare(t[0], 0, 1, w, b, prepared)
        prepared.finite = infinite == 0
        paths |= factor(t[0], prepared)
        if only_factored and not prepared.factored:
            return nothing_found
        team = deal(t[0], prepared.factors + t.factor_bytes, threads)
        if threads > 1:
            for k in prange(threads, num_threads=threads, schedule="static", chunksize=1):
                run_share(t[0], team, k, x, prepared, y)
        else:
            run_share(t[0], team, 0, x, prepared, y)
        for k in range(threads):
            thread = &team[k]
            paths |= thread.paths
            if thread.first_bad >= 0 and (bad < 0 or thread.first_bad < bad):
                bad = thread.first_bad
        # Only ever gains bits; a lost update of a concurrent run is made good by the next one.
        if paths & ~self.seen:
            self.seen |= paths
        return bad

    def paths_run(self):
        """Names of the paths that have run."""
        return frozenset(name for i, name in enumerate(PATHS) if self.seen >> i & 1)


def sum_spectra(cnp.ndarray x, cnp.ndarray w, cnp.ndarray y, index_t apart, str isa):
    """Sums of products of spectra of rows, by the calling thread alone.

    Parameters
    ----------
    x : ndarray of intp, (groups, C/groups, OH + (KH - 1) * apart)
        Addresses of rows of `y`'s strips and bins.
    w : ndarray, (groups, OC/groups, C/groups, KH, 2, bins), C-contiguous
        Complex; see `Spectral`.
    y : ndarray, (groups, OC/groups, OH, strips, bins), C-contiguous
        complex64 or complex128, filled.
    apart : int
        Rows from one row of a filter to the next.
    """
    cdef Spectral t
    cdef const Spectra* table = find_spectra(isa.encode())
    t.groups, t.oc, t.rows, t.strips, t.bins = (<object>y).shape
    t.cg, t.kh = w.shape[2], w.shape[3]
    t.apart = apart
    t.x = <const void**>cnp.PyArray_DATA(x)
    t.w = cnp.PyArray_DATA(w)
    t.y = cnp.PyArray_DATA(y)
    cdef bint double = (<object>y).dtype.itemsize == 16
    with nogil:
        if double:
            table.f64(t)
        else:
            table.f32(t)


ARITHMETIC = ("float32", "float64", "int32")


def peak_fma(str kind, int num_threads, double seconds, str isa):
    """Multiply-accumulates a second of `num_threads` threads, measured for about `seconds` seconds.

    `kind` is one of `ARITHMETIC`; the operands stay in registers, so this is the machine's ceiling
    at the ISA level `isa`.
    """
    cdef Arithmetic arithmetic = <Arithmetic><int>ARITHMETIC.index(kind)
    cdef const Ceilings* ceilings = find_ceilings(isa.encode())
    cdef index_t rounds = 1 << 12
    cdef index_t done
    cdef double best = 0
    cdef int _
    if ceilings == NULL:
        raise ValueError(f"isa must be one of {', '.join(isa_levels())}, not {isa!r}")
    guard_fork()
    began = time.perf_counter()
    while True:
        done = 0
        start = time.perf_counter()
        with nogil:
            for _ in prange(num_threads, num_threads=num_threads, schedule="static", chunksize=1):
                done += ceilings.burn(arithmetic, rounds)
        now = time.perf_counter()
        best = max(best, done / (now - start))
        if now - began > seconds:
            return best
        if now - start < 0.01:
            rounds *= 2


def copy_bandwidth(index_t size, int num_threads, int repeats):
    """Bytes read and written a second by `num_threads` threads that copy `size` bytes.

    The best of `repeats` each of a copy through the caches and one with non-temporal stores, at the highest
    ISA level of this processor; between arrays of NumPy's, whose pages are as large as those of images.
    """
    cdef index_t share = size // num_threads // LINE * LINE
    cdef const Ceilings* ceilings = find_ceilings(c_isa_levels()[0])
    # Room to begin at a cache line, which non-temporal stores need.
    cdef unsigned char[::1] first = np.empty(size + LINE, np.uint8)
    cdef unsigned char[::1] second = np.empty(size + LINE, np.uint8)
    cdef char* a = <char*>&first[0] + (-<uintptr_t>&first[0]) % <uintptr_t>LINE
    cdef char* b = <char*>&second[0] + (-<uintptr_t>&second[0]) % <uintptr_t>LINE
    cdef double best = 0
    cdef int k, turn
    guard_fork()
    # Touched first by the threads that copy, so that pages lie near them.
    with nogil:
        for k in prange(num_threads, num_threads=num_threads, schedule="static", chunksize=1):
            memset(a + k * share, 1, share)
            memset(b + k * share, 2, share)
    for turn in range(2 * repeats):
        start = time.perf_counter()
        with nogil:
            for k in prange(num_threads, num_threads=num_threads, schedule="static", chunksize=1):
                if turn % 2:
                    ceilings.streamed(b + k * share, a + k * share, share)
                else:
                    ceilings.cached(b + k * share, a + k * share, share)
        best = max(best, 2.0 * share * num_threads / (time.perf_counter() - start))
    return best
