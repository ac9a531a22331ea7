// What the engine and the kernels tell each other: plain records, no templates, no threads, no Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace convpar {

using index_t = std::int64_t;

// Rows so many bytes apart share the few lines of one set of the first cache, on all processors that convpar knows of.
constexpr index_t set_bytes = 4096;

// A line of the caches, likewise.
constexpr index_t line_bytes = 64;

// Element types by number; engine.pyx gives Python their names in this order.
enum Type : int { I8, U8, I16, U16, I32, U32, I64, U64, F16, BF16, F32, F64, C64, C128, TYPES };

// One image axis and its border: `before` points past the entries for positions -1, -2, ...,
// `after` holds those for n, n + 1, ...; an entry is a sample's index, or -1 for the fill value.
struct Axis {
    index_t n;
    const index_t* before;
    const index_t* after;

    index_t source(index_t position) const {
        if (position < 0) return before[position];
        return position < n ? position : after[position - n];
    }
};

// What a kernel's transforms and units are given. rows x columns samples make out_rows x out_columns outputs: those of a
// transform, or in cpu-toeplitz of a tile's row; rows is 0 where channels fill a tile or a word. `products` of parts are summed
// for each product (split.h), `parts` of a sample in cpu-toeplitz; integers have no parts, and kernels don't ask. `emulated`: the
// processor lacks the instructions that the kernel is for. signed_x, signed_w: whether samples and filters, of bytes, have signs.
struct Tiling {
    index_t rows, columns, out_rows, out_columns, products, emulated, signed_x, signed_w, parts;
};

// Products of a column and a row that a filter may be found to be the sum of.
constexpr int most_terms = 2;

struct Work;
using kernel_t = void (*)(const Work&);

// One call of a kernel: a rectangle of outputs of one image for some output channels of one group.
// Strides count elements. Output (o, i, j) has its tap (c, p, q) at image position
// (row0 + i*sh + p*dh, col0 + j*sw + q*dw) of channel c of the group.
struct Work {
    index_t n;               // images, for kernels with a transform; 1 for the others
    index_t oc, oh, ow;      // the rectangle
    index_t cg, kh, kw;      // channels of the group, filter size
    index_t groups, xg, yg;  // 1 but for Kernel::groups; from one to the next in input and output
    index_t sh, sw, dh, dw;  // stride and dilation
    const void* x;           // sample (0, 0) of the group's first channel
    index_t xn, xc, xr;      // its strides: image, channel, row
    index_t xs;              // column; dense kernels: to the sample under the next output
    index_t row0, col0;      // negative before the image
    Axis rows, cols;         // for rectangles that reach over the edge
    bool in_place;           // dense kernels: the input is the image itself, with more around the rectangle
    bool over_edge;          // of the image: see Kernel::over_edge; else dense kernels' row0 and col0 are 0
    bool finite;             // of such rectangles the filters: see OverEdge::multiplies
    index_t gap, after_gap;  // columns from `gap` on, before `after_gap`, are left out: see OverEdge::narrow
    const void* fill;        // one value of the sum's type
    const index_t* taps;  // dense kernels: elements from an output's first sample to that of filter column q
    const void* w;        // filters in the sum's type, packed as the kernel asks
    index_t packing;      // filters side by side in a pack
    const void* factors;  // what `factor` found, for kernels that have it
    Tiling tiling;
    const void* transformed;  // what Transform::filter made of w
    void* scratch;            // what Kernel::scratch asked for, at a multiple of 64 bytes
    // The next is called without `scratch`, where its rung asks for some: what is there is the caller's.
    kernel_t otherwise;  // the rung it builds on, for one image whose filters or samples it has nothing for
    const void* bias;    // [oc] in the sum's type
    void* y;             // output (0, 0, 0) of the rectangle, in the sum's type; but see Narrow
    index_t yn, yo, yr, ys;  // its strides: image, output channel, row, column
    bool out_in_place;       // the output is the caller's own, with more around the rectangle
    bool stream;             // the outputs won't stay in the caches
    bool off_core;           // input and output are too large for the caches of one core
    bool far;                // and for the one that cores share, or results go past them all
    index_t set_lines;       // of the first cache: lines that a set holds
};

// Of kernels that transform filters and samples; such a kernel takes several images at once, in one piece each, and
// leaves what it can't do to the rung it builds on. `shape` is the largest call, without its arrays.
struct Transform {
    // Elements that a filter of one channel becomes; null for the other kernels.
    index_t (*elements)(const Work& shape);
    // From `packing` packed filters of `count` channels from `c` on, to what all channels become together.
    void (*filter)(const Work& shape, const void* packed, index_t c, index_t count, void* to);
    // Channels that `filter` takes at once, but for the last ones.
    index_t together = 1;
    // The same of filters of bytes, from where they lie, if their taps do as in a filter by itself: of `filters` of those side by side, from one to the
    // next `apart` bytes. Null: none. The kernel takes no packed ones then, nor does the rung before.
    void (*bytes)(const Work& shape, const void* given, index_t filters, index_t apart, index_t c,
                  index_t count, void* to) = nullptr;
};

