// Builds on: unrolled.
// Idea: a block of output rows x vectors of neighbouring columns stays in registers. A vector of samples, once
//       loaded, serves every output row and every filter row that meet in it, and one operation makes a vector of products.
// Variants: with 32 registers a block slides down the image (`slide`): of K filter rows it holds the sums of K output rows, to all of which
//       a row of samples adds its products, and one of which is complete then. So a block has four vectors, or three or two of higher
//       filters, and meets one row of the image at a time. Few of its samples are loaded for a second column: they are those of the one
//       before, a lane on. Under six to nine filter rows it is tall. With 16 registers only blocks of 3 x 3 of one channel slide, of two
//       vectors, which meet one vector of samples at a time. Where a block doesn't slide (`slid`): strides, dilated columns, filters of more
//       than 15 rows, small and narrow images, either a filter column meets all rows under a block of 8 or 4 rows, or, where these don't fit
//       one pass or the first cache, a row of the image all the filter's columns (RowByRow in blocks.h). Samples of pictures become floats, and
//       sums samples if these are asked for, on their way to and from registers (narrow.h), under blocks that slide; with 16 registers those of
//       up to three filter rows and any columns.
// Step: a twentieth to a thirtieth of unrolled's time at 7 x 7 (docs/cpu-speed.md, Steps).
// Limit: arithmetic, from about 5 filter rows on; before that memory, or in a cache what surrounds so few products: weights,
//       stores, the change from block to block.

#include "blocks.h"

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    // The last block of a row, which may reach back, is stored in the usual way.
    k.streams = most_unsettled * lanes<T> + 1;
    k.narrow = narrow_by_blocks<T>();
    return k;
}

// R output rows, out_apart from each other, and N vectors of columns from j on; `lines`, where they are streamed. Q: the
// filter's columns if the block is made for so many neighbours, else 0. Always inline: a call takes a tenth as long as 3 x 3
// products.
template <class Passes, int Q, int R, int N, class T>
[[gnu::always_inline]] inline void block(const Work& t, const Rows& rows, const T* x, const T* w, T bias,
                                         T* y, index_t j, Line<T>* lines) {
    // The last vector of a row reaches back over outputs that are done already.
    index_t last = (N - 1) * lanes<T>;
    if (j + last + lanes<T> > t.ow) last = t.ow > lanes<T> ? t.ow - lanes<T> - j : 0;
    x += j;
    y += j;
    Vec<T> sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = broadcast(bias);
    }
    const index_t down = rows.out_apart * t.yr, kw = Q > 0 ? Q : t.kw;
    fetch_below<R, N>(t, x, rows.step, rows.reach, y, down);
    if (rows.below) fetch<0, 2, R, N>(x, rows.step, (R + rows.reach) * rows.step);
    for (index_t c = 0; c < t.cg; ++c, x += t.xc, w += t.kh * t.kw) {
        if (rows.along) fetch<R, N>(x, rows.step, rows.reach);
        passes<Q>(Passes(), sum, t, rows, x, t.taps, t.kw, w, kw, last);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, y += down) {
        if (lines) {
            lines[r].put(j, sum[r]);
        } else if (N > 1 || t.ow >= lanes<T>) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) store(y + (n < N - 1 ? n * lanes<T> : last), sum[r][n]);
        } else {
            store_first(y, sum[r][0], t.ow);
        }
    }
}

// Columns before the first whose vectors, which are as long as a line of the cache, begin with one: those that cross lines take
// twice as long to store. 0 where rows begin differently, or have too few vectors to gain by one more; nor do sums of one and
// two bytes gain.
template <class T>
index_t to_aligned(const Work& t, const T* y) {
    if (vector_bytes < line_bytes || sizeof(T) < 4 || t.ow <= short_row * lanes<T>) return 0;
    if (t.yr * index_t(sizeof(T)) % line_bytes != 0) return 0;
    return to_line(y);
}

