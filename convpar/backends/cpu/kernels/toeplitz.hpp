// Builds on: simd.
// Idea: a convolution along a row is a product with a banded matrix (Toeplitz's), whose columns are the filter's row, each
//       a place further down: samples x band = neighbouring outputs. The processor's matrix unit multiplies both, split
//       into parts (split.h): a tile has 16 groups of rows, one below the other, and 32 samples of each; the band makes
//       1 x 16, 2 x 8 or 4 x 4 outputs of them, whichever takes the least time.
//       Images that can't be split exactly are left to simd, after they were summed here: magnitudes are known only at the end.
// Step: up to a sixth less than simd's time for 15x15, four to seven tenths of it for 31x31 (docs/cpu-speed.md, Steps).
// Limit: the unit: 16 cycles for 8192 products of parts, half of them with zeros of the band.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "split.h"

// Samples are the first factor, bands the second.
inline index_t band_parts(const Work& t) { return parts_of_b(t.tiling.products); }

// -- bands

// Bands of a filter: groups of rows that an output's samples lie in, and 32 samples' worth of columns.
inline index_t groups(const Work& t) { return ceil_div(t.kh + t.tiling.out_rows - 1, t.tiling.out_rows); }
inline index_t chunks(const Work& t) { return ceil_div(t.kw + t.tiling.out_columns - 1, t.tiling.columns); }

// [group][chunk][part] of tiles, then the taps' magnitudes.
inline index_t band_bytes(const Work& t) { return groups(t) * chunks(t) * band_parts(t) * tile_bytes; }
inline index_t elements(const Work& shape) { return (band_bytes(shape) + row_bytes) / 4; }

// What the sample at (row, column), counted from the first sample under a group's first output, is multiplied by for each
// output: for output (k, j) tap (row - k, column - j), or 0 where the filter has none.
inline Vec<float> taps_of(const Work& t, const float* w, index_t row, index_t column) {
    const index_t wide = t.tiling.out_columns;
    __m512 taps = _mm512_setzero_ps();
    for (index_t k = 0; k < t.tiling.out_rows; ++k) {
        const index_t p = row - k, first = column - wide + 1;
        if (p < 0 || p >= t.kh) continue;
        // The lanes of output row k, those within the filter's row among them.
        const index_t skip = first < 0 ? -first : 0, end = t.kw - first < wide ? t.kw - first : wide;
        if (skip >= end) continue;
        const auto lanes_of = static_cast<__mmask16>(((1u << end) - (1u << skip)) << k * wide);
        const auto from = reinterpret_cast<std::uintptr_t>(w) + (p * t.kw + first - k * wide) * sizeof(float);
        taps = _mm512_mask_loadu_ps(taps, lanes_of, reinterpret_cast<const float*>(from));
    }
    // From rising columns to rising outputs.
    const __m512i last = _mm512_set1_epi32(int(wide - 1));
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_xor_si512(numbers, last), taps);
}

// Where the samples of a tile's row lie, from the first: pairs are neighbours in a row or, of more rows, in a column.
struct Place {
    index_t row, column;
};
inline Place place_of(const Tiling& a, index_t sample) {
    if (a.rows == 1) return {0, sample};
    // Of four rows: the upper two, then the lower two, of as many columns as a tile's outputs have.
    const index_t wide = a.rows == 2 ? a.columns : a.out_columns, pair = sample / 2;
    return {pair / wide * 2 % a.rows + sample % 2, pair / (wide * a.rows / 2) * wide + pair % wide};
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t, void* to) {
    const float* w = static_cast<const float*>(packed);
    const Tiling& a = shape.tiling;
    u8* tile = static_cast<u8*>(to) + c * elements(shape) * 4;
    float* magnitudes = reinterpret_cast<float*>(tile + band_bytes(shape));
    for (index_t g = 0; g < groups(shape); ++g) {
        for (index_t chunk = 0; chunk < chunks(shape); ++chunk, tile += band_parts(shape) * tile_bytes) {
            for (index_t k = 0; k < tile_rows; ++k) {
                const Place even = place_of(a, 2 * k), odd = place_of(a, 2 * k + 1);
                const index_t row = g * a.rows, column = chunk * a.columns;
                Vec<u32> part[3];
                split_pairs<3>(taps_of(shape, w, row + even.row, column + even.column),
                               taps_of(shape, w, row + odd.row, column + odd.column), part);
                for (index_t s = 0; s < band_parts(shape); ++s)
                    store(reinterpret_cast<u32*>(tile + s * tile_bytes + k * row_bytes), part[s]);
            }
        }
    }
    Range range;
    for (index_t k = 0; k < shape.kh * shape.kw; ++k) range.meet(broadcast(w[k]));
    magnitudes[0] = range.least();
    magnitudes[1] = range.most();
}

