// Peak arithmetic: multiply-accumulates in registers alone, in as many independent chains as hide the latency of one.
// ceilings.py puts the type T and the number of CHAINS before this text.

extern "C" __global__ void __launch_bounds__(256) burn(T* out, T factor, T term, int turns) {
    T sums[CHAINS];
#pragma unroll
    for (int k = 0; k < CHAINS; ++k) sums[k] = T(k + threadIdx.x);
#pragma unroll 16
    for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int k = 0; k < CHAINS; ++k) sums[k] = sums[k] * factor + term;
    }
    T total = sums[0];
#pragma unroll
    for (int k = 1; k < CHAINS; ++k) total += sums[k];
    // Never so, but the compiler can't know.
    if (total == term) out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
