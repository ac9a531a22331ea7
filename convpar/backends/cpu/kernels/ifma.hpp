// Builds on: simd.
// Idea: a sum of 32 bits in every lane of 64. AVX-512 IFMA multiplies such lanes and adds in one operation, eight of them, so that
//       sixteen sums take two; sixteen lanes of 32 bits take two to multiply and a third to add. It heeds the lower 52 bits of a lane,
//       and modulo 2**32 it doesn't matter what the upper ones are: so samples are loaded as they lie, in pairs. Outputs of even columns
//       meet the lower samples; those of odd columns do, too, in the vector a column further, which even ones need for their next tap.
// Step: eight to nine tenths of simd's time at 7 x 7, a fifth longer at 3 x 3 (docs/cpu-speed.md, Steps).
// Limit: arithmetic, from about 5 x 5 on.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the instruction
#else

#include "blocks.h"

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.streams = lanes<T> + 1;
    return k;
}

// Rows of outputs and of the filter whose sums, and taps of two columns, stay in registers.
constexpr int rows_at_once = 8, taps_at_once = 7;

// Sums of neighbouring outputs: of those in even and those in odd columns.
template <int R>
struct Sums {
    __m512i even[R] = {}, odd[R] = {};
};

template <int Hardware>
inline __m512i multiply_add(__m512i sum, __m512i a, __m512i b) {
    if constexpr (Hardware) {
        // By name: no level tells the compiler of it.
        asm("vpmadd52luq %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    } else {
        return _mm512_add_epi64(sum, _mm512_mul_epu32(a, b));
    }
}

// Adds the products of P taps of a filter column to the even sums of R rows, and those of the column before to the odd ones.
template <int Hardware, int P, bool Even, bool Odd, int R>
[[gnu::always_inline]] inline void column(Sums<R>& sums, const u32* x, index_t step, const u32* w,
                                          index_t w_step) {
    __m512i here[P], before[P];
#pragma GCC unroll 7
    for (int p = 0; p < P; ++p) {
        if constexpr (Even) here[p] = _mm512_set1_epi32(int(w[p * w_step]));
        if constexpr (Odd) before[p] = _mm512_set1_epi32(int(w[p * w_step - 1]));
    }
#pragma GCC unroll 14
    for (int k = 0; k < R + P - 1; ++k, x += step) {
        // Behind the last column there may be no sample; a load of some lanes takes longer.
        const __m512i sample = held(Even ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi32(0x7fff, x));
#pragma GCC unroll 7
        for (int p = 0; p < P; ++p) {
            const int r = k - p;
            if (r < 0 || r >= R) continue;
            if constexpr (Even) sums.even[r] = multiply_add<Hardware>(sums.even[r], sample, here[p]);
            if constexpr (Odd) sums.odd[r] = multiply_add<Hardware>(sums.odd[r], sample, before[p]);
        }
        // Else the compiler would keep a pointer to each row, in more registers than there are.
        asm("" : "+r"(x));
    }
}

template <int Hardware, int P, int R>
[[gnu::always_inline]] inline void pass(Sums<R>& sums, const u32* x, index_t step, index_t kw, const u32* w) {
    column<Hardware, P, true, false>(sums, x, step, w, kw);
    for (index_t q = 1; q < kw; ++q) column<Hardware, P, true, true>(sums, x + q, step, w + q, kw);
    column<Hardware, P, false, true>(sums, x + kw, step, w + kw, kw);
}

// R output rows of a vector of columns from j on. P: the filter's rows if a pass takes them all, else 0.
template <int P, int R, int Hardware, class T>
void block(const Work& t, index_t taken, const T* x, const T* w, T bias, const T* y, index_t j,
           Vec<T> (&done)[R]) {
    Sums<R> sums;
    x += j;
    fetch_below<R, 1>(t, x, t.xr, t.kh - 1, y + j, t.yr);
    for (index_t c = 0; c < t.cg; ++c, x += t.xc, w += t.kh * t.kw) {
        if (t.ow > short_row * lanes<T>) fetch<R, 1>(x, t.xr, t.kh - 1);
        if constexpr (P > 0) {
            pass<Hardware, P>(sums, x, t.xr, t.kw, w);
        } else {
            for (index_t p = 0; p < t.kh; p += taken) {
                switch (t.kh - p < taken ? t.kh - p : taken) {
#define PASS(N)                                                                                           \
    case N:                                                                                               \
        if constexpr (N <= taps_at_once) pass<Hardware, N>(sums, x + p * t.xr, t.xr, t.kw, w + p * t.kw); \
        break;
                    EACH_PASS
#undef PASS
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const __m512i both =
            _mm512_mask_blend_epi32(0xaaaa, sums.even[r], _mm512_slli_epi64(sums.odd[r], 32));
        done[r] = reinterpret_cast<Vec<T> >(both) + broadcast(bias);
    }
}

// R output rows over the whole width.
template <int P, int R, int Hardware, class T>
void strip(const Work& t, index_t taken, const T* x, const T* w, T bias, T* y) {
    constexpr index_t wide = lanes<T>;
    Vec<T> done[R];
    Line<T> lines[R];
    index_t j = 0;
    if (t.stream) {
        for (int r = 0; r < R; ++r) lines[r].begin(y + r * t.yr);
        for (; j + wide < t.ow; j += wide) {
            block<P, R, Hardware>(t, taken, x, w, bias, y, j, done);
            for (int r = 0; r < R; ++r) lines[r].put(j, {done[r]});
        }
        for (Line<T>& line : lines) line.end(j);
    }
    for (; j < t.ow; j += wide) {
        // The last vector of a row reaches back over outputs that are done already.
        if (j + wide > t.ow && t.ow > wide) j = t.ow - wide;
        block<P, R, Hardware>(t, taken, x, w, bias, y, j, done);
        for (int r = 0; r < R; ++r) store_first(y + r * t.yr + j, done[r], t.ow < wide ? t.ow : wide);
    }
}

template <int P, int Hardware, class T>
void filters(const Work& t) {
    const index_t passes = ceil_div(t.kh, taps_at_once), taken = ceil_div(t.kh, passes);
    for (index_t o = 0; o < t.oc; ++o) {
        const T* w = static_cast<const T*>(t.w) + o * t.cg * t.kh * t.kw;
        const T bias = static_cast<const T*>(t.bias)[o];
        const T* x = static_cast<const T*>(t.x);
        T* y = static_cast<T*>(t.y) + o * t.yo;
        for (index_t left = t.oh; left > 0;) {
            int high = rows_at_once;
            while (high > left) high /= 2;
            switch (high) {
                case 1: strip<P, 1, Hardware>(t, taken, x, w, bias, y); break;
                case 2: strip<P, 2, Hardware>(t, taken, x, w, bias, y); break;
                case 4: strip<P, 4, Hardware>(t, taken, x, w, bias, y); break;
                case 8: strip<P, 8, Hardware>(t, taken, x, w, bias, y); break;
            }
            left -= high;
            x += high * t.xr;
            y += high * t.yr;
        }
    }
    if (t.stream) stream_end();
}

// The filter's rows if a pass takes them all, else 0.
template <int... P>
constexpr int alone(Heights<P...>) {
    return sizeof...(P) == 1 && (P + ... + 0) <= taps_at_once ? (P + ... + 0) : 0;
}

template <class T>
void work(const Work& t) {
    if (t.tiling.emulated) return filters<0, 0, T>(t);
    choose_passes<T>(t, Rows(t), [&](auto heights) { filters<alone(decltype(heights)()), 1, T>(t); });
}

#endif
