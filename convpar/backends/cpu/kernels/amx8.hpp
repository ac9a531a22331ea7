// Builds on: pairs.
// Idea: a processor's unit for products of matrices takes bytes as they are, with a sign or without, and sums 32 bits of them: what floats need
//       parts for (amx), and a rounding for every sum, is exact here with one product. Samples and filters of four channels are a word: a tile of
//       filters, 16 output channels x 64 channels, meets one of samples, 64 channels x 16 neighbouring outputs, for every tap.
// Variants: filters become words from where they lie, unless their taps lie otherwise than in a filter by itself. Sums begin with the bias, or in
//        later passes over the channels with what is there; where all places and channels of a tile have outputs, the unit stores them. Under filters
//        of one sample tiles begin with lines of the result.
// Step: less than a fifth of pairs' time, from 64 to 64 and from 256 to 256 channels (docs/cpu-speed.md, Steps).
// Limit: what surrounds the unit's products, of which it makes 1024 a cycle: filters that become words, samples that are laid out, and results,
//        four times as large as these.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "words.h"

#include "tiled.h"

// Channels of a word, and of a tile.
constexpr int in_word = 4;
constexpr index_t depth = in_word * chunk_words;

inline index_t chunks_of(const Work& t) { return ceil_div(t.cg, depth); }

// -- words

// Of neighbouring places, 64 at most, the bytes of four channels.
class Fours {
    __m512i channel[in_word];

  public:
    // Of so many channels, which are `apart`; samples of a channel are `Step` apart, 1 or 2. Nothing is read for places that don't exist, which
    // are zeros.
    template <int Step>
    [[gnu::always_inline]] void load(const u8* p, index_t apart, index_t count, __mmask64 exist) {
        // Each 16 of 64 places to a part of their own of every 128 bits.
        alignas(64) static constexpr u32 by_vectors[2][16] = {
            {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15},
            {0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15}};
        const __m512i turned = _mm512_load_si512(by_vectors[Step - 1]);
        constexpr unsigned long long every_other = 0x5555555555555555u;
#pragma GCC unroll 4
        for (int c = 0; c < in_word; ++c, p = offset_by(p, apart)) {
            const __mmask64 those = c < count ? exist : 0;
            __m512i bytes;
            if constexpr (Step == 1) {
                bytes = _mm512_maskz_loadu_epi8(those, p);
            } else {
                const __m512i first = _mm512_maskz_loadu_epi8(_pdep_u64(those, every_other), p),
                              second = _mm512_maskz_loadu_epi8(_pdep_u64(those >> 32, every_other),
                                                               offset_by(p, line_bytes));
                bytes = _mm512_packus_epi16(first, second);
            }
            channel[c] = _mm512_maskz_permutexvar_epi32(0xffff, turned, bytes);
        }
    }
    // The words of 16 of them.
    template <int Vector>
    Vec<u32> words() const {
        __m512i even, odd;
        if constexpr (Vector < 2) {
            even = _mm512_unpacklo_epi8(channel[0], channel[1]);
            odd = _mm512_unpacklo_epi8(channel[2], channel[3]);
        } else {
            even = _mm512_unpackhi_epi8(channel[0], channel[1]);
            odd = _mm512_unpackhi_epi8(channel[2], channel[3]);
        }
        return reinterpret_cast<Vec<u32> >(Vector % 2 ? _mm512_unpackhi_epi16(even, odd)
                                                      : _mm512_unpacklo_epi16(even, odd));
    }
};

// Of 64 places so many.
inline __mmask64 first_64(index_t count) {
    return _bzhi_u64(~0ull, static_cast<unsigned>(count < 0 ? 0 : count < 64 ? count : 64));
}

// -- filters: [16 output channels][64 channels][tap] of tiles

inline index_t elements(const Work& shape) {
    const index_t words = chunks_of(shape) * shape.kh * shape.kw * tile_bytes / word_bytes;
    return shape.cg ? ceil_div(words, shape.cg * tile_rows) : 0;
}

