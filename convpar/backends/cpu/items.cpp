#include "items.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace convpar {
namespace {

index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }
index_t padded(index_t bytes) { return (bytes + 63) / 64 * 64; }
// From one row of so many bytes to the next: rows don't share a set of the first cache.
index_t row_pitch(index_t bytes) { return padded(bytes) + (padded(bytes) % set_bytes == 0 ? 64 : 0); }

// Positions along one axis under `outputs` neighbouring outputs, as the staged piece of a tile keeps them. Where none has more
// than a single output only the taps themselves are kept, so that a wide dilation costs no room.
struct Span {
    index_t count, step, dilation;
    Span(index_t outputs, index_t stride, index_t taps, index_t dilation_, bool single)
        : count(single ? taps : (outputs - 1) * stride + (taps - 1) * dilation_ + 1),
          step(single ? dilation_ : 1), dilation(single ? 1 : dilation_) {}
};
Span rows_under(const Task& t, index_t outputs) {
    return Span(outputs, t.sh, t.kh, t.dh, std::min(t.piece_rows, t.oh) == 1);
}
Span columns_under(const Task& t, index_t outputs) { return Span(outputs, t.sw, t.kw, t.dw, outputs == 1); }

// Outputs [from, to) along one axis whose every tap is inside the image.
void inner(index_t n, index_t before, index_t taps, index_t stride, index_t dilation, index_t outputs,
           index_t& from, index_t& to) {
    from = std::min(ceil_div(before, stride), outputs);
    const index_t room = before + n - 1 - (taps - 1) * dilation;  // last position where a window may begin
    to = room < 0 ? 0 : std::min(room / stride + 1, outputs);
    to = std::max(from, to);
}

// Rows [i0, i1) and columns [j0, j1) of outputs, but for a gap of columns, empty as a rule. Not cleared, for there are many.
struct Rect {
    index_t i0, i1, j0, j1;
    index_t gap0, gap1;
    bool empty() const { return i0 >= i1 || j1 - j0 <= gap1 - gap0; }
    index_t area() const { return (i1 - i0) * (j1 - j0); }
};

struct Tile : Rect {
    index_t image, images, group, groups, oc0, oc1;
};

// What a tile falls into: rectangles to be read in place, and others to be gathered first.
struct Cuts {
    static constexpr int most = 9;
    Rect rects[most];
    int count = 0;
    void add(const Rect& r) {
        if (!r.empty()) rects[count++] = r;
    }
    void add(index_t i0, index_t i1, index_t j0, index_t j1) { add(Rect{i0, i1, j0, j1, j0, j0}); }
};

bool inside(const Task& t, const Rect& r) {
    return r.i0 >= t.inner_top && r.i1 <= t.inner_bottom && r.j0 >= t.inner_left && r.j1 <= t.inner_right;
}

bool gathered(const Task& t, const Rect& r) {
    if (t.stage) return true;
    const Narrow& narrow = t.kernel.narrow;
    if (t.narrow && (r.i1 - r.i0 < narrow.rows || r.j1 - r.j0 < narrow.width)) return true;
    const bool wide_enough = t.kernel.any_width || r.j1 - r.j0 >= t.kernel.dense;
    return t.kernel.dense && !(inside(t, r) && wide_enough);
}

// Whether a kernel that takes edges by itself leaves the rectangle, all inside, to the rung before.
bool wide(const Task& t, const Rect& r) {
    const index_t narrow = t.kernel.over_edge.narrow;
    return narrow && !gathered(t, r) && r.j1 - r.j0 > narrow;
}

// Whether its outputs are stored past the caches.
bool streamed(const Task& t, const Rect& r) {
    return t.stream && r.j1 - r.j0 >= t.kernel.streams && (!t.kernel.over_edge.narrow || wide(t, r));
}

// A tile is wide if it has at least so many times the columns at its border, which fill whole vectors.
constexpr index_t narrow_share = 16;

Cuts cut(const Task& t, const Tile& tile) {
    Cuts cuts;
    const index_t i1 = std::clamp(t.inner_top, tile.i0, tile.i1);
    const index_t i2 = std::clamp(t.inner_bottom, i1, tile.i1);
    index_t j1 = std::clamp(t.inner_left, tile.j0, tile.j1);
    index_t j2 = std::clamp(t.inner_right, j1, tile.j1);
    if (t.stage) {
        cuts.add(tile.i0, tile.i1, tile.j0, tile.j1);
    } else if (!t.kernel.dense) {
        // Rows and columns that meet the border apart from those that don't.
        const index_t is[] = {tile.i0, i1, i2, tile.i1}, js[] = {tile.j0, j1, j2, tile.j1};
        for (int a = 0; a < 3; ++a) {
            for (int b = 0; b < 3; ++b) cuts.add(is[a], is[a + 1], js[b], js[b + 1]);
        }
    } else {
        // Columns at the border fill whole vectors. Four or five pieces take longer than a narrow tile that is gathered whole, or one
        // that is mostly border.
        const index_t lanes = t.kernel.dense;
        if (inside(t, tile) || t.kernel.packing > 1 || t.elements || (t.over_edge && t.sw != 1)) {
            cuts.add(tile.i0, tile.i1, tile.j0, tile.j1);
            return cuts;
        }
        if (j1 > tile.j0) j1 = tile.j0 + ceil_div(j1 - tile.j0, lanes) * lanes;
        if (j2 < tile.j1) j2 = tile.j1 - ceil_div(tile.j1 - j2, lanes) * lanes;
        const Rect middle{i1, i2, j1, j2, j1, j1};
        const index_t width = tile.j1 - tile.j0, at_border = width - (j2 - j1);
        // Where the rung before is much faster in the middle, pieces are worth it.
        const bool leaves = t.leaves_middle && t.over_edge;
        const bool narrow = leaves ? j2 - j1 <= t.kernel.over_edge.narrow : narrow_share * at_border > width;
        const bool mostly_border = 2 * middle.area() < tile.area();
        if (middle.empty() || narrow || mostly_border || gathered(t, middle)) {
            cuts.add(tile.i0, tile.i1, tile.j0, tile.j1);
        } else {
            cuts.add(tile.i0, i1, tile.j0, tile.j1);
            if (t.over_edge && t.kernel.over_edge.narrow) {
                // Both edges in turn, and last: what is between brings their lines into the caches.
                cuts.add(i1, i2, j1, j2);
                cuts.add(Rect{i1, i2, tile.j0, tile.j1, j1, j2});
            } else {
                cuts.add(i1, i2, tile.j0, j1);
                cuts.add(i1, i2, j1, j2);
                cuts.add(i1, i2, j2, tile.j1);
            }
            cuts.add(i2, tile.i1, tile.j0, tile.j1);
        }
    }
    return cuts;
}

struct Quotient {
    index_t whole, rest;
};
// By one, as often is the case, in no time.
Quotient divide(index_t a, index_t b) { return b == 1 ? Quotient{a, 0} : Quotient{a / b, a % b}; }

