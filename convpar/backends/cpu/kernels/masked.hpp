// Builds on: simd.
// Idea: lanes beyond the edge of the image are masked as they are loaded, so that the zeros around it need no copy. Blocks are
//       as wide as a row of a small image and slide down all of it: each row of samples, once loaded, meets all rows of
//       the filter, and those that would lie above or below the image are left out.
// Variants: columns that fill half a vector are folded where arithmetic limits (seven filter rows): the other half takes those of other
//       rows. Of filters of more than seven rows or sixteen columns blocks are lower, and meet a column of the filter at a time: more
//       masked loads, which some processors do in turn with products. Of a wide image only the edges are taken so, and under such filters
//       of any whose middle is three vectors wide or more. Small planes of several groups are taken in one call, for their blocks and masks
//       are the same, and where rows fill half a vector two planes at once, one beside the other. Outputs two rows and columns apart need
//       no copy, either: a filter column meets every other lane of two vectors of samples. Under 3 x 3, 5 x 5 and 7 x 7 of one channel
//       blocks slide there, too, and even and odd columns of a row are told apart once. With AVX2 masks are vectors in memory, blocks have
//       fewer vectors, no columns are folded, from six filter rows on simd takes the middle, and under 7 x 7 of float64 outputs two columns
//       apart don't slide.
// Step: with AVX-512 a third to half of simd's time at 3 x 3 on AMD's processors, seven to eight tenths on Intel's, and two thirds to four
//       fifths at 7 x 7, of planes of 56 x 56; of planes of 7 x 7 a tenth to a fifth. With AVX2 four fifths at 3 x 3, a fifth longer at 7 x 7
//       (choosers take simd there), and under half of planes of 7 x 7 or with a stride (docs/cpu-speed.md, Steps).
// Limit: memory up to 5 x 5, beyond that arithmetic. A last vector that isn't full takes as long as the others, unless it is
//       folded.

#if !defined(CONVPAR_AVX512) && !defined(__AVX2__)
#define CONVPAR_ABSENT  // there are no masked loads
#else

#include "masks.h"

// Columns of outputs beyond which simd's blocks are faster where there is no edge.
template <class T>
constexpr index_t narrow = 16 * lanes<T>;

// Most filter rows of blocks that slide (`work`) and are faster than simd's, and vectors of outputs from which on those are under more of
// them.
constexpr int fast_rows = many_registers ? 7 : 5, least_slid = 3;

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    // The rung before streams what is left to it, if it is as wide as that.
    k.streams = narrow<T> + 1;
    k.over_edge = {1, most_columns, lanes<T>, true, narrow<T>, most_stride};
    k.over_edge.narrow_if_slow = least_slid * lanes<T> - 1;
    k.over_edge.fast_rows = fast_rows;
    k.over_edge.fast_columns = most_columns;
    k.groups = true;
    k.strided = true;
    return k;
}

// -- blocks that slide: filters of up to seven rows and sixteen columns, without a stride

// Bytes that stay in a core's second cache while several filters read them in turn.
constexpr index_t second_cache = 1 << 20;

// Most vectors of a block that slides: K rows of sums fit the registers with the samples and a weight, and with 16 registers a mask. There
// compilers find room for nine sums over one channel only.
template <int K, bool Several>
constexpr int slid_vectors = many_registers ? (K < 7 ? 4 : 3)
                             : K < 3        ? 4
                             : K == 3       ? (Several ? 2 : 3)
                             : K < 6        ? 2
                                            : 1;

// Whether arithmetic limits filters of K rows. Of several channels such filters are seldom met, and would take compilers long.
template <int K, bool Several>
constexpr bool bound = K >= 6 && !Several;

// Whether blocks that need no masks, or only of the first vector, have code of their own. With AVX2 each mask is a load.
template <int K, bool Several>
constexpr bool without_masks = !many_registers || bound<K, Several>;
template <int K, bool Several>
constexpr bool first_masked = many_registers && bound<K, Several>;

// Rows of outputs after which the next of several blocks has its turn, for memory is read best along rows. But where arithmetic
// limits, as many as the first cache holds: blocks lose most at their ends.
constexpr index_t turn_rows = 16, first_cache = 32'768;
template <int K, bool Several, class T>
index_t rows_in_turn(const Work& t) {
    if constexpr (!bound<K, Several>) return turn_rows;
    const index_t fit = first_cache / (index_t(sizeof(T)) * (t.ow + t.kw - 1)) - (K - 1);
    return fit > turn_rows ? fit : turn_rows;
}

// Calls `with` for the blocks of a row in turn, each with so many rows of outputs at most.
template <int S, class T, class F>
void in_turn(const Work& t, Row<S, T>& row, index_t rows, F with) {
    for (index_t i = 0, end; i < t.oh; i = end) {
        end = t.oh - i < rows ? t.oh : i + rows;
        for (index_t b = 0; b < row.blocks; ++b) with(row.at(t, b), i, end);
    }
}

// Stores a row of a block's outputs.
template <int S, int N, class T>
[[gnu::always_inline]] inline void leave_beside(const Work& t, const Block<S, T>& block, T* to,
                                                const Vec<T> (&sum)[N]) {
    if (t.off_core && t.out_in_place) {
        fetch<1, 3, 1, N>(to, 0, rows_ahead * t.yr);
        if (block.followed) fetch<1, 3, 1, 1>(to, 0, rows_ahead * t.yr + N * lanes<T>);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N - 1; ++n) store(to + n * lanes<T>, sum[n]);
    store(to + (N - 1) * lanes<T>, sum[N - 1], block.outputs);
}

