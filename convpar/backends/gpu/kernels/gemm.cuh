// What the rungs share that see a convolution as matrix products, one for each image and group:
//
//     outputs (channels x positions) = filters (channels x taps) * patches (taps x positions)
//
// A position is an output's place in its plane, counted row by row; a tap is a place in a filter, counted as
// in (C/groups, KH, KW). For `Tile` the matrix of outputs is a plane: tile.plane is the group, tile.row its
// first output channel and tile.column its first position. A block takes the taps in slabs of I::DEPTH, a
// power of two, and has one slab of both matrices in shared memory at a time; past the last tap a slab holds
// zeros.
#pragma once
#include "problem.cuh"

template <class I>
__device__ inline typename I::Index count_taps(const Problem& p) {
    return typename I::Index(p.group_c) * filter_rows<I>(p) * filter_columns<I>(p);
}
template <class I>
__device__ inline typename I::Index count_positions(const Problem& p) {
    return typename I::Index(p.oh) * typename I::Index(p.ow);
}

template <class I>
constexpr int THREADS = I::BLOCK_ROWS * I::BLOCK_COLUMNS;

// Rows of a slab of `rows` that the block loads at a time, a thread for each position: a power of two.
template <class I>
__device__ constexpr int rows_at_a_time(int rows) {
    int count = 1;
    while (2 * count <= rows && 2 * count * I::TILE_COLUMNS <= THREADS<I>) count *= 2;
    return count;
}

// -- Patches

template <class I>
struct Tap {
    typename I::Index channel;  // of the group
    int row, column;            // of the filter

    static __device__ Tap of(typename I::Index number, const Problem& p) {
        const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
        const typename I::Index line = number / kw;
        return {line / kh, int(line % kh), int(number % kw)};
    }

    // The tap that lies `step` further on.
    __device__ Tap plus(const Tap& step, const Problem& p) const {
        const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
        Tap sum{channel + step.channel, row + step.row, column + step.column};
        if (sum.column >= kw) {
            sum.column -= kw;
            ++sum.row;
        }
        if (sum.row >= kh) {
            sum.row -= kh;
            ++sum.channel;
        }
        return sum;
    }
};

// Where a tap's sample lies, seen from a patch's first one.
template <class I>
struct Way {
    using Index = typename I::Index;
    Index elements;       // to its channel; all the way where no border can come between
    Index rows, columns;  // then

    static __device__ Way to(const Tap<I>& tap, const Problem& p) {
        const Way way{tap.channel * Index(p.x_c), tap.row * Index(p.dilation_y),
                      tap.column * Index(p.dilation_x)};
        if (I::BORDERS) return way;
        return {way.elements + way.rows * Index(p.x_h) + way.columns * Index(p.x_w), 0, 0};
    }
};

// What the output at one position sees of the image.
template <class I>
class Patch {
    using Index = typename I::Index;
    const Plane<I> image_;  // the group's first channel
    const Index y_, x_;     // the patch's first sample
    const Index elements_;  // from the image's to it

  public:
    __device__ Patch(const Arrays<I>& arrays, const Problem& p, Index n, Index group, Index position)
        : image_(arrays, p, n, group * Index(p.group_c)),
          y_(position / Index(p.ow) * Index(p.stride_y) - Index(p.top)),
          x_(position % Index(p.ow) * Index(p.stride_x) - Index(p.left)),
          elements_(y_ * Index(p.x_h) + x_ * Index(p.x_w)) {}

    __device__ typename I::Operand at(const Way<I>& way) const {
        if (!I::BORDERS) return image_.at(0, 0, elements_ + way.elements);
        return image_.at(image_.row(y_ + way.rows), image_.column(x_ + way.columns), way.elements);
    }
};

// -- How a thread learns which tap a row of a slab belongs to: I::REUSE

enum Reuse {
    NO_REUSE,      // by division, at each load
    IN_REGISTERS,  // by division once; from there on by addition, in registers
    IN_SHARED,     // from a table of the slab's ways in shared memory: one division each for the whole block
};

// Bytes of the table, with which shared memory begins.
template <class I>
constexpr int TAP_TABLE_BYTES = I::REUSE == IN_SHARED ? 24 * I::DEPTH : 0;

// Fills the table for the slab that begins with tap `slab`; only while no thread reads it.
template <class I>
__device__ inline void tabulate_taps(const Problem& p, typename I::Index slab) {
    if constexpr (I::REUSE == IN_SHARED) {
        const Shared<Way<I>> table = dynamic_shared<Way<I>>(0);
#pragma unroll 1
        for (int i = thread_index(); i < I::DEPTH; i += THREADS<I>) {
            table[i] = Way<I>::to(Tap<I>::of(slab + i, p), p);
        }
    }
}
template <class I>
__device__ inline void tabulate_first_taps(const Problem& p) {
    if constexpr (I::REUSE == IN_SHARED) {
        tabulate_taps<I>(p, 0);
        __syncthreads();
    }
}

