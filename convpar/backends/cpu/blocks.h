// Blocks of output rows x vectors of columns in registers, for the kernels whose lanes are columns. Included after
// simd.h.

#include "narrow.h"

// Output rows x vectors of a block, and filter rows of a pass: their sums, weights and a sample fit the registers (16 + 8 + 1
// of 32, 8 + 5 + 1 of 16), and a block has sums enough to hide the latency of an addition. A tall block loads less for each
// product; a wide one is for the few rows that may be left.
constexpr int wide_vectors = many_registers ? 4 : 2;
constexpr int tall_rows = many_registers ? 8 : 4, tall_vectors = 2;
constexpr int pass_rows = many_registers ? 8 : 5;
// Most rows of a filter that one pass takes alone. With 16 registers a weight or two then come from memory, which costs less
// than a second pass, unless products need registers as well.
template <class T>
constexpr int lone_pass_rows = !many_registers ? (fused_products ? 7 : pass_rows)
                               : fused<T>      ? 9
                                               : pass_rows;
// Vectors of a row that come between two calls of Line::settle, at most.
constexpr int most_unsettled = 2 * wide_vectors;
// A filter of so many rows may take two passes.
template <class T>
constexpr int least_halved = lone_pass_rows<T> + 1;

// Adds the products of P rows of one filter column to R output rows. Output row r meets filter row p in row r + p under the
// filter; these rows are `step` elements apart. The last of the N vectors begins at column `last`.
// Always inline: sums that go to a call by reference lie in memory.
template <int P, int R, int N, class X, class T>
[[gnu::always_inline]] inline void column(Vec<T> (&sum)[R][N], const X* row, index_t step, const T* w,
                                          index_t w_step, index_t last) {
    Vec<T> weight[P];
#pragma GCC unroll 9
    for (int p = 0; p < P; ++p) weight[p] = broadcast(w[p * w_step]);
#pragma GCC unroll 16
    for (int k = 0; k < R + P - 1; ++k, row += step) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const Vec<T> sample = held(load_as<T>(row + (n < N - 1 ? n * lanes<T> : last)));
#pragma GCC unroll 9
            for (int p = 0; p < P; ++p) {
                const int r = k - p;
                if (r >= 0 && r < R) sum[r][n] = mac(sum[r][n], sample, weight[p]);
            }
        }
        // Else the compiler would keep a pointer to each row, in more registers than there are.
        asm("" : "+r"(row));
    }
}

// The same of all filter columns: Q neighbours, or if Q is 0 any, whose samples are `taps` elements from those of the first.
template <int P, int R, int N, int Q, class X, class T>
[[gnu::always_inline]] inline void pass(Vec<T> (&sum)[R][N], const X* x, index_t step, const index_t* taps,
                                        index_t kw, const T* w, index_t w_step, index_t last) {
    if constexpr (Q > 0) {
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) column<P, R, N>(sum, x + q, step, w + q, w_step, last);
    } else {
        for (index_t q = 0; q < kw; ++q) column<P, R, N>(sum, x + taps[q], step, w + q, w_step, last);
    }
}

// Elements from `p` to the first line of the cache that begins there or behind.
template <class T>
index_t to_line(const T* p) {
    return (-reinterpret_cast<std::uintptr_t>(p) & (line_bytes - 1)) / sizeof(T);
}

// How the rows of outputs and filter meet. Rows of outputs with the same i % out_apart share rows of the image, and so
// do rows of the filter with the same p % taps_apart.
struct Rows {
    index_t out_apart, taps_apart, step;
    index_t taken, longer;  // filter rows of the first `longer` passes; the others take one less
    index_t reach;          // rows under a block beyond its own
    bool along, below;  // what blocks of long rows fetch: samples of the next ones there; of those below them
    explicit Rows(const Work& t) {
        out_apart = t.sh == 1 ? t.dh : 1;
        taps_apart = t.sh == 1 ? 1 : t.dh == 1 ? t.sh : t.kh;
        step = (t.sh == 1 ? t.dh : t.sh) * t.xr;
        reach = (t.kh - 1) / taps_apart;
        along = below = false;
        // As few passes as there can be, all nearly equal.
        const index_t passes = reach / pass_rows + 1;
        taken = reach / passes + 1;
        longer = reach + 1 - passes * (taken - 1);
    }
};

