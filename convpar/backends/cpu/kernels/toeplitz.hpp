// Builds on: simd.
// Idea: a convolution along a row is a product with a banded matrix (Toeplitz's), whose columns are the filter's row, each
//       a place further down: samples x band = neighbouring outputs. The processor's matrix unit multiplies both, split
//       into parts (split.h). A tile of samples is 16 overlapping windows of 2 x 16 or 4 x 8 of them, as far apart as the 2 x 8, 4 x 4
//       or 8 x 2 outputs that a tile of bands makes of a window; whichever shape takes the least time. Two tiles of windows, side by side,
//       meet two of bands, for the outputs under the windows' first rows and for as many further down.
//       The unit multiplies by itself: meanwhile, product by product, vectors split the samples of the rows to come and
//       give the outputs of the block before.
//       Images that can't be split exactly are left to simd, after they were summed here: magnitudes are known only at the end.
// Variants: zeros around an image are split with the samples, from where these lie; what is left to simd is gathered before. Samples of 8
//       significant bits are one part and those of 16 two, and meet taps of three: half as many products, or a sixth fewer. Pictures of bytes are read and
//       stored as they are.
// Step: a fifth less than simd's time for 15x15, two thirds less for 31x31, and half for 11x11 of bytes (docs/cpu-speed.md, Steps).
// Limit: the unit and its power: 16 cycles for 8192 products of parts, a fifth to a half of them with zeros of the band from 9x9 on. And the first
//       cache, where what is split meanwhile pushes out windows and bands.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "narrow.h"
#include "tiles.h"

#include "split.h"

// Samples are the first factor, bands the second. Two tiles of either meet at a time.
constexpr index_t together = 2;
inline index_t band_parts(const Work& t) { return parts_beside(t.tiling.parts, t.tiling.products); }

// -- bands

// Groups of as many rows as a window has, that an output's samples lie in; and windows beside each other.
inline index_t groups_of(const Work& t) { return ceil_div(t.kh + t.tiling.out_rows - 1, t.tiling.rows); }
inline index_t chunks_of(const Work& t) {
    return ceil_div(t.kw + t.tiling.out_columns - 1, t.tiling.columns);
}

// [group][chunk][part] of tiles, then the taps' magnitudes.
inline index_t band_bytes(const Work& t) { return groups_of(t) * chunks_of(t) * band_parts(t) * tile_bytes; }
inline index_t elements(const Work& shape) { return (band_bytes(shape) + row_bytes) / 4; }

// What the sample at (row, column), counted from the first one of a window, is multiplied by for the outputs of the first row: for output j tap
// (row, column - j), or 0 where the filter has none.
inline __m512 taps_of(const Work& t, const float* w, index_t row, index_t column) {
    const index_t wide = t.tiling.out_columns, first = column - wide + 1;
    const index_t skip = first < 0 ? -first : 0, end = t.kw - first < wide ? t.kw - first : wide;
    if (row >= t.kh || skip >= end) return _mm512_setzero_ps();
    const auto exist = static_cast<__mmask16>((1u << end) - (1u << skip));
    const auto from = reinterpret_cast<std::uintptr_t>(w) + (row * t.kw + first) * sizeof(float);
    // From rising columns to rising outputs.
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i falling = _mm512_xor_si512(numbers, _mm512_set1_epi32(int(wide - 1)));
    return _mm512_maskz_permutexvar_ps(__mmask16(-1), falling,
                                       _mm512_maskz_loadu_ps(exist, reinterpret_cast<const float*>(from)));
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t, void* to) {
    const float* w = static_cast<const float*>(packed);
    const Tiling& a = shape.tiling;
    u8* band = static_cast<u8*>(to) + c * elements(shape) * 4;
    float* magnitudes = reinterpret_cast<float*>(band + band_bytes(shape));
    // Of rows: a window's samples lie column by column, each from top to bottom.
    const index_t pairs = a.rows / 2;
    // What the first row of outputs meets in a row of samples, the next one meets a row further down.
    const auto later = static_cast<__mmask16>(0xffffu << a.out_columns);
    for (index_t column = 0; column < chunks_of(shape) * a.columns; ++column) {
        const index_t chunk = column / a.columns, place = column % a.columns * pairs;
        __m512 taps[2] = {};
        for (index_t row = 0; row < groups_of(shape) * a.rows; row += 2) {
            taps[0] = _mm512_or_ps(_mm512_maskz_expand_ps(later, taps[1]), taps_of(shape, w, row, column));
            taps[1] =
                _mm512_or_ps(_mm512_maskz_expand_ps(later, taps[0]), taps_of(shape, w, row + 1, column));
            Vec<u32> part[3];
            split_pairs<3>(reinterpret_cast<Vec<float> >(taps[0]), reinterpret_cast<Vec<float> >(taps[1]),
                           part);
            u8* tile = band + (row / a.rows * chunks_of(shape) + chunk) * band_parts(shape) * tile_bytes;
            for (index_t s = 0; s < band_parts(shape); ++s)
                store(reinterpret_cast<u32*>(tile + s * tile_bytes + (place + row % a.rows / 2) * row_bytes),
                      part[s]);
        }
    }
    Range range;
    for (index_t k = 0; k < shape.kh * shape.kw; ++k) range.meet(broadcast(w[k]));
    magnitudes[0] = range.least();
    magnitudes[1] = range.most();
}

