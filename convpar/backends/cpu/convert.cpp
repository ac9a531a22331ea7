// Compiled once for each ISA level, for the compiler to vectorise.
#include "convert.h"

#include <limits>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace convpar::converters::CONVPAR_ISA {
// Two levels must never share a function, or the linker may keep the one this processor can't run.
namespace {

#include "types.h"

#include "simd.h"

#include "narrow.h"

struct bf16 {
    u16 bits;
};

inline float widen(bf16 h) {
    const u32 bits = u32(h.bits) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// Rounds the last 16 bits of a float's pattern away, to nearest, ties to even.
inline bf16 to_bf16(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {u16((bits >> 16) | 0x40u)};
    return {u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Unsigned integers as wide as a sum.
template <class Sum>
using Bits = std::conditional_t<sizeof(Sum) == 4, u32, u64>;

// The pattern of the binary16 nearest to a binary32 or binary64 T, ties to even, in one rounding. Numbers and patterns are single ones
// or vectors.
template <class T, class Pattern, class Number>
inline Pattern half_bits(Number value) {
    using Word = Bits<T>;
    constexpr int digits = std::numeric_limits<T>::digits - 1, dropped = digits - 10;
    constexpr Word one = 1, bias = std::numeric_limits<T>::max_exponent - 1, half_bias = 15;
    constexpr Word least_normal = (bias - half_bias + 1) << digits, end = (bias + half_bias + 1) << digits;
    constexpr Word infinite = (2 * bias + 1) << digits;
    Pattern bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const Pattern magnitude = bits & ~Word(0) >> 1, none{};
    // A carry moves on to the next exponent by itself, and from the largest to infinity.
    const Pattern odd = (magnitude >> dropped) & one;
    const Pattern normal =
        (magnitude - ((bias - half_bias) << digits) + ((one << (dropped - 1)) - 1) + odd) >> dropped;
    // A whole number of 2**-24; adding a large power of two rounds to it.
    constexpr T shift = T(one << digits) * T(0x1p-24);
    Word shift_bits;
    __builtin_memcpy(&shift_bits, &shift, sizeof shift_bits);
    Number rounded;
    __builtin_memcpy(&rounded, &magnitude, sizeof rounded);
    rounded += shift;
    Pattern subnormal;
    __builtin_memcpy(&subnormal, &rounded, sizeof subnormal);
    subnormal -= shift_bits;
    const Pattern beyond = magnitude > infinite ? none + Word(0x7e00) : none + Word(0x7c00);
    const Pattern half = magnitude < least_normal ? subnormal : magnitude < end ? normal : beyond;
    return ((bits >> (8 * sizeof(T) - 16)) & Word(0x8000)) | half;
}
template <class T>
inline f16 to_f16(T value) {
    return {u16(half_bits<T, Bits<T>>(value))};
}

template <class T>
struct is_complex : std::false_type {};
template <class T>
struct is_complex<complex<T>> : std::true_type {};

template <class T>
inline T read(const char* p, bool swapped) {
    T v;
    if (!swapped || sizeof(T) == 1) {
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    constexpr int part = is_complex<T>::value ? sizeof(T) / 2 : sizeof(T);
    char turned[sizeof(T)];
    for (int i = 0; i < int(sizeof(T)); ++i) turned[i] = p[i / part * part + (part - 1 - i % part)];
    __builtin_memcpy(&v, turned, sizeof v);
    return v;
}

template <class T>
inline void write(char* p, T v, bool swapped) {
    if (swapped && sizeof(T) > 1) v = read<T>(reinterpret_cast<const char*>(&v), true);
    __builtin_memcpy(p, &v, sizeof v);
}

template <class From>
inline From plain(From v) {
    return v;
}
inline float plain(f16 v) { return widen(v); }
inline float plain(bf16 v) { return widen(v); }

// Rows of tiles are short: a call of memcpy would take longer than the copy.
inline void copy(const char* from, index_t size, char* to) {
    index_t i = 0;
    for (; i + 64 <= size; i += 64) {
        // The processor reads ahead by itself, but not into the next page. Two pages: a plane is often a few, and the next follows it.
        fetch_line(from + i, 8192);
        __builtin_memcpy(to + i, from + i, 64);
    }
#define LEFT(BYTES)                                \
    if (size & BYTES) {                            \
        __builtin_memcpy(to + i, from + i, BYTES); \
        i += BYTES;                                \
    }
    LEFT(32)
    LEFT(16)
    LEFT(8)
    LEFT(4)
    LEFT(2)
    LEFT(1)
#undef LEFT
}

// Calls `take` with the first of every N neighbours in memory; the last N reach back over what is done. Returns how many were taken: all, or
// none of fewer than N.
template <index_t N, class Take>
inline index_t whole_vectors(index_t count, Take take) {
    if (count < N) return 0;
    for (index_t i = 0; i < count - N; i += N) take(i);
    take(count - N);
    return count;
}

// binary16 to binary32 and back, with one rounding, to nearest, ties to even: so many at a time, and fewer.
#if defined(CONVPAR_AVX512)
constexpr index_t halves = 16;
inline void widen_halves(const char* from, float* to) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    _mm512_storeu_ps(to, _mm512_maskz_cvtph_ps(all16, half));
}
inline void narrow_halves(const float* from, char* to) {
    const __m512 wide = _mm512_loadu_ps(from);
    const __m256i half = _mm512_maskz_cvtps_ph(all16, wide, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
}
// By instructions of all 512 bits, which no further set is needed for.
inline void widen_few(const char* from, index_t count, float* to) {
    const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
    const __m256i half = _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(some, from));
    _mm512_mask_storeu_ps(to, some, _mm512_maskz_cvtph_ps(some, half));
}
inline void narrow_few(const float* from, index_t count, char* to) {
    const __mmask16 some = static_cast<__mmask16>((1u << count) - 1);
    const __m512 wide = _mm512_maskz_loadu_ps(some, from);
    const __m256i half = _mm512_maskz_cvtps_ph(some, wide, _MM_FROUND_TO_NEAREST_INT);
    _mm512_mask_storeu_epi16(to, some, _mm512_castsi256_si512(half));
}
#elif defined(__F16C__)
constexpr index_t halves = 8;
inline void widen_halves(const char* from, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void narrow_halves(const float* from, char* to) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
}
inline void widen_few(const char* from, index_t count, float* to) {
    for (index_t i = 0; i < count; ++i) to[i] = _cvtsh_ss(read<u16>(from + 2 * i, false));
}
inline void narrow_few(const float* from, index_t count, char* to) {
    for (index_t i = 0; i < count; ++i)
        write(to + 2 * i, u16(_cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT)), false);
}
#else
#ifdef __aarch64__
constexpr index_t halves = 4;
inline void widen_halves(const char* from, float* to) {
    float16x4_t half;
    __builtin_memcpy(&half, from, sizeof half);
    vst1q_f32(to, vcvt_f32_f16(half));
}
inline void narrow_halves(const float* from, char* to) {
    const float16x4_t half = vcvt_f16_f32(vld1q_f32(from));
    __builtin_memcpy(to, &half, sizeof half);
}
#else
constexpr index_t halves = lanes<float>;
typedef u16 Halves __attribute__((vector_size(2 * halves)));
inline void widen_halves(const char* from, float* to) {
    Halves half;
    __builtin_memcpy(&half, from, sizeof half);
    store(to, widened<Vec<float>>(__builtin_convertvector(half, Vec<u32>)));
}
inline void narrow_halves(const float* from, char* to) {
    const Halves half = __builtin_convertvector((half_bits<float, Vec<u32>>(load(from))), Halves);
    __builtin_memcpy(to, &half, sizeof half);
}
#endif
inline void widen_few(const char* from, index_t count, float* to) {
    for (index_t i = 0; i < count; ++i) to[i] = widen(read<f16>(from + 2 * i, false));
}
inline void narrow_few(const float* from, index_t count, char* to) {
    for (index_t i = 0; i < count; ++i) write(to + 2 * i, to_f16(from[i]), false);
}
#endif

// Neighbours in memory.
inline void widen_row(const char* from, index_t count, float* to) {
    if (!whole_vectors<halves>(count, [&](index_t i) { widen_halves(from + 2 * i, to + i); }))
        widen_few(from, count, to);
}
inline void narrow_row(const float* from, index_t count, char* to) {
    if (!whole_vectors<halves>(count, [&](index_t i) { narrow_halves(from + i, to + 2 * i); }))
        narrow_few(from, count, to);
}

#ifdef CONVPAR_AVX512
// Integers of one or two bytes, as many as there are sums in a vector.
template <class From>
constexpr bool widens = std::is_integral_v<From> && sizeof(From) <= 2;
template <class From, class Sum>
inline void widen_vector(const char* from, Sum* to) {
    __m512i whole;
    if constexpr (sizeof(From) == 1) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        whole = std::is_signed_v<From> ? _mm512_maskz_cvtepi8_epi32(all16, some)
                                       : _mm512_maskz_cvtepu8_epi32(all16, some);
    } else {
        const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        whole = std::is_signed_v<From> ? _mm512_maskz_cvtepi16_epi32(all16, some)
                                       : _mm512_maskz_cvtepu16_epi32(all16, some);
    }
    if constexpr (std::is_same_v<Sum, float>) {
        _mm512_storeu_ps(to, _mm512_maskz_cvtepi32_ps(all16, whole));
    } else {
        _mm512_storeu_si512(to, whole);
    }
}
#endif

// Neighbours in memory.
template <class From, class Sum>
inline void gather_row(const char* from, index_t count, Sum* y) {
    if constexpr (std::is_same_v<From, Sum>) {
        return copy(from, count * sizeof(Sum), reinterpret_cast<char*>(y));
    }
    if constexpr (std::is_same_v<From, f16> && std::is_same_v<Sum, float>) return widen_row(from, count, y);
    index_t i = 0;
#ifdef CONVPAR_AVX512
    if constexpr (widens<From> && sizeof(Sum) == 4) {
        i = whole_vectors<lanes<Sum>>(count, [&](index_t k) {
            const char* next = from + k * index_t(sizeof(From));
            // Too short a row to be read ahead: its place in the next tile to the right.
            fetch_line(next, count * index_t(sizeof(From)));
            widen_vector<From>(next, y + k);
        });
    }
#endif
    for (; i < count; ++i) y[i] = To<Sum>::from(plain(read<From>(from + i * sizeof(From), false)));
}

template <class From, class Sum>
inline void gather_row(const char* from, index_t stride, bool swapped, index_t count, Sum* y) {
    for (index_t i = 0; i < count; ++i) y[i] = To<Sum>::from(plain(read<From>(from + i * stride, swapped)));
}

// Elements that are brought together before they are converted, or converted before they are spread: neighbours are converted as
// vectors.
constexpr index_t together = 256;

// Every so many bytes.
template <class From, class Sum>
inline void gather_apart(const char* from, index_t stride, index_t count, Sum* y) {
    if constexpr (std::is_same_v<From, Sum>) {
        gather_row<From>(from, stride, false, count, y);
    } else {
        char near[together * sizeof(From)];
        for (index_t i = 0; i < count; i += together) {
            const index_t taken = count - i < together ? count - i : together;
            for (index_t k = 0; k < taken; ++k)
                __builtin_memcpy(near + k * sizeof(From), from + (i + k) * stride, sizeof(From));
            gather_row<From>(near, taken, y + i);
        }
    }
}

template <class From, class Sum>
void gather(const Source& from, index_t rows, index_t count, char* to, index_t pitch) {
    constexpr index_t size = sizeof(From);
    const char* x = from.first;
    for (index_t i = 0; i < rows; ++i, x += from.row, to += pitch) {
        Sum* y = reinterpret_cast<Sum*>(to);
        if (from.swapped) {
            gather_row<From>(x, from.element, true, count, y);
        } else if (from.element == size) {
            gather_row<From>(x, count, y);
        } else if (from.element == 2 * size) {
            gather_row<From>(x, 2 * size, false, count, y);
        } else {
            gather_apart<From>(x, from.element, count, y);
        }
    }
}

// The value of `v` in the output type; `fits` becomes false where the rule had to act.
template <class Out, class Sum>
inline Out fit(Sum v, Overflow rule, bool& fits) {
    if constexpr (std::is_same_v<Out, f16>) {
        return to_f16(v);
    } else if constexpr (std::is_same_v<Out, bf16>) {
        return to_bf16(static_cast<float>(v));
    } else if constexpr (is_complex<Out>::value) {
        return To<Out>::from(v);
    } else if constexpr (!std::is_integral_v<Out>) {
        return static_cast<Out>(v);
    } else if constexpr (std::is_integral_v<Sum>) {
        if (rule == WRAP) return static_cast<Out>(v);
        constexpr Out low = std::numeric_limits<Out>::min(), high = std::numeric_limits<Out>::max();
        const bool below = std::is_signed_v<Sum> && v < 0 && (!std::is_signed_v<Out> || i64(v) < i64(low));
        const bool above = v > 0 && u64(v) > u64(high);
        fits = fits && !below && !above;
        return below ? low : above ? high : static_cast<Out>(v);
    } else {
        constexpr Out low = std::numeric_limits<Out>::min(), high = std::numeric_limits<Out>::max();
        // The default rounding mode: to nearest, ties to even.
        const Sum whole = sizeof(Sum) == 4 ? Sum(__builtin_rintf(float(v))) : Sum(__builtin_rint(double(v)));
        // One past the largest integer is a power of two, so a float holds it.
        constexpr Sum end = Sum(u64(1) << (std::numeric_limits<Out>::digits - 1)) * 2;
        if (whole >= Sum(low) && whole < end) return static_cast<Out>(whole);
        fits = false;
        return whole >= end ? high : whole < Sum(low) ? low : Out(0);
    }
}

// Whether `nearest` can do it: every value of Out lies where adding a large power of two leaves no room for a fraction.
template <class Sum, class Out>
constexpr bool rounds_by_shift = std::is_floating_point_v<Sum> && std::is_integral_v<Out> &&
                                 (sizeof(Out) <= 2 || (sizeof(Sum) == 8 && sizeof(Out) <= 4));

// As `fit` without telling what didn't fit; of a vector, since compilers make branches of one sum's extremes.
template <class Out, class Sum>
inline Vec<Bits<Sum>> nearest(Vec<Sum> v) {
    const Vec<Sum> low = broadcast(Sum(std::numeric_limits<Out>::min()));
    const Vec<Sum> high = broadcast(Sum(std::numeric_limits<Out>::max()));
    // As the instructions for extremes have it: the second operand where the first is no number.
    if constexpr (std::numeric_limits<Out>::min() != 0) v = v == v ? v : Vec<Sum>{};
    v = v > low ? v : low;
    v = v < high ? v : high;
    // The last bits of the sum's pattern are now those of the rounded integer.
    return reinterpret_cast<Vec<Bits<Sum>>>(v + (sizeof(Sum) == 4 ? Sum(0x1.8p23) : Sum(0x1.8p52)));
}

#ifdef CONVPAR_AVX512
// A vector of Out, or the first lanes of it, rounded as `nearest` does.
template <class Out>
inline __m512i round_vector(const float* x, __mmask64 some) {
    __m512i whole[packed_together<Out>];
#pragma GCC unroll 4
    for (int k = 0; k < packed_together<Out>; ++k)
        whole[k] = rounded<Out>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> 16 * k), x + 16 * k));
    return packed<Out>(whole);
}

