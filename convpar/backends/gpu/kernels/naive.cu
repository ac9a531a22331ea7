// Builds on: nothing; the ladder starts here.
// Idea: one thread computes one output, and a grid of blocks covers tiles, output channels and images.
// Limit: every thread fetches all its samples and weights for itself, C/groups * KH * KW of each.
#include "problem.cuh"

template <class I>
__device__ void naive(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Sum = typename I::Sum;
    const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
    Filters<I> filters(arrays, p);

    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index oc = tile.plane;
        filters.choose(oc);
        const Index row = tile.row + thread_row<I>(), column = tile.column + thread_column<I>();
        if (row >= Index(p.oh) || column >= Index(p.ow)) continue;

        const Index first_channel = oc / Index(p.group_oc) * Index(p.group_c);
        const Index y = row * Index(p.stride_y) - Index(p.top);
        const Index x = column * Index(p.stride_x) - Index(p.left);
        Sum sum{};
        Index tap = 0;
        for (Index c = 0; c < Index(p.group_c); ++c) {
            const Plane<I> image(arrays, p, tile.n, first_channel + c);
#pragma unroll I::UNROLL_ROWS
            for (int i = 0; i < kh; ++i) {
                const Index sample_row = image.row(y + i * Index(p.dilation_y));
#pragma unroll I::UNROLL_COLUMNS
                for (int j = 0; j < kw; ++j) {
                    const Index sample_column = image.column(x + j * Index(p.dilation_x));
                    sum = multiply_add(image.at(sample_row, sample_column), filters.at(tap++), sum);
                }
            }
        }
        store(arrays, p, tile.n, oc, row, column, sum);
    }
}
