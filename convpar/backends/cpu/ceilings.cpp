// Peak arithmetic of one ISA level: as many independent vector sums as hide the latency of one.
#include "ceilings.h"

// The class of vector registers, as inline assembly names it.
#if defined(__x86_64__)
#ifdef __AVX512F__
#define CONVPAR_REGISTER "v"
#else
#define CONVPAR_REGISTER "x"
#endif
#else
#define CONVPAR_REGISTER "w"
#endif

namespace convpar::ceilings::CONVPAR_ISA {
namespace {

// Chains of sums as many as fit the registers beside the two operands.
#if defined(__AVX512F__)
constexpr int vector_bytes = 64, chains = 24;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32, chains = 12;
#else
constexpr int vector_bytes = 16, chains = 12;
#endif

template <class T>
index_t chain(index_t rounds, double& result) {
    typedef T V __attribute__((vector_size(vector_bytes)));
    V sums[chains], a, b;
    const int lanes = vector_bytes / sizeof(T);
    for (int l = 0; l < lanes; ++l) {
        // Opaque to the compiler, and no value grows into infinity or a subnormal.
        volatile int one = 1;
        a[l] = T(one);
        b[l] = T(one) / T(3);
    }
    // Every loop over the chains is unrolled, or they would live in memory.
#pragma GCC unroll 32
    for (int k = 0; k < chains; ++k) sums[k] = a * T(k);
    for (index_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
        for (int k = 0; k < chains; ++k) {
            sums[k] = sums[k] * b + a;
            asm volatile("" : "+" CONVPAR_REGISTER(sums[k]));  // no folding of rounds
        }
    }
    V total = sums[0];
#pragma GCC unroll 32
    for (int k = 1; k < chains; ++k) total += sums[k];
    result = 0;
    for (int l = 0; l < lanes; ++l) result += double(total[l]);
    return rounds * chains * lanes;
}

}  // namespace

extern index_t burn(Arithmetic kind, index_t rounds, double& result);
index_t burn(Arithmetic kind, index_t rounds, double& result) {
    switch (kind) {
        case FMA_F32: return chain<float>(rounds, result);
        case FMA_F64: return chain<double>(rounds, result);
        default: return chain<unsigned>(rounds, result);
    }
}

}  // namespace convpar::ceilings::CONVPAR_ISA
