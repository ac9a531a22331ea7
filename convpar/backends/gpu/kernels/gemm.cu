// Builds on: im2col.cu, whose patches it multiplies with the filters.
// Idea: a block brings a slab of both matrices into shared memory, where each weight serves all positions of
//       the tile and each sample all of its channels; the sums stay in registers.
// Limit: the patches, read from global memory once for every TILE_ROWS output channels; then reads of shared
//        memory, two a product unless a thread computes a block of outputs.
#include "gemm.cuh"

template <class I>
__device__ void gemm(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    constexpr int STEP = rows_at_a_time<I>(I::DEPTH);
    const Index taps = count_taps<I>(p), positions = count_positions<I>(p);
    const int row = thread_index() / I::TILE_COLUMNS, column = thread_index() % I::TILE_COLUMNS;
    Filters<I> filters(arrays, p);
    const Slabs<I> slabs(0);

    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index position = tile.column + column;
        const Operand* patch = reinterpret_cast<const Operand*>(arrays.scratch) + position +
                               (tile.n * (p.planes * taps) + tile.plane * taps) * positions;
        RegisterBlock<I> block;
        for (Index slab = 0; slab < taps; slab += I::DEPTH) {
            slabs.load_weights(filters, p, tile, slab);
            if (row < STEP) {
#pragma unroll
                for (int k = 0; k < I::DEPTH; k += STEP) {
                    const Index tap = slab + k + row;
                    const bool exists = tap < taps && position < positions;
                    slabs.samples[(k + row) * I::TILE_COLUMNS + column] =
                        exists ? patch[tap * positions] : Operand{};
                }
            }
            __syncthreads();
            block.add_product(slabs);
            __syncthreads();
        }
        block.store_all(arrays, p, tile);
    }
}
