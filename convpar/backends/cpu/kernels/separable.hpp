// Builds on: simd, which computes what isn't separable.
// Idea: a filter that is a column times a row needs kh + kw products an output instead of kh * kw: the column's sums of
//       a few rows go to a strip in the first cache, and the row's sums over that to the output. A large filter may
//       also be the sum of two such terms. Samples of pictures become floats for the column's sums, and the row's sums samples (narrow.h).
// Step: a quarter to four tenths of simd's time at 15 x 15 (docs/cpu-speed.md, Steps).
// Limit: memory, up to about 15 x 15; then loads that straddle two cache lines, one for every product of the row.

#include "blocks.h"

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

// The number of terms, columns u times rows v, that a filter w is the sum of, so far; then u and v of each of them.
template <class T>
struct Terms {
    const T* w;
    index_t kh, kw;
    T* found;
    T* u(int term) const { return found + 1 + term * (kh + kw); }
    T* v(int term) const { return u(term) + kh; }
    T tap(index_t p, index_t q) const { return w[p * kw + q]; }
};

// What the first `terms` leave of a tap, in the arithmetic of factors: exact for integers.
template <class T>
inline auto rest(const Terms<T>& t, int terms, index_t p, index_t q) {
    if constexpr (epsilon<T> == 0) {
        T left = t.tap(p, q);
        for (int k = 0; k < terms; ++k) left = mac(left, T(T(0) - t.u(k)[p]), t.v(k)[q]);
        return left;
    } else {
        double left = double(t.tap(p, q));
        for (int k = 0; k < terms; ++k) {
            const double u = double(t.u(k)[p]), v = double(t.v(k)[q]);
            // In float64 the product itself is rounded, and fma tells by how much.
            left = sizeof(T) == 8 ? __builtin_fma(-u, v, left) : left - u * v;
        }
        return left;
    }
}

// Whether the terms stand for the tap, so that the error of their sums stays within that of the direct one.
template <class T>
bool stands_for(const Terms<T>& t, int terms, index_t p, index_t q) {
    if constexpr (epsilon<T> == 0) {
        return rest(t, terms, p, q) == T(0);
    } else {
        const double w = magnitude(t.tap(p, q));
        // Here float64 may lose the residual below its smallest number.
        const bool lost = sizeof(T) == 8 && w < 0x1p-960;
        double products = 0;
        for (int k = 0; k < terms; ++k) {
            const T u = t.u(k)[p], v = t.v(k)[q];
            if (lost && u != 0 && v != 0) return false;
            products += magnitude(double(u) * double(v));
        }
        if (lost) return w == 0;
        // Of two terms the first leaves what float64 rounds.
        const double rounded = terms > 1 ? epsilon<f64> * magnitude(rest(t, 1, p, q)) : 0;
        const index_t roundings = t.kh + t.kw + terms, direct = t.kh * t.kw + 2;
        return magnitude(rest(t, terms, p, q)) + rounded + roundings * epsilon<T> * products <=
               direct * epsilon<T> * w;
    }
}