// R output rows over the whole width, in blocks of nearly equal width.
template <class Passes, int Q, int R, int N, class T>
void strip(const Work& t, const Rows& rows, const T* x, const T* w, T bias, T* y) {
    Line<T> streamed[R];
    Line<T>* lines = t.stream ? streamed : nullptr;
    index_t aligned = 0;
    if (lines) {
        for (int r = 0; r < R; ++r) lines[r].begin(y + r * rows.out_apart * t.yr);
    } else {
        aligned = to_aligned(t, y);
    }
    const index_t vectors = (t.ow - aligned - 1) / lanes<T> + 1, blocks = (vectors - 1) / N + 1;
    // A vector that the first block overlaps, if that is to begin later.
    index_t j = 0;
    for (index_t b = aligned > 0 ? -1 : 0; b < blocks; ++b) {
        const index_t n = b < 0 ? 1 : vectors / blocks + (b < vectors % blocks);
        if (lines && b == blocks - 1) {
            // The last block may reach back.
            for (Line<T>& line : streamed) line.end(j);
            lines = nullptr;
        }
        switch (n) {
            case 1: block<Passes, Q, R, 1>(t, rows, x, w, bias, y, j, lines); break;
            case 2: block<Passes, Q, R, 2>(t, rows, x, w, bias, y, j, lines); break;
            case 3:
                if constexpr (N >= 3) block<Passes, Q, R, 3>(t, rows, x, w, bias, y, j, lines);
                break;
            case 4:
                if constexpr (N >= 4) block<Passes, Q, R, 4>(t, rows, x, w, bias, y, j, lines);
                break;
        }
        j += b < 0 ? aligned : n * lanes<T>;
        if (lines) {
            for (Line<T>& line : streamed) line.settle(j);
        }
    }
}

template <class Passes, int Q, class T>
void filters(const Work& t, const Rows& rows) {
    constexpr int vectors = block_vectors<Passes>;
    static_assert(vectors <= most_unsettled,
                  "the last block of a row isn't streamed: `streams` knows its width");
    for (index_t o = 0; o < t.oc; ++o) {
        const T* w = static_cast<const T*>(t.w) + o * t.cg * t.kh * t.kw;
        const T bias = static_cast<const T*>(t.bias)[o];
        for (index_t first = 0; first < rows.out_apart && first < t.oh; ++first) {
            const T* x = static_cast<const T*>(t.x) + first * t.sh * t.xr;
            T* y = static_cast<T*>(t.y) + o * t.yo + first * t.yr;
            index_t left = (t.oh - first - 1) / rows.out_apart + 1;
            while (left > 0) {
                int taken = tall_rows;
                while (taken > left) taken /= 2;
                switch (taken) {
                    case 1: strip<Passes, Q, 1, wide_vectors>(t, rows, x, w, bias, y); break;
                    case 2: strip<Passes, Q, 2, wide_vectors>(t, rows, x, w, bias, y); break;
                    case 4: strip<Passes, Q, 4, vectors>(t, rows, x, w, bias, y); break;
                    case 8:
                        if constexpr (tall_rows == 8) strip<Passes, Q, 8, vectors>(t, rows, x, w, bias, y);
                        break;
                }
                left -= taken;
                x += taken * rows.step;
                y += taken * rows.out_apart * t.yr;
            }
        }
    }
    if (t.stream) stream_end();
}

// Whether the samples of neighbouring filter columns are neighbours.
inline bool neighbours(const Work& t) {
    for (index_t q = 0; q < t.kw; ++q) {
        if (t.taps[q] != q) return false;
    }
    return true;
}

// The rows of the image under a block come one after the other, and each, once loaded, meets all rows of the filter. Only the
// sums of so many rows of outputs are in registers: of the first of them they are complete then, and leave. So blocks are wide
// though filters be high, the first cache has to hold no more than a row at a time, however far they lie apart, and the weights,
// which but for 3 x 3 are loaded again for every row, are few beside the products.

// Filter rows from which on arithmetic limits.
constexpr int least_bound = 6;