// The words of a filter's `count` channels from `w` on for one tap, of `lanes` output channels, which packed filters have side by
// side: word k. From one channel to the next are `apart` elements.
inline Vec<u32> filter_word(const u32* w, index_t apart, index_t k, index_t count) {
    Vec<u32> channel[in_word] = {};
    for (int c = 0; c < in_word; ++c) {
        if (in_word * k + c < count) channel[c] = load(w + (in_word * k + c) * apart);
    }
    return word_of<in_word>(channel);
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t count, void* to) {
    const u32* w = static_cast<const u32*>(packed);
    const index_t taps = shape.kh * shape.kw;
    u32* tile = static_cast<u32*>(to) + c / depth * taps * tile_bytes / word_bytes;
    for (index_t tap = 0; tap < taps; ++tap, w += tile_rows, tile += tile_bytes / word_bytes) {
        Vec<u32> words[tile_rows];
        for (index_t k = 0; k < tile_rows; ++k) words[k] = filter_word(w, taps * tile_rows, k, count);
        transpose<u32>(words);
        for (index_t k = 0; k < tile_rows; ++k) store(tile + k * tile_rows, words[k]);
    }
}

// The same of filters of bytes as they lie.
inline void transform_bytes(const Work& shape, const void* given, index_t filters, index_t apart, index_t c,
                            index_t count, void* to) {
    const u8* w = static_cast<const u8*>(given);
    const index_t taps = shape.kh * shape.kw;
    u8* tile = static_cast<u8*>(to) + c / depth * taps * tile_bytes;
    for (index_t row = 0; row < tile_rows; ++row, w = offset_by(w, apart), tile += row_bytes) {
        // Missing output channels are zeros.
        const index_t channels = row < filters ? count : 0;
        if (taps == 1) {
            _mm512_storeu_si512(tile, _mm512_maskz_loadu_epi8(first_64(channels), w));
            continue;
        }
        for (index_t tap = 0; tap < taps; tap += tile_rows) {
            Vec<u32> words[chunk_words];
#pragma GCC unroll 16
            for (int k = 0; k < chunk_words; ++k) {
                Fours fours;
                fours.load<1>(offset_by(w, k * in_word * taps + tap), taps, channels - k * in_word,
                              first_64(taps - tap) & 0xffff);
                words[k] = fours.words<0>();
            }
            transpose<u32>(words);
#pragma GCC unroll 16
            for (int k = 0; k < tile_rows; ++k) {
                if (tap + k < taps) store(reinterpret_cast<u32*>(tile + (tap + k) * tile_bytes), words[k]);
            }
        }
    }
}

constexpr Packing packing = {in_word, 1, 2 * tile_bytes};

// Samples, and where taps are met.
inline index_t scratch_bytes(const Work& shape) {
    return aside + Samples(shape, packing).most_bytes(shape) + Taps::bytes(shape);
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T, class X>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    if (sizeof(X) == 2) return {};
    k.packing = tile_rows;
    k.transform = {elements, transform_filter, depth, transform_bytes};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    k.over_edge = zeros_as_samples;
    return k;
}

// Sums of M x N tiles in registers, of filters and samples with signs or without.
template <int M, int N, bool SignW, bool SignX, class Unit>
struct ByteBlock {
    static constexpr int shares = 1, tiles = M * N, times_beside = 1;
    Unit& unit;
    int since_awake = 0;  // additions

    template <class Beside>
    [[gnu::always_inline]] void add(const Factor& w, const Factor& x, Beside beside) {
        // One product is soon done: now and then is enough.
        if (++since_awake % 8 == 0) unit.stay_awake();
        unit.template load_tile<4>(w.first, w.row);
        if constexpr (M > 1) unit.template load_tile<5>(w.first + w.tile, w.row);
        unit.template load_tile<6>(x.first, x.row);
        beside();
        multiply<0, 4, 6>();
        if constexpr (M > 1) multiply<1, 5, 6>();
        if constexpr (N > 1) {
            unit.template load_tile<7>(x.first + x.tile, x.row);
            multiply<M, 4, 7>();
            if constexpr (M > 1) multiply<M + 1, 5, 7>();
        }
    }

  private:
    template <int Sum, int A, int B>
    void multiply() {
        unit.template multiply_bytes<Sum, A, B, SignW, SignX>();
    }
};