// -- samples: [part][channel][group] of rows of windows. Groups take turns: those under the outputs of a step, and those that the next one needs besides.

constexpr index_t columns_at_once = 16;

// Along one axis, samples that exist, of so many from the first.
struct Extent {
    index_t first, end;
    static Extent of(index_t count, index_t start, index_t image, bool over_edge) {
        if (!over_edge) return {0, count};
        return {start < 0 ? -start : 0, image - start < count ? image - start : count};
    }
    bool has(index_t k) const { return first <= k && k < end; }
};

struct Samples {
    index_t columns, rows;             // of the samples, with zeros around an image
    Extent across_image, down_image;   // those that exist
    index_t across;                    // vectors of columns
    index_t met, more, kept;           // groups under a step's outputs, those that each step adds, and both
    index_t window, block;             // bytes from a tile's window, and a block's first one, to the next
    index_t group, channel, part;      // bytes
    index_t step_rows, block_columns;  // outputs
    explicit Samples(const Work& t) {
        const Tiling& a = t.tiling;
        step_rows = together * a.out_rows;
        block_columns = together * tile_rows * a.out_columns;
        columns = t.ow + t.kw - 1;
        rows = t.oh + t.kh - 1;
        across_image = Extent::of(columns, t.col0, t.cols.n, t.over_edge);
        down_image = Extent::of(rows, t.row0, t.rows.n, t.over_edge);
        const index_t column = 2 * a.rows;
        window = a.out_columns * column;
        block = block_columns * column;
        const index_t read =
            ceil_div(t.ow, block_columns) * block_columns - a.out_columns + chunks_of(t) * a.columns;
        across = ceil_div(read, columns_at_once);
        met = groups_of(t) + a.out_rows / a.rows;
        more = step_rows / a.rows;
        kept = met + more;
        // An odd number of lines spreads groups over the caches.
        group = (across * columns_at_once * column / row_bytes | 1) * row_bytes;
        channel = kept * group;
        part = t.cg * channel;
    }
};

// Split samples; or those of an image that can't be split, as floats (`gathered`), which are as large as two parts.
inline index_t scratch_bytes(const Work& shape) {
    const index_t parts = shape.tiling.parts > 2 ? shape.tiling.parts : 2;
    return parts * Samples(shape).part;
}

template <class X>
void work_on(const Work& t);

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.transform = {elements, transform_filter};
    k.scratch = scratch_bytes;
    // Any filter, however far beyond the image; zeros mustn't meet what isn't finite.
    constexpr index_t any = index_t(1) << 40;
    k.over_edge = {1, any, any, false, 0};
    k.narrow = {{work_on<u8>, nullptr}, {}, {}, any, any, 1, 1, 1};
    return k;
}

// Samples X become floats, and sums results of the same type.
inline Vec<float> load_samples(const float* p, __mmask16 exist) { return _mm512_maskz_loadu_ps(exist, p); }
inline Vec<float> load_samples(const u8* p, __mmask16 exist) {
    return _mm512_maskz_cvtepi32_ps(all16, _mm512_maskz_cvtepu8_epi32(all16, _mm_maskz_loadu_epi8(exist, p)));
}
inline void store_results(float* p, Vec<float> v, __mmask16 exist) { _mm512_mask_storeu_ps(p, exist, v); }
inline void store_results(u8* p, Vec<float> v, __mmask16 exist) {
    const __m512i whole = _mm512_maskz_max_epi32(all16, rounded<u8>(v), _mm512_setzero_si512());
    _mm_mask_storeu_epi8(p, exist, _mm512_maskz_cvtepi32_epi8(all16, whole));
}

