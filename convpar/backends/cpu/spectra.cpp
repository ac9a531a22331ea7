// Builds on: simd.
// Idea: a vector of neighbouring numbers of a spectrum, once loaded, serves every output row and every filter row that
//       meet in it. Every number has a weight of its own, so the weights of a pass are vectors in registers too.
// Limit: arithmetic.
#include "spectra.h"

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace convpar::spectra::CONVPAR_ISA {
// Two levels must never share a function, or the linker may keep the one this processor can't run.
namespace {

#include "types.h"

#include "simd.h"

// Output rows of a block, and filter rows of a pass: two sums an output row, two weights a filter row and a sample fill
// the registers.
constexpr int block_rows = many_registers ? 8 : 4;
constexpr int pass_rows = many_registers ? 6 : 3;

// Real and imaginary parts change places.
template <class T, int... I>
inline Vec<T> swapped(Vec<T> v, Numbers<I...>) {
    return pick<T>(v, v, Numbers<(I ^ 1)...>());
}

// Sums of R output rows: of numbers times the weights' real parts, and times their imaginary parts.
template <int R, class T>
struct Sums {
    Vec<T> re[R], im[R];
};

// Adds the products of P filter rows to R output rows, at elements from `at` on.
template <int P, int R, class T>
inline void pass(Sums<R, T>& sum, const void* const* x, index_t apart, index_t at, const T* w, index_t size) {
    Vec<T> re[P], im[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
        re[p] = held(load(w + 2 * p * size));
        im[p] = held(load(w + (2 * p + 1) * size));
    }
#pragma GCC unroll 16
    for (int k = 0; k < R + P - 1; ++k) {
        const Vec<T> v = held(load(static_cast<const T*>(x[k * apart]) + at));
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            const int r = k - p;
            if (r < 0 || r >= R) continue;
            sum.re[r] = mac(sum.re[r], v, re[p]);
            sum.im[r] = mac(sum.im[r], v, im[p]);
        }
    }
}

// R output rows, `apart` from each other; `from` is where the vector begins in a spectrum, `at` in the strips.
template <int R, class T>
void block(const Spectral& t, const void* const* x, const T* w, T* y, index_t from, index_t at) {
    const index_t size = 2 * t.bins, x_rows = t.rows + (t.kh - 1) * t.apart;
    // Passes of nearly the same length.
    const index_t passes = (t.kh - 1) / pass_rows + 1, least = t.kh / passes, longer = t.kh % passes;
    Sums<R, T> sum;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum.re[r] = sum.im[r] = Vec<T>{};
    for (index_t c = 0; c < t.cg; ++c, x += x_rows) {
        const void* const* above = x;
        for (index_t k = 0; k < passes; ++k) {
            const index_t taken = least + (k < longer);
            switch (taken) {
#define PASS(P)                                                                            \
    case P:                                                                                \
        if constexpr (P <= pass_rows) pass<P, R>(sum, above, t.apart, at, w + from, size); \
        break;
                PASS(1)
                PASS(2)
                PASS(3)
                PASS(4)
                PASS(5)
                PASS(6)
#undef PASS
            }
            above += taken * t.apart;
            w += 2 * taken * size;
        }
    }
    const index_t step = t.apart * t.strips * size;
    // (a + ib)(c - id) = ac + bd + i(bc - ad)
    Vec<T> sign;
#pragma GCC unroll 64
    for (int k = 0; k < lanes<T>; ++k) sign[k] = k % 2 ? T(-1) : T(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
        store(y + r * step + at, mac(sum.re[r], swapped<T>(sum.im[r], All<T>()), sign));
}

// Spectra shorter than a vector.
template <class T>
void narrow(const Spectral& t, const void* const* x, const T* w, T* y, index_t strip) {
    const index_t size = 2 * t.bins, x_rows = t.rows + (t.kh - 1) * t.apart;
    for (index_t i = 0; i < t.rows; ++i) {
        for (index_t e = 0; e < size; ++e) {
            T re = 0, im = 0;
            for (index_t c = 0; c < t.cg; ++c) {
                for (index_t p = 0; p < t.kh; ++p) {
                    const T* v = static_cast<const T*>(x[c * x_rows + i + p * t.apart]) + strip * size;
                    const T* weights = w + 2 * (c * t.kh + p) * size;
                    re = mac(re, v[e], weights[e]);
                    im = mac(im, v[e ^ 1], weights[size + e]);
                }
            }
            y[(i * t.strips + strip) * size + e] = e % 2 ? re - im : re + im;
        }
    }
}

template <class T>
void work(const Spectral& t) {
    const index_t size = 2 * t.bins, x_rows = t.rows + (t.kh - 1) * t.apart;
    const auto* w = static_cast<const T*>(t.w);
    auto* y = static_cast<T*>(t.y);
    for (index_t g = 0; g < t.groups; ++g) {
        const void* const* x = t.x + g * t.cg * x_rows;
        for (index_t o = 0; o < t.oc; ++o, w += t.cg * t.kh * 2 * size, y += t.rows * t.strips * size) {
            for (index_t strip = 0; strip < t.strips; ++strip) {
                if (size < lanes<T>) {
                    narrow(t, x, w, y, strip);
                    continue;
                }
                for (index_t j = 0; j < size; j += lanes<T>) {
                    // The last vector reaches back over numbers that are done already.
                    const index_t from = j + lanes<T> > size ? size - lanes<T> : j, at = strip * size + from;
                    for (index_t first = 0; first < t.apart && first < t.rows; ++first) {
                        const void* const* above = x + first;
                        T* out = y + first * t.strips * size;
                        index_t left = (t.rows - first - 1) / t.apart + 1;
                        while (left > 0) {
                            int taken = block_rows;
                            while (taken > left) taken /= 2;
                            switch (taken) {
                                case 1: block<1>(t, above, w, out, from, at); break;
                                case 2: block<2>(t, above, w, out, from, at); break;
                                case 4: block<4>(t, above, w, out, from, at); break;
                                case 8:
                                    if constexpr (block_rows == 8) block<8>(t, above, w, out, from, at);
                                    break;
                            }
                            left -= taken;
                            above += taken * t.apart;
                            out += taken * t.apart * t.strips * size;
                        }
                    }
                }
            }
        }
    }
}

}  // namespace

extern const Spectra table;
const Spectra table = {work<float>, work<double>};

}  // namespace convpar::spectra::CONVPAR_ISA
