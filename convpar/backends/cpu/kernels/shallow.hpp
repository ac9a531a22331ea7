// Builds on: packed.
// Idea: the processor's matrix unit (tiles.h), of floats split into parts (split.h), for images of few channels, which fill no tile's row by
//       themselves. All samples of a pixel lie beside each other, and pixel beside pixel, so that a row of the filter's window, of 7 columns x 4
//       channels, is 64 bytes in one piece. A tile takes 16 such windows: they overlap, its rows being no further apart than the
//       windows are, so no sample is laid out twice. It meets the filter's row of 16 output channels.
//       Images whose magnitudes don't allow exact parts are left to packed.
// Step: a fifth less than packed's time for 7 x 7 of four channels, a tenth of three with a stride of two (docs/cpu-speed.md, Steps).
// Limit: loads of windows, most of which cross lines of the cache and take two, beside the unit's products, some of which are with zeros.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "split.h"

// Channels at most: of more, cpu-amx fills a tile's row by those of one pixel. rungs.inc says the same.
constexpr index_t most_channels = 16;

// Pairs of channels of a pixel, and tiles' rows of a window's.
inline index_t pairs_of(const Work& t) { return ceil_div(t.cg, 2); }
inline index_t chunks_of(const Work& t) { return ceil_div(t.kw * pairs_of(t), tile_rows); }

// -- filters: [16 output channels][row][chunk][part] of tiles, then their magnitudes

inline index_t filter_tiles(const Work& t) { return t.kh * chunks_of(t) * parts_of_b(t.tiling.products); }

inline index_t elements(const Work& shape) {
    const index_t floats = (filter_tiles(shape) * tile_bytes + row_bytes) / 4;
    return shape.cg ? ceil_div(floats, shape.cg * tile_rows) : 0;
}

inline void transform_filter(const Work& shape, const void* packed, index_t, index_t count, void* to) {
    const float* w = static_cast<const float*>(packed);
    const index_t pairs = pairs_of(shape), taps = shape.kh * shape.kw;
    const index_t parts = parts_of_b(shape.tiling.products);
    u8* tile = static_cast<u8*>(to);
    Range range;
    const auto weights = [&](index_t channel, index_t p, index_t q) {
        if (channel >= count || q >= shape.kw) return Vec<float>{};
        return load(w + (channel * taps + p * shape.kw + q) * tile_rows);
    };
    for (index_t p = 0; p < shape.kh; ++p) {
        for (index_t chunk = 0; chunk < chunks_of(shape); ++chunk, tile += parts * tile_bytes) {
            for (index_t k = 0; k < tile_rows; ++k) {
                const index_t q = (chunk * tile_rows + k) / pairs, pair = (chunk * tile_rows + k) % pairs;
                const Vec<float> even = weights(2 * pair, p, q), odd = weights(2 * pair + 1, p, q);
                range.meet(even);
                range.meet(odd);
                Vec<u32> part[3];
                split_pairs<3>(even, odd, part);
                for (index_t s = 0; s < parts; ++s)
                    store(reinterpret_cast<u32*>(tile + s * tile_bytes + k * row_bytes), part[s]);
            }
        }
    }
    float* magnitudes = reinterpret_cast<float*>(tile);
    magnitudes[0] = range.least();
    magnitudes[1] = range.most();
}

// -- samples: [part][row][column] of pixels, [pair of channels] of pairs. Rows of one remainder by the vertical stride follow each other, so
// that a tile may run on into the next row of outputs

struct Samples {
    index_t columns, high;      // places of a row, a horizontal stride apart; rows
    index_t runs;               // in which a row's columns come, by their remainders by that stride
    index_t pixel, place, row;  // bytes from each to the next
    index_t phase, part;        // bytes of rows of one remainder, and of a part
    index_t outputs;            // with the places between their rows
    explicit Samples(const Work& t) {
        columns = t.ow + (t.kw - 1) / t.sw;
        high = (t.oh - 1) * t.sh + t.kh;
        const bool apart = t.sw != 1 && t.xs == 1;
        runs = !apart ? 1 : t.kw < t.sw ? t.kw : t.sw;
        pixel = pairs_of(t) * 4;
        place = t.sw * pixel;
        row = columns * place;
        // Behind the last row, what its last vectors write beyond its end; and behind all, what is read beyond the last output's window.
        phase = ceil_div(ceil_div(high, t.sh) * row + tile_rows * place, row_bytes) * row_bytes;
        part = t.sh * phase + ceil_div(4 * tile_rows * place, row_bytes) * row_bytes +
               (chunks_of(t) + 1) * row_bytes;
        outputs = (t.oh - 1) * columns + t.ow;
    }
    // Bytes from the first row to another.
    index_t below(const Work& t, index_t p) const { return p % t.sh * phase + p / t.sh * row; }
};