template <class Out>
inline void round_first(const float* x, index_t count, Out* to) {
    store_first(to, reinterpret_cast<Vec<Out>>(round_vector<Out>(x, (__mmask64(1) << count) - 1)), count);
}
#endif

// Neighbours in memory, by `nearest`.
template <class Out, class Sum>
inline void round_row(const Sum* x, index_t count, char* to) {
    index_t i = 0;
#ifdef CONVPAR_AVX512
    if constexpr (std::is_same_v<Sum, float> && packs<Out>) {
        Out* y = reinterpret_cast<Out*>(to);
        for (; i + lanes<Out> <= count; i += lanes<Out>) {
            fetch_line<1>(to, (i + count) * index_t(sizeof(Out)));
            store(y + i, reinterpret_cast<Vec<Out>>(round_vector<Out>(x + i, ~__mmask64(0))));
        }
        if (i < count) round_first(x + i, count - i, y + i);
        return;
    }
#elif defined(__x86_64__)
    if constexpr (std::is_same_v<Sum, float> && packs<Out>) {
        i = whole_vectors<lanes<Out>>(count, [&](index_t first) {
            decltype(rounded<Out>(load(x))) whole[packed_together<Out>];
            for (int k = 0; k < packed_together<Out>; ++k)
                whole[k] = rounded<Out>(load(x + first + k * lanes<Sum>));
            const auto bytes = reinterpret_cast<Vec<u8>>(packed<Out>(whole));
            store(reinterpret_cast<u8*>(to + first * index_t(sizeof(Out))), bytes);
        });
    }
#endif
    constexpr int some = 4 * lanes<Sum>;
    bool ignored = true;
    const auto round_some = [&](index_t first) {
        Bits<Sum> whole[some];
        for (int k = 0; k < some; k += lanes<Sum>) store(whole + k, nearest<Out, Sum>(load(x + first + k)));
        for (int k = 0; k < some; ++k)
            write(to + (first + k) * index_t(sizeof(Out)), static_cast<Out>(whole[k]), false);
    };
    // What vectors of Out took is all; fewer than one of them has are fewer than these, too.
    if (i == 0) i = whole_vectors<some>(count, round_some);
    for (; i < count; ++i) write(to + i * sizeof(Out), fit<Out>(x[i], SATURATE, ignored), false);
}