// Items follow each other along a plane, and then from plane to plane; but where channels are beside each other, those of a tile
// come first, which read and write the same lines of the cache. Where filters take more room than samples, the same filters meet all
// images before the next ones come.
Tile tile_of(const Task& t, index_t item) {
    Tile tile;
    const index_t per_group = t.oc / t.groups;
    const index_t parts = t.blocks * t.group_parts, tiles = t.row_tiles * t.col_tiles;
    index_t image, part, at;
    if (t.filters_stay) {
        const Quotient inner = divide(item, tiles), outer = divide(inner.whole, ceil_div(t.n, t.images));
        part = outer.whole, image = outer.rest, at = inner.rest;
    } else if (t.beside) {
        const Quotient inner = divide(item, parts), outer = divide(inner.whole, tiles);
        image = outer.whole, at = outer.rest, part = inner.rest;
    } else {
        const Quotient inner = divide(item, tiles), outer = divide(inner.whole, parts);
        image = outer.whole, part = outer.rest, at = inner.rest;
    }
    const auto [row, col] = divide(at, t.col_tiles);
    const auto [group_part, block] = divide(part, t.blocks);
    tile.group = group_part * t.together;
    tile.groups = std::min(t.together, t.groups - tile.group);
    tile.image = image * t.images;
    tile.images = std::min(t.images, t.n - tile.image);
    tile.oc0 = tile.group * per_group + block * t.block;
    tile.oc1 = std::min(tile.oc0 + t.block * tile.groups, (tile.group + tile.groups) * per_group);
    tile.i0 = row * t.tile_rows;
    tile.i1 = std::min(tile.i0 + t.tile_rows, t.oh);
    tile.j0 = col * t.tile_cols;
    tile.j1 = std::min(tile.j0 + t.tile_cols, t.ow);
    return tile;
}

// The largest call of a kernel, without its arrays; but of groups the fewest, for which kernels may ask more room: other calls have
// more of them.
Work shape_of(const Task& t) {
    Work shape = {};
    shape.n = t.images;
    shape.groups = t.together && t.groups % t.together ? t.groups % t.together : t.together;
    shape.packing = t.kernel.packing;
    shape.rows = t.rows;
    shape.cols = t.cols;
    shape.xc = t.x.step[1];
    shape.xs = t.x.step[3] * t.sw;
    shape.ys = t.convert ? 1 : t.y.step[3];
    shape.oc = t.oc / t.groups;
    shape.oh = std::min(t.tile_rows, t.oh);
    shape.ow = std::min(t.tile_cols, t.ow);
    shape.cg = t.c / t.groups;
    shape.kh = t.kh;
    shape.kw = t.kw;
    shape.sh = t.sh;
    shape.sw = t.sw;
    shape.dh = t.dh;
    shape.dw = t.dw;
    shape.taps = t.taps;
    shape.set_lines = t.set_lines;
    shape.tiling = t.tiling;
    return shape;
}

// Elements of a row of sums that wait for their conversion.
index_t sums_pitch(const Task& t, const Rect& tile) {
    const index_t width = tile.j1 - tile.j0, size = size_of(t.sum);
    return t.kernel.dense ? row_pitch(width * size) / size : width;
}

struct Value16 {
    std::uint64_t parts[2];
};

template <class T>
void repeat(const char* value, index_t rows, index_t count, char* to, index_t pitch) {
    T v;
    std::memcpy(&v, value, sizeof v);
    for (index_t i = 0; i < rows; ++i, to += pitch) {
        for (index_t k = 0; k < count; ++k) std::memcpy(to + k * sizeof v, &v, sizeof v);
    }
}

// One value of the sum's type in `rows` rows of `count`, `pitch` bytes apart.
void set(const Task& t, const char* value, index_t rows, index_t count, char* to, index_t pitch) {
    switch (size_of(t.sum)) {
        case 1: return repeat<std::uint8_t>(value, rows, count, to, pitch);
        case 2: return repeat<std::uint16_t>(value, rows, count, to, pitch);
        case 4: return repeat<std::uint32_t>(value, rows, count, to, pitch);
        case 8: return repeat<std::uint64_t>(value, rows, count, to, pitch);
        default: return repeat<Value16>(value, rows, count, to, pitch);
    }
}

// Positions along one axis, from, from + step, ...: `before` of `count` lie before the image, then `middle` inside.
struct Positions {
    index_t from, step, count, before, middle;
    Positions(index_t from_, index_t step_, index_t count_, index_t n)
        : from(from_), step(step_), count(count_) {
        before = from < 0 ? std::min(count, ceil_div(-from, step)) : 0;
        const index_t first = from + before * step;
        middle = first < n ? std::min(count - before, ceil_div(n - first, step)) : 0;
    }
    index_t operator[](index_t k) const { return from + k * step; }
};

// Where a row of the staged tile's channels goes: bytes from a row to the next, and from a plane to the next.
struct Planes {
    index_t channels, pitch, plane;
};

// One value in `rows` rows of `count` of all planes.
void set_planes(const Task& t, const char* value, index_t rows, index_t count, char* to, const Planes& p) {
    for (index_t c = 0; c < p.channels; ++c, to += p.plane) set(t, value, rows, count, to, p.pitch);
}

// Pixels from which on squares of them and their channels are worth turning.
constexpr index_t least_turned = 4;

// `rows` rows of `count` samples of all channels.
void bring(const Task& t, Source row, index_t rows, index_t count, char* to, const Planes& p) {
    if (t.part_x && p.channels > 1 && count >= least_turned) {
        return t.part_x(row, rows, count, p.channels, to, p.pitch, p.plane);
    }
    for (index_t c = 0; c < p.channels; ++c, to += p.plane, row.first += t.x.stride[1])
        t.gather_x(row, rows, count, to, p.pitch);
}

// The columns [k, end) of `rows` neighbouring rows, all beyond the image's left or right edge; `row` is the first.
void stage_edge(const Task& t, const Positions& columns, Source row, index_t rows, index_t k, index_t end,
                char* to, const Planes& planes) {
    const index_t size = size_of(t.sum);
    const char* image = row.first;
    for (; k < end; ++k) {
        const index_t j = t.cols.source(columns[k]);
        // Where one sample is the fill value, all are.
        if (j < 0) return set_planes(t, t.fill, rows, end - k, to + k * size, planes);
        row.first = image + j * t.x.stride[3];
        bring(t, row, rows, 1, to + k * size, planes);
    }
}

// `rows` rows of the staged tile whose samples lie in rows of the image that are `row.row` bytes apart.
void stage_rows(const Task& t, const Positions& columns, Source row, index_t rows, char* to,
                const Planes& planes) {
    stage_edge(t, columns, row, rows, 0, columns.before, to, planes);
    stage_edge(t, columns, row, rows, columns.before + columns.middle, columns.count, to, planes);
    if (!columns.middle) return;
    row.first += columns[columns.before] * t.x.stride[3];
    row.element = t.x.stride[3] * columns.step;
    bring(t, row, rows, columns.middle, to + columns.before * size_of(t.sum), planes);
}