// The same of a pair of planes.
template <int S, class T>
[[gnu::always_inline]] inline void leave_both(const Work& t, const Block<S, T>& block, T* to, Vec<T> sum) {
    store_both(to, to + t.yg, sum, block.outputs);
}

// Where the vectors of a block that slides lie: N of them beside each other, from row i of outputs on. Where not any may need masks,
// each is loaded under every column. Some processors join lanes where they multiply, and mask them there.
template <int N, Edges Masked, class T>
struct Beside {
    static constexpr int vectors = N;
    static constexpr bool pair = false;
    // A row of samples.
    struct Line {
        const T* samples;
        index_t channel;  // to the next one's
        Vec<T> at[N];     // under a column of the filter
    };
    const Work& t;
    const Samples<T>& x;
    const Block<1, T>& block;
    index_t above;  // row of the image under the first row of outputs and of the filter
    T* y;

    Beside(const Work& t_, const Samples<T>& x_, const Block<1, T>& block_, T* y_, index_t i)
        : t(t_), x(x_), block(block_), above(i - x_.top), y(y_ + i * t_.yr + block_.j) {}

    // To row u of samples. Whether that is in the image.
    bool point(Line& line, index_t u) const {
        const bool exists = x.exists(above + u);
        line.samples = x.row_or_zeros(above + u, block.j - x.left);
        line.channel = t.xc & -index_t(exists);
        return exists;
    }
    void next_channel(Line& line) const { line.samples += line.channel; }
    [[gnu::always_inline]] void fetch_on(const Line& line, index_t ahead) const {
        fetch<0, 3, 1, N>(line.samples, 0, ahead);
        if (block.followed) fetch<0, 3, 1, 1>(line.samples, 0, ahead + N * lanes<T>);
    }
    [[gnu::always_inline]] void first_column(Line& line) const {
        if constexpr (Masked != ANY) return load_column(line, 0, block.masks[0][0]);
        load_masked(line, 0);
    }
    [[gnu::always_inline]] void load_masked(Line& line, index_t q) const {
        const T* samples = line.samples + q;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) line.at[n] = held(load(samples + n * lanes<T>, block.masks[q][n]));
    }
    [[gnu::always_inline]] void load_column(Line& line, index_t q, Mask<T> mask) const {
        const T* samples = line.samples + q;
        line.at[0] = held(Masked == FIRST ? load(samples, mask) : load(samples));
#pragma GCC unroll 4
        for (int n = 1; n < N; ++n) line.at[n] = held(load(samples + n * lanes<T>));
    }
    // Lanes under filter column q, of the vector that is masked.
    Mask<T> mask(index_t q) const { return block.masks[q][Masked == FIRST ? 0 : N - 1]; }
    // From the column before q: of each vector all lanes but the first, and the next one's first. Where vectors are joined only the last is
    // loaded, for those that cross a line of the cache take two loads.
    [[gnu::always_inline]] void next_column(Line& line, index_t q, Mask<T> mask) const {
        if constexpr (Masked != ANY) return load_column(line, q, mask);
        if constexpr (!joins) return load_masked(line, q);
#pragma GCC unroll 4
        for (int n = 0; n < N - 1; ++n) line.at[n] = join<1, T>(line.at[n], line.at[n + 1]);
        line.at[N - 1] = held(load(line.samples + q + (N - 1) * lanes<T>, mask));
    }
    // Stores row i of outputs.
    [[gnu::always_inline]] void leave(index_t i, const Vec<T> (&sum)[N]) const {
        leave_beside(t, block, y + i * t.yr, sum);
    }
};

// Lanes of `a` from the q-th on, half as many as there are, then those of `b`.
template <class T, int... I>
inline Vec<T> halves(Vec<T> a, Vec<T> b, index_t q, Numbers<I...>) {
    const auto first = reinterpret_cast<__m512i>(a), second = reinterpret_cast<__m512i>(b);
    const auto numbers = reinterpret_cast<__m512i>(Lanes<T>{(I < half<T> ? I : I + half<T>)...} +
                                                   static_cast<SignedOf<T> >(q));
    if constexpr (sizeof(T) == 4)
        return reinterpret_cast<Vec<T> >(_mm512_permutex2var_epi32(first, numbers, second));
    if constexpr (sizeof(T) == 8)
        return reinterpret_cast<Vec<T> >(_mm512_permutex2var_epi64(first, numbers, second));
}

// Or folded: the last columns of a plane, which fill half a vector at most, of 2 N parts of its rows. A vector takes two parts. One
// such vector would not do, for each sum waits for the one before.
template <int N, class T>
struct Folded {
    static constexpr int vectors = N, parts = 2 * N;
    static constexpr bool pair = false;
    struct Line {
        const T* samples[parts];
        index_t channel[parts];
        Vec<T> all[parts];  // under all columns of the filter
        Vec<T> at[N];
    };
    const Work& t;
    const Samples<T>& x;
    index_t j, height, first[parts];  // first column, rows of a part, and the parts' first ones
    Mask<T> inputs, outputs;          // of a part
    T* y;