// Output rows of such a block, and of a tall one, for filters of some rows: a row of samples is loaded anew for fewer of these, and there
// are fewer ends, where rows meet few of the filter's and wait for each other's sums. Where memory limits they fetch too far ahead, of more
// filter rows registers hold the sums of no more than eight, and the code that takes narrow samples outgrows the first cache.
constexpr int slid_rows = 8, most_tall = 9;
template <class T, int K>
constexpr int tall_slid_rows =
    fused<T> && many_registers && K >= least_bound && K <= most_tall ? 24 : slid_rows;

// And of 3 x 3 where rows of the image share sets of the first cache, of eight lines: those under a higher block, and those that it
// stores, push each other out. With sets of twelve lines it was slower.
constexpr int crowded_rows = 4;

// Whether rows of the image, `step` elements apart, share sets of the first cache.
template <class T>
bool share_sets(index_t step) {
    return step != 0 && step * index_t(sizeof(T)) % set_bytes == 0;
}

// Whether sets hold no more than eight lines.
inline bool small_sets(const Work& t) { return t.set_lines <= 8; }

// Elements from a sample to one that a block of N vectors fetches into the first cache: as a rule that of the block beside it, so that
// the processor follows the rows. Where these share sets of the cache, which hold fewer lines than a block has rows, that would be
// gone before its turn: then one of the block's own rows, from the second cache. With sets of eight lines that was no faster.
template <int K, int N, class X, class T>
[[gnu::always_inline]] inline index_t fetched_ahead(const Work& t, index_t step) {
    constexpr index_t beside = (N + 1) * lanes<T>;
    if (K < least_bound || !share_sets<X>(step) || small_sets(t)) return beside;
    return 3 * step + lanes<T>;
}

// Elements from a sample of a row that a block of R is the first to meet to one that it fetches into the second cache: of the block
// below, or on that row. What was gathered is in the second cache, and so far behind it may lie what another thread gathers: then the
// samples' own lines are fetched, which does nothing.
template <int R, class X>
index_t fetched_next(const Work& t, index_t step) {
    constexpr index_t on_row = 1024 / sizeof(X);
    return !t.in_place ? 0 : far_apart<X>(step) ? on_row : R * step;
}

// Vectors of a block that slides with 16 registers.
constexpr int few_slid = 2;

// Most vectors of a block whose sums, of K rows or all, fit the registers with the samples and a weight, which AVX-512 may take
// from memory. 0: none.
template <class T, int K>
constexpr int slid_vectors() {
    // With 16 there is room for enough sums of three filter rows, and of no more; vectors of 16 bytes take as long in other blocks.
    if (vector_registers < 32) return vector_bytes > 16 && K == 3 ? few_slid : 0;
    constexpr int room = fused<T> && vector_bytes == line_bytes ? 32 : 31;
    constexpr int sums = K < tall_slid_rows<T, K> ? K : tall_slid_rows<T, K>, fit = room / (sums + 1);
    return fit < wide_vectors ? fit : wide_vectors;
}

// Filter rows whose weights have registers of their own, of three columns.
template <int K>
constexpr int kept_rows = many_registers ? K : K - 1;

// The weights of Q columns, each in a register.
template <int K, int Q, class T, int Columns>
[[gnu::always_inline]] inline void keep(Vec<T> (&to)[K][Columns], const T* w) {
#pragma GCC unroll 3
    for (int p = 0; p < kept_rows<K>; ++p) {
#pragma GCC unroll 3
        for (int q = 0; q < Q; ++q) to[p][q] = held(broadcast(w[p * Q + q]));
    }
}

// The samples under the filter column that is `q` columns on from that of `first`. Vectors that cross a line of the cache take two
// loads, so that only the last of them is loaded, and the others are joined of those.
template <int q, int N, class T, class X>
[[gnu::always_inline]] inline void move_on(Vec<T> (&to)[N], const Vec<T> (&first)[N], const X* samples) {
#pragma GCC unroll 4
    for (int n = 0; n < N - 1; ++n) to[n] = join<q, T>(first[n], first[n + 1]);
    to[N - 1] = held(load_as<T>(samples + q + (N - 1) * lanes<T>));
}