inline index_t scratch_bytes(const Work& shape) {
    return Samples(shape).part * parts_of_a(shape.tiling.products);
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = tile_rows;
    k.transform = {elements, transform_filter, most_channels};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    return k;
}

// The lanes of K vectors, in turn: lane 0 of each, then lane 1.
template <int K>
inline void take_turns(Vec<u32> (&v)[K]) {
    if constexpr (K > 1) {
        Vec<u32> even[K / 2], odd[K / 2];
#pragma GCC unroll 4
        for (int k = 0; k < K / 2; ++k) even[k] = v[2 * k], odd[k] = v[2 * k + 1];
        take_turns<K / 2>(even);
        take_turns<K / 2>(odd);
        const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
#pragma GCC unroll 4
        for (int k = 0; k < K / 2; ++k) {
            const auto a = reinterpret_cast<__m512i>(even[k]), b = reinterpret_cast<__m512i>(odd[k]);
            v[2 * k] = reinterpret_cast<Vec<u32>>(_mm512_permutex2var_epi32(a, lower, b));
            v[2 * k + 1] = reinterpret_cast<Vec<u32>>(_mm512_permutex2var_epi32(a, upper, b));
        }
    }
}

// Splits an image row by row, as they are met, while they are in the first cache.
template <int Parts>
class Splitter {
    const Work& t;
    const Samples& s;
    u8* const to;
    const float* image = nullptr;
    index_t row = 0, column = 0;
    void (Splitter::* const next)();
    Range range;

    // A pair of channels of the columns that `mask` has.
    [[gnu::always_inline]] void split(const float* from, bool second, __mmask16 mask,
                                      Vec<u32> (&part)[Parts]) {
        const Vec<float> even = _mm512_maskz_loadu_ps(mask, from);
        const Vec<float> odd = _mm512_maskz_loadu_ps(second ? mask : 0, second ? from + t.xc : from);
        range.meet(even);
        range.meet(odd);
        split_pairs<Parts>(even, odd, part);
    }

    // `Runs` and `Pairs` as they are, or 0: any. What is stored beyond a row's end the next row covers.
    template <int Runs, int Pairs>
    void step() {
        const index_t runs = Runs > 0 ? Runs : s.runs, pairs = Pairs > 0 ? Pairs : pairs_of(t);
        const index_t apart = runs > 1 ? s.place : s.pixel, last = (t.ow - 1) * t.sw + t.kw - 1;
        const float* from = image + row * t.xr + column;
        u8* line = to + s.below(t, row) + column * apart;
        const auto columns_of = [&](index_t run) {
            const index_t left = (runs > 1 ? (last - run) / t.sw : last) + 1 - column;
            return static_cast<__mmask16>(left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1 : 0);
        };
        if constexpr (Pairs > 0) {
            constexpr int vectors = Runs * Pairs;
            Vec<u32> all[Parts][vectors];
#pragma GCC unroll 2
            for (int run = 0; run < Runs; ++run) {
                const float* channel = from + (Runs > 1 ? t.taps[run] : 0);
                const __mmask16 mask = columns_of(run);
#pragma GCC unroll 8
                for (int pair = 0; pair < Pairs; ++pair, channel += 2 * t.xc) {
                    Vec<u32> part[Parts];
                    split(channel, pair + 1 < Pairs || t.cg % 2 == 0, mask, part);
#pragma GCC unroll 3
                    for (int n = 0; n < Parts; ++n) all[n][run * Pairs + pair] = part[n];
                }
            }
#pragma GCC unroll 3
            for (int n = 0; n < Parts; ++n) {
                take_turns<vectors>(all[n]);
#pragma GCC unroll 8
                for (int k = 0; k < vectors; ++k)
                    store(reinterpret_cast<u32*>(line + n * s.part + k * row_bytes), all[n][k]);
            }
        } else {
            const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i places = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(int(apart)));
            for (index_t run = 0; run < runs; ++run) {
                const float* channel = from + (runs > 1 ? t.taps[run] : 0);
                for (index_t pair = 0; pair < pairs; ++pair, channel += 2 * t.xc) {
                    Vec<u32> part[Parts];
                    split(channel, 2 * pair + 1 < t.cg, columns_of(run), part);
                    for (int n = 0; n < Parts; ++n)
                        _mm512_i32scatter_epi32(line + n * s.part + (run * pairs + pair) * 4, places,
                                                reinterpret_cast<__m512i>(part[n]), 1);
                }
            }
        }
        column += tile_rows;
        if (column * apart >= s.row) {
            column = 0;
            ++row;
        }
    }
    static auto step_for(const Work& t, const Samples& s) {
        const index_t runs = s.runs == t.sw ? s.runs : s.runs == 1 ? 1 : 0;
        switch (10 * runs + pairs_of(t)) {
            case 12: return &Splitter::step<1, 2>;
            case 14: return &Splitter::step<1, 4>;
            case 18: return &Splitter::step<1, 8>;
            case 22: return &Splitter::step<2, 2>;
            case 24: return &Splitter::step<2, 4>;
            default: return &Splitter::step<0, 0>;
        }
    }

  public:
    Splitter(const Work& t_, const Samples& s_, u8* to_) : t(t_), s(s_), to(to_), next(step_for(t_, s_)) {
        // What no row covers meets zeros of the filter; whatever else it were, that might be no zero.
        __builtin_memset(to, 0, s.part * Parts);
    }
    void begin(const float* x) {
        image = x;
        row = 0;
        range = Range();
    }
    // What outputs of rows up to this one meet, and what zeros of the filter meet behind that: of the image before, it might be no zero.
    void until(index_t i) {
        const index_t behind = ceil_div(row_bytes, s.row) * t.sh, end = i * t.sh + t.kh + behind;
        while (row < end && row < s.high) (this->*next)();
    }
    // Of the whole image, when it is split.
    const Range& magnitudes() const { return range; }
};