template <class Sum, class Out>
index_t scatter_row(const char* from, index_t count, char* to, index_t stride, bool swapped, Overflow rule) {
    const Sum* x = reinterpret_cast<const Sum*>(from);
    if (stride == sizeof(Out) && !swapped) {
        if constexpr (rounds_by_shift<Sum, Out>) {
            if (rule != RAISE) {
                round_row<Out>(x, count, to);
                return -1;
            }
        } else if constexpr (std::is_integral_v<Sum> && std::is_integral_v<Out>) {
            if (rule == WRAP) {
                for (index_t i = 0; i < count; ++i)
                    write(to + i * sizeof(Out), static_cast<Out>(x[i]), false);
                return -1;
            }
            if (rule == SATURATE) {
                bool ignored = true;
                for (index_t i = 0; i < count; ++i) {
                    write(to + i * sizeof(Out), fit<Out>(x[i], SATURATE, ignored), false);
                }
                return -1;
            }
        } else if constexpr (std::is_same_v<Sum, Out>) {
            __builtin_memcpy(to, from, count * sizeof(Out));
            return -1;
        } else if constexpr (std::is_same_v<Sum, float> && std::is_same_v<Out, f16>) {
            narrow_row(x, count, to);
            return -1;
        } else if constexpr (!std::is_integral_v<Out>) {
            // No rule acts on these.
            bool ignored = true;
            for (index_t i = 0; i < count; ++i)
                write(to + i * sizeof(Out), fit<Out>(x[i], rule, ignored), false);
            return -1;
        }
    }
    if (stride != sizeof(Out) && !swapped && (rule != RAISE || !std::is_integral_v<Out>)) {
        char near[together * sizeof(Out)];
        for (index_t i = 0; i < count; i += together) {
            const index_t taken = count - i < together ? count - i : together;
            scatter_row<Sum, Out>(reinterpret_cast<const char*>(x + i), taken, near, sizeof(Out), false,
                                  rule);
            for (index_t k = 0; k < taken; ++k)
                __builtin_memcpy(to + (i + k) * stride, near + k * sizeof(Out), sizeof(Out));
        }
        return -1;
    }
    index_t first = -1;
    for (index_t i = 0; i < count; ++i) {
        bool fits = true;
        write(to + i * stride, fit<Out>(x[i], rule, fits), swapped);
        if (!fits && first < 0) first = i;
    }
    return rule == RAISE ? first : -1;
}