template <class T>
bool stand_for(const Terms<T>& t, int terms) {
    for (index_t p = 0; p < t.kh; ++p) {
        for (index_t q = 0; q < t.kw; ++q) {
            if (!stands_for(t, terms, p, q)) return false;
        }
    }
    return true;
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

inline u64 common_divisor(u64 a, u64 b) {
    while (b) {
        const u64 left = a % b;
        a = b;
        b = left;
    }
    return a;
}

// The first term that may be all of a filter of floating point. Its row has no element above 1, so that no sum of the
// column overflows or vanishes where the direct sum doesn't.
template <class T>
bool find_one(const Terms<T>& t) {
    // A filter of no structure is told by the four taps in its middle.
    const T* middle = t.w + (t.kh / 2 - 1) * t.kw + t.kw / 2 - 1;
    const double one = double(middle[0]) * double(middle[t.kw + 1]),
                 other = double(middle[1]) * double(middle[t.kw]);
    if (!(magnitude(one - other) <= 1e-3 * magnitude(one))) return false;
    T *u = t.u(0), *v = t.v(0);
    index_t pivot = 0;
    for (index_t k = 1; k < t.kh * t.kw; ++k) {
        if (magnitude(t.w[k]) > magnitude(t.w[pivot])) pivot = k;
    }
    if (t.w[pivot] == T(0)) return false;
    const T* row = t.w + pivot / t.kw * t.kw;
    const index_t column = pivot % t.kw;
    if (const double scale = whole(t.w, t.kh * t.kw)) {
        // Filters of few bits are factored without rounding or not at all, so that whole samples give exact sums.
        u64 divisor = 0;
        for (index_t q = 0; q < t.kw; ++q) divisor = common_divisor(u64(magnitude(row[q]) * scale), divisor);
        double half = 1;  // a power of two that leaves nothing above 1 in the row
        while (magnitude(row[column]) * scale > half * double(divisor)) half *= 2;
        for (index_t q = 0; q < t.kw; ++q) v[q] = T(double(row[q]) * scale / double(divisor) / half);
        for (index_t p = 0; p < t.kh; ++p) {
            u[p] = T(double(t.tap(p, column)) / double(v[column]));
            for (index_t q = 0; q < t.kw; ++q) {
                if (rest(t, 1, p, q) != 0) return false;
            }
        }
        return true;
    }
    for (index_t q = 0; q < t.kw; ++q) v[q] = row[q] / t.w[pivot];
    for (index_t p = 0; p < t.kh; ++p) u[p] = t.tap(p, column);
    return stand_for(t, 1);
}

// The element of what `terms` leave that the next term is drawn through: the largest of the row with the fewest taps, so
// that terms overlap in few; or the smallest, which may divide the others.
template <class T>
bool find_pivot(const Terms<T>& t, int terms, bool smallest, index_t& i, index_t& j) {
    index_t fewest = 0;
    double best = 0;
    for (index_t p = 0; p < t.kh; ++p) {
        index_t taps = 0, at = 0;
        double most = 0;
        for (index_t q = 0; q < t.kw; ++q) {
            const double left = magnitude(rest(t, terms, p, q));
            if (!(left > 0)) continue;
            ++taps;
            if (most == 0 || (smallest ? left < most : left > most)) {
                most = left;
                at = q;
            }
        }
        if (taps == 0) continue;
        // Rounding leaves no zeros to be counted.
        const bool fewer = terms == 0 && taps != fewest;
        if (best == 0 || (fewer ? taps < fewest : smallest ? most < best : most > best)) {
            best = most;
            fewest = taps;
            i = p;
            j = at;
        }
    }
    return best > 0;
}

// Two terms that are a filter of floating point. Their rows have no element above a half, so that where sums of columns
// are subnormal, both together err no more than the direct sum.
template <class T>
bool find_two(const Terms<T>& t) {
    // A filter of no structure is told by the nine taps in its middle.
    const T* middle = t.w + (t.kh - 3) / 2 * t.kw + (t.kw - 3) / 2;
    double determinant = 0, products = 0;
    for (int q = 0; q < 3; ++q) {
        const double top = double(middle[q]);
        const T *second = middle + t.kw, *third = second + t.kw;
        const int r = (q + 1) % 3, s = (q + 2) % 3;
        const double one = double(second[r]) * double(third[s]), other = double(second[s]) * double(third[r]);
        determinant += top * (one - other);
        products += magnitude(top) * (magnitude(one) + magnitude(other));
    }
    if (!(magnitude(determinant) <= 1e-3 * products)) return false;
    const bool exact = whole(t.w, t.kh * t.kw) != 0;
    for (int k = 0; k < 2; ++k) {
        index_t i = 0, j = 0;
        if (!find_pivot(t, k, exact, i, j)) return false;
        const double pivot = rest(t, k, i, j);
        T *u = t.u(k), *v = t.v(k);
        double largest = 0;
        for (index_t q = 0; q < t.kw; ++q) {
            v[q] = T(rest(t, k, i, q) / pivot);
            largest = magnitude(v[q]) > largest ? magnitude(v[q]) : largest;
        }
        for (index_t p = 0; p < t.kh; ++p) u[p] = T(rest(t, k, p, j));
        // As in a single term, without rounding or not at all.
        if (exact && !(whole(u, t.kh) && whole(v, t.kw))) return false;
        double scale = 1;
        while (largest * scale > 0.5) scale /= 2;
        for (index_t q = 0; q < t.kw; ++q) v[q] = T(double(v[q]) * scale);
        for (index_t p = 0; p < t.kh; ++p) u[p] = T(double(u[p]) / scale);
    }
    if (exact) {
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q) {
                if (rest(t, 2, p, q) != 0) return false;
            }
        }
    }
    return stand_for(t, 2);
}