// With 16 registers: adds to R output rows the products of row k under the block with three columns, one vector of samples after the
// other. The weights of the last filter row are loaded anew for each column.
template <int K, int R, int N, class X, class T>
[[gnu::always_inline]] inline void add_one_by_one(Vec<T> (&sum)[K][N], int k, const Vec<T> (&kept)[K][3],
                                                  const T* w, const X* samples, const index_t* taps) {
#pragma GCC unroll 3
    for (int q = 0; q < 3; ++q) {
        const T* last_row = w + (K - 1) * 3;
        // Else the compiler would keep them in scalar registers, and broadcast them from there.
        asm("" : "+r"(last_row));
        const Vec<T> last = held(broadcast(last_row[q]));
        const X* column = samples + (converts<X, T> ? taps[q] : q);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
            const Vec<T> sample = held(load_as<T>(column + n * lanes<T>));
#pragma GCC unroll 3
            for (int p = 0; p < K; ++p) {
                const int r = k - p;
                if (r >= 0 && r < R)
                    sum[r % K][n] = mac(sum[r % K][n], sample, p < K - 1 ? kept[p][q] : last);
            }
        }
    }
}

// R output rows and N vectors of columns from j on; K filter rows, and Q columns if that isn't 0. Rows under a block
// are `step` apart, rows of outputs `down`. `lines`, where they are streamed. `next`: see fetched_next. Several: channels; the loop over
// them takes a twentieth longer where there is one. X, Y: of samples and of results, the sums' type or narrow ones (narrow.h).
template <int K, int Q, int R, int N, bool Several, class X, class Y, class T>
[[gnu::always_inline]] inline void slide(const Work& t, const X* x, index_t step, const T* w, T bias, Y* y,
                                         index_t down, index_t j, Line<T>* lines, bool fetches,
                                         index_t next) {
    const index_t kw = Q > 0 ? Q : t.kw, ahead = fetched_ahead<K, N, X, T>(t, step);
    // Columns of pictures may be as far apart as these have colours.
    const bool neighbours = !converts<X, T> || kw == 1 || t.taps[1] == 1;
    constexpr bool one_by_one = Q > 0 && !many_registers;
    static_assert(
        Q == 0 || (Q == 3 && (one_by_one ? N * K + kept_rows<K> * Q + 3 < 16 : N * (K + 2) + K * Q < 32)),
        "sums, weights and two columns of samples, or one sample, have a register each, and no more columns "
        "are unrolled");
    static_assert(R + K - 1 <= 32, "every row is unrolled");
    Vec<T> sum[K][N], kept[K][Q > 0 ? Q : 1];
    if constexpr (Q > 0 && !Several) keep<K, Q>(kept, w);
#pragma GCC unroll 32
    for (int k = 0; k < R + K - 1; ++k, x += step) {
        if (k < R) {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[k % K][n] = broadcast(bias);
        }
        // Adds the products of a column: of filter row p with `weight(p)`.
        const auto add = [&](const Vec<T>(&sample)[N], auto weight) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int p = 0; p < K; ++p) {
                const int r = k - p;
                if (r < 0 || r >= R) continue;
                const Vec<T> factor = weight(p);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[r % K][n] = mac(sum[r % K][n], sample[n], factor);
            }
        };
        const X* samples = x;
        const T* weights = w;
        for (index_t c = 0; c < (Several ? t.cg : 1); ++c, samples += t.xc, weights += K * kw) {
            // Of rows that this block is the first to meet what one after it will be, and what the block beside it is; a filter of one
            // row is left to the processor. In the caches of a core the first takes longer where products are as few as of 3 x 3.
            if (fetches) {
                constexpr int fetched = fetched_lines<X, T, N>;
                if (k >= K - 1 && (K > 3 || t.off_core)) fetch<0, 2, 1, fetched>(samples, 0, next);
                if (K > 1) fetch<0, 3, 1, fetched>(samples, 0, ahead);
            }
            [[maybe_unused]] Vec<T> sample[N];
            [[maybe_unused]] const auto load_column = [&](Vec<T>(&to)[N],
                                                          index_t q) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) to[n] = held(load_as<T>(samples + q + n * lanes<T>));
            };
            if constexpr (one_by_one) {
                static_assert(!Several, "weights are kept before");
                add_one_by_one<K, R>(sum, k, kept, weights, samples, t.taps);
            } else if constexpr (Q == 3) {
                if constexpr (Several) keep<K, Q>(kept, weights);
                Vec<T> next[N];
                load_column(sample, 0);
                add(sample, [&](int p) __attribute__((always_inline)) { return kept[p][0]; });
                if (neighbours) {
                    move_on<1, N, T>(next, sample, samples);
                } else {
                    load_column(next, t.taps[1]);
                }
                add(next, [&](int p) __attribute__((always_inline)) { return kept[p][1]; });
                if (neighbours) {
                    move_on<2, N, T>(next, sample, samples);
                } else {
                    load_column(next, t.taps[2]);
                }
                add(next, [&](int p) __attribute__((always_inline)) { return kept[p][2]; });
            } else {
                load_column(sample, 0);
                for (index_t q = 0;;) {
                    add(sample,
                        [&](int p) __attribute__((always_inline)) { return broadcast(weights[p * kw + q]); });
                    if (++q == kw) break;
                    // Where arithmetic limits no faster, for some processors join lanes where they multiply; nor of three vectors, nor
                    // of integers, whose products take longer; but of narrow samples, whose conversion takes longer.
                    constexpr bool joins = N > 3 && fused<T> && (K < least_bound || converts<X, T>);
                    if (joins && neighbours) {
                        move_on<1, N, T>(sample, sample, samples + q - 1);
                    } else {
                        load_column(sample, neighbours ? q : t.taps[q]);
                    }
                }
            }
        }
        if (k >= K - 1) {
            const int r = k - (K - 1);
            if (!converts<Y, T> && lines) {
                lines[r].put(j, sum[r % K]);
            } else {
                store_as(y, sum[r % K]);
            }
            y += down;
        }
        // Else the compiler would keep a pointer to each row, in more registers than there are.
        asm("" : "+r"(x));
    }
}

