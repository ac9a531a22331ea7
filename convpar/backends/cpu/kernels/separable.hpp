// Builds on: simd, which computes what isn't separable.
// Idea: a filter that is a column times a row needs kh + kw products an output instead of kh * kw: the column's sums of
//       a few rows go to a strip in the first cache, and the row's sums over that to the output.
// Limit: memory, up to about 15 x 15; then loads that straddle two cache lines, one for every product of the row.

#include "blocks.h"

template <class T>
constexpr index_t packing = 1;

// The largest error of a rounding, relative to the exact value; 0 where arithmetic is exact.
template <class T>
constexpr double epsilon = 0;
template <>
constexpr double epsilon<f32> = 0x1p-24;
template <>
constexpr double epsilon<f64> = 0x1p-53;

template <class T>
inline double magnitude(T v) {
    return v < 0 ? -double(v) : double(v);
}

// Whether u * v stands for w at one tap, so that the error of the two sums, `terms` roundings, stays within that of the
// direct one.
template <class T>
inline bool stands_for(T u, T v, T w, index_t terms, index_t direct) {
    if constexpr (epsilon<T> == 0) {
        return mac(T(0), u, v) == w;
    } else {
        // Here float64 may lose the residual below its smallest number.
        if (sizeof(T) == 8 && magnitude(w) < 0x1p-960) return w == 0 && (u == 0 || v == 0);
        const double product = double(u) * double(v);
        // In float64 the product itself is rounded, and fma tells by how much.
        const double residual = magnitude(__builtin_fma(double(u), double(v), -double(w)));
        return residual + terms * epsilon<T> * magnitude(product) <= direct * epsilon<T> * magnitude(w);
    }
}

