// Builds on: naive.cu.
// Idea: a block brings its tile of the input, halo included, to shared memory: one read a sample, many uses.
// Limit: two barriers a stage of channels, threads that only load or wait, one shared read a product.
#include "problem.cuh"

enum TileLayout { CHANNEL_FIRST, CHANNEL_LAST };

template <class I>
__device__ void tiled(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    using Sum = typename I::Sum;
    const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
    const int stride_y = int(p.stride_y), dilation_y = int(p.dilation_y);
    const int stride_x = int(p.stride_x), dilation_x = int(p.dilation_x);
    const int rows = (I::TILE_ROWS - 1) * stride_y + (kh - 1) * dilation_y + 1;
    const int columns = (I::TILE_COLUMNS - 1) * stride_x + (kw - 1) * dilation_x + 1;
    const Shared<Operand> samples = dynamic_shared<Operand>(0);
    Filters<I> filters(arrays, p);
    const int row = thread_row<I>(), column = thread_column<I>();

    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index oc = tile.plane;
        filters.choose(oc);
        const Index first_channel = oc / Index(p.group_oc) * Index(p.group_c);
        const Index y = tile.row * stride_y - Index(p.top), x = tile.column * stride_x - Index(p.left);
        // At the far edges of the output a tile is smaller, and so is what it needs of the input.
        const int out_rows = int(smaller(Index(I::TILE_ROWS), Index(p.oh) - tile.row));
        const int out_columns = int(smaller(Index(I::TILE_COLUMNS), Index(p.ow) - tile.column));
        const int last_row = (out_rows - 1) * stride_y + (kh - 1) * dilation_y;
        const int last_column = (out_columns - 1) * stride_x + (kw - 1) * dilation_x;
        const bool computes = row < out_rows && column < out_columns;

        Sum sum{};
        for (Index c = 0; c < Index(p.group_c); c += Index(p.stage)) {
            const int channels = int(smaller(Index(p.stage), Index(p.group_c) - c));
            const auto place = [&](int k, int i, int j) {
                return I::LAYOUT == CHANNEL_LAST ? (i * columns + j) * channels + k
                                                 : (k * rows + i) * columns + j;
            };

            for (int k = 0; k < channels; ++k) {
                const Plane<I> image(arrays, p, tile.n, first_channel + c + k);
#pragma unroll I::LOADS_DOWN
                for (int i = row; i <= last_row; i += I::BLOCK_ROWS) {
                    const Index sample_row = image.row(y + i);
#pragma unroll I::LOADS_ACROSS
                    for (int j = column; j <= last_column; j += I::BLOCK_COLUMNS) {
                        samples[place(k, i, j)] = image.at(sample_row, image.column(x + j));
                    }
                }
            }
            __syncthreads();

            const auto add_product = [&](int k, int i, int j) {
                const Operand sample =
                    samples[place(k, row * stride_y + i * dilation_y, column * stride_x + j * dilation_x)];
                sum = multiply_add(sample, filters.at((c + k) * (kh * kw) + i * kw + j), sum);
            };
            if (computes && I::LAYOUT == CHANNEL_FIRST) {
                for (int k = 0; k < channels; ++k) {
#pragma unroll I::UNROLL_ROWS
                    for (int i = 0; i < kh; ++i) {
#pragma unroll I::UNROLL_COLUMNS
                        for (int j = 0; j < kw; ++j) add_product(k, i, j);
                    }
                }
            } else if (computes) {
#pragma unroll I::UNROLL_ROWS
                for (int i = 0; i < kh; ++i) {
#pragma unroll I::UNROLL_COLUMNS
                    for (int j = 0; j < kw; ++j) {
                        for (int k = 0; k < channels; ++k) add_product(k, i, j);
                    }
                }
            }
            __syncthreads();
        }
        if (computes) store(arrays, p, tile.n, oc, tile.row + row, tile.column + column, sum);
    }
}
