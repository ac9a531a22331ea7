// Builds on: naive.cu; gemm.cu multiplies what this kernel writes.
// Idea: what each output sees of the image is written out as a column of a matrix; convolution is then a
//       product of matrices, the best-studied kernel of all. A thread writes what one channel gives to one
//       position.
// Limit: memory traffic; every sample is written up to KH * KW times, and read again as often.
#include "gemm.cuh"

template <class I>
__device__ void im2col(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
    const Index positions = count_positions<I>(p);

    // A tile is a run of positions, its plane a channel.
    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index position = tile.column + threadIdx.x;
        if (position >= positions) continue;
        const Plane<I> image(arrays, p, tile.n, tile.plane);
        const Index y = position / Index(p.ow) * Index(p.stride_y) - Index(p.top);
        const Index x = position % Index(p.ow) * Index(p.stride_x) - Index(p.left);
        Operand* patch = reinterpret_cast<Operand*>(arrays.scratch) +
                         ((tile.n * p.c + tile.plane) * kh * kw * positions + position);
#pragma unroll I::UNROLL_ROWS
        for (int i = 0; i < kh; ++i) {
            const Index sample_row = image.row(y + i * Index(p.dilation_y));
#pragma unroll I::UNROLL_COLUMNS
            for (int j = 0; j < kw; ++j) {
                *patch = image.at(sample_row, image.column(x + j * Index(p.dilation_x)));
                patch += positions;
            }
        }
    }
}