// Whether it may pay to fetch rows below a block, and samples beside one that slides. With vectors of 32 bytes Intel's processors gain a
// twelfth at 3 x 3 (family 6, model 207), but AMD's that have no longer ones take a fifth longer, and a third at 5 x 5 (family 25, model 1).
// With vectors of 16 bytes, which take long enough without, it took a twentieth longer.
inline bool fetching_pays() { return vector_bytes == line_bytes || (vector_bytes > 16 && intel()); }

// Whether rows of the image, `step` elements apart, lie so far from each other that Intel's processors read them sooner one after the
// other: fetching a few lines of each row below takes a fifth longer at 3 x 3 on 16384 columns, and a tenth at 7 x 7 (family 6, models
// 167 and 207); on 4096 it is level.
template <class X>
bool far_apart(index_t step) {
    return intel() && step * index_t(sizeof(X)) >= 32768;
}

// Whether blocks may gain by fetching samples for those below: where they come from memory, row by row of one plane.
template <class X>
bool may_fetch_below(const Work& t) {
    return t.far && t.in_place && t.cg == 1 && t.sh == 1 && fetching_pays() && !far_apart<X>(t.xr);
}

// A row of outputs on its way to memory, past the caches: columns come in order, without gaps, and leave in whole lines of the
// cache, of which no part goes another way: the processor would have to fetch them again. The processor joins parts of a line
// only as long as it has few lines at work.
template <class T, bool IsLine = vector_bytes == line_bytes>
class Line;

// Vectors as long as a line: each leaves with the end of the one before.
template <class T>
class Line<T, true> {
    T* y;
    index_t skip;  // columns before the first line
    Vec<T> last;   // what has come but isn't stored yet

  public:
    void begin(T* y_) {
        y = y_;
        skip = to_line(y);
    }
    // The vectors of columns from j on.
    template <int N>
    void put(index_t j, const Vec<T> (&v)[N]) {
        const index_t to = j - lanes<T> + skip;
        if (j == 0) {
            store_first(y, v[0], skip);
        } else {
            stream(y + to, join<T>(last, v[0], skip));
        }
#pragma GCC unroll 4
        for (int n = 1; n < N; ++n) stream(y + (to + n * lanes<T>), join<T>(v[n - 1], v[n], skip));
        last = v[N - 1];
    }
    // All columns before j have come; called after every few vectors.
    void settle(index_t) {}
    // The same, and no more will come.
    void end(index_t j) {
        store_first(y + (j - lanes<T> + skip), join<T>(last, last, skip), lanes<T> - skip);
    }
};

// Shorter vectors wait in the first cache until there are some lines. Joined in registers they would take as long as 5 x 5
// products: these processors have no instruction that shifts lanes by a number known at run time.
template <class T>
class Line<T, false> {
    static constexpr index_t line = line_bytes / sizeof(T), at_once = 8 * line;
    T* y;
    // Column of the first that wait, which begin with a line; negative where the row begins within that.
    index_t first;
    alignas(line_bytes) T waiting[at_once + most_unsettled * lanes<T>];

    [[gnu::noinline]] void leave(index_t count) {
        const index_t begin = first < 0 ? -first : 0;
        index_t k = begin == 0 ? 0 : count < line ? count : line;
        __builtin_memcpy(y + (first + begin), waiting + begin, (k - begin) * sizeof(T));
        for (; k + line <= count; k += line) {
#pragma GCC unroll 4
            for (index_t n = 0; n < line; n += lanes<T>) stream(y + (first + k + n), load(waiting + k + n));
        }
        __builtin_memcpy(y + (first + k), waiting + k, (count - k) * sizeof(T));
        first += count;
    }

  public:
    void begin(T* y_) {
        y = y_;
        const index_t skip = to_line(y);
        first = skip == 0 ? 0 : skip - line;
    }
    template <int N>
    void put(index_t j, const Vec<T> (&v)[N]) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store(waiting + (j - first) + n * lanes<T>, v[n]);
    }
    void settle(index_t j) {
        if (j - first < at_once) return;
        leave(at_once);
#pragma GCC unroll 8
        for (int n = 0; n < most_unsettled; ++n)
            store(waiting + n * lanes<T>, load(waiting + at_once + n * lanes<T>));
    }
    void end(index_t j) { leave(j - first); }
};

// Cases of filter rows in a pass.
#define EACH_PASS PASS(1) PASS(2) PASS(3) PASS(4) PASS(5) PASS(6) PASS(7) PASS(8)

// Filter rows of each pass, where they are known at compile time; else none.
template <int... P>
struct Heights {};

