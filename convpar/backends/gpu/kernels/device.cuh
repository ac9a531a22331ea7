// Everything that depends on the machine, written twice: for a GPU and, where CONVPAR_EMULATED is defined, as
// what it means on a CPU. Kernels hold no intrinsic and no PTX of their own. The emulator puts its
// emulator.hpp before this file: qualifiers, threadIdx and its like, __syncthreads, __syncwarp and checked
// shared memory come from there.
#pragma once

// -- Shared memory
//
// `Shared<T>` is a pointer into the block's shared memory, `dynamic_shared<T>(offset)` one `offset` bytes
// into it; the size is the launch's. The emulator checks every access for bounds and races, through a
// stand-in for a reference: read an element into a typed variable before calling a template or taking a
// member.

#ifndef CONVPAR_EMULATED
template <class T>
using Shared = T*;

extern __shared__ __align__(16) unsigned char shared_bytes[];

template <class T>
__device__ inline Shared<T> dynamic_shared(int offset) {
    return reinterpret_cast<T*>(shared_bytes + offset);
}
template <class T, class U>
__device__ inline Shared<T> shared_cast(Shared<U> pointer) {
    return reinterpret_cast<T*>(pointer);
}
#endif

// -- Constant memory
//
// All that a module has where its kernel uses any, in banks that the launcher hands out: a launch finds its
// filters `bank` bytes in. compile.py defines CONSTANT_BYTES.

#ifndef CONVPAR_EMULATED
extern "C" {
__constant__ __align__(16) unsigned char constant_bytes[CONSTANT_BYTES];
}
#else
alignas(16) static unsigned char constant_bytes[CONSTANT_BYTES];
#endif

// -- Atomics: `*to += value`, in no particular order.

__device__ inline void atomic_add(float* to, float value) {
#ifndef CONVPAR_EMULATED
    atomicAdd(to, value);
#else
    *to += value;
#endif
}
__device__ inline void atomic_add(double* to, double value) {
#ifndef CONVPAR_EMULATED
    atomicAdd(to, value);
#else
    *to += value;
#endif
}
__device__ inline void atomic_add(int* to, int value) {
#ifndef CONVPAR_EMULATED
    atomicAdd(to, value);
#else
    *to = int(unsigned(*to) + unsigned(value));
#endif
}
__device__ inline void atomic_add(unsigned long long* to, unsigned long long value) {
#ifndef CONVPAR_EMULATED
    atomicAdd(to, value);
#else
    *to += value;
#endif
}
__device__ inline void atomic_add(long long* to, long long value) {
    atomic_add(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}
__device__ inline void atomic_min(unsigned long long* to, unsigned long long value) {
#ifndef CONVPAR_EMULATED
    atomicMin(to, value);
#else
    *to = value < *to ? value : *to;
#endif
}
#ifdef CONVPAR_EMULATED
template <class T>
inline void atomic_add(Shared<T> to, T value) {
    emulator::check(reinterpret_cast<unsigned char*>(to.raw()), sizeof(T), emulator::ATOMIC);
    atomic_add(to.raw(), value);
}
#endif

// -- Plain functions that either side names differently

template <class T>
__device__ inline T smaller(T a, T b) {
    return b < a ? b : a;
}

// To the nearest whole number, halves to the even one.
__device__ inline float round_even(float value) {
#ifndef CONVPAR_EMULATED
    return rintf(value);
#else
    return __builtin_rintf(value);
#endif
}
__device__ inline double round_even(double value) {
#ifndef CONVPAR_EMULATED
    return rint(value);
#else
    return __builtin_rint(value);
#endif
}

// -- Half precision: storage, conversion (to the nearest, ties to even) and a fused multiply-add. No header
// needed.

struct Half {
    unsigned short bits;
};

__device__ inline float to_float(Half value) {
    float result;
#ifndef CONVPAR_EMULATED
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
#else
    const unsigned sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    unsigned bits;
    if (rest < 0x400u) {  // zero and subnormals: a whole number of 2**-24
        result = float(rest) * 0x1p-24f;
        __builtin_memcpy(&bits, &result, 4);
    } else {
        bits = (rest << 13) + (rest < 0x7c00u ? 112u << 23 : 224u << 23);
    }
    bits |= sign;
    __builtin_memcpy(&result, &bits, 4);
#endif
    return result;
}

__device__ inline Half to_half(double value) {
    Half result;
#ifndef CONVPAR_EMULATED
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(result.bits) : "d"(value));
#else
    unsigned long long bits;
    __builtin_memcpy(&bits, &value, 8);
    const unsigned sign = bits >> 48 & 0x8000u;
    bits &= ~(1ull << 63);
    double size;
    __builtin_memcpy(&size, &bits, 8);
    unsigned rest;
    if (!(size < 65520.0)) {  // halfway from the largest to the next one up, infinity and NaN
        rest = size == size ? 0x7c00u : 0x7e00u;
    } else if (size < 0x1p-14) {
        rest = unsigned(__builtin_rint(size * 0x1p24));
    } else {
        bits += (1ull << 41) - 1 + (bits >> 42 & 1);  // 52 - 10 bits are cut; ties go to the even one
        rest = unsigned(bits >> 42) - (1008u << 10);
    }
    result.bits = static_cast<unsigned short>(sign | rest);
#endif
    return result;
}