inline u64 common_divisor(u64 a, u64 b) {
    while (b) {
        const u64 rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// The power of two up to 256 that makes whole numbers below 2**24 of all taps, or 0.
template <class T>
double whole(const T* w, index_t count) {
    for (double scale = 1; scale <= 256; scale *= 2) {
        bool all = true;
        for (index_t k = 0; k < count && all; ++k) {
            const double scaled = magnitude(w[k]) * scale;
            all = scaled < 0x1p24 && scaled == double(u64(scaled));
        }
        if (all) return scale;
    }
    return 0;
}

// The column u and the row v whose product is the filter w, after a 1; or a 0 where there are none. The row has no
// element above 1, so that no sum of the column overflows or vanishes where the direct sum doesn't.
template <class T>
void factor_one(const T* w, index_t kh, index_t kw, T* found) {
    T* u = found + 1;
    T* v = u + kh;
    found[0] = T(0);
    if (kh < 2 || kw < 2) return;
    if constexpr (epsilon<T> == 0) {
        using S = SignedOf<T>;
        index_t row = 0;
        u64 divisor = 0;
        for (; row < kh && !divisor; ++row) {
            for (index_t q = 0; q < kw; ++q) {
                const S s = S(w[row * kw + q]);
                divisor = common_divisor(s < 0 ? u64(0) - u64(s) : u64(s), divisor);
            }
        }
        if (!divisor) return;
        const T* chosen = w + (row - 1) * kw;
        index_t pivot = 0;
        for (index_t q = 0; q < kw; ++q) {
            const S s = S(chosen[q]);
            const u64 part = (s < 0 ? u64(0) - u64(s) : u64(s)) / divisor;
            v[q] = s < 0 ? T(u64(0) - part) : T(part);
            if (v[q]) pivot = q;
        }
        for (index_t p = 0; p < kh; ++p) {
            const T tap = w[p * kw + pivot];
            // The lowest number over -1 would overflow, and processors trap it.
            u[p] = v[pivot] == T(-1) ? T(u64(0) - u64(tap)) : T(S(tap) / S(v[pivot]));
        }
    } else {
        // A filter of no structure is told by the four taps in its middle.
        const T* middle = w + (kh / 2 - 1) * kw + kw / 2 - 1;
        const double one = double(middle[0]) * double(middle[kw + 1]),
                     other = double(middle[1]) * double(middle[kw]);
        if (!(magnitude(one - other) <= 1e-3 * magnitude(one))) return;
        index_t pivot = 0;
        for (index_t k = 1; k < kh * kw; ++k) {
            if (magnitude(w[k]) > magnitude(w[pivot])) pivot = k;
        }
        if (w[pivot] == T(0)) return;
        const T* row = w + pivot / kw * kw;
        const index_t column = pivot % kw;
        if (const double scale = whole(w, kh * kw)) {
            // Filters of few bits are factored without rounding or not at all, so that whole samples give exact sums.
            u64 divisor = 0;
            for (index_t q = 0; q < kw; ++q)
                divisor = common_divisor(u64(magnitude(row[q]) * scale), divisor);
            double half = 1;  // a power of two that leaves nothing above 1 in the row
            while (magnitude(row[column]) * scale > half * double(divisor)) half *= 2;
            for (index_t q = 0; q < kw; ++q) v[q] = T(double(row[q]) * scale / double(divisor) / half);
            for (index_t p = 0; p < kh; ++p) {
                const double exact = double(w[p * kw + column]) / double(v[column]);
                u[p] = T(exact);
                for (index_t q = 0; q < kw; ++q) {
                    if (double(u[p]) * double(v[q]) != double(w[p * kw + q])) return;
                }
            }
            found[0] = T(1);
            return;
        }
        for (index_t q = 0; q < kw; ++q) v[q] = row[q] / w[pivot];
        for (index_t p = 0; p < kh; ++p) u[p] = w[p * kw + column];
    }
    for (index_t p = 0; p < kh; ++p) {
        for (index_t q = 0; q < kw; ++q) {
            if (!stands_for(u[p], v[q], w[p * kw + q], kh + kw + 1, kh * kw + 2)) return;
        }
    }
    found[0] = T(1);
}

template <class T>
bool factor(const void* w, index_t filters, index_t kh, index_t kw, void* found) {
    bool any = false;
    for (index_t o = 0; o < filters; ++o) {
        T* one = static_cast<T*>(found) + o * (1 + kh + kw);
        factor_one(static_cast<const T*>(w) + o * kh * kw, kh, kw, one);
        any = any || one[0] != T(0);
    }
    return any;
}

template <class T>
constexpr factor_t factors = factor<T>;

constexpr int columns_at_once = 512;
constexpr index_t farthest = 512;
template <class T>
constexpr index_t streams = columns_at_once + 1;
template <class T>
constexpr Transform transform = {};
template <class T>
constexpr index_t strip_pitch = columns_at_once + farthest + lanes<T>;

inline index_t farthest_tap(const Work& t) {
    index_t most = 0;
    for (index_t q = 0; q < t.kw; ++q) most = t.taps[q] > most ? t.taps[q] : most;
    return most;
}

// R rows of sums over the filter's column, for `width` columns from x on, of which j are done; `probe` becomes NaN
// where a sum is infinite or no number.
template <int R, int N, class T>
index_t column_sums(const Work& t, const Rows& rows, const T* x, const T* u, index_t j, index_t width,
                    T* sums, Vec<T>& probe) {
    static const index_t here = 0;
    for (; j + N * lanes<T> <= width || (N == 1 && j < width); j += N * lanes<T>) {
        // The last vector reaches back over what is done, or on where the row is short and was gathered.
        if (N == 1 && j + lanes<T> > width && width > lanes<T>) j = width - lanes<T>;
        Vec<T> sum[R][N] = {};
        if (t.in_place) fetch<R, N>(x + j, R + rows.reach, rows.step);
        passes(sum, t, rows, x + j, &here, 1, u, 1, (N - 1) * lanes<T>);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                store(sums + r * strip_pitch<T> + j + n * lanes<T>, sum[r][n]);
                if constexpr (epsilon<T> != 0) probe = mac(probe, sum[r][n], Vec<T>{});
            }
        }
    }
    return j;
}

// R x N vectors of outputs: sums over the filter's row, of what column_sums left.
template <int R, int N, class T>
inline void row_sums(Vec<T> (&sum)[R][N], const Work& t, const T* sums, const T* v, T bias) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = broadcast(bias);
    }
    for (index_t q = 0; q < t.kw; ++q) {
        const Vec<T> weight = broadcast(v[q]);
        const T* sample = sums + t.taps[q];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                sum[r][n] = mac(sum[r][n], load(sample + r * strip_pitch<T> + n * lanes<T>), weight);
            }
        }
    }
}