// The next term of a filter of integers. Its pivot is one that the least power of two divides, and the rest of the
// pivot, which is odd, has an inverse modulo 2**bits: so there is no remainder.
template <class T>
bool find_next(const Terms<T>& t, int terms) {
    u64 least = 0;
    index_t i = 0, j = 0;
    for (index_t k = 0; k < t.kh * t.kw && least != 1; ++k) {
        const u64 left = rest(t, terms, k / t.kw, k % t.kw), power = left & (u64(0) - left);
        if (power && (!least || power < least)) {
            least = power;
            i = k / t.kw;
            j = k % t.kw;
        }
    }
    if (!least) return false;
    const u64 odd = u64(rest(t, terms, i, j)) / least;
    u64 inverse = odd;  // of three bits, and twice as many with every step
    for (int step = 0; step < 5; ++step) inverse *= 2 - odd * inverse;
    for (index_t q = 0; q < t.kw; ++q) t.v(terms)[q] = T(rest(t, terms, i, q) / least);
    for (index_t p = 0; p < t.kh; ++p) t.u(terms)[p] = T(rest(t, terms, p, j) * inverse);
    return true;
}

// How many terms the filter is, 0 if it isn't any or two would save less than half of the products.
template <class T>
int find_terms(const Terms<T>& t) {
    if (t.kh < 2 || t.kw < 2) return 0;
    const bool two = 2 * 2 * (t.kh + t.kw) <= t.kh * t.kw;
    if constexpr (epsilon<T> == 0) {
        if (!find_next(t, 0)) return 0;
        if (stand_for(t, 1)) return 1;
        return two && find_next(t, 1) && stand_for(t, 2) ? 2 : 0;
    } else {
        return find_one(t) ? 1 : two && find_two(t) ? 2 : 0;
    }
}

template <class T>
bool factor(const void* w, index_t filters, index_t kh, index_t kw, void* found) {
    bool any = false;
    for (index_t o = 0; o < filters; ++o) {
        const Terms<T> terms = {static_cast<const T*>(w) + o * kh * kw, kh, kw,
                                static_cast<T*>(found) + o * (1 + most_terms * (kh + kw))};
        terms.found[0] = T(find_terms(terms));
        any = any || terms.found[0] != T(0);
    }
    return any;
}

// Outputs that a strip of column sums is made for at once, so that it stays in the first cache, and elements that taps may
// reach beyond them.
constexpr int columns_at_once = 512;
constexpr index_t farthest = 512;

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.narrow = narrow_by_blocks<T>();
    k.factor = factor<T>;
    k.farthest = farthest;
    k.streams = columns_at_once + 1;
    return k;
}

template <class T>
constexpr index_t strip_pitch = columns_at_once + farthest + lanes<T>;

inline index_t farthest_tap(const Work& t) {
    index_t most = 0;
    for (index_t q = 0; q < t.kw; ++q) most = t.taps[q] > most ? t.taps[q] : most;
    return most;
}

