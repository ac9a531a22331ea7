// One rung at one ISA level: the kernel file that CONVPAR_KERNEL names, instantiated for every pair of types and
// every filter size. Meson compiles this file once for each rung and level.
#include "kernel.h"

#include <limits>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace convpar::CONVPAR_RUNG::CONVPAR_ISA {
// Two levels must never share a function, or the linker may keep the one this processor can't run.
namespace {

#include "types.h"

// Types whose sums are alike share an instantiation: only the width matters where sums wrap.
[[maybe_unused]] Type wrapping(Type t) {
    switch (t) {
        case I8: return U8;
        case I16: return U16;
        case I32: return U32;
        case I64: return U64;
        default: return t;
    }
}

#ifdef CONVPAR_DENSE

#include "simd.h"

template <class T>
void work(const Work& t);

// A kernel over vectors that has nothing but `work`. Each says in `kernel` what it has beyond this.
template <class T>
constexpr Kernel over_vectors() {
    return {work<T>, nullptr, 1, lanes<T>, 0, nullptr, 0, {}, nullptr, {}};
}

#include CONVPAR_KERNEL

#ifdef CONVPAR_ABSENT

Kernel find(Type, Type, index_t, index_t) { return {}; }

#else

// Whatever else the input is, the engine gathers it tile by tile in the sum's type.
Kernel find(Type x, Type sum, index_t, index_t) {
    sum = wrapping(sum);
#ifdef CONVPAR_INTEGERS
    if (sum != U32) return {};
    switch (x) {
        case I8: return kernel<u32, i8>();
        case U8: return kernel<u32, u8>();
        case I16: return kernel<u32, i16>();
        default: return wrapping(x) == sum ? kernel<u32, u32>() : Kernel{};
    }
#else
    if (wrapping(x) != sum) return {};
    switch (sum) {
#define SUM(NAME, T) \
    case NAME: return kernel<T>();
        CONVPAR_DENSE
#undef SUM
        default: return {};
    }
#endif
}

#endif

#else

#include "window.h"

#include CONVPAR_KERNEL

template <class X, class Sum, int KH, int KW>
void inside(const Work& t) {
    if (t.xs == 1 && t.dw == 1) {
        work<Sum, KH, KW>(t, Inside<X, Sum, true>(t));
    } else {
        work<Sum, KH, KW>(t, Inside<X, Sum, false>(t));
    }
}
template <class X, class Sum, int KH, int KW>
void bordered(const Work& t) {
    work<Sum, KH, KW>(t, Bordered<X, Sum>(t));
}

// Pairs that unrolled filters have a kernel for: those met most, for each takes compilers long.
template <class X, class Sum>
constexpr bool unrolls = std::is_same_v<X, Sum> || std::is_same_v<Sum, float> ||
                         (std::is_same_v<X, u8> && std::is_same_v<Sum, u32>);

template <int K, class X, class Sum>
constexpr Kernel of_size() {
    if constexpr (K == 0 || unrolls<X, Sum>) {
        return {inside<X, Sum, K, K>, bordered<X, Sum, K, K>, 1, 0, 0, nullptr, 0, {}, nullptr, {}};
    }
    return {};
}

template <class X, class Sum>
Kernel sized(index_t kh, index_t kw) {
#define SIZE(K) \
    if (K == 0 || (kh == K && kw == K)) return of_size<K, X, Sum>();
    CONVPAR_SIZES
#undef SIZE
    return {};
}

// Other pairs are converted tile by tile to (sum, sum) by the engine.
Kernel find(Type x, Type sum, index_t kh, index_t kw) {
    sum = wrapping(sum);
    if (wrapping(x) == sum) x = sum;
#define PAIR(XN, X, SN, S) \
    if (x == XN && sum == SN) return sized<X, S>(kh, kw);
    PAIR(U8, u8, U8, u8)
    PAIR(I8, i8, U16, u16)
    PAIR(U8, u8, U16, u16)
    PAIR(U16, u16, U16, u16)
    PAIR(I8, i8, U32, u32)
    PAIR(U8, u8, U32, u32)
    PAIR(I16, i16, U32, u32)
    PAIR(U16, u16, U32, u32)
    PAIR(U32, u32, U32, u32)
    PAIR(I8, i8, U64, u64)
    PAIR(U8, u8, U64, u64)
    PAIR(I16, i16, U64, u64)
    PAIR(U16, u16, U64, u64)
    PAIR(I32, i32, U64, u64)
    PAIR(U32, u32, U64, u64)
    PAIR(U64, u64, U64, u64)
    PAIR(I8, i8, F32, float)
    PAIR(U8, u8, F32, float)
    PAIR(I16, i16, F32, float)
    PAIR(U16, u16, F32, float)
    PAIR(F16, f16, F32, float)
    PAIR(F32, float, F32, float)
    PAIR(I8, i8, F64, double)
    PAIR(U8, u8, F64, double)
    PAIR(I16, i16, F64, double)
    PAIR(U16, u16, F64, double)
    PAIR(I32, i32, F64, double)
    PAIR(U32, u32, F64, double)
    PAIR(I64, i64, F64, double)
    PAIR(U64, u64, F64, double)
    PAIR(F32, float, F64, double)
    PAIR(F64, double, F64, double)
    PAIR(F32, float, C64, c64)
    PAIR(C64, c64, C64, c64)
    PAIR(F64, double, C128, c128)
    PAIR(C128, c128, C128, c128)
#undef PAIR
    return {};
}

#endif

constexpr const char* compiled_for =
#if defined(__AVX512F__) && defined(__AVX512BW__)
    "v4";
#elif defined(__AVX2__) && defined(__FMA__)
    "v3";
#else
    "baseline";
#endif

}  // namespace

extern const Rung table;
const Rung table = {find, compiled_for};

}  // namespace convpar::CONVPAR_RUNG::CONVPAR_ISA
