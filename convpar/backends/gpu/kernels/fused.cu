// Builds on: gemm.cu.
// Idea: the patches are never written out ("implicit GEMM"): the multiply loads each sample of its slab from
//       the image.
// Limit: index arithmetic, since each load must find the channel, filter row and filter column of its tap: by
//        division, unless they are kept (REUSE).
#include "gemm.cuh"

template <class I>
__device__ void fused(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    constexpr int STEP = rows_at_a_time<I>(I::DEPTH);
    const int row = thread_index() / I::TILE_COLUMNS, column = thread_index() % I::TILE_COLUMNS;
    Filters<I> filters(arrays, p);
    const Slabs<I> slabs(TAP_TABLE_BYTES<I>);

    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index position = tile.column + column;
        const bool exists = position < count_positions<I>(p);
        const Patch<I> patch(arrays, p, tile.n, tile.plane, position);
        Taps<I, STEP> taps(p, row);
        tabulate_first_taps<I>(p);
        RegisterBlock<I> block;
        for (Index slab = 0; slab < count_taps<I>(p); slab += I::DEPTH) {
            slabs.load_weights(filters, p, tile, slab);
            if (row < STEP) {
#pragma unroll
                for (int k = row; k < row + I::DEPTH; k += STEP) {
                    slabs.samples[k * I::TILE_COLUMNS + column] =
                        exists ? taps.sample(patch, slab, k) : Operand{};
                    taps.advance();
                }
            }
            __syncthreads();
            tabulate_taps<I>(p, slab + I::DEPTH);
            block.add_product(slabs);
            __syncthreads();
        }
        block.store_all(arrays, p, tile);
    }
}