// The input under the rectangle, of all groups of the tile: [groups][cg][staged_rows][pitch], of which rows.count are used;
// and behind what a row holds so many zeros, as far as there is room.
void stage(const Task& t, const Tile& tile, const Rect& r, const Span& rows, const Span& cols, index_t pitch,
           const char* x, index_t zeros, char* to) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups, width = r.j1 - r.j0;
    const index_t row0 = r.i0 * t.sh - t.top, col0 = r.j0 * t.sw - t.left;
    const index_t runs = t.kernel.dense ? t.run_count : 1;
    const Positions lines(row0, rows.step, rows.count, t.h);
    const char zero[sizeof(Value16)] = {};
    pitch *= size;
    for (index_t k = 0; k < runs; ++k) {
        const Run run = t.kernel.dense ? t.runs[k] : Run{0, cols.step, 0, 0};
        const Positions columns(col0 + run.start, run.step, t.kernel.dense ? width + run.excess : cols.count,
                                t.w);
        const index_t end = k + 1 < runs ? t.runs[k + 1].offset : pitch / size;
        const index_t used = columns.count * size, unused = std::min(zeros, end - run.offset - columns.count);
        const char* plane = x + tile.image * t.x.stride[0] + tile.group * cg * t.x.stride[1];
        const index_t channels = cg * tile.groups;
        // Planes one after the other, unless their channels are read together.
        const Planes planes{t.part_x ? channels : 1, pitch, t.staged_rows * pitch};
        for (index_t c = 0; c < channels; c += planes.channels, plane += t.x.stride[1]) {
            char* line = to + run.offset * size + c * planes.plane;
            Source row{plane, rows.step * t.x.stride[2], t.x.stride[3], t.x.swapped};
            for (index_t p = 0; p < rows.count;) {
                const index_t i = t.rows.source(lines[p]), together = p == lines.before ? lines.middle : 1;
                const index_t taken = std::max(together, index_t(1));
                if (i < 0) {
                    set_planes(t, t.fill, 1, columns.count, line, planes);
                } else {
                    row.first = plane + i * t.x.stride[2];
                    stage_rows(t, columns, row, taken, line, planes);
                }
                if (unused) set_planes(t, zero, taken, unused, line + used, planes);
                p += taken;
                line += taken * pitch;
            }
        }
    }
}

template <class Bits>
bool finite(const char* values, index_t count, Bits exponent) {
    // As wide as a value: compilers find vectors for it.
    Bits others = 0;
    for (index_t k = 0; k < count; ++k) {
        Bits bits;
        std::memcpy(&bits, values + k * sizeof bits, sizeof bits);
        others |= Bits((bits & exponent) == exponent);
    }
    return others == 0;
}

// Whether products of zeros with so many values of the sum's type are zeros.
bool finite(const Task& t, const char* values, index_t count) {
    switch (t.sum) {
        case F32: return finite<std::uint32_t>(values, count, 0x7f800000u);
        case F64: return finite<std::uint64_t>(values, count, 0x7ff0000000000000u);
        case C64:
        case C128: return false;
        default: return true;
    }
}

// Rows of outputs that meet the same rows of the filter: as many as a block of cpu-simd has, but for nine filter rows.
constexpr index_t band_rows = 8;

// Calls `kernel` for the rectangle band by band, without the rows of the filter that meet nothing but zeros above and below
// the image: of 27 rows around 14 a quarter.
void call_in_bands(const Task& t, const Rect& r, Work work, kernel_t kernel) {
    const index_t size = size_of(t.sum), height = work.oh;
    const char *x = static_cast<const char*>(work.x), *w = static_cast<const char*>(work.w);
    char* y = static_cast<char*>(work.y);
    for (index_t i = 0, next; i < height; i = next) {
        index_t first = 0, end = 0;
        // Bands that meet the same rows are one.
        for (next = i; next < height;) {
            const index_t last = std::min(next + band_rows, height) - 1;
            const index_t from = std::clamp(t.top - r.i0 - last, index_t(0), t.kh - 1);
            const index_t to = std::clamp(t.top - r.i0 - next + t.h, from + 1, t.kh);
            if (next > i && (from != first || to != end)) break;
            first = from;
            end = to;
            next = last + 1;
        }
        work.oh = next - i;
        work.kh = end - first;
        work.x = x + (i + first) * work.xr * size;
        work.w = w + first * t.kw * size;
        work.y = y + i * work.yr * size;
        kernel(work);
    }
}

// How the kernel is called for a rectangle: all but where it lies, which differs from plane to plane.
struct Call {
    Work work;
    kernel_t kernel;
    bool gathers, skips;
    index_t zeros;  // behind what is gathered of a row
    bool sums;      // results are the tile's sums, still to be converted
    index_t x;      // bytes to the first sample from the first of the group's
    index_t y;      // bytes to the first output from the first of the output channel's, or of the tile's sums
    unsigned paths;  // that it takes
};

