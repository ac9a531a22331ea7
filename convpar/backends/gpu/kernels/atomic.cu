// Builds on: naive.cu, turned round.
// Idea: one thread per input multiplies it with each weight that meets it and adds atomically to the outputs.
// Limit: an atomic addition a product, many at a time to the same addresses; float sums in no fixed order.
#include "problem.cuh"

template <class I>
__device__ void atomic(const Arrays<I>& arrays, const Problem& p) {
    using Index = typename I::Index;
    using Operand = typename I::Operand;
    using Sum = typename I::Sum;
    const int kh = filter_rows<I>(p), kw = filter_columns<I>(p);
    const Index oh = Index(p.oh), ow = Index(p.ow);
    const Index stride_y = Index(p.stride_y), stride_x = Index(p.stride_x);
    Filters<I> filters(arrays, p);

    // Tiles of the padded image: a sample in the padding is an input like any other.
    for (Tile<I> tile(p); tile.exists(p); tile.next(p)) {
        const Index y = tile.row + thread_row<I>(), x = tile.column + thread_column<I>();
        if (y >= Index(p.top + p.h + p.bottom) || x >= Index(p.left + p.w + p.right)) continue;
        const Plane<I> image(arrays, p, tile.n, tile.plane);
        const Operand sample = image.at(image.row(y - Index(p.top)), image.column(x - Index(p.left)));

        const Index group = tile.plane / Index(p.group_c), c = tile.plane % Index(p.group_c);
        for (Index oc = group * Index(p.group_oc); oc < (group + 1) * Index(p.group_oc); ++oc) {
            filters.choose(oc);
            const Sums<I> sums(arrays, p, tile.n, oc);
            for (int i = 0; i < kh; ++i) {
                const Index down = y - i * Index(p.dilation_y);
                if (down < 0 || down % stride_y || down / stride_y >= oh) continue;
                for (int j = 0; j < kw; ++j) {
                    const Index along = x - j * Index(p.dilation_x);
                    if (along < 0 || along % stride_x || along / stride_x >= ow) continue;
                    const Operand weight = filters.at((c * kh + i) * kw + j);
                    atomic_add(sums.at(down / stride_y, along / stride_x),
                               multiply_add(sample, weight, Sum{}));
                }
            }
        }
    }
}