// R output rows over the whole width, in blocks of N and N - 1 vectors. Apart from what calls it, which takes registers of
// its own.
template <int K, int Q, int R, int N, bool Several, class X, class Y, class T>
[[gnu::noinline]] void slid_strip(const Work& t, const X* x, index_t step, const T* w, T bias, Y* y,
                                  index_t down) {
    Line<T> streamed[R];
    Line<T>* lines = nullptr;
    const bool fetches = fetching_pays();
    const index_t next = fetched_next<R, X>(t, step);
    // Columns of a block before all others, whose last vector the next one overlaps to begin with a line.
    index_t apart = 0;
    // Narrow results go through the caches, wherever they begin.
    if constexpr (!converts<Y, T>) {
        if (t.stream) {
            lines = streamed;
            for (int r = 0; r < R; ++r) lines[r].begin(y + r * down);
        } else if (const index_t aligned = to_aligned(t, y)) {
            apart = aligned + (N - 1) * lanes<T>;
        }
    }
    const index_t vectors = ceil_div(t.ow - apart, lanes<T>), blocks = ceil_div(vectors, index_t(N));
    for (index_t j = 0, left = vectors, b = blocks + (apart > 0); b > 0; --b) {
        // Of all blocks that are left as many as there must be have a vector less; the last, if five are left, another.
        const bool before = b > blocks;
        const index_t n = before || b * N - left < b ? N : N - 1;
        left -= before ? 0 : n;
        if (b == 1) {
            // The last block may reach back over outputs that are done already.
            if (lines) {
                for (Line<T>& line : streamed) line.end(j);
            }
            lines = nullptr;
            j = t.ow - n * lanes<T>;
        }
        if (n == N) {
            slide<K, Q, R, N, Several>(t, x + j, step, w, bias, y + j, down, j, lines, fetches, next);
        } else {
            slide<K, Q, R, N - 1, Several>(t, x + j, step, w, bias, y + j, down, j, lines, fetches, next);
        }
        j += before ? apart : n * lanes<T>;
        if (lines) {
            for (Line<T>& line : streamed) line.settle(j);
        }
    }
}