// Splits samples of one image into the parts of windows, 16 columns of a group of `High` rows at a time. Of bytes the range is known.
template <int Parts, int High, class X>
class Splitter {
    static constexpr int pairs = High / 2;
    static constexpr index_t bytes = columns_at_once * High * 2;
    const Work& t;
    const Samples& s;
    u8* const samples;
    const index_t down = t.xr, part = s.part, to_next_step = s.more * High * t.xr;
    const X* x = nullptr;
    index_t next = 0, end = 0;  // groups
    index_t c = 0, row = 0;     // of the next group; of the one that is split
    // What is split next; the row's first column beyond it and `whole` columns, whose samples all exist.
    const X* from = nullptr;
    u8* to = nullptr;
    index_t column = 0, whole = 0;
    const index_t width = s.across * columns_at_once;
    const Extent inner = {ceil_div(s.across_image.first, columns_at_once) * columns_at_once,
                          s.across_image.end / columns_at_once * columns_at_once};

    template <class Mask>
    [[gnu::always_inline]] void split(Mask exists) {
        Vec<u32> parts[pairs][Parts];
#pragma GCC unroll 2
        for (int m = 0; m < pairs; ++m) {
            Vec<float> sample[2];
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
                const X* at = offset_by(from, (2 * m + k) * down);
                // What later groups need is too far for processors to look ahead.
                fetch_line<0, 2>(at, to_next_step);
                sample[k] = load_samples(at, exists(2 * m + k));
                if constexpr (!converts<X, float>) range.meet(sample[k]);
            }
            split_pairs<Parts, Parts == 3>(sample[0], sample[1], parts[m]);
        }
#pragma GCC unroll 3
        for (int n = 0; n < Parts; ++n) {
            auto* line = reinterpret_cast<u32*>(to + n * part);
            if constexpr (High == 4) exchange_pairs(parts[0][n], parts[1][n]);
#pragma GCC unroll 2
            for (int m = 0; m < pairs; ++m) store(line + m * lanes<u32>, parts[m][n]);
        }
        from = offset_by(from, columns_at_once);
        to += bytes;
    }
    // Of two rows of pairs to columns of two.
    static void exchange_pairs(Vec<u32>& upper, Vec<u32>& lower) {
        const Vec<u32> left = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
        const auto a = reinterpret_cast<__m512i>(upper), b = reinterpret_cast<__m512i>(lower);
        const auto first = reinterpret_cast<__m512i>(left), second = reinterpret_cast<__m512i>(left + 8);
        upper = reinterpret_cast<Vec<u32> >(_mm512_permutex2var_epi32(a, first, b));
        lower = reinterpret_cast<Vec<u32> >(_mm512_permutex2var_epi32(a, second, b));
    }
    // The next row; its first and last columns, beside which there are zeros; all of them in rows above and below the samples.
    [[gnu::noinline]] bool begin_or_end_row() {
        if (column == width) {
            if (next == end) return false;
            row = next * High;
            from = offset_by(x, c * t.xc + row * down);
            to = samples + c * s.channel + next % s.kept * s.group;
            column = 0;
            if (++c == t.cg) c = 0, ++next;
        }
        const bool rows_exist = s.down_image.has(row) && s.down_image.has(row + High - 1);
        if (column == inner.first && inner.first < inner.end && rows_exist) {
            whole = inner.end - inner.first;
            column = inner.end;
            return some();
        }
        const Extent& exist = s.across_image;
        const auto columns = first_places(exist.end - column) & ~first_places(exist.first - column);
        split([&](int k) { return static_cast<__mmask16>(s.down_image.has(row + k) ? columns : 0); });
        column += columns_at_once;
        return true;
    }

  public:
    Range range;
    Splitter(const Work& t_, const Samples& s_, u8* samples_) : t(t_), s(s_), samples(samples_) {}

    void begin(const X* image) {
        x = image;
        next = end = c = whole = 0;
        column = width;
        range = Range();
        if constexpr (converts<X, float>) range.meet(1, 255);
    }
    // From now on groups are split up to this one, of filters without channels none.
    void until(index_t group) { end = t.cg > 0 ? group : 0; }
    // Sixteen columns or the beginning of a row, if any is left.
    [[gnu::always_inline]] bool some() {
        if (whole == 0) return begin_or_end_row();
        split([](int) { return __mmask16(0xffff); });
        whole -= columns_at_once;
        return true;
    }
    void finish() {
        while (some()) {
        }
    }
};

