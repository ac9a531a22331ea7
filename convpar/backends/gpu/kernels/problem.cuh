// What every kernel shares: the problem, the arrays, and how blocks, samples, filters and results are found.
//
// A kernel is one template over an instance `I`, a struct of types and constants that launch.py fills in:
//   X, W, Operand, Sum, Out   element types of the image, of the stored filters, of a product's factors, of the
//                             sum and of the result
//   Index                     int, or long long where 32 bits can't hold every offset inside a plane
//   KH, KW                    the filter's size where it is known at compile time, else 0
//   BORDERS                   whether positions may lie in the padding
//   OVERFLOW                  WRAP, SATURATE or RAISE
//   TILE_ROWS, TILE_COLUMNS   outputs of a thread block
//   BLOCK_ROWS, BLOCK_COLUMNS its threads
//   ROW_LANES                 whether neighbouring threads walk along a column of the image, row by row
//   FILTERS                   GLOBAL, CONSTANT or SHARED: where the filters are read from
//   UNROLL_ROWS, UNROLL_COLUMNS   how many turns of each filter loop become one
// and whatever the kernel alone needs.
#pragma once
#include "numbers.cuh"

// One field a line: launch.py reads this declaration and fills it in by name. Strides count elements.
struct Problem {
    long long n;           // images of this launch
    long long c;           // channels of the image
    long long h;           // rows of the image
    long long w;           // columns of the image
    long long oc;          // output channels
    long long oh;          // rows of the output
    long long ow;          // columns of the output
    long long kh;          // rows of the filter
    long long kw;          // columns of the filter
    long long group_c;     // channels a group
    long long group_oc;    // output channels a group
    long long stride_y;    // rows from one output to the next
    long long stride_x;    // columns from one output to the next
    long long dilation_y;  // rows from one tap to the next
    long long dilation_x;  // columns from one tap to the next
    long long top;         // rows of padding above
    long long bottom;      // rows of padding below
    long long left;        // columns of padding before
    long long right;       // columns of padding after
    long long x_n;         // strides of the image
    long long x_c;
    long long x_h;
    long long x_w;
    long long out_n;  // strides of the output
    long long out_c;
    long long out_h;
    long long out_w;
    long long planes;      // planes of an image that blocks walk over: one per output channel, or per channel
    long long tiles_down;  // tiles of a plane
    long long tiles_across;
    long long stage;          // channels that a block holds in shared memory at a time
    long long filter_offset;  // where filters begin in shared memory, in bytes
    long long fill_low;       // the fill value: the bits of an Operand
    long long fill_high;
};

template <class I>
struct Arrays {
    const typename I::X* x;        // images of this launch
    const typename I::W* w;        // filters, dense (OC, C/groups, KH, KW); unused where they are constant
    const typename I::Sum* bias;   // dense (OC), or null
    typename I::Out* out;          // results of this launch
    const long long* borders;      // the tables that Plane explains
    unsigned long long* overflow;  // the smallest index of a result that doesn't fit
    unsigned char* scratch;        // what passes from one launch of a plan to the next
    long long first;               // index of the first image of this launch
    long long bank;                // where the filters begin in constant memory
};

// The kernel as the launcher sees it. `__restrict__` is an option, so RESTRICT is a macro. The last arguments
// are the threads of a block and, if the launch says so, the blocks that a multiprocessor shall hold at
// least.
#define CONVPAR_ENTRY(kernel, I, ...)                                                            \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) convpar_##kernel(                  \
        const typename I::X* RESTRICT x, const typename I::W* RESTRICT w,                        \
        const typename I::Sum* RESTRICT bias, typename I::Out* RESTRICT out,                     \
        const long long* RESTRICT borders, unsigned long long* overflow, unsigned char* scratch, \
        long long first, long long bank, const __grid_constant__ Problem problem) {              \
        kernel<I>(Arrays<I>{x, w, bias, out, borders, overflow, scratch, first, bank}, problem); \
    }

enum Filter { GLOBAL, CONSTANT, SHARED };

template <class I>
__device__ inline int filter_rows(const Problem& p) {
    return I::KH ? I::KH : int(p.kh);
}
template <class I>
__device__ inline int filter_columns(const Problem& p) {
    return I::KW ? I::KW : int(p.kw);
}

// -- Blocks and threads

template <class I>
__device__ inline int thread_row() {
    return I::ROW_LANES ? threadIdx.x : threadIdx.y;
}
template <class I>
__device__ inline int thread_column() {
    return I::ROW_LANES ? threadIdx.y : threadIdx.x;
}
__device__ inline int thread_index() { return threadIdx.x + blockDim.x * threadIdx.y; }
__device__ inline int block_threads() { return blockDim.x * blockDim.y; }

// The tile of outputs that a thread block computes. A grid may be smaller than the work: a block then goes on
// to the tile a whole grid further, all its threads together.
template <class I>
class Tile {
    using Index = typename I::Index;
    Index index_, tiles_, across_;

    __device__ void place() {
        row = index_ / across_ * I::TILE_ROWS;
        column = index_ % across_ * I::TILE_COLUMNS;
    }

  public:
    Index n, plane;     // image of this launch, plane of that image
    Index row, column;  // the tile's first place in the plane

    __device__ explicit Tile(const Problem& p)
        : index_(blockIdx.x), tiles_(Index(p.tiles_down) * Index(p.tiles_across)),
          across_(Index(p.tiles_across)), n(blockIdx.z), plane(blockIdx.y) {
        place();
    }

    __device__ bool exists(const Problem& p) const { return n < Index(p.n); }

