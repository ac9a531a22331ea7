// Builds on: packed.
// Idea: a processor's unit for products of matrices. It multiplies bfloat16, of 8 bits, but sums float32: a sample and a
//       tap, of 24 bits, are split into three parts each, and of the nine products of parts as few are summed as the
//       contract allows, three for long sums and six for short ones (Henry, Tang and Heinecke 2019). A tile of filters,
//       16 output channels x 32 channels, meets one of samples, 32 channels x 16 neighbouring outputs, for every tap.
//       Images whose magnitudes don't allow exact parts are left to packed.
// Variants: zeros around an image, under filters of 3 x 3 to 5 x 5, are split with the samples, from where these lie. With a stride samples
//       are parted as they are split, so that those of neighbouring outputs are neighbours. Many channels meet the filters in several
//       passes, between which sums wait among the results. Outputs of a block are stored beside the products of the next.
// Step: half of packed's time or less, from 64 to 64 and from 256 to 256 channels (docs/cpu-speed.md, Steps).
// Limit: the unit: 16 cycles for 8192 products of parts, 512 a cycle where vectors make 32 products of floats; and tiles that neither channels nor outputs fill.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "grids.h"
#include "split.h"
#include "tiled.h"

// Channels of a tile, pairs of which are a word.
constexpr index_t depth = 2 * chunk_words;

inline index_t chunks_of(const Work& t) { return ceil_div(t.cg, depth); }

// -- filters: [16 output channels][32 channels][tap][part] of tiles, then the magnitudes of each 32 channels

inline index_t filter_tiles(const Work& t) {
    return chunks_of(t) * t.kh * t.kw * parts_of_a(t.tiling.products);
}

inline index_t elements(const Work& shape) {
    const index_t floats = filter_tiles(shape) * tile_bytes / 4 + ceil_div(2 * chunks_of(shape), 16) * 16;
    return shape.cg ? ceil_div(floats, shape.cg * tile_rows) : 0;
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t count, void* to) {
    const float* w = static_cast<const float*>(packed);
    const index_t taps = shape.kh * shape.kw, parts = parts_of_a(shape.tiling.products);
    u8* tile = static_cast<u8*>(to) + c / depth * taps * parts * tile_bytes;
    Range range;
    for (index_t tap = 0; tap < taps; ++tap) {
        Vec<u32> pairs[3][tile_rows];
        for (index_t k = 0; k < tile_rows; ++k) {
            const float* first = w + (2 * k * taps + tap) * tile_rows;
            const Vec<float> even = 2 * k < count ? load(first) : Vec<float>{};
            const Vec<float> odd = 2 * k + 1 < count ? load(first + taps * tile_rows) : Vec<float>{};
            range.meet(even);
            range.meet(odd);
            Vec<u32> part[3];
            split_pairs<3>(even, odd, part);
            for (int s = 0; s < 3; ++s) pairs[s][k] = part[s];
        }
        for (index_t s = 0; s < parts; ++s, tile += tile_bytes) {
            transpose<u32>(pairs[s]);
            for (index_t k = 0; k < tile_rows; ++k)
                store(reinterpret_cast<u32*>(tile + k * row_bytes), pairs[s][k]);
        }
    }
    float* magnitudes = static_cast<float*>(to) + filter_tiles(shape) * tile_bytes / 4 + c / depth * 2;
    magnitudes[0] = range.least();
    magnitudes[1] = range.most();
}

// -- samples

// An image's magnitudes so far, and whether they allow exact parts.
struct Image {
    Range range;
    bool exact;
};

inline Packing packing_of(const Work& t) {
    return {2, parts_of_b(t.tiling.products), 2 * tile_bytes * parts_of_a(t.tiling.products)};
}

// Images, samples, and where taps are met.
inline index_t scratch_bytes(const Work& shape) {
    return shape.n * index_t(sizeof(Image)) + aside + Samples(shape, packing_of(shape)).most_bytes(shape) +
           Taps::bytes(shape);
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = tile_rows;
    k.transform = {elements, transform_filter, depth};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    // As packed takes them, to which some images are left.
    k.over_edge = {3, 5, 2, false, 0, 2, true};
    k.over_edge.dilated = true;
    return k;
}