// -- outputs

// Gives the sums of a block as rows of outputs, 16 columns of `Rows` rows at a time.
template <int Rows, class Y>
class Results {
    static constexpr int square = tile_rows * tile_rows, sums = together * together * square;
    const Work& t;
    const Samples& s;
    alignas(64) float done[sums];
    const index_t down = t.yr;
    Vec<float> bias = {};
    // Of the block that is given: bands, rows and columns that are left, and where from and to.
    int bands = 0;
    index_t rows = 0, columns = 0, column = 0;
    const float* from = nullptr;
    Y* to = nullptr;
    // From it to the block beside it, or below, whose lines are fetched: stores to lines that aren't there would hold up what follows.
    index_t to_next = 0;

    // Vectors of some outputs of every row, one row behind the other, become rows.
    template <int Half>
    static void turn(Vec<float> (&row)[Rows]) {
        constexpr int apart = Half * Rows / tile_rows;
#pragma GCC unroll 8
        for (int k = 0; k < Rows; ++k) {
            if (!(k & apart)) exchange<Half, float>(row[k], row[k + apart], All<float>());
        }
        if constexpr (apart > 1) turn<Half / 2>(row);
    }
    // The last columns and rows of all.
    [[gnu::noinline]] void put_existing(const Vec<float> (&row)[Rows]) {
        const index_t left = columns - column, count = left < 16 ? left : 16;
        for (int k = 0; k < Rows && k < rows; ++k)
            store_results(to + column + k * down, row[k] + bias, first_places(count));
    }

  public:
    Results(const Work& t_, const Samples& s_) : t(t_), s(s_) {}

    // The sums of a block, whose outputs begin at (row, column).
    template <class Unit>
    void take(Unit& unit, Y* y, index_t row, index_t column_, float bias_) {
        finish();
        store_sums<together * together>(unit, done);
        from = done;
        bias = broadcast(bias_);
        to = y + row * down + column_;
        rows = t.oh - row;
        columns = t.ow - column_ < s.block_columns ? t.ow - column_ : s.block_columns;
        column = 0;
        bands = rows > Rows ? 2 : 1;
        to_next = column_ + s.block_columns < t.ow ? s.block_columns : s.step_rows * down - column_;
    }
    // Sixteen columns, if any are left.
    [[gnu::always_inline]] bool some() {
        if (bands == 0) return false;
        Vec<float> row[Rows];
#pragma GCC unroll 8
        for (int k = 0; k < Rows; ++k) row[k] = load(from + column * Rows + k * tile_rows);
        turn<tile_rows / 2>(row);
        if (rows >= Rows && column + 16 <= columns) {
            Y* at = to + column;
#pragma GCC unroll 8
            for (int k = 0; k < Rows; ++k, at = offset_by(at, down)) {
                fetch_line<1>(at, to_next);
                store_results(at, row[k] + bias, 0xffff);
            }
        } else {
            put_existing(row);
        }
        column += 16;
        if (column >= columns) {
            column = 0;
            --bands;
            rows -= Rows;
            from += together * square;
            to = offset_by(to, Rows * down);
        }
        return true;
    }
    void finish() {
        while (some()) {
        }
    }
};

// -- blocks of sums

template <int Parts, int Products, int High, int Rows, class Unit, class X>
class Blocks {
    using Sums = Block<together, together, Products, Unit, Parts>;
    static constexpr index_t window = tile_rows / Rows * 2 * High, tile = tile_rows * window;
    // Lines of a block's windows. They are fetched part by part, each beside so many products.
    static constexpr int lines = (together * tile - window + row_bytes - 1) / row_bytes + 1;
    static constexpr int slots = Products / Parts, lines_at_once = (lines + slots - 1) / slots;
    Unit& unit;
    const Work& t;
    const Samples& s;
    const index_t groups = groups_of(t), chunks = chunks_of(t), later = Rows / High;
    index_t splits;  // of columns, beside the products of each part
    const u8* next_windows = nullptr;
    int fetches = 0;