template <class Sum, class Out>
index_t scatter(const char* from, index_t pitch, index_t rows, index_t count, const Target& to,
                Overflow rule) {
    index_t first = -1;
    char* y = to.first;
    for (index_t i = 0; i < rows; ++i, from += pitch, y += to.row) {
        const index_t bad = scatter_row<Sum, Out>(from, count, y, to.element, to.swapped, rule);
        if (bad >= 0 && first < 0) first = i * count + bad;
    }
    return first;
}

// By squares of vectors, the last of which reach back over columns that are done.
template <class T>
void pack(const char* from, index_t apart, index_t rows, index_t count, index_t packing, char* to) {
    for (index_t r = 0; r < packing; r += lanes<T>) {
        for (index_t i = 0; i < count; i += lanes<T>) {
            if (i + lanes<T> > count && count >= lanes<T>) i = count - lanes<T>;
            const index_t wide = count < lanes<T> ? count : index_t(lanes<T>);
            Vec<T> square[lanes<T>];
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) {
                square[k] = Vec<T>{};
                if (r + k >= rows) continue;
                const char* row = from + (r + k) * apart + i * index_t(sizeof(T));
                square[k] = load_first(reinterpret_cast<const T*>(row), wide);
            }
            transpose<T>(square);
            T* column = reinterpret_cast<T*>(to) + i * packing + r;
            // Fewer columns side by side than a vector has lanes are followed by others'.
            const index_t filled = packing < lanes<T> ? packing : index_t(lanes<T>);
            for (index_t k = 0; k < wide; ++k, column += packing) store_first(column, square[k], filled);
        }
    }
}