// R rows of sums over the filter's column, for `width` columns from x on, of which j are done; `probe` becomes NaN
// where a sum is infinite or no number. X: of samples, the sums' type or narrow.
template <class Passes, int R, int N, class X, class T>
[[gnu::always_inline]] inline index_t column_sums(const Work& t, const Rows& rows, const X* x, const T* u,
                                                  index_t j, index_t width, T* sums, Vec<T>& probe) {
    static const index_t here = 0;
    for (; j + N * lanes<T> <= width || (N == 1 && j < width); j += N * lanes<T>) {
        // The last vector reaches back over what is done, or on where the row is short and was gathered.
        if (N == 1 && j + lanes<T> > width && width > lanes<T>) j = width - lanes<T>;
        Vec<T> sum[R][N] = {};
        constexpr int fetched = fetched_lines<X, T, N>;
        if (rows.below) fetch<0, 2, R, fetched>(x + j, rows.step, (R + rows.reach) * rows.step);
        fetch<R, fetched>(x + j, rows.step, rows.reach);
        passes<1>(Passes(), sum, t, rows, x + j, &here, 1, u, 1, (N - 1) * lanes<T>);
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

// The same of all terms; of two, each is summed by itself, and `probe` knows of them too.
template <int R, int N, class T>
inline void all_sums(Vec<T> (&sum)[R][N], const Work& t, int terms, const T* sums, const T* v, T bias,
                     Vec<T>& probe) {
    row_sums(sum, t, sums, v, bias);
    if (terms == 1) return;
    Vec<T> second[R][N];
    row_sums(second, t, sums + R * strip_pitch<T>, v + t.kh + t.kw, T(0));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            sum[r][n] += second[r][n];
            if constexpr (epsilon<T> != 0) probe = mac(probe, sum[r][n], Vec<T>{});
        }
    }
}

// R output rows over the whole width, of a filter of so many terms.
template <class Passes, int R, class X, class Y, class T>
void strip(const Work& t, const Rows& rows, const X* x, int terms, const T* u, T bias, Y* y, Vec<T>& probe) {
    const T* v = u + t.kh;
    const index_t beyond = farthest_tap(t), down = rows.out_apart * t.yr;
    T sums[most_terms * R * strip_pitch<T>];
    Line<T> lines[R];
    const bool streamed = !converts<Y, T> && t.stream;
    if constexpr (!converts<Y, T>) {
        if (streamed) {
            for (int r = 0; r < R; ++r) lines[r].begin(y + r * down);
        }
    }
    for (index_t j0 = 0; j0 < t.ow; j0 += columns_at_once) {
        const bool last = j0 + columns_at_once >= t.ow;
        if (last && streamed) {
            for (Line<T>& line : lines) line.end(j0);
        }
        if (t.ow - j0 < lanes<T> && t.ow >= lanes<T>) j0 = t.ow - lanes<T>;
        const index_t width = last ? t.ow - j0 : columns_at_once;
        for (int k = 0; k < terms; ++k) {
            const T* column = u + k * (t.kh + t.kw);
            T* to = sums + k * R * strip_pitch<T>;
            const index_t done =
                column_sums<Passes, R, wide_vectors>(t, rows, x + j0, column, 0, width + beyond, to, probe);
            column_sums<Passes, R, 1>(t, rows, x + j0, column, done, width + beyond, to, probe);
            // Lanes beyond the outputs read what nothing was stored to, and `probe` knows of them.
            for (int r = 0; r < R && width < lanes<T>; ++r)
                store(to + r * strip_pitch<T> + width + beyond, Vec<T>{});
        }
        index_t j = 0;
        for (; j + 2 * lanes<T> <= width; j += 2 * lanes<T>) {
            Vec<T> sum[R][2];
            all_sums(sum, t, terms, sums + j, v, bias, probe);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                if (last || !streamed) {
                    store_as(y + r * down + j0 + j, sum[r]);
                } else {
                    lines[r].put(j0 + j, sum[r]);
                    lines[r].settle(j0 + j + 2 * lanes<T>);
                }
            }
        }
        for (; j < width; j += lanes<T>) {
            if (j + lanes<T> > width && width > lanes<T>) j = width - lanes<T>;
            Vec<T> sum[R][1];
            all_sums(sum, t, terms, sums + j, v, bias, probe);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                Y* to = y + r * down + j0 + j;
                if constexpr (converts<Y, T>) {
                    store_as(to, sum[r]);
                } else {
                    store_first(to, sum[r][0], width - j < lanes<T> ? width - j : index_t(lanes<T>));
                }
            }
        }
    }
}