    void fetch_windows() {
        if (fetches == 0) return;
#pragma GCC unroll 32
        for (int k = 0; k < lines_at_once; ++k) fetch_line(next_windows, k * row_bytes);
        next_windows += lines_at_once * row_bytes;
        if (--fetches % slots == 0) next_windows += s.part - slots * lines_at_once * row_bytes;
    }

  public:
    Splitter<Parts, High, X> split;
    Results<Rows, X> results;
    Blocks(Unit& unit_, const Work& t_, const Samples& s_, u8* samples)
        : unit(unit_), t(t_), s(s_), split(t_, s_, samples), results(t_, s_) {
        const index_t blocks = ceil_div(t.ow, s.block_columns) * t.oc * t.cg;
        // To begin a row is a turn of its own.
        const index_t turns = s.more * t.cg * (s.across + 1);
        splits = blocks > 0 ? ceil_div(turns, blocks * s.met * chunks * Products) : 0;
    }

    // Of all channels: `bands` are those of one output channel, `x` the samples of the block's first window.
    void sum(const u8* x, const u8* bands, index_t row) {
        const index_t band = band_parts(t) * tile_bytes, second = later * chunks * band;
        const bool below = t.oh - row > Rows;
        const auto beside = [&]() __attribute__((always_inline)) {
            fetch_windows();
            results.some();
            for (index_t k = 0; k < splits; ++k) split.some();
        };
        zero_sums<Sums::tiles>(unit);
        const u8* const beside_it = x + s.block;
        const index_t first = row / High % s.kept;
        for (index_t c = 0; c < t.cg; ++c, x += s.channel, bands += elements(t) * 4) {
            index_t slot = first;
            for (index_t g = 0; g < s.met; ++g) {
                const u8* at = x + slot * s.group;
                slot = slot + 1 == s.kept ? 0 : slot + 1;
                const u8* next = g + 1 < s.met  ? x + slot * s.group
                                 : c + 1 < t.cg ? x + s.channel + first * s.group
                                                : beside_it + first * s.group;
                for (index_t k = 0; k < chunks; ++k, at += row_bytes) {
                    next_windows = k + 1 < chunks ? at + row_bytes : next;
                    fetches = slots * Parts;
                    Sums sums{unit};
                    const Factor windows{at, window, s.part, tile},
                        of{bands + (g * chunks + k) * band, row_bytes, tile_bytes, -second};
                    if (g < later || (g < groups && !below)) {
                        sums.template add<true, false>(windows, of, beside);
                    } else if (g < groups) {
                        sums.template add<true, true>(windows, of, beside);
                    } else if (below) {
                        sums.template add<false, true>(windows, of, beside);
                    }
                }
            }
        }
    }
};

// Of bytes, which no rung before takes under filters of any height, sums of an image that can't be split exactly.
inline void sum_bytes(const Work& t, const Samples& s, const u8* x, u8* y) {
    const float *w = static_cast<const float*>(t.w), *bias = static_cast<const float*>(t.bias);
    const auto before = [](index_t end, index_t column) { return first_places(end - column); };
    for (index_t o = 0; o < t.oc; ++o, w += t.kh * t.kw, y += t.yo) {
        for (index_t i = 0; i < t.oh; ++i) {
            for (index_t j = 0; j < t.ow; j += lanes<float>) {
                Vec<float> sum = broadcast(bias[o]);
                for (index_t p = 0; p < t.kh; ++p) {
                    if (!s.down_image.has(i + p)) continue;
                    for (index_t q = 0, column = j; q < t.kw; ++q, ++column) {
                        const auto exist = static_cast<__mmask16>(before(s.across_image.end, column) &
                                                                  ~before(s.across_image.first, column));
                        const u8* at = offset_by(x, (i + p) * t.xr + column);
                        sum = mac(sum, load_samples(at, exist), broadcast(w[p * t.kw + q]));
                    }
                }
                store_results(y + i * t.yr + j, sum, first_places(t.ow - j));
            }
        }
    }
}