// Channels that are neighbours in memory, as pictures (H, W, C) have them: pixels are loaded as vectors of channels, and squares of
// vectors turned. `high` rows of `wide` sums, `apart` bytes from each other, become `wide` rows of `high`, `to_apart` bytes from
// each other. Whole vectors are loaded, so that what follows a row must be readable.
template <class Sum>
[[gnu::noinline]] void turn_square(const char* from, index_t apart, index_t high, index_t wide, char* to,
                                   index_t to_apart) {
    Vec<Sum> square[lanes<Sum>];
#pragma GCC unroll 16
    for (int k = 0; k < lanes<Sum>; ++k) {
        square[k] = k < high ? load(reinterpret_cast<const Sum*>(from + k * apart)) : Vec<Sum>{};
    }
    transpose<Sum>(square);
#pragma GCC unroll 16
    for (int k = 0; k < lanes<Sum>; ++k) {
        if (k == wide) return;
        Sum* row = reinterpret_cast<Sum*>(to + k * to_apart);
        if (high == lanes<Sum>) {
            store(row, square[k]);
        } else {
            store_first(row, square[k], high);
        }
    }
}

// Pixels of so many channels at most, beside each other, are parted and joined as they are: each plane takes lanes of as many
// vectors as there are channels, and each of those lanes of as many planes.
constexpr int few = 4;