    // Where rows can't be parted evenly, some belong to two parts.
    Folded(const Work& t_, const Samples<T>& x_, T* y_, index_t columns)
        : t(t_), x(x_), j(t_.ow - columns), height((t_.oh - 1) / parts + 1), y(y_ + j) {
        for (index_t m = 0; m < parts; ++m)
            first[m] = m * height < t.oh - height ? m * height : t.oh - height;
        inputs = lanes_between<T>(x.left - j, x.left - j + x.columns);
        outputs = lanes_between<T>(0, columns);
    }
    bool point(Line& line, index_t u) const {
        bool any = false;
#pragma GCC unroll 4
        for (int m = 0; m < parts; ++m) {
            const index_t i = first[m] - x.top + u;
            const bool exists = x.exists(i);
            any |= exists;
            line.samples[m] = x.row_or_zeros(i, j - x.left);
            line.channel[m] = t.xc & -index_t(exists);
        }
        return any;
    }
    void next_channel(Line& line) const {
#pragma GCC unroll 4
        for (int m = 0; m < parts; ++m) line.samples[m] += line.channel[m];
    }
    // The block before has done so.
    void fetch_on(const Line&, index_t) const {}
    [[gnu::always_inline]] void first_column(Line& line) const {
#pragma GCC unroll 4
        for (int m = 0; m < parts; ++m) line.all[m] = held(load(line.samples[m], inputs));
        next_column(line, 0, inputs);
    }
    Mask<T> mask(index_t) const { return inputs; }
    [[gnu::always_inline]] void next_column(Line& line, index_t q, Mask<T>) const {
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) line.at[n] = halves<T>(line.all[2 * n], line.all[2 * n + 1], q, All<T>());
    }
    [[gnu::always_inline]] void leave(index_t i, const Vec<T> (&sum)[N]) const {
        T* to = y + i * t.yr;
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
            store_both(to + first[2 * n] * t.yr, to + first[2 * n + 1] * t.yr, sum[n], outputs);
    }
};

// Or the rows of a pair of planes.
template <class T>
struct Paired {
    static constexpr int vectors = 1;
    static constexpr bool pair = true;
    struct Line {
        const T *samples, *next;  // the other plane's
        Vec<T> at[1];
    };
    const Work& t;
    const Samples<T>& x;
    const Block<1, T>& block;
    T* y;

    bool point(Line& line, index_t u) const {
        const bool exists = x.exists(u - x.top);
        line.samples = x.row_or_zeros(u - x.top, -x.left);
        line.next = line.samples + (t.xg & -index_t(exists));
        return exists;
    }
    void next_channel(Line&) const {}
    [[gnu::always_inline]] void fetch_on(const Line& line, index_t ahead) const {
        fetch<0, 3, 1, 1>(line.samples, 0, ahead);
        fetch<0, 3, 1, 1>(line.next, 0, ahead);
    }
    Mask<T> mask(index_t q) const { return block.masks[q][0]; }
    [[gnu::always_inline]] void first_column(Line& line) const { next_column(line, 0, mask(0)); }
    [[gnu::always_inline]] void next_column(Line& line, index_t q, Mask<T> mask) const {
        line.at[0] = held(load_both(line.samples + q, line.next + q, mask));
    }
    [[gnu::always_inline]] void leave(index_t i, const Vec<T> (&sum)[1]) const {
        leave_both(t, block, y + i * t.yr, sum[0]);
    }
};

// Where weights lie: with 16 registers compilers would keep some, and sums in memory.
template <class T>
inline const T* weights_of_row(const T* w) {
    return many_registers ? w : elsewhere(w);
}

// `height` rows of outputs of vectors that lie as `place` says; K filter rows, and Q columns if that isn't 0. `skips`: rows above and
// below the image add nothing, for the weights are finite. Several: channels.
template <int K, int Q, bool Several, class Place, class T, class Bias>
[[gnu::always_inline]] inline void slide(const Work& t, const Place& place, const T* w, Bias bias,
                                         index_t height, bool skips) {
    constexpr int N = Place::vectors;
    // More weights than of 3 x 3 don't fit the registers beside the sums and two columns of samples.
    constexpr bool keeps = Q == 3 && K == 3 && many_registers;
    const index_t kw = Q > 0 ? Q : t.kw;
    constexpr bool keeps_masks = Q > 0 && many_registers;
    Mask<T> masks[keeps_masks ? Q : 1];
#pragma GCC unroll 8
    for (int q = 0; keeps_masks && q < Q; ++q) masks[q] = held_mask(place.mask(q));
    const auto mask_of = [&](index_t q) __attribute__((always_inline)) {
        return keeps_masks ? masks[q] : place.mask(q);
    };
    Vec<T> kept[K][keeps ? Q : 1];
    const auto keep = [&](const T* weights) __attribute__((always_inline)) {
#pragma GCC unroll 3
        for (int p = 0; p < K; ++p) {
#pragma GCC unroll 3
            for (int q = 0; q < Q; ++q) kept[p][q] = held(weight_at<Place::pair>(weights, p * Q + q));
        }
    };
    if constexpr (keeps && !Several) keep(w);
    // sum[p]: of the row of outputs that a row of samples meets with filter row p.
    Vec<T> sum[K][N];
    const auto begin = [&](int p) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[p][n] = begun<T>(bias);
    };
    // Adds the products of row u of samples with filter rows `from` to `before`. Rows count from the first output's first sample.
    const auto meet = [&](index_t u, int from, int before) __attribute__((always_inline)) {
        typename Place::Line line;
        if (!place.point(line, u) && skips) return;
        // A column's.
        const auto add = [&](auto weight) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int p = 0; p < K; ++p) {
                if (p < from || p >= before) continue;
                const Vec<T> factor = weight(p);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[p][n] = mac(sum[p][n], line.at[n], factor);
            }
        };
        const T* weights = weights_of_row(w);
        for (index_t c = 0; c < (Several ? t.cg : 1); ++c, weights += K * kw) {
            if (t.off_core && t.in_place) {
                // Of one channel a constant number of rows: 3 x 3 takes a fiftieth longer otherwise.
                place.fetch_on(line, Several ? place.x.ahead : rows_ahead * place.x.row);
            }
            place.first_column(line);
            if constexpr (keeps) {
                if constexpr (Several) keep(weights);
#pragma GCC unroll 3
                for (int q = 0; q < Q; ++q) {
                    if (q > 0) place.next_column(line, q, mask_of(q));
                    add([&](int p) __attribute__((always_inline)) { return kept[p][q]; });
                }
            } else {
                for (index_t q = 0; q < kw; ++q) {
                    if (q > 0) place.next_column(line, q, mask_of(q));
                    add([&](int p) __attribute__((always_inline)) {
                        return weight_at<Place::pair>(weights, p * kw + q);
                    });
                }
            }
            place.next_channel(line);
        }
    };
    // The row of outputs that is complete after row u of samples leaves, if there is one.
    const auto leave = [&](index_t u) __attribute__((always_inline)) {
        if (u >= K - 1) place.leave(u - (K - 1), sum[K - 1]);
    };
    // The next row of samples meets each row of outputs with the next row of the filter. Registers are renamed, which takes no
    // time, and so the loop is short however many rows there are.
    const auto pass_on = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int p = K - 1; p > 0; --p) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[p][n] = sum[p - 1][n];
        }
        begin(0);
    };
    index_t u = 0;