// Those of a mask, `step` elements apart; the other lanes are zeros.
inline Vec<float> load_existing(const float* p, index_t step, __mmask16 mask) {
    if (step == 1) return _mm512_maskz_loadu_ps(mask, p);
    if (step == 2) {
        const unsigned every_other_one = _pdep_u32(mask, 0x55555555u);
        return every_other<0, float>(_mm512_maskz_loadu_ps(__mmask16(every_other_one), p),
                                     _mm512_maskz_loadu_ps(__mmask16(every_other_one >> 16), p + 16));
    }
    float samples[16] = {};
    for (index_t k = 0; k < 16; ++k) {
        if (mask >> k & 1) samples[k] = p[k * step];
    }
    return load(samples);
}

// One row of a pair of channels, or of one. The next pair's lie on other pages, where processors don't look ahead: they are fetched on request.
template <int Parts>
[[gnu::always_inline]] inline void take_row(const Work& t, const Samples& s, const float* from, bool second,
                                            index_t first, index_t end, bool fetches, u8* to, Range& range) {
    constexpr index_t line = line_bytes / index_t(sizeof(float));
    const index_t lines = t.xs < 4 ? t.xs : 4;
    for (index_t j = 0; j < s.across.places; j += 16) {
        const __mmask16 mask = first_places(end - j) & ~first_places(first - j);
        const float* at = elsewhere(from + j * t.xs);
        for (index_t k = 0; fetches && k < lines; ++k) {
            fetch<0, 2, 1, 1>(at, 0, 2 * t.xc + k * line);
            fetch<0, 2, 1, 1>(at, 0, 3 * t.xc + k * line);
        }
        const Vec<float> even = load_existing(at, t.xs, mask);
        const Vec<float> odd = load_existing(at + (second ? t.xc : 0), t.xs, second ? mask : __mmask16(0));
        range.meet(even);
        range.meet(odd);
        Vec<u32> part[Parts];
        split_pairs<Parts>(even, odd, part);
#pragma GCC unroll 3
        for (int k = 0; k < Parts; ++k)
            _mm512_mask_storeu_epi32(to + k * s.part + j * word_bytes, first_places(s.across.places - j),
                                     reinterpret_cast<__m512i>(part[k]));
    }
}

template <int Products>
struct Floats {
    using Sum = float;
    template <int M, int N, class Unit>
    using Sums = Block<M, N, Products, Unit>;
    static constexpr index_t filter_parts = parts_of_a(Products);
};

template <int Products, int Hardware, class T>
void images(const Work& t) {
    const Samples s(t, packing_of(t));
    const float* x = static_cast<const float*>(t.x);
    const u8* w = static_cast<const u8*>(t.transformed);
    const index_t pack = t.cg * elements(t) * tile_rows * 4;
    Range filters;
    for (index_t o = 0; o < t.oc; o += tile_rows) {
        const u8* behind = w + o / tile_rows * pack + filter_tiles(t) * tile_bytes;
        const float* magnitudes = reinterpret_cast<const float*>(behind);
        for (index_t k = 0; k < chunks_of(t); ++k) filters.meet(magnitudes[2 * k], magnitudes[2 * k + 1]);
    }
    Image* images = static_cast<Image*>(t.scratch);
    for (index_t n = 0; n < t.n; ++n) images[n] = {Range(), true};
    u8* room = reinterpret_cast<u8*>(images + t.n);
    u8* samples = first_sample<T>(t, s, room);
    Taps taps(t, room + aside + t.n * s.image);
    taps.find(t, s);
    const auto take_pass = [&](index_t n, index_t c, index_t count) {
        if (!images[n].exact) return;
        Range range = images[n].range;
        take(t, s, taps.existing, x + n * t.xn + c * t.xc, count, samples + n * s.image,
             [&](const float* from, index_t channels, index_t first, index_t end, bool fetches, u8* to)
                 __attribute__((always_inline)) {
                     take_row<parts_of_b(Products)>(t, s, from, channels > 1, first, end, fetches, to, range);
                 });
        images[n] = {range, exact(range, filters, t.cg * t.kh * t.kw)};
    };
    Tiles<Hardware> unit;
    in_passes(t, s, take_pass, [&](index_t first, index_t chunks) {
        channels<Floats<Products> >(unit, t, s, {first, chunks, taps, w, pack, samples},
                                    [&](index_t n) { return images[n].exact; });
    });
    for (index_t n = 0; n < t.n; ++n) {
        if (images[n].exact) continue;
        Work image = t;
        image.n = 1;
        image.x = x + n * t.xn;
        image.y = static_cast<float*>(t.y) + n * t.yn;
        // What is there is this rung's, and as large as that asks for.
        image.scratch = nullptr;
        t.otherwise(image);
    }
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