// Adds to `sofar` its lanes from `next`, vector m of pixels of C channels, of which channel c becomes a plane.
template <class T, int C, int c, int m, int... I>
inline Vec<T> take_channel(Vec<T> sofar, Vec<T> next, Numbers<I...>) {
    constexpr int n = lanes<T>;
    return pick<T>(sofar, next,
                   Numbers<((I * C + c) / n == m      ? n + (I * C + c) % n
                            : m == 1 && I * C + c < n ? I * C + c
                                                      : I)...>());
}
template <class T, int C, int c, int... m>
inline Vec<T> take_channel(const Vec<T> (&pixels)[C], Numbers<0, m...>) {
    Vec<T> plane = pixels[0];
    ((plane = take_channel<T, C, c, m>(plane, pixels[m], All<T>())), ...);
    return plane;
}
template <class T, int C, int... c>
inline void part_few(const T* pixels, T* planes, index_t apart, Numbers<c...>) {
    const Vec<T> loaded[C] = {load(pixels + c * lanes<T>)...};
    (store(planes + c * apart, take_channel<T, C, c>(loaded, Numbers<c...>())), ...);
}

// Adds to `sofar`, vector m of pixels of C channels, the lanes of `plane`, which is channel c.
template <class T, int C, int m, int c, int... I>
inline Vec<T> give_channel(Vec<T> sofar, Vec<T> plane, Numbers<I...>) {
    constexpr int n = lanes<T>;
    return pick<T>(sofar, plane,
                   Numbers<((m * n + I) % C == c             ? n + (m * n + I) / C
                            : c == 1 && (m * n + I) % C == 0 ? (m * n + I) / C
                                                             : I)...>());
}
template <class T, int C, int m, int... c>
inline Vec<T> give_channel(const Vec<T> (&planes)[C], Numbers<0, c...>) {
    Vec<T> pixels = planes[0];
    ((pixels = give_channel<T, C, m, c>(pixels, planes[c], All<T>())), ...);
    return pixels;
}
template <class T, int C, int... c>
inline void join_few(const T* planes, index_t apart, T* pixels, Numbers<c...>) {
    const Vec<T> loaded[C] = {load(planes + c * apart)...};
    (store(pixels + c * lanes<T>, give_channel<T, C, c>(loaded, Numbers<c...>())), ...);
}

// A vector of pixels of 2 to `few` channels, no more than lanes.
template <class T>
[[gnu::noinline]] void part_few(index_t channels, const T* pixels, T* planes, index_t apart) {
    if (channels == 2) part_few<T, 2>(pixels, planes, apart, UpTo<2>::type());
    if constexpr (lanes<T> >= few) {
        if (channels == 3) part_few<T, 3>(pixels, planes, apart, UpTo<3>::type());
        if (channels == 4) part_few<T, 4>(pixels, planes, apart, UpTo<4>::type());
    }
}
template <class T>
[[gnu::noinline]] void join_few(index_t channels, const T* planes, index_t apart, T* pixels) {
    if (channels == 2) join_few<T, 2>(planes, apart, pixels, UpTo<2>::type());
    if constexpr (lanes<T> >= few) {
        if (channels == 3) join_few<T, 3>(planes, apart, pixels, UpTo<3>::type());
        if (channels == 4) join_few<T, 4>(planes, apart, pixels, UpTo<4>::type());
    }
}

// Calls `square` with the first of some pixels, the first of some channels, and how many there are of each, no more than lanes. The
// last pixels reach back over what is done.
template <class Sum, class Square>
inline void by_squares(index_t pixels, index_t channels, Square square) {
    constexpr index_t most = lanes<Sum>;
    for (index_t j = 0; j < pixels; j += most) {
        if (j + most > pixels && pixels >= most) j = pixels - most;
        const index_t high = pixels < most ? pixels : most;
        for (index_t c = 0; c < channels; c += most)
            square(j, c, high, channels - c < most ? channels - c : most);
    }
}

// Fetches the channels of the pixels after these: of a line from each, which no processor foresees.
template <int Write>
[[gnu::always_inline]] inline void fetch_next(const char* first, index_t apart, index_t high) {
    for (index_t k = 0; k < high; ++k) fetch_line<Write>(first, (high + k) * apart);
}