// The taps of the rows that a thread loads: `row`, `row` + STEP and so on, slab after slab.
template <class I, int STEP>
class Taps {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    const Problem& p_;
    Tap<I> tap_, step_;

  public:
    __device__ Taps(const Problem& p, int row) : p_(p) {
        if constexpr (I::REUSE == IN_REGISTERS) {
            tap_ = Tap<I>::of(row, p);
            step_ = Tap<I>::of(STEP, p);
        }
    }

    // What `patch` has in this row of the slab, or in the next one; zero past the last tap.
    __device__ Operand sample(const Patch<I>& patch, Index slab, int row, bool next = false) const {
        const Index number = slab + row + next;
        Way<I> way;
        if constexpr (I::REUSE == NO_REUSE) {
            way = Way<I>::to(Tap<I>::of(number, p_), p_);
        } else if constexpr (I::REUSE == IN_SHARED) {
            way = dynamic_shared<Way<I>>(0)[row + next];
        } else {
            way = Way<I>::to(next ? tap_.plus({0, 0, 1}, p_) : tap_, p_);
        }
        return number < count_taps<I>(p_) ? patch.at(way) : Operand{};
    }

    __device__ void advance() {
        if constexpr (I::REUSE == IN_REGISTERS) tap_ = tap_.plus(step_, p_);
    }
};

// -- Results

// Writes one output of a tile, unless it lies outside the matrix.
template <class I>
__device__ inline void store_at(const Arrays<I>& arrays, const Problem& p, const Tile<I>& tile, int row,
                                int column, typename I::Sum sum) {
    using Index = typename I::Index;
    const Index channel = tile.row + row, position = tile.column + column;
    if (channel >= Index(p.group_oc) || position >= count_positions<I>(p)) return;
    store(arrays, p, tile.n, tile.plane * Index(p.group_oc) + channel, position / Index(p.ow),
          position % Index(p.ow), sum);
}

// -- The product of two slabs by multiply-adds, for rungs without matrix units

// The slabs in shared memory, `offset` bytes into it. A row of weights is one longer than it need be, so that
// threads that read down a column meet different banks.
template <class I>
struct Slabs {
    using Operand = typename I::Operand;
    static constexpr int PITCH = I::DEPTH + 1;
    Shared<Operand> weights;  // TILE_ROWS channels x DEPTH taps
    Shared<Operand> samples;  // DEPTH taps x TILE_COLUMNS positions

    __device__ explicit Slabs(int offset)
        : weights(dynamic_shared<Operand>(offset)),
          samples(dynamic_shared<Operand>(offset + I::TILE_ROWS * PITCH * int(sizeof(Operand)))) {}

    // Brings in the weights from tap `slab` on; neighbouring threads read neighbouring taps.
    __device__ void load_weights(Filters<I>& filters, const Problem& p, const Tile<I>& tile,
                                 typename I::Index slab) const {
        using Index = typename I::Index;
        for (int i = thread_index(); i < I::TILE_ROWS * I::DEPTH; i += block_threads()) {
            const Index channel = tile.row + i / I::DEPTH, tap = slab + i % I::DEPTH;
            Operand weight{};
            if (channel < Index(p.group_oc) && tap < count_taps<I>(p)) {
                filters.choose(tile.plane * Index(p.group_oc) + channel);
                weight = filters.at(tap);
            }
            weights[i / I::DEPTH * PITCH + i % I::DEPTH] = weight;
        }
    }
};

// The sums that a thread keeps. Its rows and columns of the tile lie as far apart as the block has threads,
// so that neighbouring threads have neighbouring positions.
template <class I>
class RegisterBlock {
    using Operand = typename I::Operand;
    static constexpr int ROWS = I::TILE_ROWS / I::BLOCK_ROWS, COLUMNS = I::TILE_COLUMNS / I::BLOCK_COLUMNS;
    typename I::Sum sums_[ROWS][COLUMNS] = {};

    static __device__ int row(int i) { return threadIdx.y + i * I::BLOCK_ROWS; }
    static __device__ int column(int j) { return threadIdx.x + j * I::BLOCK_COLUMNS; }

  public:
    __device__ void add_product(const Slabs<I>& slabs) {
        for (int k = 0; k < I::DEPTH; ++k) {
            Operand weights[ROWS], samples[COLUMNS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) weights[i] = slabs.weights[row(i) * Slabs<I>::PITCH + k];
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) samples[j] = slabs.samples[k * I::TILE_COLUMNS + column(j)];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    sums_[i][j] = multiply_add(samples[j], weights[i], sums_[i][j]);
            }
        }
    }

    __device__ void store_all(const Arrays<I>& arrays, const Problem& p, const Tile<I>& tile) const {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) store_at(arrays, p, tile, row(i), column(j), sums_[i][j]);
        }
    }
};