#pragma GCC unroll 8
    for (int p = 0; p < K; ++p) begin(p);
    // The first rows meet the filter's first rows only, ...
#pragma GCC unroll 8
    for (int last = 0; last < K - 1; ++last, ++u) {
        meet(u, 0, last + 1);
        pass_on();
    }
    for (; u < height; ++u) {
        meet(u, 0, K);
        leave(u);
        pass_on();
    }
    // ... and the last ones its last. The compiler has to know `from`.
#pragma GCC unroll 8
    for (int from = 1; from < K; ++from) {
        if (u - height + 1 != from) continue;
        meet(u, from, K);
        leave(u);
        pass_on();
        ++u;
    }
}

// Rows i to end of outputs in a block. Apart from what calls it, which takes registers of its own.
template <int K, int Q, int N, bool Several, Edges Masked, class T>
[[gnu::noinline]] void slid_strip(const Work& t, const Samples<T> x, const Block<1, T>& block, const T* w,
                                  T bias, T* y, index_t i, index_t end, bool skips) {
    slide<K, Q, Several>(t, Beside<N, Masked, T>(t, x, block, y, i), w, bias, end - i, skips);
}

template <int K, int Q, bool Several, class T>
void slide_down(const Work& t, const Samples<T>& x, const Block<1, T>& block, const T* w, T bias, T* y,
                index_t i, index_t end, bool skips) {
    with_vectors(block.vectors, [&](auto n) {
        constexpr int N = n;
        if constexpr (N <= slid_vectors<K, Several>) {
            const auto strip = [&](auto masked) {
                slid_strip<K, Q, N, Several, masked()>(t, x, block, w, bias, y, i, end, skips);
            };
            if constexpr (without_masks<K, Several>) {
                if (block.edges == NONE) return strip(std::integral_constant<Edges, NONE>());
            }
            if constexpr (first_masked<K, Several>) {
                if (N > 1 && block.edges == FIRST) return strip(std::integral_constant<Edges, FIRST>());
            }
            strip(std::integral_constant<Edges, ANY>());
        }
    });
}

// A pair of planes.
template <int K, int Q, class T>
[[gnu::noinline]] void slid_pair(const Work& t, const Samples<T> x, const Block<1, T>& block, const T* w,
                                 Vec<T> biases, T* y, bool skips) {
    slide<K, Q, false>(t, Paired<T>{t, x, block, y}, w, biases, t.oh, skips);
}

// Vectors of columns that are folded.
constexpr int folded_vectors = 2;

template <int K, int Q, bool Several, class T>
[[gnu::noinline]] void fold(const Work& t, const Samples<T> x, index_t columns, const T* w, T bias, T* y,
                            bool skips) {
    const Folded<folded_vectors, T> place(t, x, y, columns);
    slide<K, Q, Several>(t, place, w, bias, place.height, skips);
}

// Whether columns are folded under K filter rows. Under fewer than seven finding the parts' rows takes as long as it saves, ...
template <int K>
constexpr bool folds = K == 7 && many_registers;

// ... as it does of few rows of outputs, or without a vector before them. How many columns.
template <int K, class T>
index_t folded_columns(const Work& t) {
    const index_t rest = t.ow % lanes<T>;
    const bool fit = rest <= half<T> && rest + t.kw - 1 <= lanes<T>;
    const bool gain = folds<K> && t.ow > lanes<T> && t.oh >= 8 * folded_vectors;
    return fit && gain && t.gap >= t.after_gap ? rest : 0;
}