// Whether the one's bits are the other's: sums of integers are kept in unsigned types.
template <class A, class B>
constexpr bool alike =
    std::is_same_v<A, B> || (std::is_integral_v<A> && std::is_integral_v<B> && sizeof(A) == sizeof(B));

template <class From, class Sum>
void part(const Source& from, index_t rows, index_t count, index_t channels, char* to, index_t pitch,
          index_t plane) {
    constexpr index_t size = sizeof(From), most = lanes<Sum>;
    // Pixels of no more channels than lanes follow each other, as a rule.
    const bool dense = channels <= most && from.element == channels * size;
    Sum near[most * most + most];
    const char* x = from.first;
    for (index_t i = 0; i < rows; ++i, x += from.row, to += pitch) {
        by_squares<Sum>(count, channels, [&](index_t j, index_t c, index_t high, index_t wide) {
            const char* first = x + j * from.element + c * size;
            char* planes = to + c * plane + j * index_t(sizeof(Sum));
            if (!dense) fetch_next<0>(first, from.element, high);
            if (alike<From, Sum> && wide == most) {
                return turn_square<Sum>(first, from.element, high, wide, planes, plane);
            }
            const index_t apart = dense ? channels : most;
            const bool whole = dense && channels <= few && high == most;
            Sum* const out = reinterpret_cast<Sum*>(planes);
            const index_t planes_apart = plane / index_t(sizeof(Sum));
            if (alike<From, Sum> && whole) {
                return part_few(channels, reinterpret_cast<const Sum*>(first), out, planes_apart);
            }
            if (dense) {
                gather_row<From>(first, high * channels, near);
                if (whole) return part_few(channels, near, out, planes_apart);
            } else {
                for (index_t k = 0; k < high; ++k)
                    gather_row<From>(first + k * from.element, wide, near + k * most);
            }
            turn_square<Sum>(reinterpret_cast<const char*>(near), apart * index_t(sizeof(Sum)), high, wide,
                             planes, plane);
        });
    }
}

template <class Sum, class Out>
void join(const char* from, index_t pitch, index_t plane, index_t rows, index_t count, index_t channels,
          const Target& to, Overflow rule) {
    constexpr index_t size = sizeof(Out), most = lanes<Sum>;
    const bool dense = channels <= most && to.element == channels * size;
    Sum near[most * most + most];
    char* y = to.first;
    for (index_t i = 0; i < rows; ++i, from += pitch, y += to.row) {
        by_squares<Sum>(count, channels, [&](index_t j, index_t c, index_t high, index_t wide) {
            char* first = y + j * to.element + c * size;
            const char* planes = from + c * plane + j * index_t(sizeof(Sum));
            if (!dense) fetch_next<1>(first, to.element, high);
            if (std::is_same_v<Sum, Out> && wide == most) {
                return turn_square<Sum>(planes, plane, wide, high, first, to.element);
            }
            const index_t apart = (dense ? channels : most) * index_t(sizeof(Sum));
            char* rows_of_pixels = reinterpret_cast<char*>(near);
            if (dense && channels <= few && high == most) {
                const bool same = std::is_same_v<Sum, Out>;
                join_few(channels, reinterpret_cast<const Sum*>(planes), plane / index_t(sizeof(Sum)),
                         same ? reinterpret_cast<Sum*>(first) : near);
                if (same) return;
            } else {
                turn_square<Sum>(planes, plane, wide, high, rows_of_pixels, apart);
            }
            if (dense) {
                scatter_row<Sum, Out>(rows_of_pixels, high * channels, first, size, false, rule);
            } else {
                for (index_t k = 0; k < high; ++k)
                    scatter_row<Sum, Out>(rows_of_pixels + k * apart, wide, first + k * to.element, size,
                                          false, rule);
            }
        });
    }
}

// Whether squares of so wide sums are turned: others are seldom met, or have too many lanes.
template <class Sum>
constexpr bool turned = !is_complex<Sum>::value && (sizeof(Sum) == 4 || sizeof(Sum) == 8);

// What a conversion is asked for.
struct Gather {
    using type = gather_t;
    template <class From, class Sum>
    static type of() {
        return gather<From, Sum>;
    }
};
struct Part {
    using type = part_t;
    template <class From, class Sum>
    static type of() {
        if constexpr (turned<Sum>) return part<From, Sum>;
        return nullptr;
    }
};
struct Scatter {
    using type = scatter_t;
    template <class Sum, class Out>
    static type of() {
        return scatter<Sum, Out>;
    }
};
struct Join {
    using type = join_t;
    template <class Sum, class Out>
    static type of() {
        if constexpr (turned<Sum> && !is_complex<Out>::value) return join<Sum, Out>;
        return nullptr;
    }
};