template <class Y, class T>
void direct(const Work& t, index_t o) {
    Work one = t;
    one.oc = 1;
    one.w = static_cast<const T*>(t.w) + o * t.kh * t.kw;
    one.bias = static_cast<const T*>(t.bias) + o;
    one.y = static_cast<Y*>(t.y) + o * t.yo;
    t.otherwise(one);
}

template <class Passes, class X, class Y, class T>
void filters(const Work& t, const Rows& rows) {
    const T* found = static_cast<const T*>(t.factors);
    for (index_t o = 0; o < t.oc; ++o, found += 1 + most_terms * (t.kh + t.kw)) {
        const int terms = int(found[0]);
        if (terms == 0) {
            direct<Y, T>(t, o);
            continue;
        }
        Vec<T> probe = {};
        const T bias = static_cast<const T*>(t.bias)[o];
        for (index_t first = 0; first < rows.out_apart && first < t.oh; ++first) {
            const X* x = static_cast<const X*>(t.x) + first * t.sh * t.xr;
            Y* y = static_cast<Y*>(t.y) + o * t.yo + first * t.yr;
            const index_t high = (t.oh - first - 1) / rows.out_apart + 1;
            for (index_t i = 0; i < high;) {
                // Narrow samples have as many rows; their last strip reaches back.
                if (converts<X, T> && high - i < 4) i = high - 4;
                const X* from = x + i * rows.step;
                Y* to = y + i * rows.out_apart * t.yr;
                if (high - i >= 4) {
                    strip<Passes, 4>(t, rows, from, terms, found + 1, bias, to, probe);
                    i += 4;
                } else if constexpr (!converts<X, T>) {
                    if (high - i >= 2) {
                        strip<Passes, 2>(t, rows, from, terms, found + 1, bias, to, probe);
                        i += 2;
                    } else {
                        strip<Passes, 1>(t, rows, from, terms, found + 1, bias, to, probe);
                        ++i;
                    }
                }
            }
        }
        // A sample that isn't finite, or a column's sum that overflows, may meet a 0 of the row that the filter's own
        // taps don't let it meet.
        bool finite = true;
        for (int k = 0; k < lanes<T>; ++k) finite = finite && probe[k] == probe[k];
        if (!finite) {
            if (t.stream) stream_end();
            direct<Y, T>(t, o);
        }
    }
    if (t.stream) stream_end();
}

// Blocks also fetch what the strip below will read, as far as the second cache, where that comes from memory: 1.1 to 1.2
// times as fast, and no faster for more than 7 filter rows.
template <class X>
Rows fetching(const Work& t) {
    Rows rows(t);
    rows.below = may_fetch_below<X>(t) && t.kh <= 7;
    return rows;
}

template <class T>
void work(const Work& t) {
    const Rows rows = fetching<T>(t);
    choose_passes<T>(t, rows, [&](auto heights) { filters<decltype(heights), T, T, T>(t, rows); });
}

#ifdef CONVPAR_NARROW

template <class X, class Y>
void work_narrow(const Work& t) {
    const Rows rows = fetching<X>(t);
    with_height(NarrowHeights<Y>(), t.kh,
                [&](auto height) { filters<decltype(height), X, Y, float>(t, rows); });
}

#endif