// -- samples: [part][channel][group of rows][lines of 64 bytes], each line as place_of says. A tile's row, 64 bytes, spans the
// columns of two tiles of outputs, so that the next tile begins 32 bytes on

// Columns of a group of rows that are split together, and lines that they become.
constexpr index_t together(index_t rows) { return rows == 1 ? 32 : 16; }
constexpr index_t lines_of(index_t rows) { return rows == 4 ? 2 : 1; }

struct Samples {
    index_t down, beside;          // tiles of sums
    index_t columns, high;         // of the samples
    index_t across, rows;          // of columns split together; groups of rows
    index_t group, channel, part;  // bytes
    explicit Samples(const Work& t) {
        const Tiling& a = t.tiling;
        down = ceil_div(t.oh, tile_rows * a.out_rows);
        beside = ceil_div(t.ow, a.out_columns);
        columns = t.ow + t.kw - 1;
        high = t.oh + t.kh - 1;
        across = ceil_div((beside + 2 * chunks(t) - 1) * a.out_columns, together(a.rows));
        rows = down * tile_rows + groups(t) - 1;
        group = (across * lines_of(a.rows) | 1) * row_bytes;  // odd: groups spread over the caches
        channel = rows * group;
        part = t.cg * channel;
    }
};

inline index_t scratch_bytes(const Work& shape) {
    return parts_of_a(shape.tiling.products) * Samples(shape).part;
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.transform = {elements, transform_filter};
    k.scratch = scratch_bytes;
    return k;
}

// So many samples behind one, and maybe behind the array.
inline const float* behind(const float* sample, index_t samples) {
    return reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(sample) + samples * sizeof(float));
}

// Splits samples into the parts of a tile's rows, a group of `High` rows at a time.
template <int Parts, int High>
class Splitter {
    // Vectors whose samples are paired lane by lane: of one row's columns, or of two rows.
    static constexpr int vectors = High == 1 ? 2 : High, pairs = vectors / 2;
    const Work& t;
    const Samples& s;

