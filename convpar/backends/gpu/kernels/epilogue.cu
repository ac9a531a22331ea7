// Builds on: nothing; a step of rungs whose sums aren't finished by the kernel that makes them.
// Idea: one thread an output: the sum that waits in the workspace, if any, plus the bias becomes the result.
// Limit: memory traffic.
#include "problem.cuh"

template <class I>
__device__ void epilogue(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index row = tile.row + thread_row<I>(), column = tile.column + thread_column<I>();
        if (row >= Index(p.oh) || column >= Index(p.ow)) continue;
        typename I::Sum sum{};
        if constexpr (!I::IN_PLACE) sum = *Sums<I>(arrays, p, tile.n, tile.plane).at(row, column);
        store(arrays, p, tile.n, tile.plane, row, column, sum);
    }
}
