// What one ISA level can do at most: as many independent vector sums as hide the latency of one, and copies.
#include "ceilings.h"

#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace convpar::ceilings::CONVPAR_ISA {
// Two levels must never share a function, or the linker may keep the one this processor can't run.
namespace {

#include "types.h"

#include "simd.h"

// As many sums as fit the registers beside the two operands.
constexpr int chains = many_registers ? 24 : 12;

template <class T>
index_t chain(index_t rounds) {
    // Opaque to the compiler, and no value grows into infinity or a subnormal.
    volatile int one = 1;
    const Vec<T> a = broadcast(T(one)), b = broadcast(T(one) / T(3));
    Vec<T> sums[chains];
    // Every loop over the chains is unrolled, or they would live in memory.
#pragma GCC unroll 32
    for (int k = 0; k < chains; ++k) sums[k] = a * T(k);
    for (index_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
        for (int k = 0; k < chains; ++k) sums[k] = held(mac(a, sums[k], b));  // no folding of rounds
    }
    Vec<T> total = sums[0];
#pragma GCC unroll 32
    for (int k = 1; k < chains; ++k) total += sums[k];
    double result = 0;
    for (int l = 0; l < lanes<T>; ++l) result += double(total[l]);
    sink = result;
    return rounds * chains * lanes<T>;
}

index_t burn(Arithmetic kind, index_t rounds) {
    switch (kind) {
        case FMA_F32: return chain<f32>(rounds);
        case FMA_F64: return chain<f64>(rounds);
        default: return chain<u32>(rounds);
    }
}

void cached(char* to, const char* from, index_t bytes) { std::memcpy(to, from, size_t(bytes)); }

void streamed(char* to, const char* from, index_t bytes) {
    u8* y = reinterpret_cast<u8*>(to);
    const u8* x = reinterpret_cast<const u8*>(from);
#pragma GCC unroll 4
    for (index_t i = 0; i < bytes; i += vector_bytes) stream(y + i, load(x + i));
    stream_end();  // the time counts until the last store is out
}

}  // namespace

extern const Ceilings table;
const Ceilings table = {burn, cached, streamed};

}  // namespace convpar::ceilings::CONVPAR_ISA