// Adds to R rows x N vectors the products of all filter rows and columns (Q as in `pass`) with one channel. Filter columns
// are w[0], w[1], ..., filter rows `row` apart.
template <int Q, int R, int N, class X, class T, int First, int... Others>
[[gnu::always_inline]] inline void passes(Heights<First, Others...>, Vec<T> (&sum)[R][N], const Work& t,
                                          const Rows& rows, const X* x, const index_t* taps, index_t kw,
                                          const T* w, index_t row, index_t last) {
    pass<First, R, N, Q>(sum, x, rows.step, taps, kw, w, row, last);
    if constexpr (sizeof...(Others) > 0) {
        passes<Q>(Heights<Others...>(), sum, t, rows, x + First * rows.step, taps, kw, w + First * row, row,
                  last);
    }
}
template <int Q, int R, int N, class T>
[[gnu::always_inline]] inline void passes(Heights<>, Vec<T> (&sum)[R][N], const Work& t, const Rows& rows,
                                          const T* x, const index_t* taps, index_t kw, const T* w,
                                          index_t row, index_t last) {
    for (index_t first = 0; first < rows.taps_apart && first < t.kh; ++first) {
        const T* above = x + first * t.dh * t.xr;
        const T* weights = w + first * row;
        index_t left = (t.kh - first - 1) / rows.taps_apart + 1;
        for (index_t k = 0; left > 0; ++k) {
            const index_t most = rows.taken - (k >= rows.longer), count = left < most ? left : most;
            switch (count) {
#define PASS(P)                                                                                      \
    case P:                                                                                          \
        if constexpr (P <= pass_rows) {                                                              \
            pass<P, R, N, Q>(sum, above, rows.step, taps, kw, weights, rows.taps_apart * row, last); \
        }                                                                                            \
        break;
                EACH_PASS
#undef PASS
            }
            left -= count;
            above += count * rows.step;
            weights += count * rows.taps_apart * row;
        }
    }
}

// The image's rows one after the other instead of the filter's columns, of as many filter rows as a block has or more. Without
// weights to keep there is room for three vectors of a tall block.
struct RowByRow {};
constexpr int wide_row = 3;

// Vectors of a tall block.
template <class Passes>
constexpr int block_vectors = tall_vectors;
template <>
constexpr int block_vectors<RowByRow> = wide_row;

// Adds the products of the image's row k under the block and, if k is less than R - 1, of that one filter height below it. Each
// output row meets one of them, with the filter's row k - r or k - r + height, so that all sums of a block are at work together.
// From the one row to the other it is `below` in the image; the rest as in `pass`, with all the filter's weights.
template <int k, int R, int N, class T>
[[gnu::always_inline]] inline void meet(Vec<T> (&sum)[R][N], const T* x, index_t below, index_t height,
                                        const index_t* taps, index_t kw, const T* w, index_t w_step,
                                        index_t last) {
    for (index_t q = 0; q < kw; ++q) {
        const T* row = x + taps[q];
        Vec<T> samples[N];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            if (r == k + 1) row += below;
            if (r == 0 || r == k + 1) {
                // Else the compiler keeps an address for each vector, some of them in vector registers, and moving these back takes
                // ports that FMAs need.
                asm("" : "+r"(row));
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) samples[n] = held(load(row + (n < N - 1 ? n * lanes<T> : last)));
            }
            const Vec<T> weight = broadcast(w[(k - r + (r > k ? height : 0)) * w_step + q]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[r][n] = mac(sum[r][n], samples[n], weight);
        }
    }
}
template <int R, int N, class T, int... k>
[[gnu::always_inline]] inline void meet(Numbers<k...>, Vec<T> (&sum)[R][N], const T* x, index_t step,
                                        index_t height, const index_t* taps, index_t kw, const T* w,
                                        index_t w_step, index_t last) {
    (meet<k>(sum, x + k * step, height * step, height, taps, kw, w, w_step, last), ...);
}

template <int Q, int R, int N, class T>
[[gnu::always_inline]] inline void passes(RowByRow, Vec<T> (&sum)[R][N], const Work& t, const Rows& rows,
                                          const T* x, const index_t* taps, index_t kw, const T* w,
                                          index_t row, index_t last) {
    if constexpr (R > 1) {
        meet(typename UpTo<R - 1>::type(), sum, x, rows.step, t.kh, taps, kw, w, row, last);
    }
    for (index_t k = R - 1; k < t.kh; ++k)
        meet<R - 1>(sum, x + k * rows.step, 0, 0, taps, kw, w + (k - R + 1) * row, row, last);
}