// -- outputs

// Neighbouring outputs of a tile that lie in one row: its lanes, and elements from the first output to where lane 0 would lie.
struct Piece {
    __mmask16 mask;
    index_t to;
};

// Those among the 16 places from `place` on.
inline index_t find_pieces(const Work& t, const Samples& s, index_t place, Piece* pieces) {
    index_t found = 0;
    const index_t end = place + tile_rows < s.outputs ? place + tile_rows : s.outputs;
    for (index_t at = place; at < end;) {
        const index_t i = at / s.columns, j = at % s.columns, from = at - place;
        if (j < t.ow) {
            const index_t width = t.ow - j < end - at ? t.ow - j : end - at;
            pieces[found++] = {static_cast<__mmask16>(((1u << width) - 1) << from), i * t.yr + j - from};
        }
        at += s.columns - j;
    }
    return found;
}

// A block of tiles of sums that lie in memory, turned and given while the unit is busy with the next one's: its products leave most of
// the processor idle.
class Outputs {
    Piece pieces[4][tile_rows];
    index_t counts[4], apart, channels;  // from one channel to the next; channels that there are
    int across, shares;                  // tiles of places beside each other; tiles whose sums are one
    int given = 0, fetched = 0;
    const float* bias;
    float* y;

    void give_tile(int tile) const;

  public:
    int tiles = 0;
    alignas(64) float done[4 * tile_rows * tile_rows];  // column by column, and share by share

    // 16 M places and 16 N channels, from these on.
    template <int M, int N>
    void begin(const Work& t, const Samples& s, index_t place, index_t o, int shares_, float* image) {
        apart = t.yo;
        channels = t.oc - o < N * tile_rows ? t.oc - o : index_t(N * tile_rows);
        across = M;
        shares = shares_;
        tiles = M * N;
        given = fetched = 0;
        bias = static_cast<const float*>(t.bias) + o;
        y = image + o * t.yo;
        for (int m = 0; m < M; ++m) counts[m] = find_pieces(t, s, place + m * tile_rows, pieces[m]);
    }
    // Lines that aren't there would hold up what follows a store to them.
    void fetch(int count) {
        for (; fetched < count; ++fetched) {
            const int m = fetched % across, first = fetched / across * tile_rows;
            const index_t end = channels < first + tile_rows ? channels : index_t(first + tile_rows);
            for (index_t k = 0; k < counts[m]; ++k) {
                const float* to = y + pieces[m][k].to + __builtin_ctz(pieces[m][k].mask);
                for (index_t n = first; n < end; ++n) __builtin_prefetch(to + n * apart, 1);
            }
        }
    }
    // The first `count` tiles, but for those that were given before.
    void give(int count) {
        for (; given < count; ++given) give_tile(given);
    }
};

void Outputs::give_tile(int tile) const {
    constexpr int square = tile_rows * tile_rows;
    const int m = tile % across, n = tile / across * tile_rows;
    const float* sums = done + tile * square;
    Vec<float> rows[tile_rows];
#pragma GCC unroll 16
    for (int k = 0; k < tile_rows; ++k) rows[k] = load(sums + k * tile_rows);
    for (int share = 1; share < shares; ++share) {
#pragma GCC unroll 16
        for (int k = 0; k < tile_rows; ++k) rows[k] += load(sums + share * across * square + k * tile_rows);
    }
    transpose<float>(rows);
#pragma GCC unroll 16
    for (int k = 0; k < tile_rows; ++k) {
        if (n + k >= channels) break;
        const Vec<float> sum = rows[k] + broadcast(bias[n + k]);
        const auto row = reinterpret_cast<std::uintptr_t>(y + (n + k) * apart);
        for (const Piece* piece = pieces[m]; piece < pieces[m] + counts[m]; ++piece)
            _mm512_mask_storeu_ps(reinterpret_cast<float*>(row + piece->to * sizeof(float)), piece->mask,
                                  sum);
    }
}