    __device__ void next(const Problem& p) {
        index_ += gridDim.x;
        if (index_ >= tiles_) {
            index_ = blockIdx.x;
            plane += gridDim.y;
            if (plane >= Index(p.planes)) {
                plane = blockIdx.y;
                n += gridDim.z;
            }
        }
        place();
    }
};

// -- Samples

// One channel of one image. A position counts from the first sample; in the padding it is looked up in the
// tables that boundary.py made: rows above, rows below, columns before, columns after. There -1 stands for
// the fill value.
template <class I>
class Plane {
    using X = typename I::X;
    using Operand = typename I::Operand;
    using Index = typename I::Index;
    const X* first_;
    const long long* borders_;
    const Problem& p_;

    // `table` begins with the positions before the image; `before` counts them.
    static __device__ Index sample(Index position, Index size, const long long* table, Index before) {
        if (!I::BORDERS || (position >= 0 && position < size)) return position;
        return Index(table[before + (position < 0 ? position : position - size)]);
    }

  public:
    __device__ Plane(const Arrays<I>& arrays, const Problem& p, Index n, Index c)
        : first_(arrays.x + (n * p.x_n + c * p.x_c)), borders_(arrays.borders), p_(p) {}

    // The row of samples seen at a position, -1 for fill.
    __device__ Index row(Index y) const { return sample(y, Index(p_.h), borders_, Index(p_.top)); }
    __device__ Index column(Index x) const {
        return sample(x, Index(p_.w), borders_ + (p_.top + p_.bottom), Index(p_.left));
    }

    // The sample in `row` and `column`, or the one `further` elements on; the fill value where either is -1.
    __device__ Operand at(Index row, Index column, Index further = 0) const {
        if (I::BORDERS && (row < 0 || column < 0)) return fill();
        return convert<Operand>(first_[further + row * Index(p_.x_h) + column * Index(p_.x_w)]);
    }

    __device__ Operand fill() const { return *reinterpret_cast<const Operand*>(&p_.fill_low); }
};

// -- Filters

// The filters of one output channel, wherever they live. Taps are numbered as in (C/groups, KH, KW).
template <class I>
class Filters {
    using W = typename I::W;
    using Operand = typename I::Operand;
    using Index = typename I::Index;
    const W* all_;
    const W* of_channel_;
    Shared<Operand> staged_;
    Index size_;

  public:
    __device__ Filters(const Arrays<I>& arrays, const Problem& p)
        : size_(Index(p.group_c) * filter_rows<I>(p) * filter_columns<I>(p)) {
        if constexpr (I::FILTERS == CONSTANT) {
            all_ = reinterpret_cast<const W*>(constant_bytes + arrays.bank);
        } else {
            all_ = arrays.w;
        }
        of_channel_ = all_;
        if constexpr (I::FILTERS == SHARED) staged_ = dynamic_shared<Operand>(int(p.filter_offset));
    }

    // Turns to another output channel. All threads of the block call it: shared memory is filled between
    // barriers.
    __device__ void choose(Index oc) {
        of_channel_ = all_ + static_cast<long long>(oc) * size_;
        if constexpr (I::FILTERS == SHARED) {
            __syncthreads();
            for (Index i = thread_index(); i < size_; i += block_threads()) {
                staged_[i] = convert<Operand>(of_channel_[i]);
            }
            __syncthreads();
        }
    }

    __device__ Operand at(Index tap) const {
        if constexpr (I::FILTERS == SHARED) {
            return staged_[tap];
        } else {
            return convert<Operand>(of_channel_[tap]);
        }
    }
};

// -- Unfinished sums

// Sums of one plane that several launches or threads make: in the output itself where I::IN_PLACE says that
// it can hold them, else dense (n, OC, OH, OW) in the workspace.
template <class I>
class Sums {
    using Sum = typename I::Sum;
    using Index = typename I::Index;
    Sum* first_;
    Index row_stride_, column_stride_;

  public:
    __device__ Sums(const Arrays<I>& arrays, const Problem& p, Index n, Index oc) {
        if constexpr (I::IN_PLACE) {
            first_ = reinterpret_cast<Sum*>(arrays.out) + (n * p.out_n + oc * p.out_c);
            row_stride_ = Index(p.out_h);
            column_stride_ = Index(p.out_w);
        } else {
            first_ = reinterpret_cast<Sum*>(arrays.scratch) + (n * p.oc + oc) * (p.oh * p.ow);
            row_stride_ = Index(p.ow);
            column_stride_ = 1;
        }
    }
    __device__ Sum* at(Index row, Index column) const {
        return first_ + (row * row_stride_ + column * column_stride_);
    }
};

// -- Results

// The epilogue: adds the bias, converts the sum and writes it to its place.
template <class I>
__device__ inline void store(const Arrays<I>& arrays, const Problem& p, typename I::Index n,
                             typename I::Index oc, typename I::Index row, typename I::Index column,
                             typename I::Sum sum) {
    using Out = typename I::Out;
    using Index = typename I::Index;
    if (arrays.bias) sum = add(sum, arrays.bias[oc]);
    bool outside;
    const Out result = finish<Out, I::OVERFLOW>(sum, outside);
    Out* plane = arrays.out + (n * p.out_n + oc * p.out_c);
    plane[row * Index(p.out_h) + column * Index(p.out_w)] = result;
    if (I::OVERFLOW == RAISE && outside) {
        atomic_min(arrays.overflow, (((arrays.first + n) * p.oc + oc) * p.oh + row) * p.ow + column);
    }
}