__device__ inline Half to_half(float value) {
#ifndef CONVPAR_EMULATED
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
#else
    return to_half(double(value));
#endif
}

// a * b + c, rounded once.
__device__ inline Half half_multiply_add(Half a, Half b, Half c) {
#ifndef CONVPAR_EMULATED
    Half result;
    asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(result.bits) : "h"(a.bits), "h"(b.bits), "h"(c.bits));
    return result;
#else
    return to_half(double(to_float(a)) * double(to_float(b)) + double(to_float(c)));
#endif
}

__device__ inline Half half_add(Half a, Half b) {
#ifndef CONVPAR_EMULATED
    Half result;
    asm("add.rn.f16 %0, %1, %2;" : "=h"(result.bits) : "h"(a.bits), "h"(b.bits));
    return result;
#else
    return to_half(double(to_float(a)) + double(to_float(b)));
#endif
}

// -- Warps of 32 threads, numbered along x first. All threads of a warp must take part.

__device__ inline int lane() {
    return int(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
}

template <class T>
__device__ inline T shuffle(T value, int from_lane) {
#ifndef CONVPAR_EMULATED
    return __shfl_sync(0xffffffffu, value, from_lane);
#else
    return emulator::all_lanes(value)[from_lane % 32];
#endif
}
template <class T>
__device__ inline T shuffle_down(T value, int distance) {
#ifndef CONVPAR_EMULATED
    return __shfl_down_sync(0xffffffffu, value, distance);
#else
    const T* lanes = emulator::all_lanes(value);
    return lane() + distance < 32 ? lanes[lane() + distance] : value;
#endif
}
template <class T>
__device__ inline T shuffle_xor(T value, int mask) {
#ifndef CONVPAR_EMULATED
    return __shfl_xor_sync(0xffffffffu, value, mask);
#else
    return emulator::all_lanes(value)[lane() ^ mask];
#endif
}

// -- Matrix units (tensor cores): a warp adds the product of a 16 x 16 and a 16 x 8 matrix of halves to a 16
// x 8 matrix of floats. Each lane holds a fragment of every matrix. With g = lane() / 4 and t = lane() % 4:
//   A   pairs[i]    row g + 8 * (i % 2), columns 2 * t + 8 * (i / 2) and the next
//   B   pairs[i]    rows 2 * t + 8 * i and the next, column g
//   C   values[i]   row g + 8 * (i / 2), column 2 * t + i % 2
// These are the layouts of mma.m16n8k16; those of m16n8k8, which sm_75 has, are its halves.

struct HalfPair {
    unsigned bits;  // the first half in the lower 16
};
struct MatrixA {
    HalfPair pairs[4];
};
struct MatrixB {
    HalfPair pairs[2];
};
struct MatrixC {
    float values[4];
};

__device__ inline HalfPair half_pair(Half first, Half second) {
    return {first.bits | static_cast<unsigned>(second.bits) << 16};
}

// sums += a * b. Products are exact. In which order they are added, and whether sums are rounded or cut, is
// up to the unit. The emulator cuts them where an H200 may: 23 bits below the largest exponent that two factors add up
// to, where a subnormal one has that of the smallest normal number.
__device__ inline void matrix_multiply_add(MatrixC& sums, const MatrixA& a, const MatrixB& b) {
    float* c = sums.values;
#ifdef CONVPAR_EMULATED
    struct Factors {
        MatrixA a;
        MatrixB b;
    };
    const Factors* lanes = emulator::all_lanes(Factors{a, b});
    const auto half = [](HalfPair pair, int which) {
        return double(to_float(Half{static_cast<unsigned short>(pair.bits >> 16 * which)}));
    };
    const auto exponent = [](double value, int least) {
        int e;
        __builtin_frexp(value, &e);
        return e - 1 > least ? e - 1 : least;
    };
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + i % 2;
        double sum = c[i];
        int largest = sum != 0 ? exponent(sum, -126) : -126;
        for (int k = 0; k < 16; ++k) {
            const HalfPair left = lanes[row % 8 * 4 + k % 8 / 2].a.pairs[row / 8 + k / 8 * 2];
            const HalfPair right = lanes[column * 4 + k % 8 / 2].b.pairs[k / 8];
            const double one = half(left, k % 2), other = half(right, k % 2);
            sum += one * other;
            if (one == 0 || other == 0) continue;
            const int together = exponent(one, -14) + exponent(other, -14);
            largest = together > largest ? together : largest;
        }
        const double last_bit = __builtin_ldexp(1, largest - 23);
        if (__builtin_isfinite(sum)) sum = __builtin_trunc(sum / last_bit) * last_bit;
        c[i] = float(sum);
        unsigned bits;
        memcpy(&bits, c + i, 4);
        bits -= __builtin_fabs(double(c[i])) > __builtin_fabs(sum);  // one less is one step towards zero
        memcpy(c + i, &bits, 4);
    }
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.pairs[0].bits), "r"(a.pairs[1].bits), "r"(a.pairs[2].bits), "r"(a.pairs[3].bits),
          "r"(b.pairs[0].bits), "r"(b.pairs[1].bits));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        asm volatile(
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, "
            "%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.pairs[2 * i].bits), "r"(a.pairs[2 * i + 1].bits), "r"(b.pairs[i].bits));
    }
