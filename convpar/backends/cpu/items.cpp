#include "items.h"

#include <algorithm>
#include <cstring>

namespace convpar {
namespace {

index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }
index_t padded(index_t bytes) { return (bytes + 63) / 64 * 64; }

// Positions along one axis under `outputs` neighbouring outputs, as the staged tile keeps them. Under a single
// output only the taps themselves are kept, so that a wide dilation costs no room.
struct Span {
    index_t count, step, dilation;
    Span(index_t outputs, index_t stride, index_t taps, index_t dilation_)
        : count(outputs > 1 ? (outputs - 1) * stride + (taps - 1) * dilation_ + 1 : taps),
          step(outputs > 1 ? 1 : dilation_), dilation(outputs > 1 ? dilation_ : 1) {}
};

// Outputs [from, to) along one axis whose every tap is inside the image.
void inner(index_t n, index_t before, index_t taps, index_t stride, index_t dilation, index_t outputs,
           index_t& from, index_t& to) {
    from = std::min(ceil_div(before, stride), outputs);
    const index_t room = before + n - 1 - (taps - 1) * dilation;  // last position where a window may begin
    to = room < 0 ? 0 : std::min(room / stride + 1, outputs);
    to = std::max(from, to);
}

struct Tile {
    index_t image, group, oc0, oc1, i0, i1, j0, j1;
};

Tile tile_of(const Task& t, index_t item) {
    Tile tile;
    const index_t col = item % t.col_tiles;
    item /= t.col_tiles;
    const index_t row = item % t.row_tiles;
    item /= t.row_tiles;
    const index_t per_group = t.oc / t.groups;
    const index_t block = item % t.blocks;
    item /= t.blocks;
    tile.group = item % t.groups;
    tile.image = item / t.groups;
    tile.oc0 = tile.group * per_group + block * t.block;
    tile.oc1 = std::min(tile.oc0 + t.block, (tile.group + 1) * per_group);
    tile.i0 = row * t.tile_rows;
    tile.i1 = std::min(tile.i0 + t.tile_rows, t.oh);
    tile.j0 = col * t.tile_cols;
    tile.j1 = std::min(tile.j0 + t.tile_cols, t.ow);
    return tile;
}

void set_fill(char* to, const char* fill, index_t size, index_t count) {
    for (index_t i = 0; i < count; ++i) std::memcpy(to + i * size, fill, size);
}

// The input under the tile, borders resolved, in the sum's type: [cg][rows.count][cols.count].
void stage(const Task& t, const Tile& tile, const Span& rows, const Span& cols, const char* x, char* to) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups;
    const char* image = x + tile.image * t.x.stride[0] + tile.group * cg * t.x.stride[1];
    const index_t row0 = tile.i0 * t.sh - t.top, col0 = tile.j0 * t.sw - t.left;
    for (index_t c = 0; c < cg; ++c) {
        for (index_t r = 0; r < rows.count; ++r, to += cols.count * size) {
            const index_t i = t.rows.source(row0 + r * rows.step);
            if (i < 0) {
                set_fill(to, t.fill, size, cols.count);
                continue;
            }
            const char* row = image + c * t.x.stride[1] + i * t.x.stride[2];
            for (index_t q = 0; q < cols.count;) {
                const index_t position = col0 + q * cols.step;
                const index_t j = t.cols.source(position);
                index_t run = 1;
                if (position >= 0 && position < t.w) {
                    run = std::min(cols.count - q, ceil_div(t.w - position, cols.step));
                }
                if (j < 0) {
                    set_fill(to + q * size, t.fill, size, 1);
                } else {
                    t.gather_x(row + j * t.x.stride[3], t.x.stride[3] * cols.step, t.x.swapped, run,
                               to + q * size);
                }
                q += run;
            }
        }
    }
}