// Filters of K rows: those that are met most without a loop over columns, which takes a tenth longer.
template <int K, bool Several, class T>
void slid(const Work& t, const Samples<T>& samples) {
    const index_t folded = folded_columns<K, T>(t);
    Row<1, T> row(t, samples, t.ow - folded, true, slid_vectors<K, Several>);
    constexpr int square = K == 3 || (!Several && (K == 5 || K == 7)) ? K : 0;
    const bool is_square = square > 0 && t.kw == square;
    const auto down = is_square ? slide_down<K, square, Several, T> : slide_down<K, 0, Several, T>;
    const index_t high = row.blocks == 1 ? t.oh : rows_in_turn<K, Several, T>(t);
    const bool skips = t.over_edge && t.finite;
    if constexpr (!Several) {
        if (pairs<T>(t)) {
            row.first.halve(t.kw);
            const auto pair = is_square ? slid_pair<K, square, T> : slid_pair<K, 0, T>;
            return each_pair(t, samples, [&](const Samples<T>& x, const T* w, Vec<T> biases, T* y) {
                pair(t, x, row.first, w, biases, y, skips);
            });
        }
    }
    // Of samples under all outputs: where channels are no farther apart, these are whole planes.
    const index_t plane = (t.oh + K - 1) * samples.row;
    each_filter(t, samples, [&](Samples<T> x, index_t o, const T* w, T bias, T* y) {
        // The last of several filters finds its samples in the second cache, and fetches the next group's or image's.
        const bool next = Several && o > 0 && o + 1 == t.oc && t.xc <= plane &&
                          t.cg * plane * index_t(sizeof(T)) <= second_cache;
        if (next) x.ahead = t.cg * t.xc;
        in_turn(t, row, high, [&](const Block<1, T>& block, index_t i, index_t end) {
            down(t, x, block, w, bias, y, i, end, skips);
        });
        if constexpr (folds<K>) {
            const auto last = is_square ? fold<K, square, Several, T> : fold<K, 0, Several, T>;
            if (folded > 0) last(t, x, folded, w, bias, y, skips);
        }
    });
}

// -- blocks that slide over outputs two rows and columns apart: square filters of one channel

// As `join`, of vectors whose halves are two planes'.
template <int Skip, class T, int... I>
inline Vec<T> join_halves(Vec<T> a, Vec<T> b, Numbers<I...>) {
    return pick<T>(a, b,
                   Numbers<(I % half<T> + Skip < half<T> ? I + Skip : lanes<T> + I + Skip - half<T>)...>());
}

// Samples of even columns and of odd ones, as they are told apart when a row is loaded: those under N vectors of outputs, and what the
// last outputs meet behind them.
template <int N, class T>
struct ToldApart {
    Vec<T> even[N + 1], odd[N + 1];

    [[gnu::always_inline]] void tell(int n, Vec<T> first, Vec<T> second) {
        even[n] = every_other<0, T>(first, second);
        odd[n] = every_other<1, T>(first, second);
    }
    // What vector n of outputs meets of filter column Q.
    template <int Q, bool Halves>
    [[gnu::always_inline]] Vec<T> under(int n) const {
        const Vec<T>(&samples)[N + 1] = Q % 2 == 0 ? even : odd;
        if constexpr (Q < 2) return samples[n];
        if constexpr (Halves) return join_halves<Q / 2, T>(samples[n], samples[n + 1], All<T>());
        return join<Q / 2, T>(samples[n], samples[n + 1]);
    }
};

// Rows of samples from the one under the first row of outputs and of the filter on, and from `before` columns before the image. As
// Samples::row_or_zeros but with a branch: rows come one by one, and the few that don't exist are the first or the last.
template <class T>
struct RowsUnder {
    std::uintptr_t first;  // not a pointer: it may lie before the array
    index_t bytes;         // from one to the next
    index_t above, rows;   // the first one's number in the image, and how many there are

    RowsUnder(const Samples<T>& x, index_t above_, index_t before)
        : bytes(x.row * index_t(sizeof(T))), above(above_), rows(x.rows) {
        first = reinterpret_cast<std::uintptr_t>(x.first) + above * bytes - before * index_t(sizeof(T));
    }
    // Null where there is none.
    const T* at(index_t u) const {
        const bool exists = std::uint64_t(above + u) < std::uint64_t(rows);
        return exists ? reinterpret_cast<const T*>(first + u * bytes) : nullptr;
    }
};

// Where the vectors of a block lie: N beside each other.
template <int N, class T>
struct Apart {
    static constexpr int vectors = N;
    static constexpr bool pair = false;
    const Work& t;
    const Block<2, T>& block;
    RowsUnder<T> rows;
    Mask<T> inputs[2 * N], behind;
    bool any_behind;
    T* y;

    Apart(const Work& t_, const Samples<T>& x, const Block<2, T>& block_, T* y_, index_t i)
        : t(t_), block(block_), rows(x, 2 * i - x.top, x.left - 2 * block_.j), y(y_ + i * t_.yr + block_.j) {
        // More don't fit the registers for masks.
#pragma GCC unroll 8
        for (int n = 0; n < 2 * N; ++n) inputs[n] = N < 4 ? held_mask(block.masks[0][n]) : block.masks[0][n];
        const index_t rest = t.ow - block.j - block.last, end = 2 * (block.j + N * lanes<T>)-x.left;
        behind = lanes_between<T>(-end, x.columns - end);
        any_behind = (rest < lanes<T> ? rest : lanes<T>)+(t.kw - 1) / 2 > lanes<T> && any_lane<T>(behind);
    }
    [[gnu::always_inline]] void fetch_on(const T* samples, index_t ahead) const {
        fetch<0, 3, 1, 2 * N>(samples, 0, ahead);
    }
    [[gnu::always_inline]] void load_row(ToldApart<N, T>& to, const T* samples) const {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n, samples += 2 * lanes<T>)
            to.tell(n, load(samples, inputs[2 * n]), load(samples + lanes<T>, inputs[2 * n + 1]));
        to.tell(N, any_behind ? load(samples, behind) : Vec<T>{}, Vec<T>{});
    }
    [[gnu::always_inline]] void leave(index_t i, const Vec<T> (&sum)[N]) const {
        leave_beside(t, block, y + i * t.yr, sum);
    }
};

// Or each plane of a pair fills half of a vector.
template <class T>
struct PairApart {
    static constexpr int vectors = 1;
    static constexpr bool pair = true;
    const Work& t;
    const Block<2, T>& block;
    RowsUnder<T> rows;
    Mask<T> inputs;
    bool any_behind;
    T* y;