void lay_out(const Task& t, const Tile& tile, const Rect& r, const Prepared& prepared, Call& call) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups;
    Work& work = call.work;
    work = shape_of(t);
    work.n = tile.images;
    work.oc = (tile.oc1 - tile.oc0) / tile.groups;
    work.groups = 1;
    work.oh = r.i1 - r.i0;
    work.ow = r.j1 - r.j0;
    work.gap = r.gap0 - r.j0;
    work.after_gap = r.gap1 - r.j0;
    work.fill = t.fill;
    work.otherwise = t.otherwise;
    const bool apart = gathered(t, r),
               over_edge = apart && t.over_edge && (prepared.finite || t.kernel.over_edge.multiplies);
    bool bordered = false;
    call.gathers = apart && !over_edge;
    if (call.gathers) {
        const Span rows = rows_under(t, work.oh), cols = columns_under(t, work.ow);
        const index_t pitch = t.kernel.dense ? t.pitch : cols.count;
        // A kernel that looks at values reads on, as transforms do, and what was there before mustn't decide its way; lanes that count
        // for nothing mustn't meet subnormals, which take some processors a hundred times as long. Mostly that is a vector; but
        // transforms, and sums of columns that lie in several runs, pass over whole rows.
        const bool narrow = work.ow < t.kernel.dense, several = t.run_count > 1;
        const bool whole_rows = t.elements ? several || narrow : prepared.factored && several;
        call.zeros = whole_rows ? pitch : prepared.factored || narrow ? t.kernel.dense : 0;
        call.paths = PATH_STAGED;
        work.xc = t.staged_rows * pitch;
        work.xn = tile.groups * cg * work.xc;
        work.xs = 1;
        work.xr = pitch;
        work.dh = rows.dilation;
        work.dw = cols.dilation;
        work.taps = t.taps + t.kw;
    } else {
        call.x = 0;
        work.xn = t.x.step[0];
        work.xc = t.x.step[1];
        work.xr = t.x.step[2];
        work.xs = t.x.step[3] * (t.kernel.dense ? t.sw : 1);
        work.row0 = r.i0 * t.sh - t.top;
        work.col0 = r.j0 * t.sw - t.left;
        work.in_place = true;
        work.over_edge = over_edge;
        work.finite = prepared.finite;
        bordered = !t.kernel.dense && !inside(t, r);
        call.paths = bordered || over_edge ? PATH_BORDER : PATH_INSIDE;
        if (t.kernel.dense && !over_edge) {
            call.x = work.row0 * t.x.stride[2] + work.col0 * t.x.stride[3];
            work.row0 = work.col0 = 0;
        }
    }
    const bool narrow = t.narrow && !call.gathers;
    call.sums = t.convert && !narrow;
    work.out_in_place = !call.sums;
    if (call.sums) {
        const index_t width = sums_pitch(t, tile), height = tile.i1 - tile.i0;
        work.yo = height * width;
        work.yn = (tile.oc1 - tile.oc0) * work.yo;
        work.yr = width;
        work.ys = 1;
        call.y = ((r.i0 - tile.i0) * width + (r.j0 - tile.j0)) * size;
    } else {
        work.yn = t.y.step[0];
        work.yo = t.y.step[1];
        work.yr = t.y.step[2];
        work.ys = t.y.step[3];
        call.y = r.i0 * t.y.stride[2] + r.j0 * t.y.stride[3];
    }
    work.set_lines = t.set_lines;
    // Where it has nothing to gain, has found nothing in any filter, or asks for samples where they are.
    const bool as_they_lie = t.kernel.strided && t.kernel.packing == 1 && t.sw != 1;
    const bool direct = wide(t, r) || (t.kernel.factor && !prepared.factored) ||
                        (call.gathers && (as_they_lie || t.leaves_middle));
    if (narrow) work.otherwise = t.otherwise_narrow;
    call.kernel = direct     ? work.otherwise
                  : bordered ? t.kernel.bordered
                  : narrow   ? find_narrow(t.kernel, t.x.type, t.convert)
                             : t.kernel.inside;
    work.off_core = t.off_core;
    work.far = t.far;
    work.stream = streamed(t, r);
    if (work.stream) call.paths |= PATH_STREAMED;
    const bool beyond = r.i0 < t.inner_top || r.i1 > t.inner_bottom;
    call.skips = t.skips && beyond && !work.in_place && work.oc == 1 && !prepared.factored;
    if (t.kernel.groups && !direct && !call.skips) {
        work.groups = tile.groups;
        work.xg = cg * work.xc;
        work.yg = work.oc * work.yo;
    }
}

void perform(const Task& t, const Tile& tile, const Rect& r, Call& call, const char* x,
             const Prepared& prepared, char* y, Thread& thread) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups, per_group = t.oc / t.groups;
    Work& work = call.work;
    thread.paths |= call.paths;
    // The rung before asked for none.
    work.scratch = call.kernel == work.otherwise ? nullptr : thread.scratch;
    if (call.gathers) {
        const Span rows = rows_under(t, work.oh), cols = columns_under(t, work.ow);
        Tile one = tile;
        for (index_t k = 0; k < tile.images; ++k, ++one.image) {
            stage(t, one, r, rows, cols, work.xr, x, call.zeros, thread.staged + k * work.xn * size);
        }
        work.x = thread.staged;
    } else {
        work.x = x + tile.image * t.x.stride[0] + tile.group * cg * t.x.stride[1] + call.x;
    }
    work.y = call.y + (call.sums ? thread.sums : y + tile.image * t.y.stride[0] + tile.oc0 * t.y.stride[1]);
    const index_t x_group = cg * work.xc * (work.in_place ? size_of(t.x.type) : size);
    const index_t y_group = per_group * work.yo * (call.sums ? size : size_of(t.y.type));
    index_t oc = tile.oc0;
    for (index_t group = tile.group; group < tile.group + tile.groups;
         group += work.groups, oc += work.groups * per_group) {
        const index_t pack = t.kernel.lanes_are_groups
                                 ? group / t.kernel.lanes_are_groups
                                 : group * t.packs + (oc - group * per_group) / t.kernel.packing;
        const index_t filters = (pack - prepared.first) * t.kernel.packing * cg;
        work.w = prepared.filters + filters * t.kh * t.kw * size;
        work.transformed = prepared.transformed + filters * t.elements * size;
        work.bias = prepared.bias + oc * size;
        work.factors = prepared.factors + oc * (1 + most_terms * (t.kh + t.kw)) * size;
        if (call.skips && finite(t, static_cast<const char*>(work.w), t.kh * t.kw)) {
            call_in_bands(t, r, work, call.kernel);
        } else {
            call.kernel(work);
        }
        work.x = static_cast<const char*>(work.x) + x_group;
        work.y = static_cast<char*>(work.y) + y_group;
    }
}

// The calls of a thread's last tile: those of another plane are the same.
struct Calls {
    Tile tile;
    Cuts cuts;
    Call calls[Cuts::most];
    bool any = false;

    bool serve(const Tile& other) const {
        return any && tile.i0 == other.i0 && tile.i1 == other.i1 && tile.j0 == other.j0 &&
               tile.j1 == other.j1 && tile.images == other.images && tile.groups == other.groups &&
               tile.oc1 - tile.oc0 == other.oc1 - other.oc0;
    }
};

// The sums of a rectangle of the tile, or of all of it.
void convert(const Task& t, const Tile& tile, const Rect& r, char* y, Thread& thread) {
    const index_t width = r.j1 - r.j0, height = r.i1 - r.i0, size = size_of(t.sum);
    const index_t pitch = sums_pitch(t, tile) * size, plane = (tile.i1 - tile.i0) * pitch;
    const char* sums = thread.sums + (r.i0 - tile.i0) * pitch + (r.j0 - tile.j0) * size;
    const index_t channels = tile.oc1 - tile.oc0;
    thread.paths |= PATH_CONVERTED;
    for (index_t n = tile.image; n < tile.image + tile.images; ++n) {
        Target to{
            y + n * t.y.stride[0] + tile.oc0 * t.y.stride[1] + r.i0 * t.y.stride[2] + r.j0 * t.y.stride[3],
            t.y.stride[2], t.y.stride[3], t.y.swapped};
        if (t.join_y && channels > 1 && width >= least_turned) {
            t.join_y(sums, pitch, plane, height, width, channels, to, t.overflow);
            sums += channels * plane;
            continue;
        }
        for (index_t o = tile.oc0; o < tile.oc1; ++o, sums += plane, to.first += t.y.stride[1]) {
            const index_t bad = t.scatter_y(sums, pitch, height, width, to, t.overflow);
            if (bad >= 0) {
                const index_t i = r.i0 + bad / width, j = r.j0 + bad % width;
                const index_t place = ((n * t.oc + o) * t.oh + i) * t.ow + j;
                if (thread.first_bad < 0 || place < thread.first_bad) thread.first_bad = place;
            }
        }
    }
}