#endif
}

// -- Asynchronous copies from global to shared memory, 4, 8 or 16 bytes, both ends aligned to that many.
//
// A copy has landed once its thread has waited for it, and is seen by others after a barrier that follows.
// The emulator spoils the destination at once and copies in the wait: the latest moment that is legal.
// `valid` false writes zeros and reads nothing. Before sm_80 the copy is an ordinary one.

template <int BYTES, class T>
__device__ inline void copy_async(Shared<T> to, const T* from, bool valid = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#ifdef CONVPAR_EMULATED
    emulator::copy_later(to.raw(), from, BYTES, valid);
#elif __CUDA_ARCH__ >= 800
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(address), "l"(from), "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
#else
    struct alignas(BYTES) Piece {
        unsigned words[BYTES / 4];
    };
    *reinterpret_cast<Piece*>(to) = valid ? *reinterpret_cast<const Piece*>(from) : Piece{};
#endif
}

// Makes one group of the copies begun since the last call.
__device__ inline void copy_async_commit() {
#ifdef CONVPAR_EMULATED
    emulator::commit_copies();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `GROUPS` groups of this thread are still under way.
template <int GROUPS>
__device__ inline void copy_async_wait() {
#ifdef CONVPAR_EMULATED
    emulator::land_copies(GROUPS);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}