    // One part of pairs, in the order of a tile's rows.
    static void put(u8* line, const __m512i (&pair)[pairs]) {
        if constexpr (High == 1) {
            alignas(64) static constexpr u16 neighbours[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                               22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
                                                               13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
            _mm512_storeu_si512(line, _mm512_permutexvar_epi16(_mm512_load_si512(neighbours), pair[0]));
        } else if constexpr (High == 2) {
            _mm512_storeu_si512(line, pair[0]);
        } else {
            const __m512i left = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
            const __m512i right = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
            _mm512_storeu_si512(line, _mm512_permutex2var_epi64(pair[0], left, pair[1]));
            _mm512_storeu_si512(line + row_bytes, _mm512_permutex2var_epi64(pair[0], right, pair[1]));
        }
    }
    // The columns that are split together, but for samples that `within` leaves out of vector v: a bit for each.
    template <class Mask>
    [[gnu::always_inline]] void step(const float* from, u8* line, Mask within) {
        // Rows are too short to be read ahead by themselves.
        constexpr index_t rows_ahead = High == 1 ? 3 : High;
        Vec<float> sample[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const float* at = High == 1 ? behind(from, 16 * v) : behind(from, v * t.xr);
            __builtin_prefetch(behind(at, rows_ahead * t.xr));
            sample[v] = _mm512_maskz_loadu_ps(within(v), at);
            range.meet(sample[v]);
        }
        Vec<u32> part[pairs][Parts];
#pragma GCC unroll 2
        for (int m = 0; m < pairs; ++m) split_pairs<Parts>(sample[2 * m], sample[2 * m + 1], part[m]);
#pragma GCC unroll 3
        for (int n = 0; n < Parts; ++n) {
            __m512i pair[pairs];
#pragma GCC unroll 2
            for (int m = 0; m < pairs; ++m) pair[m] = reinterpret_cast<__m512i>(part[m][n]);
            put(line + n * s.part, pair);
        }
    }

  public:
    Range range;
    Splitter(const Work& t_, const Samples& s_) : t(t_), s(s_) {}

    // A group of one channel. `high` rows of it are samples; the others, and columns beyond the last sample, become zeros.
    void group(const float* x, index_t high, u8* line) {
        constexpr index_t wide = together(High), bytes = lines_of(High) * row_bytes;
        const index_t whole = high >= High ? s.columns / wide : 0;
        index_t k = 0;
        for (; k < whole; ++k) step(x + k * wide, line + k * bytes, [](int) { return __mmask16(0xffff); });
        for (; k < s.across; ++k) {
            step(behind(x, k * wide), line + k * bytes, [&](int v) {
                const index_t left = s.columns - k * wide - (High == 1 ? 16 * v : 0);
                const bool below = High == 1 ? high <= 0 : v >= high;
                return __mmask16(below || left <= 0 ? 0 : left < 16 ? (1u << left) - 1 : 0xffff);
            });
        }
    }
};

// -- outputs

// 16 neighbouring outputs of row `k` of their group, from one, two or four tiles of sums.
template <int High>
inline Vec<float> outputs_of(const float* sums, int k) {
    constexpr int wide = tile_rows / High, square = tile_rows * tile_rows;
    sums += k * wide;
    if constexpr (High == 1) {
        return load(sums);
    } else if constexpr (High == 2) {
        const __m512d first = _mm512_castpd256_pd512(_mm256_loadu_pd(reinterpret_cast<const double*>(sums)));
        return reinterpret_cast<Vec<float> >(
            _mm512_insertf64x4(first, _mm256_loadu_pd(reinterpret_cast<const double*>(sums + square)), 1));
    } else {
        __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(sums));
        all = _mm512_insertf32x4(all, _mm_loadu_ps(sums + square), 1);
        all = _mm512_insertf32x4(all, _mm_loadu_ps(sums + 2 * square), 2);
        return _mm512_insertf32x4(all, _mm_loadu_ps(sums + 3 * square), 3);
    }
}