// Where the filter columns lie in a row that is read in place, and in a staged one: samples of the same
// remainder by the stride beside each other, or, where a wide dilation would keep too many, those of each tap apart.
void lay_out_columns(Task& t, index_t columns) {
    // Of columns that are always gathered, which may lie anywhere, nothing but their number counts.
    const index_t right = t.dw * (t.stage ? 1 : t.x.step[3]);
    for (index_t q = 0; q < t.kw; ++q) t.taps[q] = q * right;
    index_t* staged = t.taps + t.kw;
    index_t total = 0;
    t.run_count = 0;
    for (index_t q = 0; q < t.kw; ++q) {
        const index_t start = q * t.dw % t.sw, later = q * t.dw / t.sw;
        index_t k = 0;
        while (k < t.run_count && t.runs[k].start != start) ++k;
        if (k == t.run_count) t.runs[t.run_count++] = {start, t.sw, 0, 0};
        t.runs[k].excess = later;  // of the last tap so far, which reaches farthest
    }
    for (index_t k = 0; k < t.run_count; ++k) {
        t.runs[k].offset = total;
        total += columns + t.runs[k].excess;
    }
    if (total <= t.kw * columns) {
        for (index_t q = 0; q < t.kw; ++q) {
            index_t k = 0;
            while (t.runs[k].start != q * t.dw % t.sw) ++k;
            staged[q] = t.runs[k].offset + q * t.dw / t.sw;
        }
    } else {
        for (index_t q = 0; q < t.kw; ++q) {
            t.runs[q] = {q * t.dw, t.sw, 0, q * columns};
            staged[q] = q * columns;
        }
        t.run_count = t.kw;
        total = t.kw * columns;
    }
    const index_t size = size_of(t.sum);
    t.pitch = row_pitch(total * size) / size;
}

// Paths of the tiles of one image and block.
unsigned find_paths(const Task& t) {
    const bool wide_enough = std::min(t.tile_cols, t.ow) >= t.kernel.streams;
    const unsigned stores = t.stream && wide_enough ? PATH_STREAMED : 0;
    const unsigned all = stores | (t.stage          ? PATH_STAGED
                                   : t.kernel.dense ? PATH_INSIDE | PATH_STAGED
                                                    : PATH_INSIDE | PATH_BORDER);
    unsigned paths = 0;
    bool between = false;  // a row of tiles without a horizontal border has been seen: the others are alike
    for (index_t i = 0; i < t.oh && paths != all; i += t.tile_rows) {
        if (i >= t.inner_top && i + t.tile_rows <= t.inner_bottom) {
            if (between) continue;
            between = true;
        }
        for (index_t j = 0; j < t.ow && paths != all; j += t.tile_cols) {
            Tile tile;
            tile.i0 = i;
            tile.i1 = std::min(i + t.tile_rows, t.oh);
            tile.j0 = j;
            tile.j1 = std::min(j + t.tile_cols, t.ow);
            const Cuts cuts = cut(t, tile);
            for (int k = 0; k < cuts.count; ++k) {
                const Rect& r = cuts.rects[k];
                paths |= streamed(t, r) ? PATH_STREAMED : 0;
                const bool apart = gathered(t, r), in_place = apart && t.over_edge;
                paths |= in_place ? PATH_BORDER : 0;
                if (in_place && t.kernel.over_edge.multiplies) continue;
                paths |= apart ? PATH_STAGED : inside(t, r) ? PATH_INSIDE : PATH_BORDER;
            }
        }
    }
    return paths;
}

// Whether the kernel may take what lies around the image for zeros by itself.
bool reaches_over_edge(const Task& t) {
    const OverEdge& can = t.kernel.over_edge;
    if (!can.reach || !t.zeros || t.stage) return false;
    if (std::min(t.kh, t.kw) < can.least || std::max(t.kh, t.kw) > can.most) return false;
    if (std::max(t.sh, t.sw) > can.stride || (!can.dilated && std::max(t.dh, t.dw) > 1)) return false;
    if (t.dw < can.least_apart) return false;
    const index_t bottom = (t.oh - 1) * t.sh + (t.kh - 1) * t.dh + 1 - t.top - t.h,
                  right = (t.ow - 1) * t.sw + (t.kw - 1) * t.dw + 1 - t.left - t.w;
    const index_t down = ceil_div(std::max(t.top, bottom), t.dh),
                  across = ceil_div(std::max(t.left, right), t.dw);
    if (can.central && (down > (t.kh - 1) / 2 || across > (t.kw - 1) / 2)) return false;
    return std::max(down, across) <= can.reach;
}

// Whether the kernel takes samples that are narrower than sums as they are, and results that aren't sums.
bool takes_narrow(const Task& t) {
    const Narrow& narrow = t.kernel.narrow;
    if (!find_narrow(t.kernel, t.x.type, t.convert) || (t.kernel.factor && !t.otherwise_narrow)) return false;
    const auto in_rows = [](const Array& a, Type type) {
        const index_t size = size_of(type);
        const bool whole = a.stride[0] % size == 0 && a.stride[1] % size == 0 && a.stride[2] % size == 0;
        return a.type == type && !a.swapped && a.stride[3] == size && whole;
    };
    const bool given = in_rows(t.x, t.x.type) && in_rows(t.y, t.convert ? t.x.type : t.sum);
    const bool plain =
        t.c == t.groups && t.sh == 1 && t.sw == 1 && t.dh == 1 && !(t.convert && t.overflow == RAISE);
    const bool large = std::min(t.tile_rows, t.inner_bottom - t.inner_top) >= narrow.rows &&
                       std::min(t.tile_cols, t.inner_right - t.inner_left) >= narrow.width;
    const index_t most_rows = t.convert && t.far ? narrow.most_rows_far : narrow.most_rows;
    return given && plain && large && t.kh <= most_rows && t.tiling.parts <= narrow.most_parts;
}

// Filters from one pack to the next.
index_t packs_apart(const Task& t) {
    return t.kernel.lanes_are_groups ? t.kernel.lanes_are_groups : t.kernel.packing;
}

// Whether the taps of each output channel lie as in a filter by itself.
bool lie_whole(const Task& t) {
    const index_t* stride = t.filter.stride;
    const index_t size = size_of(t.filter.type), row = t.kw * size;
    return (!t.flip || t.kh * t.kw == 1) && (t.kw == 1 || stride[3] == size) &&
           (t.kh == 1 || stride[2] == row) && (t.c == t.groups || stride[1] == t.kh * row);
}

// Whether filters are packed from taps that lie so.
bool packs_whole(const Task& t) {
    const index_t packing = t.kernel.packing, lanes = t.kernel.dense;
    return packing > 1 && (packing % lanes == 0 || lanes % packing == 0) && lie_whole(t);
}

// `count` taps of each of so many output channels, which lie in one row, by way of the sum's type.
void pack_converted(const Task& t, const char* from, index_t channels, index_t count, char* to) {
    constexpr index_t most_bytes = 16 * 1024;
    alignas(64) char converted[most_bytes];
    const index_t size = size_of(t.sum), tap = size_of(t.filter.type), packing = t.kernel.packing;
    const index_t most = most_bytes / (packing * size), row = most * size;
    for (index_t first = 0, taken; first < count; first += taken) {
        taken = std::min(most, count - first);
        for (index_t o = 0; o < channels; ++o)
            t.gather_w({from + o * t.filter.stride[0] + first * tap, 0, tap, t.filter.swapped}, 1, taken,
                       converted + o * row, 0);
        t.pack(converted, row, channels, taken, packing, to + first * packing * size);
    }
}

