// Builds on: nothing; a step before other kernels, not a rung.
// Idea: one thread an element: filters or bias of any strides and type become dense, of the type asked for.
// Limit: memory traffic, of arrays that are small.
#include "problem.cuh"

template <class I>
__device__ void prepare(const Arrays<I>& arrays, const Problem& p) {
    const long long count = p.n * p.c * p.h * p.w;
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += threads) {
        const long long column = i % p.w, row = i / p.w % p.h, channel = i / (p.w * p.h) % p.c,
                        n = i / (p.w * p.h * p.c);
        const auto value = arrays.x[n * p.x_n + channel * p.x_c + row * p.x_h + column * p.x_w];
        arrays.out[i] = convert<typename I::Out>(value);
    }
}