// Leaves an image to the rung before, which can't do with zeros around it, some rows at a time: they are copied to `room`, that of split samples.
inline void gathered(Work& image, const Samples& s, void* room) {
    const float* x = static_cast<const float*>(image.x);
    float* y = static_cast<float*>(image.y);
    const Work whole = image;
    // In as many columns as were split, a row less than there is room for: rows are read on beyond the last column.
    const index_t rows = s.kept * image.tiling.rows - 1, most = rows - image.kh + 1;
    image.xr = s.across * columns_at_once;
    image.xc = rows * image.xr;
    image.x = room;
    image.row0 = image.col0 = 0;
    image.in_place = image.over_edge = false;
    for (index_t i = 0; i < whole.oh; i += most) {
        image.oh = whole.oh - i < most ? whole.oh - i : most;
        image.y = y + i * image.yr;
        float* to = static_cast<float*>(room);
        for (index_t c = 0; c < image.cg; ++c) {
            for (index_t k = i; k < i + image.oh + image.kh - 1; ++k) {
                float* row = to + c * image.xc + (k - i) * image.xr;
                for (index_t j = 0; j < image.xr; ++j) {
                    const bool exists = s.down_image.has(k) && s.across_image.has(j);
                    row[j] = exists ? *offset_by(x, c * whole.xc + k * whole.xr + j) : 0;
                }
            }
        }
        image.otherwise(image);
    }
}

template <int Parts, int Products, int High, int Rows, int Hardware, class X>
void images(const Work& t) {
    const Samples s(t);
    const float* bias = static_cast<const float*>(t.bias);
    const u8* bands = static_cast<const u8*>(t.transformed);
    u8* samples = static_cast<u8*>(t.scratch);
    const index_t filter = t.cg * elements(t) * 4;
    Range taps;
    for (index_t k = 1; k <= t.oc * t.cg; ++k) {
        const float* magnitudes = reinterpret_cast<const float*>(bands + k * elements(t) * 4 - row_bytes);
        taps.meet(magnitudes[0], magnitudes[1]);
    }
    Tiles<Hardware> unit;
    Blocks<Parts, Products, High, Rows, Tiles<Hardware>, X> blocks(unit, t, s, samples);
    for (index_t n = 0; n < t.n; ++n) {
        const X* x = offset_by(static_cast<const X*>(t.x), n * t.xn + t.row0 * t.xr + t.col0);
        X* y = static_cast<X*>(t.y) + n * t.yn;
        blocks.split.begin(x);
        blocks.split.until(s.met);
        for (index_t row = 0; row < t.oh; row += s.step_rows) {
            blocks.split.finish();
            if (row + s.step_rows < t.oh) blocks.split.until(row / High + s.kept);
            for (index_t column = 0; column < t.ow; column += s.block_columns) {
                for (index_t o = 0; o < t.oc; ++o) {
                    blocks.sum(samples + column / s.block_columns * s.block, bands + o * filter, row);
                    blocks.results.take(unit, y + o * t.yo, row, column, bias[o]);
                }
            }
        }
        blocks.results.finish();
        // Seldom, and of floats known at the end only.
        if (exact(blocks.split.range, taps, t.cg * t.kh * t.kw)) continue;
        if constexpr (converts<X, float>) {
            sum_bytes(t, s, x, y);
        } else {
            Work image = t;
            image.n = 1;
            image.x = x;
            image.y = y;
            t.over_edge ? gathered(image, s, samples) : t.otherwise(image);
        }
    }
}

template <int High, int Rows, int Hardware, class X>
void by_products(const Work& t) {
    if (t.tiling.parts == 1) {
        return t.tiling.products == 2 ? images<1, 2, High, Rows, Hardware, X>(t)
                                      : images<1, 3, High, Rows, Hardware, X>(t);
    }
    if constexpr (!converts<X, float>) {
        if (t.tiling.parts == 3) return images<3, 6, High, Rows, Hardware, X>(t);
        switch (t.tiling.products) {
            case 3: images<2, 3, High, Rows, Hardware, X>(t); break;
            case 4: images<2, 4, High, Rows, Hardware, X>(t); break;
            default: images<2, 5, High, Rows, Hardware, X>(t); break;
        }
    }
}

template <int Hardware, class X>
void by_shape(const Work& t) {
    if (t.tiling.rows == 4) return by_products<4, 4, Hardware, X>(t);
    switch (t.tiling.out_rows) {
        case 2: by_products<2, 2, Hardware, X>(t); break;
        case 4: by_products<2, 4, Hardware, X>(t); break;
        default: by_products<2, 8, Hardware, X>(t); break;
    }
}

template <class X>
void work_on(const Work& t) {
    t.tiling.emulated ? by_shape<0, X>(t) : by_shape<1, X>(t);
}
template <class T>
void work(const Work& t) {
    work_on<T>(t);
}

#endif