// Where `channels` filters, those of a pack, begin with channel c of filter f of one channel.
struct Filters {
    index_t c, channels;
    const char* first;
    Filters(const Task& t, index_t f, const char* w) {
        const index_t cg = t.c / t.groups, per_group = t.oc / t.packed_groups;
        const index_t pack = f / cg, group = pack / t.packs, in_group = pack % t.packs * packs_apart(t);
        c = f % cg;
        channels = std::min(t.kernel.packing, per_group - in_group);
        first = w + (group * per_group + in_group) * t.filter.stride[0] + c * t.filter.stride[1];
    }
};

// `count` filters from f on, of one channel each, of the same output channels, in the sum's type and in the order that the kernel asks for.
void pack_some(const Task& t, index_t f, index_t count, const char* w, char* to) {
    const index_t size = size_of(t.sum), packing = t.kernel.packing;
    const index_t taps = t.kh * t.kw, step = t.flip ? -1 : 1;
    const Filters filters(t, f, w);
    const index_t channels = filters.channels;
    const char* from = filters.first;
    if (t.pack && !t.packs_converted)
        return t.pack(from, t.filter.stride[0], channels, count * taps, packing, to);
    if (t.pack) return pack_converted(t, from, channels, count * taps, to);
    if (t.flip) from += (t.kh - 1) * t.filter.stride[2] + (t.kw - 1) * t.filter.stride[3];
    for (index_t k = 0; k < count; ++k, from += t.filter.stride[1]) {
        if (packing == 1) {
            const bool one_row = t.filter.stride[2] == t.kw * t.filter.stride[3];
            const Source rows{from, step * t.filter.stride[2], step * t.filter.stride[3], t.filter.swapped};
            t.gather_w(rows, one_row ? 1 : t.kh, one_row ? taps : t.kw, to, t.kw * size);
            to += taps * size;
            continue;
        }
        const char* row = from;
        for (index_t p = 0; p < t.kh; ++p, row += step * t.filter.stride[2]) {
            const char* tap = row;
            for (index_t q = 0; q < t.kw; ++q, tap += step * t.filter.stride[3], to += packing * size) {
                t.gather_w({tap, 0, t.filter.stride[0], t.filter.swapped}, 1, channels, to, 0);
                std::memset(to + channels * size, 0, (packing - channels) * size);
            }
        }
    }
}

// Filters first to last, of one channel each. Whether they are finite, where that is asked.
bool pack_filters(const Task& t, index_t first, index_t last, const char* w, char* to) {
    const index_t cg = t.c / t.groups, taps = t.kh * t.kw, packed = taps * t.kernel.packing;
    // Few, so that they are looked at while they are in a cache; but whole squares of `pack`.
    const index_t most = ceil_div(16, taps) * 16;
    bool all_finite = true;
    for (index_t f = first, taken; f < last; f += taken, to += taken * packed * size_of(t.sum)) {
        taken = std::min({most, cg - f % cg, last - f});
        pack_some(t, f, taken, w, to);
        all_finite = all_finite && (!t.over_edge || finite(t, to, taken * packed));
    }
    return all_finite;
}

// Has the thread's own filters be those of the tile.
void pack_block(const Task& t, const Tile& tile, Prepared& own, Calls& last) {
    const index_t cg = t.c / t.groups, in_group = tile.oc0 - tile.group * (t.oc / t.groups);
    const index_t first = tile.group * t.packs + in_group / t.kernel.packing;
    if (last.any && first == own.first) return;
    const index_t end = first + ceil_div(tile.oc1 - tile.oc0, t.kernel.packing);
    own.first = first;
    own.finite = pack_filters(t, first * cg, end * cg, own.given, own.filters);
    last.any = false;
}

// Whether a rectangle that the kernel would take in place, if the filters were finite, is larger than there is room to gather.
bool in_pieces(const Task& t, const Rect& r, const Call& call) {
    return t.over_edge && call.gathers && (r.i1 - r.i0 > t.piece_rows || r.j1 - r.j0 > t.piece_cols);
}

// Such a rectangle; its own call is never made, for what it gathers would be as large. It has no gap: kernels that have edges in one
// rectangle multiply zeros.
void perform_in_pieces(const Task& t, const Tile& tile, const Rect& r, const char* x,
                       const Prepared& prepared, char* y, Thread& thread) {
    Call call;
    for (index_t i = r.i0; i < r.i1; i += t.piece_rows) {
        for (index_t j = r.j0; j < r.j1; j += t.piece_cols) {
            const index_t i1 = std::min(i + t.piece_rows, r.i1), j1 = std::min(j + t.piece_cols, r.j1);
            const Rect piece{i, i1, j, j1, j, j};
            lay_out(t, tile, piece, prepared, call);
            perform(t, tile, piece, call, x, prepared, y, thread);
        }
    }
}

void run_item(const Task& t, index_t item, const char* x, Prepared& prepared, char* y, Thread& thread,
              Calls& last) {
    const Tile tile = tile_of(t, item);
    if (prepared.given) pack_block(t, tile, prepared, last);
    if (tile.i0 > 0) thread.paths |= PATH_SECOND_ROWS;
    if (tile.j0 > 0) thread.paths |= PATH_SECOND_COLS;
    if (tile.oc0 > tile.group * (t.oc / t.groups)) thread.paths |= PATH_SECOND_BLOCK;
    if (!last.serve(tile)) {
        last.tile = tile;
        last.cuts = cut(t, tile);
        for (int k = 0; k < last.cuts.count; ++k)
            lay_out(t, tile, last.cuts.rects[k], prepared, last.calls[k]);
        last.any = true;
    }
    for (int k = 0; k < last.cuts.count; ++k) {
        const Rect& r = last.cuts.rects[k];
        if (in_pieces(t, r, last.calls[k])) {
            perform_in_pieces(t, tile, r, x, prepared, y, thread);
        } else {
            perform(t, tile, r, last.calls[k], x, prepared, y, thread);
        }
        if (t.narrow && last.calls[k].sums) convert(t, tile, r, y, thread);
    }
    if (t.convert && !t.narrow) convert(t, tile, tile, y, thread);
}

// The share that has most items left; null if none has any.
Share* fullest(const Team& team) {
    Share* found = nullptr;
    index_t most = 0;
    for (index_t k = 0; k < team.threads; ++k) {
        const index_t left = team.share(k).left();
        if (left > most) most = left, found = &team.share(k);
    }
    return found;
}

