// Small integers of neighbouring channels as words (grids.h): fours of 8 bits, or pairs of 16. Samples come as they are, or gathered, as
// filters are packed, in the type of sums, of 32 bits. Included after simd.h.

#include "grids.h"

// Kernels over words have one for each type of samples that lie in place.
#define CONVPAR_INTEGERS

// What kernels over words say of zeros around an image, which are laid out with its samples: any are taken.
constexpr OverEdge zeros_as_samples = [] {
    constexpr index_t any = index_t(1) << 40;
    OverEdge taken{1, any, any, true, 0, any};
    taken.dilated = true;
    return taken;
}();

// Of `Channels` vectors the lower bits of each, side by side in every lane.
template <int Channels>
inline Vec<u32> word_of(const Vec<u32> (&channel)[Channels]) {
    constexpr int bits = 32 / Channels;
    constexpr u32 lower = (u32(1) << bits) - 1;
    Vec<u32> word = channel[Channels - 1] << (32 - bits);
#pragma GCC unroll 4
    for (int k = 0; k < Channels - 1; ++k) word |= (channel[k] & lower) << (bits * k);
    return word;
}

// A vector of neighbouring samples, with their signs. With AVX-512 others than of 32 bits are loaded under a mask, below.
template <class X>
inline Vec<u32> widened(const X* p) {
    if constexpr (sizeof(X) == 4) {
        return load(p);
    } else {
#ifdef __AVX2__
        const __m128i* some = reinterpret_cast<const __m128i*>(p);
        if constexpr (sizeof(X) == 2)
            return reinterpret_cast<Vec<u32>>(_mm256_cvtepi16_epi32(_mm_loadu_si128(some)));
        if constexpr (std::is_signed_v<X>)
            return reinterpret_cast<Vec<u32>>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(some)));
        return reinterpret_cast<Vec<u32>>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(some)));
#else
        u32 samples[lanes<u32>];
        for (int k = 0; k < lanes<u32>; ++k) samples[k] = static_cast<u32>(i32(p[k]));
        return load(samples);
#endif
    }
}

// Lanes from `first` to `end`.
struct LaneRange {
    index_t first, end;
    LaneRange(index_t first_, index_t end_)
        : first(first_ < 0 ? 0 : first_), end(end_ < lanes<u32> ? end_ : index_t(lanes<u32>)) {}
    bool all() const { return first == 0 && end == lanes<u32>; }
#ifdef CONVPAR_AVX512
    __mmask16 mask() const { return static_cast<__mmask16>(end > first ? (1u << end) - (1u << first) : 0); }
#endif
};

// Samples of a range of lanes, `step` elements apart; the others are zeros. Step: the same if that is 1 or 2, else 0.
template <int Step, class X>
inline Vec<u32> widened(const X* p, index_t step, const LaneRange& range) {
#ifdef CONVPAR_AVX512
    if constexpr (Step > 0 && sizeof(X) < 4) {
        constexpr int spare = 32 - 8 * int(sizeof(X));
        const __mmask16 mask = range.mask();
        const unsigned every_other = Step == 2 ? _pdep_u32(mask, 0x55555555u) : 0;
        // By masks even where all lanes are meant: else compilers warn of what is overwritten.
        __m512i wide;
        if constexpr (sizeof(X) == 1 && Step == 1)
            wide = _mm512_maskz_cvtepu8_epi32(mask, _mm_maskz_loadu_epi8(mask, p));
        if constexpr (sizeof(X) == 1 && Step == 2)
            wide = _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi8(every_other, p));
        if constexpr (sizeof(X) == 2 && Step == 1)
            wide = _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, p));
        if constexpr (sizeof(X) == 2 && Step == 2) wide = _mm512_maskz_loadu_epi16(every_other, p);
        if constexpr (std::is_signed_v<X>)
            return reinterpret_cast<Vec<u32>>(reinterpret_cast<Vec<i32>>(wide) << spare >> spare);
        return reinterpret_cast<Vec<u32>>(wide);
    } else
#endif
    {
        if constexpr (Step == 1) {
            if (range.all()) return widened(p);
        }
        u32 samples[lanes<u32>] = {};
        for (index_t k = range.first; k < range.end; ++k) samples[k] = static_cast<u32>(i32(p[k * step]));
        return load(samples);
    }
}

// One row of words of so many channels, whose places from `first` to `end` exist.
template <int Channels, int Step, class X>
[[gnu::always_inline]] inline void take_row(const Work& t, const Samples& s, const X* from, index_t channels,
                                            index_t first, index_t end, u8* to) {
    for (index_t j = 0; j < s.across.places; j += lanes<u32>) {
        const LaneRange range(first - j, end - j);
        Vec<u32> channel[Channels] = {};
#pragma GCC unroll 4
        for (int k = 0; k < Channels; ++k) {
            if (k < channels) channel[k] = widened<Step>(elsewhere(from + k * t.xc + j * t.xs), t.xs, range);
        }
        const index_t left = s.across.places - j;
        store_first(reinterpret_cast<u32*>(to) + j, word_of<Channels>(channel),
                    left < lanes<u32> ? left : index_t(lanes<u32>));
    }
}

// `count` channels of an image from `x` on.
template <int Channels, int Step, class X>
void take_words_apart(const Work& t, const Samples& s, const Taps& taps, const X* x, index_t count, u8* to) {
    take(t, s, taps.existing, x, count, to,
         [&](const X* from, index_t channels, index_t first, index_t end, bool, u8* row)
             __attribute__((always_inline)) {
                 // Nearly all words are full, and a number that is known needs no tests.
                 if (channels == Channels) {
                     take_row<Channels, Step>(t, s, from, Channels, first, end, row);
                 } else {
                     take_row<Channels, Step>(t, s, from, channels, first, end, row);
                 }
             });
}
template <int Channels, class X>
void take_words(const Work& t, const Samples& s, const Taps& taps, const X* x, index_t count, u8* to) {
    switch (t.xs) {
        case 1: return take_words_apart<Channels, 1>(t, s, taps, x, count, to);
        case 2: return take_words_apart<Channels, 2>(t, s, taps, x, count, to);
        default: return take_words_apart<Channels, 0>(t, s, taps, x, count, to);
    }
}