// Sums of 16 M neighbours of one image and 16 N channels. Meanwhile those `before` are given.
template <int Products, int M, int N, class Unit>
void sum_up(Unit& unit, const Work& t, const Samples& s, const u8* w, index_t pack, const u8* x,
            index_t place, Outputs& before, Outputs& now) {
    Block<M, N, Products, Unit> sums{unit};
    constexpr int tiles = sums.tiles;
    zero_sums<tiles>(unit);
    x += place * s.place;
    const index_t chunks = chunks_of(t), steps = t.kh * chunks;
    index_t step = 0;
    for (index_t p = 0; p < t.kh; ++p) {
        const u8* window = x + s.below(t, p);
        for (index_t chunk = 0; chunk < chunks;
             ++chunk, window += row_bytes, w += parts_of_b(Products) * tile_bytes) {
            sums.add({window, s.place, s.part, tile_rows * s.place}, {w, row_bytes, tile_bytes, pack});
            ++step;
            before.give(int(step * before.tiles / steps));
            now.fetch(int(step * now.tiles / steps));
        }
    }
    store_sums<tiles>(unit, now.done);
}

template <int Products, int Hardware, class T>
void images(const Work& t) {
    const Samples s(t);
    const float* x = static_cast<const float*>(t.x);
    const u8* w = static_cast<const u8*>(t.transformed);
    u8* samples = static_cast<u8*>(t.scratch);
    const index_t pack = t.cg * elements(t) * tile_rows * 4;
    Range taps;
    for (index_t o = 0; o < t.oc; o += tile_rows) {
        const float* magnitudes =
            reinterpret_cast<const float*>(w + o / tile_rows * pack + filter_tiles(t) * tile_bytes);
        taps.meet(magnitudes[0], magnitudes[1]);
    }
    Splitter<parts_of_a(Products)> splitter(t, s, samples);
    Tiles<Hardware> unit;
    Outputs two[2];
    bool turn = false;
    for (index_t n = 0; n < t.n; ++n) {
        splitter.begin(x + n * t.xn);
        float* y = static_cast<float*>(t.y) + n * t.yn;
        for (index_t o = 0; o < t.oc; o += 2 * tile_rows) {
            const u8* filters = w + o / tile_rows * pack;
            for (index_t place = 0; place < s.outputs;) {
                const index_t tiles = ceil_div(s.outputs - place, tile_rows);
                const bool two_channels = t.oc - o > tile_rows;
                const index_t most = two_channels ? 2 : 4, across = tiles < most ? tiles : most;
                splitter.until((place + across * tile_rows - 1) / s.columns);
#define BLOCK(M, N, O)                                                                                      \
    two[turn].begin<M, N>(t, s, place, o + (O) * tile_rows, Block<M, N, Products, Tiles<Hardware>>::shares, \
                          y);                                                                               \
    sum_up<Products, M, N>(unit, t, s, filters + (O) * pack, pack, samples, place, two[!turn], two[turn]);  \
    turn = !turn
                if (two_channels && across == 2) {
                    BLOCK(2, 2, 0);
                } else if (two_channels) {
                    BLOCK(1, 1, 0);
                    BLOCK(1, 1, 1);
                } else {
                    switch (across) {
                        case 1: BLOCK(1, 1, 0); break;
                        case 2: BLOCK(2, 1, 0); break;
                        case 3: BLOCK(3, 1, 0); break;
                        default: BLOCK(4, 1, 0); break;
                    }
                }
#undef BLOCK
                place += across * tile_rows;
            }
        }
        // Seldom, and known at the end only.
        if (!exact(splitter.magnitudes(), taps, t.cg * t.kh * t.kw)) {
            two[!turn].give(two[!turn].tiles);
            Work image = t;
            image.n = 1;
            image.x = x + n * t.xn;
            image.y = y;
            // What is there is this rung's, and as large as that asks for.
            image.scratch = nullptr;
            t.otherwise(image);
        }
    }
    two[!turn].give(two[!turn].tiles);
}

template <int Hardware, class T>
void by_products(const Work& t) {
    switch (t.tiling.products) {
        case 3: images<3, Hardware, T>(t); break;
        case 4: images<4, Hardware, T>(t); break;
        case 5: images<5, Hardware, T>(t); break;
        default: images<6, Hardware, T>(t); break;
    }
}

template <class T>
void work(const Work& t) {
    t.tiling.emulated ? by_products<0, T>(t) : by_products<1, T>(t);
}

#endif