// Products of an output, nominally, from which on threads help each other though samples and outputs may lie in the other
// core's cache, where a run before this one left them. With 9 on 1024 x 1024 that lost 4 % on 2 quiet cores and up to 15 %
// on 8 loud ones, with 49 it gained up to 11 %. Kernels without vectors take so long that it always gains.
constexpr index_t worth_stealing = 32;

// Bytes of packed filters that leave a core's caches before they are met, at least, and of a block's, which don't, at most.
constexpr index_t worth_packing_late = 1 << 20, most_packed_late = 1 << 20;

// Samples and sums of groups that an item takes together, at most, as if they were gathered and converted.
constexpr index_t most_together_bytes = 1 << 22;

// What a block fetches beyond a thread's part mustn't be what another thread writes.
constexpr index_t apart_bytes = 1024;

// From one thread's record to the next.
index_t apart(const Task& t) {
    return padded(sizeof(Thread)) + t.stage_bytes + t.scratch_bytes + t.sums_bytes + t.block_bytes +
           apart_bytes;
}

// What `complete` derives; `t.narrow` tells whether narrow samples may be taken as they are.
bool derive(Task& t, const Converters& converters) {
    const index_t size = size_of(t.sum), per_group = t.oc / t.groups, cg = t.c / t.groups;
    const bool dense = t.kernel.dense;
    for (Array* a : {&t.x, &t.y}) {
        for (int axis = 0; axis < 4; ++axis) a->step[axis] = a->stride[axis] / size_of(a->type);
    }
    inner(t.h, t.top, t.kh, t.sh, t.dh, t.oh, t.inner_top, t.inner_bottom);
    inner(t.w, t.left, t.kw, t.sw, t.dw, t.ow, t.inner_left, t.inner_right);
    t.narrow = t.narrow && takes_narrow(t);
    if (t.narrow) {
        t.stage = false;
    } else if (dense) {
        // Columns that are one and the same can't be told apart.
        const bool x_last =
                       t.kernel.channels_last && t.x.stride[1] == size_of(t.x.type) && t.x.stride[3] != 0,
                   y_last = t.kernel.channels_last && t.y.stride[1] == size;
        const bool point = t.kh == 1 && t.kw == 1,
                   strided = t.kernel.strided || (point && t.kernel.strided_points);
        t.stage = t.stage || (t.sw != 1 && !strided) || (t.x.stride[3] != size_of(t.x.type) && !x_last);
        t.convert = t.convert || (t.y.stride[3] != size && !y_last);
        if (t.kernel.lanes_are_groups && (t.stage || t.convert || !x_last || !y_last))
            t.kernel.packing = t.kernel.lanes_are_groups;
    }
    // Where outputs are a stride apart, the rung before couldn't read samples in place, nor does it store what it would stream.
    OverEdge& edge = t.kernel.over_edge;
    if ((t.sh != 1 || t.sw != 1) && edge.narrow) edge.narrow = t.kernel.streams = 0;
    const bool slow = t.kh > edge.fast_rows || t.kw > edge.fast_columns;
    t.leaves_middle = edge.narrow && edge.narrow_if_slow && cg == 1 && slow;
    if (t.leaves_middle) edge.narrow = edge.narrow_if_slow;
    t.stream = t.stream && t.kernel.streams && !t.convert;
    t.gather_x = converters.gather(t.x.type, t.sum);
    t.gather_w = converters.gather(t.filter.type, t.sum);
    t.gather_bias = t.has_bias ? converters.gather(t.bias.type, t.sum) : nullptr;
    t.scatter_y = converters.scatter(t.sum, t.y.type);
    t.pack = packs_whole(t) ? converters.pack(t.sum) : nullptr;
    t.packs_converted = t.filter.type != t.sum || t.filter.swapped;
    if (!t.gather_x || !t.gather_w || (t.has_bias && !t.gather_bias) || !t.scatter_y) return false;
    t.block = ceil_div(t.block, t.kernel.packing) * t.kernel.packing;
    t.blocks = ceil_div(per_group, t.block);
    t.row_tiles = ceil_div(t.oh, t.tile_rows);
    t.col_tiles = ceil_div(t.ow, t.tile_cols);
    const bool transformed = t.kernel.transform.elements;
    // A tile higher than an image goes on with the next one.
    t.images =
        transformed && t.oh ? std::clamp<index_t>(t.tile_rows / t.oh, 1, std::max<index_t>(t.n, 1)) : 1;
    t.elements = transformed ? t.kernel.transform.elements(shape_of(t)) : 0;
    const auto beside = [](const Array& a) { return std::abs(a.stride[1]) < std::abs(a.stride[3]); };
    const auto neighbours = [](const Array& a) { return a.stride[1] == size_of(a.type) && !a.swapped; };
    t.beside = beside(t.x) || beside(t.y);
    t.part_x = t.c > 1 && neighbours(t.x) ? converters.part(t.x.type, t.sum) : nullptr;
    t.join_y = t.convert && t.oc > 1 && neighbours(t.y) && t.overflow != RAISE
                   ? converters.join(t.sum, t.y.type)
                   : nullptr;
    t.packed_groups = t.kernel.lanes_are_groups ? 1 : t.groups;
    t.packs = ceil_div(t.oc / t.packed_groups, packs_apart(t));
    const index_t packed = t.packed_groups * t.packs * t.kernel.packing * cg;
    t.packed_bytes = padded(packed * t.kh * t.kw * size);
    t.transformed_bytes = padded(packed * t.elements * size);
    t.of_given = transformed && t.kernel.transform.bytes && size_of(t.filter.type) == 1 && lie_whole(t);
    if (t.of_given) t.packed_bytes = 0;
    // A vector of biases may begin at the last one.
    t.bias_bytes = padded((t.oc + t.kernel.packing) * size);
    t.factor_bytes = t.kernel.factor ? padded(t.oc * (1 + most_terms * (t.kh + t.kw)) * size) : 0;
    t.stage_bytes = 0;
    t.scratch_bytes = 0;
    t.sums_bytes = 0;
    const Rect largest{0, std::min(t.tile_rows, t.oh), 0, std::min(t.tile_cols, t.ow), 0, 0};
    t.over_edge = reaches_over_edge(t);
    if (!t.over_edge) {
        t.piece_rows = t.tile_rows;
        t.piece_cols = t.tile_cols;
    }
    const index_t piece_rows = std::min(t.piece_rows, largest.i1),
                  piece_cols = std::min(t.piece_cols, largest.j1);
    const Span rows = rows_under(t, piece_rows), cols = columns_under(t, piece_cols);
    t.staged_rows = rows.count;
    if (dense) lay_out_columns(t, piece_cols);
    // Several groups only where channels are parted or joined, and no more than a tile has room for; or for kernels that take them.
    const index_t plane = rows.count * (dense ? t.pitch : cols.count),
                  sums_plane = largest.i1 * sums_pitch(t, largest);
    const index_t bytes = (cg * plane + per_group * sums_plane) * size;
    const bool several = !t.elements && t.blocks == 1 && t.stage && t.convert && (t.part_x || t.join_y);
    const index_t lanes = t.kernel.lanes_are_groups;
    const bool taken = t.kernel.groups && t.blocks == 1 && (lanes || (!t.stage && !t.convert));
    const index_t most = several || taken ? most_together_bytes / std::max(bytes, index_t(1)) : 1;
    t.together = std::clamp(t.together, index_t(1), std::max(most, index_t(1)));
    // Whole packs.
    if (lanes) t.together = std::max(t.together / lanes, index_t(1)) * lanes;
    t.together = std::min(t.together, std::max(t.groups, index_t(1)));
    t.group_parts = ceil_div(t.groups, t.together);
    t.items = ceil_div(t.n, t.images) * t.group_parts * t.blocks * t.row_tiles * t.col_tiles;
    const index_t farthest = dense ? *std::max_element(t.taps, t.taps + 2 * t.kw) : 0;
    const index_t filters = std::min(t.block, per_group) * cg * t.kh * t.kw;
    // Of the tile, not of a piece.
    const index_t high = Span(largest.i1, t.sh, t.kh, t.dh, largest.i1 == 1).count,
                  wide = columns_under(t, largest.j1).count;
    const index_t samples = cg * std::min(high, t.h) * std::min(wide, t.w);
    t.filters_stay = t.blocks > 1 && t.kernel.packing > 1 && !t.elements && filters > samples;
    const index_t channels = ceil_div(std::min(t.block, per_group), t.kernel.packing) * t.kernel.packing;
    const index_t block_bytes = padded(channels * cg * t.kh * t.kw * size);
    t.packs_late = t.filters_stay && t.together == 1 && !lanes && !t.kernel.factor &&
                   t.packed_bytes >= worth_packing_late && block_bytes <= most_packed_late;
    t.block_bytes = t.packs_late ? block_bytes : 0;
    if (t.packs_late) t.packed_bytes = 0;
    // Of one channel, for with fewer rows the next one's weights would begin elsewhere; transformed filters keep all rows.
    t.skips = dense && t.zeros && !t.elements && t.kernel.packing == 1 && cg == 1 && t.sh == 1 && t.dh == 1 &&
              t.kh > band_rows;
    t.factored = t.kernel.factor && cg == 1 && t.kh > 1 && t.kw > 1 && farthest <= t.kernel.farthest;
    t.paths = find_paths(t);
    t.steals = t.far || !dense || cg * t.kh * t.kw >= worth_stealing;
    if (t.paths & PATH_STAGED) {
        // A last tile of one column keeps its taps only, which is never more. Vectors may read on past the end.
        t.stage_bytes = padded(t.images * t.together * cg * plane * size) + (dense ? 64 : 0);
    }
    if (t.convert && (!t.narrow || t.paths & PATH_STAGED)) {
        t.sums_bytes = padded(t.images * t.together * std::min(t.block, per_group) * sums_plane * size);
    }
    if (t.kernel.scratch && !largest.empty()) {
        Work shape = shape_of(t);
        shape.oc = std::min(t.block, per_group);
        shape.in_place = true;
        shape.over_edge = t.over_edge;
        const index_t in_place = t.kernel.scratch(shape);
        shape.in_place = shape.over_edge = false;
        shape.taps = t.taps + t.kw;
        shape.xs = 1;
        const index_t staged = t.paths & PATH_STAGED ? t.kernel.scratch(shape) : 0;
        t.scratch_bytes = padded(std::max(t.stage ? 0 : in_place, staged));
    }
    return true;
}

}  // namespace

