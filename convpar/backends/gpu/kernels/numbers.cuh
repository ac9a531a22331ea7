// Element types: conversion between them, the multiply-add of a sum, and the step from a sum to a result.
#pragma once
#include "device.cuh"

// The upper half of a float.
struct BFloat16 {
    unsigned short bits;
};

__device__ inline float to_float(BFloat16 value) {
    const unsigned bits = static_cast<unsigned>(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

__device__ inline BFloat16 to_bfloat16(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    if (value != value) return {static_cast<unsigned short>(bits >> 16 | 0x40u)};
    return {
        static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // ties go to the even one
}

__device__ inline BFloat16 to_bfloat16(double value) {
    // Through a float that is cut, and odd where something was cut off, the second rounding is the only one.
    float cut = float(value);
    unsigned bits;
    memcpy(&bits, &cut, 4);
    if (double(cut) != value && value == value) {
        const bool further = cut > 0 || value > 0 ? double(cut) > value : double(cut) < value;
        bits = (bits - (further ? 1u : 0u)) | 1u;
        memcpy(&cut, &bits, 4);
    }
    return to_bfloat16(cut);
}

// Aligned as its parts are: a complex array may begin at any of them.
template <class R>
struct Complex {
    R re, im;
};

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

template <class T>
constexpr bool is_complex = false;
template <class R>
constexpr bool is_complex<Complex<R>> = true;

template <class T>
constexpr bool is_narrow = same<T, Half> || same<T, BFloat16>;
template <class T>
constexpr bool is_float = same<T, float> || same<T, double> || is_narrow<T>;
template <class T>
constexpr bool is_integer = !is_float<T> && !is_complex<T>;

template <class T>
struct PartOf {
    using type = T;
};
template <class R>
struct PartOf<Complex<R>> {
    using type = R;
};

// `value` as a To: integers modulo 2**bits, floats to the nearest, reals as complex numbers. Not from complex
// to real, and not from float to integer, which `finish` does.
template <class To, class From>
__device__ inline To convert(From value) {
    if constexpr (same<To, From>) {
        return value;
    } else if constexpr (is_narrow<From>) {
        return convert<To>(to_float(value));
    } else if constexpr (is_complex<To>) {
        using Part = typename PartOf<To>::type;
        if constexpr (is_complex<From>) {
            return To{Part(value.re), Part(value.im)};
        } else {
            return To{Part(value), Part(0)};
        }
    } else if constexpr (is_narrow<To> && is_integer<From>) {
        return convert<To>(double(value));
    } else if constexpr (same<To, Half>) {
        return to_half(value);
    } else if constexpr (same<To, BFloat16>) {
        return to_bfloat16(value);
    } else {
        return To(value);
    }
}

// -- sum + a * b. Signed integers wrap, which C++ leaves undefined; complex products are the plain four.

__device__ inline float multiply_add(float a, float b, float sum) { return a * b + sum; }
__device__ inline double multiply_add(double a, double b, double sum) { return a * b + sum; }
__device__ inline int multiply_add(int a, int b, int sum) {
    return int(unsigned(a) * unsigned(b) + unsigned(sum));
}
__device__ inline unsigned long long multiply_add(unsigned long long a, unsigned long long b,
                                                  unsigned long long sum) {
    return a * b + sum;
}
__device__ inline long long multiply_add(long long a, long long b, long long sum) {
    using U = unsigned long long;
    return static_cast<long long>(U(a) * U(b) + U(sum));
}
__device__ inline Half multiply_add(Half a, Half b, Half sum) { return half_multiply_add(a, b, sum); }
__device__ inline float multiply_add(Half a, Half b, float sum) { return to_float(a) * to_float(b) + sum; }
__device__ inline Complex<float> multiply_add(Complex<float> a, Complex<float> b, Complex<float> sum) {
    return {sum.re + (a.re * b.re - a.im * b.im), sum.im + (a.re * b.im + a.im * b.re)};
}
__device__ inline Complex<double> multiply_add(Complex<double> a, Complex<double> b, Complex<double> sum) {
    return {sum.re + (a.re * b.re - a.im * b.im), sum.im + (a.re * b.im + a.im * b.re)};
}

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline double add(double a, double b) { return a + b; }
__device__ inline int add(int a, int b) { return int(unsigned(a) + unsigned(b)); }
__device__ inline unsigned long long add(unsigned long long a, unsigned long long b) { return a + b; }
__device__ inline long long add(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}
__device__ inline Half add(Half a, Half b) { return half_add(a, b); }
template <class R>
__device__ inline Complex<R> add(Complex<R> a, Complex<R> b) {
    return {a.re + b.re, a.im + b.im};
}

template <class R>
__device__ inline void atomic_add(Complex<R>* to, Complex<R> value) {
    atomic_add(&to->re, value.re);
    atomic_add(&to->im, value.im);
}

// -- From a sum to a result

enum Overflow { WRAP, SATURATE, RAISE };

template <class T>
struct Range {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr T highest = T(~0ull >> (64 - 8 * sizeof(T) + is_signed));
    static constexpr T lowest = is_signed ? T(-highest - 1) : T(0);
};

// `sum` as an Out; `outside` is set when it doesn't fit. Floats round half to even and saturate, NaN becomes
// 0.
template <class Out, int RULE, class Sum>
__device__ inline Out finish(Sum sum, bool& outside) {
    if constexpr (is_narrow<Sum>) {
        return finish<Out, RULE>(to_float(sum), outside);
    } else if constexpr (is_integer<Out> && is_float<Sum>) {
        const auto whole = round_even(sum);
        // The first number past the range is a power of two, exact in every float type; the last in it may
        // not be.
        const auto past = decltype(whole)(Range<Out>::highest / 2 + 1) * 2;
        outside = !(whole >= decltype(whole)(Range<Out>::lowest) && whole < past);
        if (!outside) return Out(whole);
        if (whole != whole) return Out(0);
        return whole < 0 ? Range<Out>::lowest : Range<Out>::highest;
    } else if constexpr (is_integer<Out> && RULE != WRAP) {
        const bool below = Range<Sum>::is_signed && sum < Sum(0) &&
                           static_cast<long long>(sum) < static_cast<long long>(Range<Out>::lowest);
        const bool above = sum > Sum(0) && static_cast<unsigned long long>(sum) >
                                               static_cast<unsigned long long>(Range<Out>::highest);
        outside = below || above;
        return below ? Range<Out>::lowest : above ? Range<Out>::highest : Out(sum);
    } else {
        outside = false;
        return convert<Out>(sum);
    }
}
