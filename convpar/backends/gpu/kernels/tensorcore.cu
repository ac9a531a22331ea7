// Builds on: fused.cu.
// Idea: products are left to the matrix units (tensor cores). Factors are rounded to half precision on their
//       way into shared memory, and a warp multiplies 16 channels x 16 taps with 16 taps x 16 positions, or
//       8 x 16 with 16 x 32 where 16 channels would leave half of the unit idle. Sums stay in float.
// Limit: loading the slabs; next to that the products cost nearly nothing.
#include "gemm.cuh"

// A slab: pairs of taps down, channels or positions across. A row takes PITCH words, so that neither storing
// a row nor loading a fragment meets a bank twice.
template <int COLUMNS>
struct PairSlab {
    static constexpr int PITCH = COLUMNS % 16 == 8 ? COLUMNS : COLUMNS + 8;
    Shared<HalfPair> pairs;

    // The fragment of the 16 (A) or 8 (B) columns from `first` on and the taps `k` to `k` + 15.
    __device__ MatrixA matrix_a(int first, int k) const {
        MatrixA a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a.pairs[i] = pairs[(k / 2 + lane() % 4 + i / 2 * 4) * PITCH + first + lane() / 4 + i % 2 * 8];
        }
        return a;
    }
    __device__ MatrixB matrix_b(int first, int k) const {
        MatrixB b;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            b.pairs[i] = pairs[(k / 2 + lane() % 4 + i * 4) * PITCH + first + lane() / 4];
        return b;
    }
};

template <class I>
__device__ void tensorcore(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    constexpr bool TURNED = I::WARP_ROWS == 8;  // the unit's 16 rows are positions, its 8 columns channels
    constexpr int PAIRS = I::DEPTH / 2, STEP = rows_at_a_time<I>(PAIRS);
    const int row = thread_index() / I::TILE_COLUMNS, column = thread_index() % I::TILE_COLUMNS;
    const Index count = count_taps<I>(p);
    Filters<I> filters(arrays, p);
    const PairSlab<I::TILE_ROWS> weights{dynamic_shared<HalfPair>(TAP_TABLE_BYTES<I>)};
    const PairSlab<I::TILE_COLUMNS> samples{weights.pairs + PAIRS * weights.PITCH};
    // Where in the tile this warp's part begins.
    const int warp = thread_index() / 32, warps_across = I::TILE_COLUMNS / I::WARP_COLUMNS;
    const int first_row = warp / warps_across * I::WARP_ROWS;
    const int first_column = warp % warps_across * I::WARP_COLUMNS;

    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index position = tile.column + column;
        const bool exists = position < count_positions<I>(p);
        const Patch<I> patch(arrays, p, tile.n, tile.plane, position);
        Taps<I, 2 * STEP> taps(p, 2 * row);
        tabulate_first_taps<I>(p);
        MatrixC sums[2] = {};
        for (Index slab = 0; slab < count; slab += I::DEPTH) {
            for (int i = thread_index(); i < I::TILE_ROWS * PAIRS; i += block_threads()) {
                const Index channel = tile.row + i / PAIRS, tap = slab + i % PAIRS * 2;
                Half low{}, high{};
                if (channel < Index(p.group_oc)) {
                    filters.choose(tile.plane * Index(p.group_oc) + channel);
                    if (tap < count) low = filters.at(tap);
                    if (tap + 1 < count) high = filters.at(tap + 1);
                }
                weights.pairs[i % PAIRS * weights.PITCH + i / PAIRS] = half_pair(low, high);
            }
            if (row < STEP) {
#pragma unroll
                for (int k = 2 * row; k < 2 * row + I::DEPTH; k += 2 * STEP) {
                    HalfPair pair{};
                    if (exists)
                        pair = half_pair(taps.sample(patch, slab, k), taps.sample(patch, slab, k, true));
                    samples.pairs[k / 2 * samples.PITCH + column] = pair;
                    taps.advance();
                }
            }
            __syncthreads();
            tabulate_taps<I>(p, slab + I::DEPTH);
#pragma unroll
            for (int k = 0; k < I::DEPTH; k += 16) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if constexpr (TURNED) {
                        matrix_multiply_add(sums[i], samples.matrix_a(first_column + 16 * i, k),
                                            weights.matrix_b(first_row, k));
                    } else {
                        matrix_multiply_add(sums[i], weights.matrix_a(first_row, k),
                                            samples.matrix_b(first_column + 8 * i, k));
                    }
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int down = lane() / 4 + j / 2 * 8, across = lane() % 4 * 2 + j % 2;
                if constexpr (TURNED) {
                    store_at(arrays, p, tile, first_row + across, first_column + 16 * i + down,
                             sums[i].values[j]);
                } else {
                    store_at(arrays, p, tile, first_row + down, first_column + 8 * i + across,
                             sums[i].values[j]);
                }
            }
        }
    }
}
