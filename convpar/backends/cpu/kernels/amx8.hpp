// Builds on: pairs.
// Idea: a processor's unit for products of matrices takes bytes as they are, with a sign or without, and sums 32 bits of them: what floats need
//       parts for (amx), and a rounding for every sum, is exact here with one product. Samples and filters of four channels are a word: a tile of
//       filters, 16 output channels x 64 channels, meets one of samples, 64 channels x 16 neighbouring outputs, for every tap.
// Step: less than a fifth of pairs' time, from 64 to 64 and from 256 to 256 channels (docs/cpu-speed.md, Steps).
// Limit: what surrounds the unit's products, of which it makes 1024 a cycle: filters that become words, samples that are laid out, and results,
//        four times as large as these.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "grids.h"
#include "tiled.h"
#include "words.h"

// Channels of a word, and of a tile.
constexpr int in_word = 4;
constexpr index_t depth = in_word * chunk_words;

inline index_t chunks_of(const Work& t) { return ceil_div(t.cg, depth); }

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

inline Packing packing_of(const Work&) { return {in_word, 1, 2 * tile_bytes}; }

// Samples, and where taps are met.
inline index_t scratch_bytes(const Work& shape) {
    return Samples(shape, packing_of(shape)).most_bytes(shape) + Taps::bytes(shape);
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T, class X>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    if (sizeof(X) == 2) return {};
    k.packing = tile_rows;
    k.transform = {elements, transform_filter, depth};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    k.over_edge = zeros_as_samples;
    return k;
}

// Sums of M x N tiles in registers, of filters and samples with signs or without.
template <int M, int N, bool SignW, bool SignX, class Unit>
struct ByteBlock {
    static constexpr int shares = 1, tiles = M * N;
    Unit& unit;
    int since_awake = 0;  // additions

    void add(const Factor& w, const Factor& x) {
        // One product is soon done: now and then is enough.
        if (++since_awake % 8 == 0) unit.stay_awake();
        unit.template load_tile<4>(w.first, w.row);
        if constexpr (M > 1) unit.template load_tile<5>(w.first + w.tile, w.row);
        unit.template load_tile<6>(x.first, x.row);
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

template <int SignW, int SignX, int Hardware, class T>
void images(const Work& t) {
    const Samples s(t, packing_of(t));
    u8* samples = static_cast<u8*>(t.scratch);
    Taps taps(t, samples + t.n * s.image);
    taps.find(t, s);
    const auto take_pass = [&](index_t n, index_t c, index_t count) {
        // Of bytes signs don't matter yet.
        const index_t first = n * t.xn + c * t.xc;
        u8* to = samples + n * s.image;
        t.in_place ? take_words<in_word>(t, s, taps, static_cast<const u8*>(t.x) + first, count, to)
                   : take_words<in_word>(t, s, taps, static_cast<const u32*>(t.x) + first, count, to);
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