    PairApart(const Work& t_, const Samples<T>& x, const Block<2, T>& block_, T* y_)
        : t(t_), block(block_), rows(x, -x.top, x.left), inputs(held_mask(block_.masks[0][0])), y(y_) {
        any_behind = t.ow + (t.kw - 1) / 2 > half<T>;
    }
    const T* other(const T* samples) const { return samples == zeros<T> ? samples : samples + t.xg; }
    [[gnu::always_inline]] void fetch_on(const T* samples, index_t ahead) const {
        fetch<0, 3, 1, 1>(samples, 0, ahead);
        fetch<0, 3, 1, 1>(other(samples), 0, ahead);
    }
    [[gnu::always_inline]] void load_row(ToldApart<1, T>& to, const T* samples) const {
        const T* next = other(samples);
        to.tell(0, load(samples, inputs), load(next, inputs));
        if (any_behind) {
            const Mask<T> behind = block.masks[0][1];
            to.tell(1, load(samples + lanes<T>, behind), load(next + lanes<T>, behind));
        } else {
            to.tell(1, Vec<T>{}, Vec<T>{});
        }
    }
    [[gnu::always_inline]] void leave(index_t i, const Vec<T> (&sum)[1]) const {
        leave_both(t, block, y + i * t.yr, sum[0]);
    }
};

// Calls `with` for each of these numbers, as a constant.
template <int... I, class F>
[[gnu::always_inline]] inline void for_each(Numbers<I...>, F with) {
    (with(std::integral_constant<int, I>()), ...);
}

// `height` rows of outputs under K x K. Rows of samples, counted from the first window's, meet even rows of the filter if they are even,
// and odd ones if they are odd. What the first rows and the last meet of outputs that aren't there is summed and never stored.
template <int K, class Place, class T, class Bias>
[[gnu::always_inline]] inline void slide_apart(const Work& t, const Place& place, const T* w, Bias bias,
                                               index_t height, bool skips) {
    constexpr int N = Place::vectors, open = K / 2 + 1;
    static_assert(K % 2 == 1, "an output's last row of samples meets other outputs' first one");
    const bool fetches = t.off_core && t.in_place;
    const index_t ahead = rows_ahead * t.xr;
    constexpr bool keeps = K == 3 && many_registers;
    Vec<T> kept[keeps ? K * K : 1];
#pragma GCC unroll 9
    for (int k = 0; keeps && k < K * K; ++k) kept[k] = held(weight_at<Place::pair>(w, k));
    // sum[d]: of the row of outputs that an even row of samples meets with filter row 2 d, and the odd one after it with the next.
    Vec<T> sum[open][N];
    const auto begin = [&](int d) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[d][n] = begun<T>(bias);
    };
    const auto meet = [&](index_t u, auto odd) __attribute__((always_inline)) {
        const T* row = place.rows.at(u);
        if (row == nullptr) {
            if (skips) return;
            row = zeros<T>;
        }
        if (fetches) place.fetch_on(row, ahead);
        ToldApart<N, T> line;
        place.load_row(line, row);
        const T* weights = weights_of_row(w);
        for_each(typename UpTo<K>::type(), [&](auto q) __attribute__((always_inline)) {
            Vec<T> samples[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) samples[n] = line.template under<q(), Place::pair>(n);
#pragma GCC unroll 4
            for (int d = 0; d < open; ++d) {
                const int p = 2 * d + odd(), k = p * K + q();
                if (p >= K) continue;
                const Vec<T> factor = keeps ? kept[keeps ? k : 0] : weight_at<Place::pair>(weights, k);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[d][n] = mac(sum[d][n], samples[n], factor);
            }
        });
    };
#pragma GCC unroll 4
    for (int d = 0; d < open; ++d) begin(d);
    for (index_t u = 0; u < height + open - 1; ++u) {
        meet(2 * u, std::integral_constant<int, 0>());
        if (u >= open - 1) place.leave(u - (open - 1), sum[open - 1]);
        if (u + 1 < height + open - 1) meet(2 * u + 1, std::integral_constant<int, 1>());
#pragma GCC unroll 4
        for (int d = open - 1; d > 0; --d) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[d][n] = sum[d - 1][n];
        }
        begin(0);
    }
}

// Rows i to end of outputs in a block.
template <int K, int N, class T>
[[gnu::noinline]] void strip_apart(const Work& t, const Samples<T> x, const Block<2, T>& block, const T* w,
                                   T bias, T* y, index_t i, index_t end, bool skips) {
    slide_apart<K>(t, Apart<N, T>(t, x, block, y, i), w, bias, end - i, skips);
}
template <int K, class T>
[[gnu::noinline]] void pair_apart(const Work& t, const Samples<T> x, const Block<2, T>& block, const T* w,
                                  Vec<T> biases, T* y, bool skips) {
    slide_apart<K>(t, PairApart<T>(t, x, block, y), w, biases, t.oh, skips);
}

// Vectors of such a block: beside their sums even and odd samples of one more fit the registers, or under 7 x 7 nearly.
constexpr int most_apart = many_registers ? most_vectors : 2;

// Of one channel, K x K.
template <int K, class T>
void slid_apart(const Work& t, const Samples<T>& samples) {
    Row<2, T> row(t, samples, t.ow, true, most_apart);
    const bool skips = t.over_edge && t.finite;
    if (pairs<T>(t)) {
        return each_pair(t, samples, [&](const Samples<T>& x, const T* w, Vec<T> biases, T* y) {
            pair_apart<K>(t, x, row.first, w, biases, y, skips);
        });
    }
    const index_t high = row.blocks == 1 ? t.oh : turn_rows;
    each_filter(t, samples, [&](const Samples<T>& x, index_t, const T* w, T bias, T* y) {
        in_turn(t, row, high, [&](const Block<2, T>& block, index_t i, index_t end) {
            with_vectors(block.vectors, [&](auto n) {
                if constexpr (n() <= most_apart) strip_apart<K, n()>(t, x, block, w, bias, y, i, end, skips);
            });
        });
    });
}