// R output rows over the whole width.
template <int R, class T>
void strip(const Work& t, const Rows& rows, const T* x, const T* u, T bias, T* y, Vec<T>& probe) {
    const T* v = u + t.kh;
    const index_t beyond = farthest_tap(t), down = rows.out_apart * t.yr;
    T sums[R * strip_pitch<T>];
    Line<T> lines[R];
    const bool streamed = t.stream;
    if (streamed) {
        for (int r = 0; r < R; ++r) lines[r].begin(y + r * down);
    }
    for (index_t j0 = 0; j0 < t.ow; j0 += columns_at_once) {
        const bool last = j0 + columns_at_once >= t.ow;
        if (last && streamed) {
            for (Line<T>& line : lines) line.end(j0);
        }
        if (t.ow - j0 < lanes<T> && t.ow >= lanes<T>) j0 = t.ow - lanes<T>;
        const index_t width = last ? t.ow - j0 : columns_at_once;
        const index_t done = column_sums<R, wide_vectors>(t, rows, x + j0, u, 0, width + beyond, sums, probe);
        column_sums<R, 1>(t, rows, x + j0, u, done, width + beyond, sums, probe);
        index_t j = 0;
        for (; j + 2 * lanes<T> <= width; j += 2 * lanes<T>) {
            Vec<T> sum[R][2];
            row_sums(sum, t, sums + j, v, bias);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int n = 0; n < 2; ++n) {
                    const index_t column = j0 + j + n * lanes<T>;
                    if (last || !streamed) {
                        store(y + r * down + column, sum[r][n]);
                    } else {
                        lines[r].put(column, sum[r][n]);
                    }
                }
            }
        }
        for (; j < width; j += lanes<T>) {
            if (j + lanes<T> > width && width > lanes<T>) j = width - lanes<T>;
            Vec<T> sum[R][1];
            row_sums(sum, t, sums + j, v, bias);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                store_first(y + r * down + j0 + j, sum[r][0],
                            width - j < lanes<T> ? width - j : index_t(lanes<T>));
        }
    }
}

template <class T>
void direct(const Work& t, index_t o) {
    Work one = t;
    one.oc = 1;
    one.w = static_cast<const T*>(t.w) + o * t.kh * t.kw;
    one.bias = static_cast<const T*>(t.bias) + o;
    one.y = static_cast<T*>(t.y) + o * t.yo;
    t.otherwise(one);
}

template <class T>
void work(const Work& t) {
    const Rows rows(t);
    const T* found = static_cast<const T*>(t.factors);
    for (index_t o = 0; o < t.oc; ++o, found += 1 + t.kh + t.kw) {
        if (found[0] == T(0)) {
            direct<T>(t, o);
            continue;
        }
        Vec<T> probe = {};
        const T bias = static_cast<const T*>(t.bias)[o];
        for (index_t first = 0; first < rows.out_apart && first < t.oh; ++first) {
            const T* x = static_cast<const T*>(t.x) + first * t.sh * t.xr;
            T* y = static_cast<T*>(t.y) + o * t.yo + first * t.yr;
            for (index_t left = (t.oh - first - 1) / rows.out_apart + 1; left > 0;) {
                const int taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                switch (taken) {
                    case 4: strip<4>(t, rows, x, found + 1, bias, y, probe); break;
                    case 2: strip<2>(t, rows, x, found + 1, bias, y, probe); break;
                    default: strip<1>(t, rows, x, found + 1, bias, y, probe);
                }
                left -= taken;
                x += taken * rows.step;
                y += taken * rows.out_apart * t.yr;
            }
        }
        // A sample that isn't finite, or a column's sum that overflows, may meet a 0 of the row that the filter's own
        // taps don't let it meet.
        bool finite = true;
        for (int k = 0; k < lanes<T>; ++k) finite = finite && probe[k] == probe[k];
        if (!finite) {
            if (t.stream) stream_end();
            direct<T>(t, o);
        }
    }
    if (t.stream) stream_end();
}