void call(const Task& t, const Tile& tile, index_t i0, index_t i1, index_t j0, index_t j1, const Span& rows,
          const Span& cols, const char* x, const char* packed, const char* bias, char* y, Thread& thread) {
    if (i0 >= i1 || j0 >= j1) return;
    const index_t size = size_of(t.sum), cg = t.c / t.groups;
    Work work;
    work.oc = tile.oc1 - tile.oc0;
    work.oh = i1 - i0;
    work.ow = j1 - j0;
    work.cg = cg;
    work.kh = t.kh;
    work.kw = t.kw;
    work.sh = t.sh;
    work.sw = t.sw;
    work.dh = t.dh;
    work.dw = t.dw;
    work.rows = t.rows;
    work.cols = t.cols;
    work.fill = t.fill;
    work.w = packed + tile.oc0 * cg * t.kh * t.kw * size;
    work.bias = bias + tile.oc0 * size;
    bool inside = i0 >= t.inner_top && i1 <= t.inner_bottom && j0 >= t.inner_left && j1 <= t.inner_right;
    if (t.stage) {
        inside = true;
        work.x = thread.staged;
        work.xs = 1;
        work.xr = cols.count;
        work.xc = rows.count * cols.count;
        work.row0 = (i0 - tile.i0) * t.sh;
        work.col0 = (j0 - tile.j0) * t.sw;
        work.dh = rows.dilation;
        work.dw = cols.dilation;
        thread.paths |= PATH_STAGED;
    } else {
        const index_t xsize = size_of(t.x.type);
        work.x = x + tile.image * t.x.stride[0] + tile.group * cg * t.x.stride[1];
        work.xc = t.x.stride[1] / xsize;
        work.xr = t.x.stride[2] / xsize;
        work.xs = t.x.stride[3] / xsize;
        work.row0 = i0 * t.sh - t.top;
        work.col0 = j0 * t.sw - t.left;
        thread.paths |= inside ? PATH_INSIDE : PATH_BORDER;
    }
    if (t.convert) {
        const index_t width = tile.j1 - tile.j0, height = tile.i1 - tile.i0;
        work.yo = height * width;
        work.yr = width;
        work.ys = 1;
        work.y = thread.sums + ((i0 - tile.i0) * width + (j0 - tile.j0)) * size;
    } else {
        work.yo = t.y.stride[1] / size;
        work.yr = t.y.stride[2] / size;
        work.ys = t.y.stride[3] / size;
        work.y = y + tile.image * t.y.stride[0] + tile.oc0 * t.y.stride[1] + i0 * t.y.stride[2] +
                 j0 * t.y.stride[3];
    }
    (inside ? t.kernel.inside : t.kernel.bordered)(work);
}

void convert(const Task& t, const Tile& tile, char* y, Thread& thread) {
    const index_t size = size_of(t.sum), width = tile.j1 - tile.j0;
    const char* sums = thread.sums;
    for (index_t o = tile.oc0; o < tile.oc1; ++o) {
        for (index_t i = tile.i0; i < tile.i1; ++i, sums += width * size) {
            char* row = y + tile.image * t.y.stride[0] + o * t.y.stride[1] + i * t.y.stride[2] +
                        tile.j0 * t.y.stride[3];
            const index_t bad = t.scatter_y(sums, width, row, t.y.stride[3], t.y.swapped, t.overflow);
            if (bad >= 0) {
                const index_t place = ((tile.image * t.oc + o) * t.oh + i) * t.ow + tile.j0 + bad;
                if (thread.first_bad < 0 || place < thread.first_bad) thread.first_bad = place;
            }
        }
    }
    thread.paths |= PATH_CONVERTED;
}

}  // namespace