template <bool SignW, bool SignX>
struct Bytes {
    using Sum = u32;
    template <int M, int N, class Unit>
    using Sums = ByteBlock<M, N, SignW, SignX, Unit>;
    static constexpr index_t filter_parts = 1;
};

// Those of 16 places that there are.
inline void store_words(u32* to, Vec<u32> words, index_t places) {
    store_first(to, words, places < tile_rows ? places : index_t(tile_rows));
}

// One row of words. The next word's samples lie on other pages, where processors don't look ahead: they are fetched on request.
template <int Step>
[[gnu::always_inline]] inline void take_bytes(const Work& t, const Samples& s, const u8* from,
                                              index_t channels, index_t first, index_t end, bool fetches,
                                              u8* to) {
    for (index_t k = 0; fetches && k < Step * s.across.places; k += line_bytes) {
        for (index_t c = in_word; c < 2 * in_word; ++c) fetch_line<0, 2>(from, c * t.xc + k);
    }
    u32* row = reinterpret_cast<u32*>(to);
    for (index_t left = s.across.places; left > 0; left -= 64, row += 64, first -= 64, end -= 64) {
        Fours fours;
        fours.load<Step>(from, t.xc, channels, first_64(end) & ~first_64(first));
        from = offset_by(from, Step * 64);
        store_words(row, fours.words<0>(), left);
        if (left > 16) store_words(row + 16, fours.words<1>(), left - 16);
        if (left > 32) store_words(row + 32, fours.words<2>(), left - 32);
        if (left > 48) store_words(row + 48, fours.words<3>(), left - 48);
    }
}
template <int Step>
void take_bytes(const Work& t, const Samples& s, const Taps& taps, const u8* x, index_t count, u8* to) {
    take(t, s, taps.existing, x, count, to,
         [&](const u8* from, index_t channels, index_t first, index_t end, bool fetches, u8* row)
             __attribute__((always_inline)) {
                 // Nearly all words are full, and a number that is known needs no tests.
                 if (channels == in_word) {
                     take_bytes<Step>(t, s, from, in_word, first, end, fetches, row);
                 } else {
                     take_bytes<Step>(t, s, from, channels, first, end, fetches, row);
                 }
             });
}

template <int SignW, int SignX, int Hardware, class T>
void images(const Work& t) {
    const Samples s(t, packing);
    u8* room = static_cast<u8*>(t.scratch);
    u8* samples = first_sample<T>(t, s, room);
    Taps taps(t, room + aside + t.n * s.image);
    taps.find(t, s);
    const auto take_pass = [&](index_t n, index_t c, index_t count) {
        const index_t first = n * t.xn + c * t.xc;
        u8* to = samples + n * s.image;
        if (!t.in_place)
            return take_words<in_word>(t, s, taps, static_cast<const u32*>(t.x) + first, count, to);
        // Of bytes signs don't matter yet.
        const u8* x = static_cast<const u8*>(t.x) + first;
        switch (t.xs) {
            case 1: return take_bytes<1>(t, s, taps, x, count, to);
            case 2: return take_bytes<2>(t, s, taps, x, count, to);
            default: return take_words_apart<in_word, 0>(t, s, taps, x, count, to);
        }
    };
    Tiles<Hardware> unit;
    const u8* w = static_cast<const u8*>(t.transformed);
    const index_t pack = t.cg * elements(t) * tile_rows * word_bytes;
    in_passes(t, s, take_pass, [&](index_t first, index_t chunks) {
        channels<Bytes<SignW, SignX> >(unit, t, s, {first, chunks, taps, w, pack, samples},
                                       [](index_t) { return true; });
    });
}

template <int Hardware, class T>
void by_signs(const Work& t) {
    if (t.tiling.signed_w) {
        t.tiling.signed_x ? images<1, 1, Hardware, T>(t) : images<1, 0, Hardware, T>(t);
    } else {
        t.tiling.signed_x ? images<0, 1, Hardware, T>(t) : images<0, 0, Hardware, T>(t);
    }
}

template <class T>
void work(const Work& t) {
    t.tiling.emulated ? by_signs<0, T>(t) : by_signs<1, T>(t);
}

#endif
