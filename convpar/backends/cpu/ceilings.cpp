// Peak arithmetic of one ISA level: as many independent vector sums as hide the latency of one.
#include "ceilings.h"

namespace convpar {
namespace ceilings {
namespace CONVPAR_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
#if defined(__AVX512F__)
constexpr int chains = 24;
#else
constexpr int chains = 12;
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
    for (int k = 0; k < chains; ++k) sums[k] = a * T(k);
    for (index_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
        for (int k = 0; k < chains; ++k) {
            sums[k] = sums[k] * b + a;
            asm volatile("" : "+x"(sums[k]));
        }
    }
    result = 0;
    for (int k = 0; k < chains; ++k) {
        for (int l = 0; l < lanes; ++l) result += double(sums[k][l]);
    }
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

}  // namespace CONVPAR_ISA
}  // namespace ceilings
}  // namespace convpar