bool complete(Task& t, const Converters& converters) {
    const Task given = t;
    t.narrow = true;
    const bool done = derive(t, converters);
    if (!done || !t.narrow || t.paths & (PATH_INSIDE | PATH_BORDER)) return done;
    // More of every tile lies at edges than between, so that all is gathered.
    t = given;
    t.stage = true;
    return derive(t, converters);
}

index_t prepare(const Task& t, index_t part, index_t parts, const char* w, const char* b,
                const Prepared& prepared) {
    const index_t size = size_of(t.sum), cg = t.c / t.groups;
    const index_t packing = t.kernel.packing, packs = t.packed_groups * t.packs;
    // A share begins with channels that are transformed together.
    const index_t together = t.elements ? t.kernel.transform.together : 1;
    const index_t shares = std::max(ceil_div(cg, together), index_t(1));
    const auto filter_of = [&](index_t share) { return share / shares * cg + share % shares * together; };
    const index_t first = filter_of(part * packs * shares / parts),
                  last = filter_of((part + 1) * packs * shares / parts);
    const bool all_finite =
        prepared.given || t.of_given ||
        pack_filters(t, first, last, w, prepared.filters + first * t.kh * t.kw * packing * size);
    const Work shape = shape_of(t);
    for (index_t k = first, count; k < last && t.elements; k += count) {
        count = std::min(together, cg - k % cg);
        if (t.of_given) {
            const Filters filters(t, k, w);
            t.kernel.transform.bytes(shape, filters.first, filters.channels, t.filter.stride[0], filters.c,
                                     count, prepared.transformed + k / cg * cg * t.elements * packing * size);
            continue;
        }
        t.kernel.transform.filter(shape, prepared.filters + k * t.kh * t.kw * packing * size, k % cg, count,
                                  prepared.transformed + k / cg * cg * t.elements * packing * size);
    }
    if (part > 0) return !all_finite;
    std::memset(prepared.bias, 0, t.bias_bytes);
    if (t.has_bias) t.gather_bias({b, 0, t.bias.stride[0], t.bias.swapped}, 1, t.oc, prepared.bias, 0);
    return !all_finite;
}

unsigned factor(const Task& t, Prepared& prepared) {
    prepared.factored =
        t.kernel.factor && t.kernel.factor(prepared.filters, t.oc, t.kh, t.kw, prepared.factors);
    return prepared.factored ? PATH_FACTORED : 0;
}

index_t team_bytes(const Task& t, index_t threads) { return threads * (index_t(sizeof(Share)) + apart(t)); }

Team deal(const Task& t, char* first, index_t threads) {
    const Team team{first, apart(t), threads};
    for (index_t k = 0; k < threads; ++k) new (&team.share(k)) Share(k, threads, t.items);
    return team;
}

void run_share(const Task& t, const Team& team, index_t k, const char* x, const Prepared& prepared, char* y) {
    char* staged = reinterpret_cast<char*>(&team[k]) + padded(sizeof(Thread));
    char* scratch = staged + t.stage_bytes;
    char* sums = scratch + t.scratch_bytes;
    Thread& thread = *new (&team[k]) Thread{staged, scratch, sums, -1, 0};
    Prepared mine = prepared;
    if (mine.given) mine.filters = sums + t.sums_bytes;
    const bool steals = t.steals && team.threads > 1;
    Share* const own = &team.share(k);
    Calls last;
    for (Share* share = own; share; share = steals ? fullest(team) : nullptr) {
        for (index_t item; (item = share->take(steals)) >= 0;) {
            if (share != own) thread.paths |= PATH_STOLEN;
            run_item(t, item, x, mine, y, thread, last);
        }
    }
}

}  // namespace convpar