// M tiles of sums beside each other, of one output channel.
template <int Products, int High, int M, class Unit>
void outputs(Unit& unit, const Work& t, const Samples& s, const u8* x, const u8* bands, index_t row,
             index_t column, float bias, float* y) {
    using Sums = Block<M, 1, Products, Unit>;
    constexpr int square = tile_rows * tile_rows, wide = tile_rows / High;
    const index_t parts = band_parts(t), filter = elements(t) * 4, steps = chunks(t);
    const index_t high = t.oh - row < tile_rows * High ? t.oh - row : index_t(tile_rows * High);
    // Stores to lines that aren't there would hold up what follows; they are fetched a few at a time.
    float* to = y + row * t.yr + column;
    const index_t fetched = t.cg > 0 ? ceil_div(high, t.cg * groups(t) * steps) : 0;
    index_t last = 0;
    Sums sums{unit};
    zero_sums<Sums::tiles>(unit);
    x += row / High * s.group + column / wide * (row_bytes / 2);
    for (index_t c = 0; c < t.cg; ++c, x += s.channel, bands += filter) {
        const u8* band = bands;
        for (index_t g = 0; g < groups(t); ++g) {
            for (index_t k = 0; k < steps; ++k, band += parts * tile_bytes) {
                for (index_t end = last + fetched; last < high && last < end; ++last) {
#pragma GCC unroll 5
                    for (index_t j = 0; j <= M * wide; j += 16)
                        __builtin_prefetch(behind(to, last * t.yr + j), 1);
                }
                sums.add({x + g * s.group + k * row_bytes, s.group, s.part, row_bytes / 2},
                         {band, row_bytes, tile_bytes, 0});
            }
        }
    }
    // 16 outputs of a row lie in High tiles; behind the last ones lies room that is read for outputs nobody sees.
    alignas(64) float done[(Sums::tiles + 3) * square];
    store_sums<Sums::tiles>(unit, done);
    for (int other = 1; other < Sums::shares; ++other) {
        for (int k = 0; k < M * square; k += 16)
            store(done + k, load(done + k) + load(done + other * M * square + k));
    }
    const Vec<float> added = broadcast(bias);
    for (int m = 0; m < M; m += High) {
        const index_t left = t.ow - column - m * wide, width = left < 16 ? left : 16;
        const index_t made = (M - m) * wide < width ? (M - m) * wide : width;
        for (index_t i = 0; i < high; ++i) {
            const float* from = done + m * square + i / High * tile_rows;
            store_first(to + i * t.yr + m * wide, outputs_of<High>(from, int(i % High)) + added, made);
        }
    }
}

template <int Products, int High, int Hardware, class T>
void images(const Work& t) {
    constexpr int wide = tile_rows / High;
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
    for (index_t n = 0; n < t.n; ++n) {
        const float* x = static_cast<const float*>(t.x) + n * t.xn;
        float* y = static_cast<float*>(t.y) + n * t.yn;
        Splitter<parts_of_a(Products), High> split(t, s);
        index_t rows = 0;  // groups that are split
        for (index_t i = 0; i < s.down; ++i) {
            for (; rows < (i + 1) * tile_rows + groups(t) - 1; ++rows) {
                for (index_t c = 0; c < t.cg; ++c) {
                    split.group(behind(x, c * t.xc + rows * High * t.xr), s.high - rows * High,
                                samples + c * s.channel + rows * s.group);
                }
            }
            for (index_t j = 0; j < s.beside; j += 4) {
                for (index_t o = 0; o < t.oc; ++o) {
#define TILES(M)                                                                                        \
    outputs<Products, High, M>(unit, t, s, samples, bands + o * filter, i * tile_rows * High, j * wide, \
                               bias[o], y + o * t.yo)
                    switch (s.beside - j) {
                        case 1: TILES(1); break;
                        case 2: TILES(2); break;
                        case 3: TILES(3); break;
                        default: TILES(4); break;
                    }
#undef TILES
                }
            }
        }
        // Seldom, and known at the end only.
        if (!exact(split.range, taps, t.cg * t.kh * t.kw)) {
            Work image = t;
            image.n = 1;
            image.x = x;
            image.y = y;
            t.otherwise(image);
        }
    }
}

template <int High, int Hardware, class T>
void by_products(const Work& t) {
    switch (t.tiling.products) {
        case 3: images<3, High, Hardware, T>(t); break;
        case 4: images<4, High, Hardware, T>(t); break;
        case 5: images<5, High, Hardware, T>(t); break;
        default: images<6, High, Hardware, T>(t); break;
    }
}

template <int Hardware, class T>
void by_rows(const Work& t) {
    switch (t.tiling.out_rows) {
        case 1: by_products<1, Hardware, T>(t); break;
        case 2: by_products<2, Hardware, T>(t); break;
        default: by_products<4, Hardware, T>(t); break;
    }
}

template <class T>
void work(const Work& t) {
    t.tiling.emulated ? by_rows<0, T>(t) : by_rows<1, T>(t);
}

#endif
