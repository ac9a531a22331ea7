// Builds on: unrolled.
// Idea: a block of output rows x vectors of neighbouring columns stays in registers. A vector of samples, once
//       loaded, serves every output row and every filter row that meet in it: R output rows and P filter rows take R + P - 1
//       loads for R * P products, of 8 and 7 one load for four.
//       Either a filter column meets all rows under a block, or, where these don't fit the first cache together or one
//       pass, a row of the image all the filter's columns (RowByRow in blocks.h).
// Step: a sixteenth to a thirtieth of unrolled's time at 7 x 7 (docs/cpu-speed.md, Steps).
// Limit: arithmetic, from about 7 filter rows on; before that memory, or in a cache what surrounds so few products: weights,
//       stores, the change from block to block.

#include "blocks.h"

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    // The last block of a row, which may reach back, is stored in the usual way.
    k.streams = most_unsettled * lanes<T> + 1;
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
    // Blocks for the few rows that may be left aren't unrolled over the columns of large filters: compilers would take minutes.
    constexpr int low = Q > 7 ? 0 : Q, four = tall_rows == 4 || Q == lone_pass_rows<T> ? Q : low;
    constexpr int vectors = Block<Passes>::vectors;
    using Left = typename Block<Passes>::Left;
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
                int taken = rows.tall;
                while (taken > left) taken = taken == 6 ? 4 : taken / 2;
                switch (taken) {
                    case 1: strip<Left, low, 1, wide_vectors>(t, rows, x, w, bias, y); break;
                    case 2: strip<Left, low, 2, wide_vectors>(t, rows, x, w, bias, y); break;
                    case 4:
                        strip<Left, four, 4, tall_rows == 4 ? vectors : wide_vectors>(t, rows, x, w, bias, y);
                        break;
                    case 6:
                        if constexpr (tall_rows == 8 && Block<Passes>::lowered) {
                            strip<Passes, Q, 6, vectors + 1>(t, rows, x, w, bias, y);
                        }
                        break;
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

template <class T, int... P>
void columns(Heights<P...> heights, const Work& t, const Rows& rows) {
    // The square filters that are met most: without a loop over columns they take a tenth less time. Products that are added
    // afterwards need registers, and take half as long again.
    constexpr int size = (P + ... + 0);
    // With few registers more rows than one pass takes mostly come one by one.
    constexpr int most = fused<T> && vector_registers == 16 ? lone_pass_rows<T> : 12;
    if constexpr (fused<T> && size % 2 == 1 && size >= 3 && size <= most) {
        if (t.kw == size && neighbours(t)) return filters<decltype(heights), size, T>(t, rows);
    }
    if constexpr (size <= most) {
        filters<decltype(heights), 0, T>(t, rows);
    } else {
        filters<Heights<>, 0, T>(t, rows);
    }
}

template <class T>
void by_rows(const Work& t, const Rows& rows) {
    switch (t.kh) {
#define PASS(P)                                                       \
    case P:                                                           \
        if constexpr (P >= least_row_by_row<T> && P < tall_rows) {    \
            return filters<RowByRow<P, tall_vectors>, 0, T>(t, rows); \
        }                                                             \
        break;
        EACH_PASS
#undef PASS
    }
    if constexpr (vector_registers == 32) {
        if (t.set_lines <= tall_rows) return filters<RowByRow<0, tall_vectors>, 0, T>(t, rows);
    }
    filters<RowByRow<0, wide_row>, 0, T>(t, rows);
}

// Rows and columns of the filters whose blocks fetch what those below will read, as far as the second cache, where that comes
// from memory: 1.1 to 1.6 times as fast at 3 x 3 and 5 x 5. At 7 x 7, where arithmetic limits, it was slower.
constexpr int most_below = 5;

// Whether rows of results fall into the sets of the samples under them, or of those a few lines to the right: stores push out
// lines that the next block needs again. Measured with eight lines a set.
template <class T>
bool results_push_out(const Work& t) {
    const auto x = reinterpret_cast<std::uintptr_t>(t.x), y = reinterpret_cast<std::uintptr_t>(t.y);
    return t.yr * index_t(sizeof(T)) % set_bytes == 0 && (y - x) % set_bytes < 6 * vector_bytes;
}

template <class T>
void work(const Work& t) {
    Rows rows(t);
    const bool follows = t.ow > short_row * lanes<T>;
    rows.below = follows && may_fetch_below(t) && t.kh <= most_below && t.kw <= most_below;
    // With so few products fetching costs more than it hides, unless blocks go through several channels or samples come from memory.
    const bool few = vector_bytes == line_bytes && t.cg == 1 && t.kh <= 3 && t.kw <= 3 && !t.far;
    rows.along = follows && !rows.below && !few;
    // Rows a multiple of set_bytes apart share one set of the first cache. `crowded`: that holds fewer lines than there are rows
    // under a block. Filters of one pass then get lower blocks; for those of more passes low blocks were slower.
    const bool share_sets = rows.step != 0 && rows.step * index_t(sizeof(T)) % set_bytes == 0;
    bool crowded = share_sets && t.set_lines < tall_rows + pass_rows - 1;
    if (vector_registers == 32 && crowded && rows.reach < lone_pass_rows<T>) {
        crowded = !rows.fit(t.set_lines);
        if (!crowded && t.set_lines <= tall_rows && results_push_out<T>(t)) rows.tall = tall_rows / 2;
    }
    if (rows.below && vector_bytes == line_bytes) {
        // Low blocks are also wide: rows come from memory, and go there, in longer pieces.
        rows.tall = tall_rows / 2;
        crowded = false;
    }
    if constexpr (least_row_by_row<T> > 0) {
        // Wide blocks gain nothing in rows that are narrower, and little of few filter columns.
        const bool fills = t.kw > 3 && t.ow > wide_row * lanes<T>;
        const bool gains = vector_registers == 32 ? crowded && (fills || t.set_lines <= tall_rows) : fills;
        if (gains && t.kh >= least_row_by_row<T> && rows.taps_apart == 1) return by_rows<T>(t, rows);
    }
    if (crowded) rows.take(set_pass_rows);
    choose_passes<T>(t, rows, [&](auto heights) { columns<T>(heights, t, rows); });
}