// In strips of Tall rows, and what is left below them in strips of R, where that isn't nearly as many.
template <int K, int Q, int R, int N, bool Several, class X, class Y, class T, int Tall = R>
void slid_filters(const Work& t, const Rows& rows) {
    const index_t apart = rows.out_apart, down = apart * t.yr;
    for (index_t o = 0; o < t.oc; ++o) {
        const T* w = static_cast<const T*>(t.w) + o * t.cg * K * t.kw;
        const T bias = static_cast<const T*>(t.bias)[o];
        for (index_t first = 0; first < apart; ++first) {
            const X* x = static_cast<const X*>(t.x) + first * t.xr;
            Y* y = static_cast<Y*>(t.y) + o * t.yo + first * t.yr;
            const index_t high = (t.oh - first - 1) / apart + 1;
            for (index_t i = 0; i < high;) {
                const bool tall = high >= Tall && high - i > Tall - R;
                const index_t taken = tall ? Tall : R;
                // The last strip reaches back, too.
                if (i + taken > high) i = high - taken;
                (tall ? slid_strip<K, Q, Tall, N, Several, X, Y, T>
                      : slid_strip<K, Q, R, N, Several, X, Y, T>)(t, x + i * rows.step, rows.step, w, bias,
                                                                  y + i * down, down);
                i += taken;
            }
        }
    }
    if (t.stream) stream_end();
}

// Most filter rows of blocks that slide, and of those that do so through several channels: others are seldom met, and would take
// compilers long. Bytes, for which there are no products, gain nothing.
template <class T>
constexpr int most_slid = fused<T> || sizeof(T) == 4 ? 15
                          : sizeof(T) > 1            ? 9
                                                     : 0;
constexpr int most_slid_channels = 7;

// Filters of 3 x 3 without a loop over columns: in caches 1.1 to 1.3 times as fast, but words of 64 bits 0.96 times.
template <int K, int N, bool Several, class T>
void slid_columns(const Work& t, const Rows& rows) {
    constexpr int R = slid_rows;
    if constexpr (K == 3) {
        // Several channels are seldom met so, and would take compilers long.
        if constexpr (!Several) {
            if (t.kw == 3 && share_sets<T>(rows.step) && small_sets(t))
                return slid_filters<3, 3, crowded_rows, N, Several, T, T, T>(t, rows);
        }
        if (t.kw == 3) return slid_filters<3, 3, R, N, Several, T, T, T>(t, rows);
    }
    // Others come here with 32 registers only: see slid_if.
    if constexpr (many_registers)
        slid_filters<K, 0, R, N, Several, T, T, T, Several ? R : tall_slid_rows<T, K> >(t, rows);
}

// Whether blocks of N and N - 1 vectors make up rows of outputs: five are no fours and threes.
template <int N, class T>
bool filled(const Work& t) {
    const index_t vectors = ceil_div(t.ow, lanes<T>);
    return t.ow >= N * lanes<T> && ceil_div(vectors, index_t(N)) * (N - 1) <= vectors;
}

// Whether it was done so, if there are K filter rows.
template <int K, class T>
bool slid_if(const Work& t, const Rows& rows) {
    if constexpr (constexpr int N = slid_vectors<T, K>(); N > 0) {
        if (t.kh != K || t.oh < slid_rows * t.dh) return false;
        if (!many_registers && (t.kw != 3 || t.cg != 1)) return false;
        if (filled<N, T>(t)) {
            if (t.cg == 1) {
                slid_columns<K, N, false, T>(t, rows);
                return true;
            }
            if constexpr (many_registers && K <= most_slid_channels) {
                slid_columns<K, N, true, T>(t, rows);
                return true;
            }
        }
        // Three or five vectors: of one channel 1.1 to 1.4 times as fast, and no faster under seven filter rows.
        if constexpr (fused<T> && N == 4 && K < 7) {
            if (t.cg == 1 && filled<3, T>(t)) {
                slid_columns<K, 3, false, T>(t, rows);
                return true;
            }
        }
    }
    return false;
}
template <class T, int... k>
bool slid(Numbers<k...>, const Work& t, const Rows& rows) {
    return t.sh == 1 && neighbours(t) && (slid_if<k + 1, T>(t, rows) || ...);
}