// Rectangles that a kernel takes in place although zeros around the image are under them.
struct OverEdge {
    index_t least, most;  // rows and columns of the filters
    index_t reach;        // rows and columns of the filter beyond the image on one side, at most; 0: none
    // By zeros, where filters aren't finite; else such filters meet zeros that were gathered. Others' products with zeros may be left out.
    bool multiplies;
    // Columns of a rectangle, at most, that are taken although all taps are inside; wider ones are left to the rung it
    // builds on. Not 0: the two edges of a wide tile are one rectangle with a gap. 0: all are taken, and there are no gaps, as with
    // strides.
    index_t narrow;
    index_t stride = 1;    // of rows and columns, at most
    bool central = false;  // filters have their middle, or one of both, inside the image
    // Not 0: `narrow` of filters of one channel that are slow here, having more rows or columns than are fast. Of those the middle of a
    // tile is left to the rung before however wide the edges are beside it, and so is what was gathered.
    index_t narrow_if_slow = 0;
    index_t fast_rows = 0, fast_columns = 0;
    bool dilated = false;     // takes filters whose rows and columns are apart, too
    index_t least_apart = 1;  // from a column to the next, at least
};

// Of kernels whose sums are floats: rectangles inside the image, or as OverEdge says, without a stride or a dilation of rows and of
// one channel, whose samples are integers of 8 or 16 bits, which become floats as they are loaded. Results are sums, or of the samples'
// type: rounded to nearest, ties to even, and saturated as they are stored.
struct Narrow {
    // Of one type of samples; null: none.
    struct Results {
        kernel_t as_samples, as_sums;
    };
    Results of_u8, of_u16, of_i16;
    // Of a filter; and where samples come from memory and results are of their type.
    index_t most_rows, most_rows_far;
    index_t rows, width;  // of a rectangle, at least
    // Of a sample and of what lies around the image, where they are split (Tiling::parts): with more all are floats.
    index_t most_parts;
};

// A kernel for rectangles whose every tap is inside the image, and one for the others; without the second,
// the engine gathers what reaches over the edge.
struct Kernel {
    kernel_t inside;
    kernel_t bordered;
    // Filters are packed as [oc / packing][cg][kh][kw][packing], missing channels as zeros.
    index_t packing;
    // Not 0: samples of neighbouring outputs, and neighbouring outputs, must be neighbours in memory, and a
    // rectangle narrower than this must have been gathered, so that there is room to read on beyond its end.
    index_t dense;
    // Filters that reach farther than this many elements in a row are beyond `factor`.
    index_t farthest;
    // Looks at `filters` filters of one channel in every run, for kernels that depend on their values; per filter,
    // 1 + most_terms * (kh + kw) elements tell what it found. Whether it found anything.
    bool (*factor)(const void* w, index_t filters, index_t kh, index_t kw, void* found);
    // Columns from which on it heeds Work::stream, or the rung before does where it is left to that (OverEdge::narrow); 0: never.
    index_t streams;
    // Transformed filters lie as [oc / packing][cg * elements * packing], beside the packed ones if there are any (Transform::bytes).
    Transform transform;
    // Bytes of scratch memory for the largest call, without its arrays; null: none.
    index_t (*scratch)(const Work& shape);
    OverEdge over_edge;
    Narrow narrow = {};
    // Channels may be neighbours in memory in place of columns, of the image and of the result: Work::xs and ys count.
    bool channels_last = false;
    // Rectangles narrower than `dense` are taken in place as well.
    bool any_width = false;
    // Takes several groups in a call.
    bool groups = false;
    // Not 0: its lanes, so many, are groups of one channel and one output channel. Filters are packed as [groups / lanes][kh][kw][packing]:
    // packs that hold more than the lanes overlap, so that a vector may begin with any group. Where channels are no neighbours in
    // memory, they hold the lanes alone. A call begins with the first group of a pack.
    index_t lanes_are_groups = 0;
    // Outputs of neighbouring columns may be a stride apart in the image; else samples are gathered, those that a filter column
    // meets beside each other. So gathered, the rung before takes them where lanes are columns.
    bool strided = false;
    // The same of filters of one sample only.
    bool strided_points = false;
};

// What takes narrow samples of type x, and gives results that are converted to that type, or sums; null: nothing does.
inline kernel_t find_narrow(const Kernel& kernel, Type x, bool converts) {
    const Narrow& narrow = kernel.narrow;
    const Narrow::Results none = {};
    const Narrow::Results& of = x == U8    ? narrow.of_u8
                                : x == U16 ? narrow.of_u16
                                : x == I16 ? narrow.of_i16
                                           : none;
    return converts ? of.as_samples : of.as_sums;
}

// One rung at one ISA level.
struct Rung {
    Kernel (*find)(Type x, Type sum, index_t kh, index_t kw);  // null pointers where there is none
    const char* isa;                                           // what the compiler was told to use
};

// The table of a rung by its name in rungs.inc and an ISA level; null where it wasn't built.
const Rung* find_rung(const char* name, const char* isa);

// Lines that a set of this processor's first cache holds; where nobody tells, as many as on most.
index_t set_lines();

// Whether this processor is Intel's. Those that were measured (family 6, models 167 and 207) take masked loads, moved lanes and lines from
// memory otherwise than AMD's.
bool intel();

// Whether this processor has a unit for products of matrices (tiles.h), and this process may use it.
bool matrix_unit();

// Whether this processor has instructions that multiply pairs of 16 bits and add both products to a sum of 32 (AVX-512 VNNI).
bool pair_unit();

// Whether this processor has instructions for products of 52 bits (AVX-512 IFMA), and gains by them.
bool word_unit();

// Levels that were built and that this processor can run, best first, ended by a null.
const char* const* isa_levels();

}  // namespace convpar