// Fewest filter rows that may be taken so; 0: never. Weights are loaded more often. With few registers, if products need none
// of their own, it gains where there would be several passes, each of which loads most samples again. With many, it gains
// where rows of the image push each other out of the first cache, for few have to stay there at once. No fewer than a block has.
template <class T>
constexpr int least_row_by_row = many_registers ? (sizeof(T) < 4 ? 0 : tall_rows)
                                 : fused<T>     ? lone_pass_rows<T> + 1
                                                : 0;

// Calls `f` with the heights of the filter's passes if they are one or, of floating point, two, of `most` rows or fewer, and else
// with none. Where sums stay in registers across the choice of a pass, compilers move them about, which takes as long as 3 x 3
// products. Sums of one and two bytes gain nothing by it.
template <class T, int most = 2 * pass_rows, class F>
void choose_passes(const Work& t, const Rows& rows, F f) {
    constexpr bool fractions = T(0.5) != T(0);
    constexpr int alone = most < lone_pass_rows<T> ? most : lone_pass_rows<T>;
    constexpr int one = sizeof(T) < 4 ? 0 : alone, two = fractions ? most : 0;
    const index_t high = rows.taps_apart == 1 ? t.kh : 0;
    if (high <= lone_pass_rows<T>) {
        switch (high) {
#define PASS(P)                                         \
    case P:                                             \
        if constexpr (P <= one) return f(Heights<P>()); \
        break;
            EACH_PASS PASS(9)
#undef PASS
        }
    } else {
        switch (high) {
#define PASS(P)                                                                                  \
    case P:                                                                                      \
        if constexpr (P >= least_halved<T> && P <= two) return f(Heights<(P + 1) / 2, P / 2>()); \
        break;
            EACH_PASS PASS(9) PASS(10) PASS(11) PASS(12)
#undef PASS
        }
    }
    f(Heights<>());
}

// Fetches what the next blocks of R rows and N vectors will read of the rows that the block above hasn't met: they come
// from memory, and the others wait in the second cache. The processor follows a row by itself, but only as far as that.
// `reach` rows are under a block beyond its own.
template <int R, int N, class T>
[[gnu::always_inline]] inline void fetch(const T* x, index_t step, index_t reach) {
    fetch<0, 3, R, N>(x, step, reach * step + 2 * N * lanes<T>);
}

// Vectors of a row that is too short to be followed.
constexpr int short_row = 8;

// Fetches what the blocks below one of R rows and N vectors will read and write, of such rows. `reach` rows are under a
// block beyond its own; `down` is from one row of outputs to the next.
template <int R, int N, class T>
[[gnu::always_inline]] inline void fetch_below(const Work& t, const T* x, index_t step, index_t reach,
                                               const T* y, index_t down) {
    if (t.ow > short_row * lanes<T>) return;
    if (t.in_place && t.cg == 1) fetch<0, 3, R, N>(x, step, (R + reach) * step);
    if (t.out_in_place) fetch<1, 3, R, N>(y, down, R * down);
}

// What a kernel has for rectangles of samples X with results Y, whose sums are floats.
template <class X, class Y>
void work_narrow(const Work& t);

#ifdef CONVPAR_NARROW

// Filters and rectangles whose samples are taken as they are, by all kernels alike, for one leaves some to another. From six filter rows
// on gathered samples meet taller blocks, which is worth more unless results, too, would come from memory first; from eight on
// conversions are little beside the products. With 16 registers higher blocks than those of three filter rows don't slide.
constexpr int most_narrow_rows = many_registers ? 5 : 3, most_narrow_rows_far = many_registers ? 7 : 3,
              least_narrow_rows = 8;

// The heights of filters whose results are Y.
template <class Y>
using NarrowHeights = typename UpTo<std::is_same_v<Y, float> ? most_narrow_rows : most_narrow_rows_far>::type;

// Calls `f` with the filter's height.
template <int... k, class F>
void with_height(Numbers<k...>, index_t kh, F f) {
    ((kh == k + 1 ? f(Heights<k + 1>()) : void()), ...);
}

#endif

template <class X, class T>
constexpr Narrow::Results narrow_results = {work_narrow<X, X>, work_narrow<X, T>};
template <class T>
constexpr Narrow narrow_by_blocks() {
#ifdef CONVPAR_NARROW
    if constexpr (std::is_same_v<T, float>) {
        return {narrow_results<u8, T>, narrow_results<u16, T>, narrow_results<i16, T>,  most_narrow_rows,
                most_narrow_rows_far,  least_narrow_rows,      wide_vectors * lanes<T>, 0};
    }
#endif
    return {};
}