#ifdef CONVPAR_NARROW

// Samples become floats as they are loaded, and sums of pictures samples as they are stored, beside products that take longer. As floats in
// a tile they would be stored and loaded again.
template <class X, class Y, int K>
void slide_narrow(Heights<K>, const Work& t) {
    constexpr int R = slid_rows, N = many_registers ? slid_vectors<float, K>() : few_slid;
    static_assert(R <= least_narrow_rows && N <= wide_vectors, "rectangles are no smaller");
    const Rows rows(t);
    if constexpr (K == 3) {
        if (t.kw == 3) return slid_filters<3, 3, R, N, false, X, Y, float>(t, rows);
    }
    slid_filters<K, 0, R, N, false, X, Y, float>(t, rows);
}
template <class X, class Y>
void work_narrow(const Work& t) {
    with_height(NarrowHeights<Y>(), t.kh, [&](auto height) { slide_narrow<X, Y>(height, t); });
}

#endif

template <class T, int... P>
void columns(Heights<P...> heights, const Work& t, const Rows& rows) {
    // With 16 registers, where few others slide, the square filters that are met most: without a loop over columns they take a tenth
    // less time. Products that are added afterwards need registers, and take half as long again.
    constexpr int size = (P + ... + 0);
    if constexpr (fused<T> && !many_registers && size % 2 == 1 && size >= 3) {
        if (t.kw == size && neighbours(t)) return filters<decltype(heights), size, T>(t, rows);
    }
    filters<decltype(heights), 0, T>(t, rows);
}

// Most filter rows of blocks that don't slide and are made for so many. With 32 registers few filters come here; with 16 more rows than
// one pass takes mostly come one by one.
template <class T>
constexpr int most_still = many_registers ? 7
                           : fused<T>     ? lone_pass_rows<T>
                                          : 2 * pass_rows;

// Rows and columns of the filters whose blocks fetch what those below will read, as far as the second cache, where that comes
// from memory: 1.1 to 1.6 times as fast at 3 x 3 and 5 x 5. At 7 x 7, where arithmetic limits, it was slower.
constexpr int most_below = 5;

template <class T>
void work(const Work& t) {
    Rows rows(t);
    if (slid<T>(typename UpTo<most_slid<T> >::type(), t, rows)) return;
    const bool follows = t.ow > short_row * lanes<T>;
    rows.below = follows && may_fetch_below<T>(t) && t.kh <= most_below && t.kw <= most_below;
    // With so few products fetching costs more than it hides, unless blocks go through several channels or samples come from memory.
    const bool few = vector_bytes == line_bytes && t.cg == 1 && t.kh <= 3 && t.kw <= 3 && !t.far;
    rows.along = follows && !rows.below && !few;
    if constexpr (least_row_by_row<T> > 0) {
        // A set holds fewer lines than there are rows under a block.
        const bool crowded = share_sets<T>(rows.step) && t.set_lines < tall_rows + pass_rows - 1;
        // Wide blocks gain nothing in rows that are narrower, and little of few filter columns.
        const bool fills = t.kw > 3 && t.ow > wide_row * lanes<T>;
        const bool gains = many_registers ? crowded && (fills || t.set_lines <= tall_rows) : fills;
        if (gains && t.kh >= least_row_by_row<T> && rows.taps_apart == 1)
            return filters<RowByRow, 0, T>(t, rows);
    }
    choose_passes<T, most_still<T> >(t, rows, [&](auto heights) { columns<T>(heights, t, rows); });
}