// -- blocks that don't slide: other filters, with a stride S or without

// Sums and rows of such a block, and filter rows whose weights, of S columns, fit the registers beside the sums and samples.
constexpr int most_sums = many_registers ? 16 : 8, most_rows = 8;
template <int S>
constexpr int pass_rows = many_registers ? 8 / S
                          : S == 1       ? 4
                                         : 1;

// What outputs fill: whole vectors; half of one; or each of a pair of planes' half of one.
enum Fill { WHOLE, HALF, BOTH };

// What Q filter columns meet of the samples from `p` on, and of another plane's from `next` on, every S-th of them each.
template <int S, int Q, Fill F, class T>
[[gnu::always_inline]] inline void load_every_other(Vec<T> (&to)[Q], const T* p, const T* next,
                                                    const Mask<T>* masks) {
    if constexpr (S == 1) {
        to[0] = held(F == BOTH ? load_both(p, next, masks[0]) : load(p, masks[0]));
    } else {
        const Vec<T> first = held(load(p, masks[0]));
        static_assert(S == 2, "of two vectors the even and the odd lanes");
        // Masked loads take their time where nothing is loaded, too.
        const Vec<T> second = F == HALF   ? first
                              : F == BOTH ? held(load(next, masks[0]))
                                          : held(load(p + lanes<T>, masks[1]));
#pragma GCC unroll 2
        for (int q = 0; q < Q; ++q)
            to[q] = held(q == 0 ? every_other<0, T>(first, second) : every_other<1, T>(first, second));
    }
}

// Rows of samples, and those of the other plane of a pair.
template <Fill F, int Height, class T>
struct Lines {
    const T *rows[Height], *next[F == BOTH ? Height : 1];

    void point(int k, const Work& t, const Samples<T>& x, index_t i, index_t j) {
        rows[k] = x.row_or_zeros(i, j);
        if constexpr (F == BOTH) next[k] = rows[k] + (t.xg & -index_t(x.exists(i)));
    }
};

// Adds to R rows x N vectors of sums the products of P rows of Q filter columns, from q on, with the rows of samples under them.
template <int S, int Q, Fill F, int P, int R, int N, int Height, class T>
[[gnu::always_inline]] inline void columns(Vec<T> (&sum)[R][N], const Lines<F, Height, T>& lines,
                                           const Block<S, T>& block, const T* w, index_t kw, index_t q) {
    Vec<T> weight[P][Q];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 2
        for (int k = 0; k < Q; ++k) weight[p][k] = weight_at<F == BOTH>(w, p * kw + q + k);
    }
    Mask<T> masks[N][S];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 2
        for (int s = 0; s < S; ++s) masks[n][s] = held_mask(block.masks[q & block.heeded][S * n + s]);
    }
#pragma GCC unroll 32
    for (int k = 0; k < Height; ++k) {
        if (k % S >= P) continue;
        const T *row = lines.rows[k], *next = F == BOTH ? lines.next[k] + q : nullptr;
        // Else the compiler would keep a pointer to each row and vector, in more registers than there are.
        asm("" : "+r"(row));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            Vec<T> sample[Q];
            load_every_other<S, Q, F>(sample, row + q + S * block.column(n, N), next, masks[n]);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                const int r = (k - p) / S;
                if (k < p || (k - p) % S != 0 || r >= R) continue;
#pragma GCC unroll 2
                for (int c = 0; c < Q; ++c) sum[r][n] = mac(sum[r][n], sample[c], weight[p][c]);
            }
        }
    }
}

// The same of all columns, S at once; of the widest filters, whose masks are those of single columns, one by one.
template <int S, Fill F, int P, int R, int N, class T>
[[gnu::always_inline]] inline void pass(const Work& t, Vec<T> (&sum)[R][N], const Samples<T>& x, index_t i,
                                        const Block<S, T>& block, const T* w) {
    Lines<F, S*(R - 1) + P, T> lines;
#pragma GCC unroll 32
    for (int k = 0; k < S * (R - 1) + P; ++k) {
        // Wider filters than masks are kept for meet no edge. Under outputs that are left out any row will do: zeros are too few.
        const bool beyond = block.heeded == 0 && i + k >= x.rows;
        lines.point(k, t, x, beyond ? x.rows - 1 : i + k, S * block.j - x.left);
    }
    index_t q = 0;
    if constexpr (S > 1) {
        for (; q + S <= t.kw && block.heeded > 0; q += S) columns<S, S, F, P>(sum, lines, block, w, t.kw, q);
    }
    for (; q < t.kw; ++q) columns<S, 1, F, P>(sum, lines, block, w, t.kw, q);
}