template <class Made, class From>
typename Made::type gather_to(Type sum) {
    if constexpr (is_complex<From>::value) {
        switch (sum) {
            case C64: return Made::template of<From, c64>();
            case C128: return Made::template of<From, c128>();
            default: return nullptr;
        }
    } else {
        if constexpr (std::is_integral_v<From>) {
            switch (sum) {
                case I8:
                case U8: return Made::template of<From, u8>();
                case I16:
                case U16: return Made::template of<From, u16>();
                case I32:
                case U32: return Made::template of<From, u32>();
                case I64:
                case U64: return Made::template of<From, u64>();
                default: break;
            }
        }
        switch (sum) {
            case F32: return Made::template of<From, float>();
            case F64: return Made::template of<From, double>();
            case C64: return Made::template of<From, c64>();
            case C128: return Made::template of<From, c128>();
            default: return nullptr;
        }
    }
}

template <class Made, class Sum>
typename Made::type scatter_to(Type to) {
    if constexpr (is_complex<Sum>::value) {
        switch (to) {
            case C64: return Made::template of<Sum, c64>();
            case C128: return Made::template of<Sum, c128>();
            default: return nullptr;
        }
    } else {
        switch (to) {
            case I8: return Made::template of<Sum, i8>();
            case U8: return Made::template of<Sum, u8>();
            case I16: return Made::template of<Sum, i16>();
            case U16: return Made::template of<Sum, u16>();
            case I32: return Made::template of<Sum, i32>();
            case U32: return Made::template of<Sum, u32>();
            case I64: return Made::template of<Sum, i64>();
            case U64: return Made::template of<Sum, u64>();
            default: break;
        }
        if constexpr (std::is_floating_point_v<Sum>) {
            switch (to) {
                case F16: return Made::template of<Sum, f16>();
                case BF16: return Made::template of<Sum, bf16>();
                case F32: return Made::template of<Sum, float>();
                case F64: return Made::template of<Sum, double>();
                case C64: return Made::template of<Sum, c64>();
                case C128: return Made::template of<Sum, c128>();
                default: break;
            }
        }
        return nullptr;
    }
}

template <class Made>
typename Made::type find_gather(Type from, Type sum) {
    switch (from) {
        case I8: return gather_to<Made, i8>(sum);
        case U8: return gather_to<Made, u8>(sum);
        case I16: return gather_to<Made, i16>(sum);
        case U16: return gather_to<Made, u16>(sum);
        case I32: return gather_to<Made, i32>(sum);
        case U32: return gather_to<Made, u32>(sum);
        case I64: return gather_to<Made, i64>(sum);
        case U64: return gather_to<Made, u64>(sum);
        case F16: return gather_to<Made, f16>(sum);
        case BF16: return gather_to<Made, bf16>(sum);
        case F32: return gather_to<Made, float>(sum);
        case F64: return gather_to<Made, double>(sum);
        case C64: return gather_to<Made, c64>(sum);
        case C128: return gather_to<Made, c128>(sum);
        default: return nullptr;
    }
}

template <class Made>
typename Made::type find_scatter(Type sum, Type to) {
    switch (sum) {
        case I8: return scatter_to<Made, i8>(to);
        case U8: return scatter_to<Made, u8>(to);
        case I16: return scatter_to<Made, i16>(to);
        case U16: return scatter_to<Made, u16>(to);
        case I32: return scatter_to<Made, i32>(to);
        case U32: return scatter_to<Made, u32>(to);
        case I64: return scatter_to<Made, i64>(to);
        case U64: return scatter_to<Made, u64>(to);
        case F32: return scatter_to<Made, float>(to);
        case F64: return scatter_to<Made, double>(to);
        case C64: return scatter_to<Made, c64>(to);
        case C128: return scatter_to<Made, c128>(to);
        default: return nullptr;
    }
}

pack_t find_pack(Type sum) {
    switch (sum) {
        case I32:
        case U32: return pack<u32>;
        case I64:
        case U64: return pack<u64>;
        case F32: return pack<float>;
        case F64: return pack<double>;
        default: return nullptr;
    }
}

}  // namespace

extern const Converters table;
const Converters table = {find_gather<Gather>, find_scatter<Scatter>, find_pack, find_gather<Part>,
                          find_scatter<Join>};

}  // namespace convpar::converters::CONVPAR_ISA