bool complete(Task& t) {
    const index_t size = size_of(t.sum), per_group = t.oc / t.groups, cg = t.c / t.groups;
    t.gather_x = find_gather(t.x.type, t.sum);
    t.gather_w = find_gather(t.filter.type, t.sum);
    t.gather_bias = t.has_bias ? find_gather(t.bias.type, t.sum) : nullptr;
    t.scatter_y = find_scatter(t.sum, t.y.type);
    if (!t.gather_x || !t.gather_w || (t.has_bias && !t.gather_bias) || !t.scatter_y) return false;
    inner(t.h, t.top, t.kh, t.sh, t.dh, t.oh, t.inner_top, t.inner_bottom);
    inner(t.w, t.left, t.kw, t.sw, t.dw, t.ow, t.inner_left, t.inner_right);
    t.blocks = ceil_div(per_group, t.block);
    t.row_tiles = ceil_div(t.oh, t.tile_rows);
    t.col_tiles = ceil_div(t.ow, t.tile_cols);
    t.items = t.n * t.groups * t.blocks * t.row_tiles * t.col_tiles;
    t.packed_bytes = padded(t.oc * cg * t.kh * t.kw * size);
    t.bias_bytes = padded(t.oc * size);
    t.stage_bytes = 0;
    t.sums_bytes = 0;
    if (t.stage) {
        const Span rows(std::min(t.tile_rows, t.oh), t.sh, t.kh, t.dh);
        const Span cols(std::min(t.tile_cols, t.ow), t.sw, t.kw, t.dw);
        // A last tile of one output keeps its taps only, which is never more.
        t.stage_bytes = padded(cg * rows.count * cols.count * size);
    }
    if (t.convert) {
        t.sums_bytes = padded(std::min(t.block, per_group) * std::min(t.tile_rows, t.oh) *
                              std::min(t.tile_cols, t.ow) * size);
    }
    return true;
}

void prepare(const Task& t, const char* w, const char* b, char* packed, char* bias) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups;
    for (index_t o = 0; o < t.oc; ++o) {
        for (index_t c = 0; c < cg; ++c) {
            for (index_t p = 0; p < t.kh; ++p, packed += t.kw * size) {
                const index_t row = t.flip ? t.kh - 1 - p : p, col = t.flip ? t.kw - 1 : 0;
                const char* from = w + o * t.filter.stride[0] + c * t.filter.stride[1] +
                                   row * t.filter.stride[2] + col * t.filter.stride[3];
                const index_t step = t.flip ? -t.filter.stride[3] : t.filter.stride[3];
                t.gather_w(from, step, t.filter.swapped, t.kw, packed);
            }
        }
    }
    if (t.has_bias) {
        t.gather_bias(b, t.bias.stride[0], t.bias.swapped, t.oc, bias);
    } else {
        std::memset(bias, 0, t.oc * size);
    }
}

void run_item(const Task& t, index_t item, const char* x, const char* packed, const char* bias, char* y,
              Thread& thread) {
    const Tile tile = tile_of(t, item);
    const Span rows(tile.i1 - tile.i0, t.sh, t.kh, t.dh);
    const Span cols(tile.j1 - tile.j0, t.sw, t.kw, t.dw);
    if (tile.i0 > 0) thread.paths |= PATH_SECOND_ROWS;
    if (tile.j0 > 0) thread.paths |= PATH_SECOND_COLS;
    if (tile.oc0 > tile.group * (t.oc / t.groups)) thread.paths |= PATH_SECOND_BLOCK;
    if (t.stage) {
        stage(t, tile, rows, cols, x, thread.staged);
        call(t, tile, tile.i0, tile.i1, tile.j0, tile.j1, rows, cols, x, packed, bias, y, thread);
    } else {
        // Rows and columns that meet the border apart from those that don't: nine rectangles at most.
        const index_t i1 = std::clamp(t.inner_top, tile.i0, tile.i1);
        const index_t i2 = std::clamp(t.inner_bottom, i1, tile.i1);
        const index_t j1 = std::clamp(t.inner_left, tile.j0, tile.j1);
        const index_t j2 = std::clamp(t.inner_right, j1, tile.j1);
        const index_t is[] = {tile.i0, i1, i2, tile.i1}, js[] = {tile.j0, j1, j2, tile.j1};
        for (int a = 0; a < 3; ++a) {
            for (int b = 0; b < 3; ++b) {
                call(t, tile, is[a], is[a + 1], js[b], js[b + 1], rows, cols, x, packed, bias, y, thread);
            }
        }
    }
    if (t.convert) convert(t, tile, y, thread);
}

}  // namespace convpar