// R rows of outputs from row i on, N vectors of each; those beyond the last are not stored.
template <int S, Fill F, int R, int N, class T, class Bias>
[[gnu::always_inline]] inline void sums(const Work& t, Samples<T> x, const Block<S, T>& block, const T* w,
                                        Bias bias, T* y, index_t i) {
    Vec<T> sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = begun<T>(bias);
    }
    const index_t first = S * i - x.top;
    y += i * t.yr + block.j;
    if (t.off_core && t.out_in_place) fetch<1, 3, R, N>(y, t.yr, rows_ahead * t.yr);
    for (index_t c = 0; c < t.cg; ++c, x.first += t.xc, w += t.kh * t.kw) {
        if (t.off_core && t.in_place) {
            const index_t ahead = (first + t.kh - 1 + rows_ahead) * x.row + S * block.j;
            fetch<0, 3, S * R, S * N>(x.first, x.row, ahead);
            if (F == BOTH) fetch<0, 3, S * R, S * N>(x.first, x.row, ahead + t.xg);
        }
        // As few passes as there are with so many rows at most, all equal but the last.
        const index_t passes = (t.kh - 1) / pass_rows<S> + 1, most = (t.kh - 1) / passes + 1;
        for (index_t p = 0, count; p < t.kh; p += count) {
            count = t.kh - p < most ? t.kh - p : most;
            const T* weights = w + p * t.kw * (F == BOTH ? lanes<T> : 1);
            switch (count) {
#define PASS(P)                                                                               \
    case P:                                                                                   \
        if constexpr (P <= pass_rows<S>) pass<S, F, P>(t, sum, x, first + p, block, weights); \
        break;
                PASS(1) PASS(2) PASS(3) PASS(4) PASS(5) PASS(6) PASS(7) PASS(8)
#undef PASS
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, y += t.yr) {
        if (i + r >= t.oh) break;
        if constexpr (F == BOTH) {
            store_both(y, y + t.yg, sum[r][0], block.outputs);
        } else {
#pragma GCC unroll 4
            for (int n = 0; n < N - 1; ++n) store(y + n * lanes<T>, sum[r][n]);
            store(y + block.last, sum[r][N - 1], block.outputs);
        }
    }
}

// Rows i to end of outputs in one block's columns, R at once. Apart from what calls it, which takes registers of its own.
template <int R, int N, int S, Fill F, class T, class Bias>
[[gnu::noinline]] void strip(const Work& t, const Samples<T>& x, const Block<S, T>& block, const T* w,
                             Bias bias, T* y, index_t i, index_t end) {
    for (; i < end; i += R) sums<S, F, R, N>(t, x, block, w, bias, y, i);
}

// The same for the number of vectors that the block has.
template <int S, int R, class T>
void of_rows(const Work& t, const Samples<T>& x, const Block<S, T>& block, const T* w, T bias, T* y,
             index_t i, index_t end) {
    with_vectors(block.vectors, [&](auto n) {
        constexpr int N = n;
        if constexpr (S == 2 && N == 1) {
            if (t.ow <= half<T>) return strip<R, N, S, HALF>(t, x, block, w, bias, y, i, end);
        }
        if constexpr (R * N <= most_sums) strip<R, N, S, WHOLE>(t, x, block, w, bias, y, i, end);
    });
}
template <int S, int R, class T>
void of_rows(const Work& t, const Samples<T>& x, const Block<S, T>& block, const T* w, Vec<T> biases, T* y,
             index_t i, index_t end) {
    strip<R, 1, S, BOTH>(t, x, block, w, biases, y, i, end);
}

// All outputs of a plane, or a pair.
template <int S, class T, class Bias>
void still(const Work& t, const Samples<T>& x, Row<S, T>& row, const T* w, Bias bias, T* y) {
    const int widest = row.vectors(0);
    index_t taken = widest == 1 ? most_rows : widest == 2 ? most_sums / 2 : most_sums / 4;
    for (index_t i = 0, end; i < t.oh; i = end) {
        // A few rows too many take less time than another block.
        while (taken / 2 >= t.oh - i) taken /= 2;
        // All rows of one block, or all blocks of one row.
        end = row.blocks == 1 && t.oh - i >= taken ? t.oh - (t.oh - i) % taken : i + taken;
        for (index_t b = 0; b < row.blocks; ++b) {
            const Block<S, T>& block = row.at(t, b);
            switch (taken) {
                case 1: of_rows<S, 1>(t, x, block, w, bias, y, i, end); break;
                case 2: of_rows<S, 2>(t, x, block, w, bias, y, i, end); break;
                case 4: of_rows<S, 4>(t, x, block, w, bias, y, i, end); break;
                case 8: of_rows<S, 8>(t, x, block, w, bias, y, i, end); break;
            }
        }
    }
}

template <int S, class T>
void still(const Work& t, const Samples<T>& samples) {
    Row<S, T> row(t, samples, t.ow, false, most_vectors);
    if (pairs<T>(t)) {
        row.first.halve(t.kw);
        return each_pair(t, samples, [&](const Samples<T>& x, const T* w, Vec<T> biases, T* y) {
            still<S>(t, x, row, w, biases, y);
        });
    }
    each_filter(t, samples, [&](const Samples<T>& x, index_t, const T* w, T bias, T* y) {
        still<S>(t, x, row, w, bias, y);
    });
}

template <class T>
void work(const Work& t) {
    const Samples<T> x(t);
    if (t.sw > 1) {
        switch (t.cg == 1 && t.kh == t.kw ? t.kh : 0) {
// What the last output meets behind its own first sample is no more than a vector.
#define SQUARE(K)                                                    \
    case K:                                                          \
        if constexpr (K <= lanes<T> + 1) return slid_apart<K>(t, x); \
        break;
            SQUARE(3) SQUARE(5) SQUARE(7)
#undef SQUARE
        }
        return still<most_stride>(t, x);
    }
    if (t.kw <= most_columns) {
        switch (t.kh) {
#define ROWS(K) \
    case K: return t.cg == 1 ? slid<K, false>(t, x) : slid<K, true>(t, x);
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7)
#undef ROWS
        }
    }
    still<1>(t, x);
}

#endif
