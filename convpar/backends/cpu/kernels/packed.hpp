// Builds on: simd.
// Idea: lanes are output channels. A sample, sent to all lanes, meets the packed weights of several output channels and filter columns,
//       and a row of neighbouring outputs stays in registers. simd loads every sample again for each output channel; here one load
//       serves a vector of them or two, whatever the row's width. As many filters as the first cache holds pass over a strip of such
//       rows before the next ones come. Any stride, width and dilation runs at the same speed.
// Variants: zeros around an image need no copy where filters of 3 x 3 to 5 x 5, dilated or not, meet them: their products are left out
//       (with AVX2 only where columns are three apart or more). Where channels are neighbours in memory, samples are read and sums stored
//       where they are, for lanes are channels there, too; so are samples under outputs that are a stride apart. Under filters of one
//       sample they are laid out first, block by block, where many output channels meet them or they push each other out of the first
//       cache.
// Step: six to eight tenths of simd's time from 64 to 64 channels and from 4 to 16 (docs/cpu-speed.md, Steps).
// Limit: arithmetic, where the output channels fill the lanes; lanes beyond them compute for nothing.

#include "panels.h"

template <class T>
constexpr bool is_float = false;
template <>
constexpr bool is_float<f32> = true;

// What is done beside FMAs and loads counts where FMAs of a pass are few; products with registers of their own leave none.
constexpr bool short_passes = !many_registers && fused_products;

// Whether zeros around an image are left out where they are.
constexpr bool takes_edges = many_registers || fused_products;

// Neighbouring filter columns that meet a sample while it is in a register. Loads slow FMAs down even where ports are
// left for them: one for every four FMAs is better than one for every two. Weights of one vector of output channels leave registers for
// more.
template <int N>
constexpr int most_columns = many_registers && N == 1 ? 7 : 5;

// Columns of filters that reach over an edge, and sets of them whose samples are neighbours.
constexpr int most_edge_columns = 5, most_runs = 2;

template <class T>
index_t scratch_bytes(const Work& shape);

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.scratch = scratch_bytes<T>;
    k.packing = lanes<T>;
    k.any_width = true;
    // Others' samples are gathered, and channels parted, by the engine: they are seldom met, and would take compilers long.
    k.channels_last = k.strided = is_float<T>;
    // One pass takes all columns, or with a stride all even or odd ones; 16 registers have room for the weights of two. Of dilated filters
    // each column is a pass: there columns that are far apart are worth it, which make much to gather for every output.
    if (takes_edges) {
        k.over_edge = {
            3, most_edge_columns, (most_edge_columns - 1) / 2, false, 0, is_float<T> ? most_runs : 1, true};
        k.over_edge.dilated = true;
        if (!many_registers) k.over_edge.least_apart = 3;
    }
    return k;
}

// Outputs whose sums fit the registers beside the weights of so many columns, a sample and one to spare.
template <int N>
constexpr int most_pixels(int columns) {
    return (vector_registers - 2 - N * columns) / N;
}

// Columns whose weights fit the registers beside the sums of J outputs.
template <int N, int J>
constexpr int columns_beside = J <= most_pixels<N>(most_columns<N>) ? most_columns<N>
                               : J <= most_pixels<N>(6)             ? 6
                               : J <= most_pixels<N>(5)             ? 5
                               : J <= most_pixels<N>(4)             ? 4
                               : J <= most_pixels<N>(3)             ? 3
                               : J <= most_pixels<N>(2)             ? 2
                                                                    : 1;

// Of the samples that a pass of some columns meets, how many of the first and of the last lie beyond the image.
struct Edges {
    index_t before, after;

    bool any() const { return before + after > 0; }
};
// No more than half of the columns. A dilated filter's columns are passes of their own: one that meets an edge may have so many samples
// beyond it.
constexpr int most_beyond_one = 4;
constexpr int most_beyond(int columns, bool edged) {
    if (!takes_edges || !edged) return 0;
    return columns == 1 ? most_beyond_one : many_registers ? columns / 2 : 0;
}

// Adds the products of Q filter columns to J outputs. The samples of neighbouring columns are neighbours, or `xs` apart.
template <int Q, bool Apart, bool Edged, int N, int J, class T>
inline void pass(Vec<T> (&sum)[N][J], const T* x, index_t xs, const T* w, index_t w_column, index_t w_block,
                 Edges edges) {
    Vec<T> weight[N][Q];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 7
        for (int q = 0; q < Q; ++q) weight[n][q] = load(w + n * w_block + q * w_column);
    }
#pragma GCC unroll 32
    for (int k = 0; k < J + Q - 1; ++k) {
        const T* at = Apart ? x : x + k;
        if (Apart) {
            x += xs;
            // Else the compiler would keep an address of each.
            asm("" : "+r"(x));
        }
        const int after = J + Q - 2 - k;
        if (k < most_beyond(Q, Edged) && k < edges.before) continue;
        if (after < most_beyond(Q, Edged) && after < edges.after) continue;
        const Vec<T> sample = held(broadcast(*at));
#pragma GCC unroll 7
        for (int q = 0; q < Q; ++q) {
            const int j = k - q;
            if (j < 0 || j >= J) continue;
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[n][j] = mac(sum[n][j], sample, weight[n][q]);
        }
    }
}

// Bytes of filters that stay in the first cache while a strip of outputs passes over them, beside its sums and samples.
// Where registers are few, that has 32 KiB on most processors.
constexpr index_t kept = many_registers ? 28'000 : 14'000;

// A filter row: elements from an output's first sample to its own, and from the first weight; bytes from there to a sample that is
// needed soon.
struct FilterRow {
    index_t x, w, ahead;
};
// Those that pass over a strip together.
struct FilterRows {
    const FilterRow *first, *end;
    index_t limit, apart;  // columns of a pass, and from one of them to the next
    index_t block;         // weights of a vector of output channels
    index_t xs;            // elements from a sample to its neighbour
    bool fetches;          // each the samples that its successors need: see `fetched_ahead`
    // Whether `edges` are of each column, for they are dilated; or of passes of even and odd columns, or of all.
    bool of_columns;
    const Edges* edges;

    Edges edges_of(index_t q) const { return of_columns ? edges[q] : Edges{}; }
    // Elements between the samples of three columns from q on that meet no edge; 0 where they aren't equally far from each other.
    index_t three_apart(const Work& t, index_t q) const {
        if (q + 2 >= t.kw || edges_of(q + 1).any() || edges_of(q + 2).any()) return 0;
        const index_t apart = t.taps[q + 1] - t.taps[q];
        return t.taps[q + 2] - t.taps[q + 1] == apart ? apart : 0;
    }
};

// Adds the products of all `rows` with Q of their columns and then the R that follow, whose samples are `second` elements
// on, in one loop without another branch: the processor keeps so short a one decoded.
template <int Q, int R, bool Apart, bool Edged, int N, int J, class T>
inline void by_rows(Vec<T> (&sum)[N][J], const FilterRows& rows, const T* x, const T* w, index_t second,
                    Edges edges) {
    const index_t w_column = rows.apart * lanes<T>;
    for (const FilterRow* row = rows.first; row != rows.end; ++row) {
        const T *samples = x + row->x, *weights = w + row->w;
        // More columns load less, and with many sums take long enough for the processor to fetch ahead by itself.
        if (Q == 1 || short_passes || Apart || rows.fetches) fetch_line(samples, row->ahead);
        pass<Q, Apart, Edged>(sum, samples, rows.xs, weights, w_column, rows.block, edges);
        if constexpr (R > 0) {
            pass<R, Apart, Edged>(sum, elsewhere(samples + second), rows.xs, weights + Q * w_column, w_column,
                                  rows.block, edges);
        }
    }
}

// Adds the products of all `rows` with three filter columns, whose samples are `apart` elements from each other: those that lie in the same
// line of the cache meet it before the next row's push it out.
template <bool Apart, int N, int J, class T>
inline void by_threes(Vec<T> (&sum)[N][J], const FilterRows& rows, const T* x, const T* w, index_t apart) {
    for (const FilterRow* row = rows.first; row != rows.end; ++row) {
        const T *samples = x + row->x, *weights = w + row->w;
#pragma GCC unroll 3
        for (int q = 0; q < 3; ++q, weights += lanes<T>) {
            fetch_line(samples, row->ahead);
            pass<1, Apart, false>(sum, samples, rows.xs, weights, 0, rows.block, {});
            samples = elsewhere(samples + apart);
        }
    }
}

// Columns of a second pass in the same loop, with 16 registers and fused products only: with more registers, and as many sums,
// the compiler would spill some. A much shorter pass has a loop of its own, so that there are fewer pairs to compile.
constexpr index_t second_pass(index_t first, index_t left) {
    return !short_passes || left < first - 1 ? 0 : left < first ? left : first;
}

// Outputs whose sums wait for the next filter rows, and then until they become rows of pixels, so that most of these are
// whole vectors: twenty blocks of 11 or 12 outputs are fourteen vectors of 16. Filters come from beyond the first cache once
// a strip: an image of 14 x 14 is one.
template <int N>
constexpr int strip = 448 / N;

// Where a block finds its sums so far, and where they go.
template <class T>
struct Sums {
    T* first;
    index_t block, pixel;  // from one vector of output channels, one pixel to the next
};

// All filter columns, each a pass of its own.
template <bool Apart, int N, int J, class T>
[[gnu::always_inline]] inline void column_by_column(Vec<T> (&sum)[N][J], const Work& t,
                                                    const FilterRows& rows, const T* x, const T* w) {
    for (index_t q = 0, taken; q < t.kw; q += taken) {
        const T *samples = x + t.taps[q], *weights = w + q * lanes<T>;
        const Edges edges = rows.edges_of(q);
        taken = 1;
        if (edges.any()) {
            if (edges.before + edges.after < J)
                by_rows<1, 0, Apart, true>(sum, rows, samples, weights, 0, edges);
        } else if (const index_t apart = rows.three_apart(t, q)) {
            by_threes<Apart>(sum, rows, samples, weights, apart);
            taken = 3;
        } else {
            by_rows<1, 0, Apart, false>(sum, rows, samples, weights, 0, edges);
        }
    }
}

// All filter columns, as many in a pass as `rows` says.
template <bool Apart, int N, int J, class T>
[[gnu::always_inline]] inline void run_by_run(Vec<T> (&sum)[N][J], const Work& t, const FilterRows& rows,
                                              const T* x, const T* w) {
    for (index_t first = 0; first < rows.apart; ++first) {
        // Filters of more runs, or of more than one pass each, don't reach over an edge.
        const Edges edges = rows.edges[first % most_runs];
        for (index_t q = first; q < t.kw;) {
            const index_t left = (t.kw - q - 1) / rows.apart + 1,
                          taken = left < rows.limit ? left : rows.limit;
            const index_t more = second_pass(taken, left - taken), next = q + taken * rows.apart;
            const index_t second = more ? t.taps[next] - t.taps[q] : 0;
            const T *samples = x + t.taps[q], *weights = w + q * lanes<T>;
            switch (taken * (most_columns<N> + 1) + more) {
#define PASS(Q, R)                                                                   \
    case Q*(most_columns<N> + 1) + R:                                                \
        if constexpr (Q <= columns_beside<N, J> && second_pass(Q, R) == R) {         \
            constexpr bool edged = Q > 1 && Q <= most_edge_columns;                  \
            by_rows<Q, R, Apart, edged>(sum, rows, samples, weights, second, edges); \
        }                                                                            \
        break;
#define PASSES(Q) PASS(Q, 0) PASS(Q, Q - 1) PASS(Q, Q)
                PASS(1, 0)
                PASS(1, 1)
                PASSES(2)
                PASSES(3)
                PASSES(4)
                PASSES(5)
                PASS(6, 0)
                PASS(7, 0)
#undef PASSES
#undef PASS
            }
            q = next + more * rows.apart;
        }
    }
}

// Filters of one sample where samples are laid out: a row is a channel, and the next one's samples and weights follow. With 16 registers
// what a list of rows loads for each would take ports that FMAs' samples need, and the processor follows by itself.
template <int N, int J, class T>
[[gnu::always_inline]] inline void channel_by_channel(Vec<T> (&sum)[N][J], const Work& t,
                                                      const FilterRows& rows, const T* x, const T* w) {
    for (index_t left = rows.end - rows.first; left > 0; --left, x += t.xc, w += lanes<T>)
        pass<1, false, false>(sum, x, 1, w, 0, rows.block, {});
}

// How a block meets filters: as many columns in a pass as fit, each column in a pass of its own, or channels of one sample. Not in one
// function, for compilers would move sums about between more loops.
enum Way { RUNS, COLUMNS, CHANNELS };

// One row of J outputs and N vectors of output channels. Apart: neighbouring samples aren't neighbours in memory.
template <int N, int J, bool Apart, Way How, class T>
void block(const Work& t, const FilterRows& rows, const T* x, const T* w, const Sums<const T>& from,
           const Sums<T>& to) {
    Vec<T> sum[N][J];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 32
        for (int j = 0; j < J; ++j) sum[n][j] = load(from.first + n * from.block + j * from.pixel);
    }
    if constexpr (How == CHANNELS) {
        channel_by_channel(sum, t, rows, x, w);
    } else if constexpr (How == COLUMNS) {
        column_by_column<Apart>(sum, t, rows, x, w);
    } else {
        run_by_run<Apart>(sum, t, rows, x, w);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 32
        for (int j = 0; j < J; ++j) store(to.first + n * to.block + j * to.pixel, sum[n][j]);
    }
}

template <class T>
using block_t = void (*)(const Work&, const FilterRows&, const T*, const T*, const Sums<const T>&,
                         const Sums<T>&);

// The block of `pixels` outputs, found among J, J - 1, ..., 1.
template <int N, int J, bool Apart, Way How, class T>
block_t<T> find_block(index_t pixels) {
    if constexpr (J == 1) {
        return block<N, 1, Apart, How, T>;
    } else {
        return pixels == J ? block<N, J, Apart, How, T> : find_block<N, J - 1, Apart, How, T>(pixels);
    }
}

// From a filter column to the one whose samples are its neighbours: with a stride of two every other column's are. 0 if there is
// none.
inline index_t columns_apart(const Work& t) {
    for (index_t apart = 1; apart < t.kw; ++apart) {
        index_t q = 0;
        while (q + apart < t.kw && t.taps[q + apart] - t.taps[q] == t.xs) ++q;
        if (q + apart == t.kw) return apart;
    }
    return 0;
}

// Whether filter columns that are no neighbours reach over an edge.
inline bool dilated_edges(const Work& t) { return takes_edges && t.over_edge && t.dw > 1; }

// How filter columns fall into passes, and rows of outputs into blocks of nearly equal width.
struct Shape {
    index_t limit, apart, blocks;
    index_t time;       // of a filter row, in half FMAs
    index_t panel = 0;  // elements from a block's samples to the next one's, where they are laid out

    index_t narrow(const Work& t) const { return t.ow / blocks; }
    index_t wider(const Work& t) const { return t.ow % blocks; }  // blocks that are a pixel wider than that
};

// The same in the way that suits the filter.
template <int N, bool Apart, class T>
block_t<T> find_block(const Work& t, const Shape& shape, index_t pixels) {
    constexpr int widest = most_pixels<N>(1);
    if constexpr (takes_edges) {
        const bool single = many_registers && shape.limit == 1 && shape.apart == 1 && t.kw > 1;
        if (single || dilated_edges(t)) return find_block<N, widest, Apart, COLUMNS, T>(pixels);
    }
    if constexpr (!many_registers && !Apart) {
        if (shape.panel) return find_block<N, widest, Apart, CHANNELS, T>(pixels);
    }
    return find_block<N, widest, Apart, RUNS, T>(pixels);
}

// The one that takes least time, if two loads take as long as an FMA, and what else is done once a pass as long as three; a
// block of too few sums would wait for each: eight are in the making, and a few more keep them coming.
template <int N>
Shape find_shape(const Work& t) {
    const index_t apart = dilated_edges(t) ? 0 : columns_apart(t), runs = apart ? apart : 1;
    Shape best{};
    // Over an edge one pass takes all columns of a run, or each is a pass.
    const index_t most = apart ? most_columns<N> : 1,
                  least = t.over_edge && apart ? (t.kw - 1) / runs + 1 : 1;
    for (index_t limit = least; limit <= (t.over_edge ? least : most); ++limit) {
        const index_t blocks = (t.ow - 1) / most_pixels<N>(int(limit)) + 1, width = (t.ow - 1) / blocks + 1;
        index_t passes = 0;
        for (index_t q = 0; q < runs && q < t.kw; ++q) passes += (t.kw - q - 1) / runs / limit + 1;
        const index_t products = t.kw * (N * width < 10 ? 10 : N * width);
        const index_t loads = t.kw * (N + 1) + passes * (width - 1);
        const index_t time = blocks * (2 * products + loads + 6 * passes);
        if (limit == least || time < best.time) best = {limit, runs, blocks, time};
    }
    return best;
}

// How many of positions `from`, from + step, ... lie before 0.
inline index_t before(index_t from, index_t step) { return from < 0 ? (step - 1 - from) / step : 0; }

// Rows of the filter above and below the image, under row i of outputs.
inline index_t rows_above(const Work& t, index_t i) {
    return t.over_edge ? before(t.row0 + i * t.sh, t.dh) : 0;
}
inline index_t rows_below(const Work& t, index_t i) {
    return t.over_edge ? before(t.rows.n - 1 - (t.row0 + i * t.sh + (t.kh - 1) * t.dh), t.dh) : 0;
}

// Filter rows and columns that may lie beyond the image on each side.
constexpr int most_left_out = takes_edges ? most_edge_columns / 2 : 0;

// Columns of outputs from one edge of such filters to the next: there blocks begin anew, so that the samples under a column lie all inside
// the image or all beyond, or but for a few at its ends.
struct Stretch {
    index_t from, blocks, narrow, wider;  // a block's pixels, and how many have one more
};

template <int N>
struct Stretches {
    Stretch all[2 * most_left_out + 1];
    int count = 0;

    Stretches(const Work& t, const Shape& shape) {
        if (!dilated_edges(t)) {
            all[count++] = {0, shape.blocks, shape.narrow(t), shape.wider(t)};
            return;
        }
        const index_t most = most_pixels<N>(int(shape.limit));
        for (index_t j = 0, next; j < t.ow; j = next) {
            next = t.ow;
            for (index_t q = 0; q < t.kw; ++q) {
                const index_t first = t.col0 + q * t.dw;
                // Until the column's samples are inside, and then until they no longer are.
                const index_t comes = before(first, t.sw), leaves = before(first - t.cols.n, t.sw);
                if (comes > most_beyond_one && comes > j && comes < next) next = comes;
                if (leaves < t.ow - most_beyond_one && leaves > j && leaves < next) next = leaves;
            }
            const index_t width = next - j, blocks = (width - 1) / most + 1;
            all[count++] = {j, blocks, width / blocks, width % blocks};
        }
    }
};

// A block of a strip.
template <class T>
struct Piece {
    block_t<T> block;
    index_t x;  // elements to its first sample
    T* y;
    index_t pixels;
    Edges edges[takes_edges ? most_edge_columns : most_runs];  // see FilterRows
    int list;                                                  // of filter rows
    bool ends;                                                 // what follows lies elsewhere
};

// Bytes of samples under a strip, of all channels, that won't be in the second cache when the next strip comes.
constexpr index_t many_samples = 1'000'000;

// Bytes from a sample of channel c to the one that its filter rows fetch, if a block is `width` pixels, and so many channels are taken
// together.
template <int N, class T>
index_t fetched_ahead(const Work& t, index_t c, index_t width, index_t together) {
    // Of channels beside each other a line holds several: each fetches another line of the pixels after these.
    if (kernel<T>().strided && t.xs != 1 && t.xc == 1) {
        return ((width + 1) * t.xs - c) * index_t(sizeof(T)) + c * line_bytes;
    }
    // What was gathered waits in the second cache; in place, the next row of outputs is far from any cache, unless there are so many
    // channels that the next of them are.
    const index_t high = t.ow < strip<N> ? strip<N> / t.ow * t.sh : t.sh, apart = t.dh < high ? t.dh : high;
    const index_t under = (high + (t.kh - 1) * apart) * t.ow * t.sw * index_t(sizeof(T));
    const bool many = t.cg > together && t.cg * under > many_samples;
    const index_t ahead = !t.in_place ? t.xc : many ? together * t.xc : (t.over_edge ? high : t.sh) * t.xr;
    return ahead * index_t(sizeof(T));
}

// The filter rows that outputs meet: a list of those of all channels that are taken together, and for each number that may lie beyond
// the image, above and below, another.
template <int N, class T>
class Lists {
    static constexpr int most = most_left_out + 1;
    FilterRow all[kept / (N * vector_bytes)], some[most * most][kept / (3 * N * vector_bytes)];
    index_t left[most * most];  // rows of one channel, by list

    static_assert(!takes_edges || most_edge_columns * most_edge_columns * N * vector_bytes <= kept,
                  "lists that lack a row are of whole filters");
    FilterRow* list(int number) { return number == 0 ? all : some[number]; }

  public:
    index_t rows, together;  // all rows of some channels together, or some rows of one

    Lists(const Work& t, index_t width) {
        const index_t w_row = t.kw * lanes<T>, row_bytes = N * t.kw * vector_bytes;
        const index_t room = row_bytes < kept ? kept / row_bytes : 1;
        rows = t.kh < room ? t.kh : room;
        // Nearly as many each time.
        const index_t times = t.cg > 0 ? (t.cg - 1) / (room / rows) + 1 : 1;
        together = t.cg > 0 ? (t.cg - 1) / times + 1 : 1;
        for (index_t a = 0; a <= rows_above(t, 0); ++a) {
            for (index_t b = 0; b <= rows_below(t, t.oh - 1); ++b) {
                left[number(a, b)] = rows - a - b;
                FilterRow* row = list(number(a, b));
                for (index_t c = 0; c < together; ++c) {
                    const index_t ahead = fetched_ahead<N, T>(t, c, width, together);
                    for (index_t p = a; p < rows - b; ++p)
                        *row++ = {c * t.xc + p * t.dh * t.xr, (c * rows + p) * w_row, ahead};
                }
            }
        }
    }
    static int number(index_t above, index_t below) { return int(above * most + below); }
    const FilterRow* first(int number) const { return number == 0 ? all : some[number]; }
    // Of so many channels, or some rows of one.
    const FilterRow* end(int number, index_t channels, index_t rows_left) const {
        return first(number) + channels * (rows_left < left[number] ? rows_left : left[number]);
    }
};

// Stores a pixel's sums, of N vectors, where channels are neighbours in memory and the last vector isn't full.
template <int N, class T>
void store_pixel(const T* sums, T* y, index_t last) {
    for (int n = 0; n < N; ++n) {
        const Vec<T> some = load(sums + n * strip<N> * lanes<T>);
        if (n + 1 < N) {
            store(y + n * lanes<T>, some);
        } else {
            store_first(y + n * lanes<T>, some, last);
        }
    }
}

// N vectors of output channels over the whole rectangle.
template <int N, bool Apart, class T>
void channels(const Work& t, const Shape& shape, const Lists<N, T>& lists, const T* w, const T* bias, T* y,
              index_t last) {
    const Stretches<N> stretches(t, shape);
    block_t<T> blocks[2 * most_left_out + 1][2];
    for (int k = 0; k < stretches.count; ++k) {
        const Stretch& s = stretches.all[k];
        for (int more = 0; more <= (s.wider > 0); ++more)
            blocks[k][more] = find_block<N, Apart, T>(t, shape, s.narrow + more);
    }
    const index_t xs = Apart ? t.xs : 1;
    const bool by_pixels = t.ys != 1;
    const index_t w_row = t.kw * lanes<T>, rows = lists.rows, together = lists.together;
    const T* x = static_cast<const T*>(t.x);
    // Whole squares of vectors are turned: the last one may begin at the last output. No vector straddles lines.
    alignas(line_bytes) T done[(N * strip<N> + lanes<T> - 1) * lanes<T>];
    Piece<T> pieces[strip<N> + 1];
    const bool dilated = dilated_edges(t);
    int stretch = 0;
    for (index_t i = 0, b = 0; i < t.oh;) {
        index_t count = 0;
        for (index_t room = strip<N>; i < t.oh;) {
            const Stretch& s = stretches.all[stretch];
            const bool wide = b < s.wider;
            const index_t j = s.from + b * s.narrow + (wide ? b : s.wider), width = s.narrow + wide;
            if (room < width) break;
            room -= width;
            const bool ends = b + 1 == s.blocks, row_ends = ends && stretch + 1 == stretches.count;
            Piece<T>& piece = pieces[count++];
            // Where rows of outputs follow each other in memory, they are one.
            piece = {blocks[stretch][wide],
                     shape.panel ? b * shape.panel : i * t.sh * t.xr + j * xs,
                     y + i * t.yr + j * t.ys,
                     width,
                     {},
                     0,
                     row_ends && t.yr != t.ow};
            if (takes_edges && t.over_edge) {
                piece.x += t.row0 * t.xr + t.col0 * (xs / t.sw);
                piece.list = Lists<N, T>::number(rows_above(t, i), rows_below(t, i));
                for (index_t run = 0; run < (dilated ? t.kw : shape.apart); ++run) {
                    // From the first sample under the run's first column to the last under its last, or under a column.
                    const index_t from = t.col0 + j * t.sw + run * t.dw, more = (width - 1) * t.sw;
                    const index_t end = from + more + (dilated ? 0 : (t.kw - 1 - run) / t.sw * t.sw);
                    piece.edges[run] = {before(from, t.sw), before(t.cols.n - 1 - end, t.sw)};
                }
            }
            b = ends ? 0 : b + 1;
            stretch = row_ends ? 0 : stretch + ends;
            i += row_ends;
        }
        pieces[count - 1].ends = true;
        pieces[count].y = nullptr;
        // Once at least: without channels there is the bias.
        for (index_t c = 0; c == 0 || c < t.cg; c += together) {
            const index_t taken = t.cg - c < together ? t.cg - c : together;
            for (index_t p = 0; p < t.kh; p += rows) {
                const bool first = c + p == 0, final = c + together >= t.cg && p + rows >= t.kh;
                T *sums = done, *from = done, *to = pieces->y;
                for (const Piece<T>* piece = pieces; piece < pieces + count; ++piece) {
                    // Stores to lines that aren't there would hold up what follows.
                    for (index_t k = 0; final && !by_pixels && k < (N - 1) * lanes<T> + last; ++k)
                        fetch_line(piece->y + k * t.yo + piece->pixels - 1, 0);
                    for (index_t j = 0; final && by_pixels && j < piece->pixels; ++j) {
                        for (int n = 0; n < N; ++n) fetch_line(piece->y + j * t.ys + n * lanes<T>, 0);
                    }
                    const Sums<const T> so_far = first ? Sums<const T>{bias, lanes<T>, 0}
                                                       : Sums<const T>{sums, strip<N> * lanes<T>, lanes<T>};
                    const bool to_end = final && by_pixels && last == lanes<T>;
                    const Sums<T> place = to_end ? Sums<T>{piece->y, lanes<T>, t.ys}
                                                 : Sums<T>{sums, strip<N> * lanes<T>, lanes<T>};
                    const FilterRows taps{lists.first(piece->list),
                                          lists.end(piece->list, taken, t.kh - p),
                                          shape.limit,
                                          shape.apart,
                                          t.cg * t.kh * w_row,
                                          xs,
                                          t.in_place,
                                          dilated,
                                          piece->edges};
                    piece->block(t, taps, x + (piece->x + c * t.xc + p * t.dh * t.xr),
                                 w + (c * t.kh + p) * w_row, so_far, place);
                    if (final && by_pixels && !to_end) {
                        for (index_t j = 0; j < piece->pixels; ++j)
                            store_pixel<N>(sums + j * lanes<T>, piece->y + j * t.ys, last);
                    }
                    sums += piece->pixels * lanes<T>;
                    if (!final || by_pixels) continue;
                    index_t given = (sums - from) / lanes<T>;
                    if (!piece->ends) given = given / lanes<T> * lanes<T>;
                    for (int n = 0; n < N; ++n) {
                        turn(from + n * strip<N> * lanes<T>, given, to + n * lanes<T> * t.yo, t.yo,
                             n + 1 < N ? index_t(lanes<T>) : last);
                    }
                    from += given * lanes<T>;
                    to = piece->ends ? piece[1].y : to + given;
                }
            }
        }
    }
}

// Output channels from `o` on, N vectors at a time; a single one that is left isn't taken. Where it ended.
template <int N, class T>
index_t channels_from(const Work& t, const Shape& shape, index_t o) {
    const Lists<N, T> lists(t, shape.narrow(t));
    const index_t w_block = t.cg * t.kh * t.kw * lanes<T>;
    for (; t.oc - o > (N - 1) * lanes<T>; o += N * lanes<T>) {
        const T* w = static_cast<const T*>(t.w) + o / lanes<T> * w_block;
        const T* bias = static_cast<const T*>(t.bias) + o;
        T* y = static_cast<T*>(t.y) + o * t.yo;
        const index_t left = t.oc - o - (N - 1) * lanes<T>, last = left < lanes<T> ? left : lanes<T>;
        if constexpr (kernel<T>().strided) {
            if (t.xs != 1) {
                channels<N, true>(t, shape, lists, w, bias, y, last);
                continue;
            }
        }
        channels<N, false>(t, shape, lists, w, bias, y, last);
    }
    return o;
}

// How rows of outputs fall into blocks, of pairs of vectors of output channels if there are any, and of the last one, or of all.
struct Shapes {
    bool pairs;
    Shape two, one;
};
template <class T>
Shapes find_shapes(const Work& t) {
    const Shape two = find_shape<2>(t), one = find_shape<1>(t);
    // Where registers hold few filter columns of two vectors, more of one may take less time.
    return {t.oc > lanes<T> && (!short_passes || two.time <= 2 * one.time), two, one};
}

template <class T>
void all_channels(const Work& t, const Shapes& shapes) {
    const index_t o = shapes.pairs ? channels_from<2, T>(t, shapes.two, 0) : 0;
    if (o < t.oc) channels_from<1, T>(t, shapes.one, o);
}

// -- samples laid out: filters of one sample

// Pixels are taken as one row, in strips. Where lines of a block's samples push each other out of the first cache, or many output channels
// come back to them, panels of a strip are laid out once (panels.h).

// Bytes of a strip's samples, which stay in the second cache beside the filters; vectors of output channels, and channels, of which
// it is worth it in any case; and channels if their lines push each other out.
constexpr index_t laid_out_bytes = 1 << 19, worth_vectors = 8, worth_channels = 64, worth_crowded = 128;

// Whether the first cache can't hold what a block meets of all channels.
template <class T>
bool crowded(const Work& t) {
    const index_t bytes = index_t(sizeof(T)), plane = (t.xc < 0 ? -t.xc : t.xc) * bytes;
    const index_t lines = most_pixels<2>(1) * t.xs * bytes / line_bytes + 1, met = lines * line_bytes;
    // Planes a multiple of so many lines apart begin in every so many-th set.
    index_t sets = set_bytes / line_bytes;
    for (index_t apart = 2 * line_bytes; sets > 1 && plane > 0 && plane % apart == 0; apart *= 2) sets /= 2;
    return t.cg * (met < plane ? met : plane) > (sets + lines - 1) * t.set_lines * line_bytes;
}

// Pixels of a strip, at most; 0: samples are met where they are.
template <class T>
index_t most_in_strip(const Work& t) {
    const bool planes = t.in_place && t.xc != 1 && t.kh == 1 && t.kw == 1;
    const bool several = t.oc >= worth_vectors * lanes<T> && t.cg >= worth_channels;
    if (!planes || !(several || (t.cg >= worth_crowded && crowded<T>(t)))) return 0;
    const index_t room = laid_out_bytes / (t.cg * index_t(sizeof(T))), least = 4 * most_pixels<2>(1);
    return room < least ? least : room < strip<2> ? room : index_t(strip<2>);
}

// Pixels as a row of outputs, and how their samples are laid out.
struct Strip {
    Work row;
    Shapes shapes;
};

template <class T>
Strip find_strip(const Work& t, index_t pixels) {
    Work row = t;
    row.oh = row.sh = row.xs = 1;
    row.ow = pixels;
    // What is fetched is the next channel, not the next row.
    row.in_place = false;
    Shapes shapes = find_shapes<T>(row);
    Shape shape = shapes.pairs ? shapes.two : shapes.one;
    // A channel's samples are whole vectors, which lie in as few lines as they can. Panels begin in different sets of the first cache,
    // and behind the last one is room for a vector.
    row.xc = ceil_div(shape.narrow(row) + (shape.wider(row) > 0), index_t(lanes<T>)) * lanes<T>;
    shape.panel = t.cg * row.xc + line_bytes / index_t(sizeof(T));
    // A last single vector takes the pairs' blocks, for which panels are laid out.
    shapes.one = shapes.two = shape;
    return {row, shapes};
}

template <class T>
index_t scratch_bytes(const Work& shape) {
    const index_t most = most_in_strip<T>(shape);
    if (!most) return 0;
    // Smaller calls may have longer strips, or fewer output channels and wider blocks: no more of them, and each less than a vector
    // wider than its pixels.
    const index_t all = shape.oh * shape.ow, pixels = all < most ? all : most;
    const index_t blocks = ceil_div(pixels, index_t(most_pixels<2>(1)));
    return shape.cg * (pixels + blocks * lanes<T>)*index_t(sizeof(T)) + blocks * line_bytes;
}

// Lays out the samples of a strip, from pixel `first` of the rectangle on.
template <class T>
void lay_out_strip(const Work& t, index_t first, const Strip& whole, T* to) {
    static_assert(4 * most_pixels<2>(1) <= strip<2>, "a strip has no more pixels");
    const Shape& shape = whole.shapes.one;
    const Pixels pixels(t);
    Part parts[strip<2>], *end = parts;
    for (index_t b = 0; b < shape.blocks; ++b) {
        const index_t width = shape.narrow(whole.row) + (b < shape.wider(whole.row));
        end = find_parts<T>(pixels, first, width, b * shape.panel, end);
        first += width;
    }
    lay_out(static_cast<const T*>(t.x), t.xc, t.xs, t.cg, parts, end, to, whole.row.xc);
}

template <class T>
void work(const Work& t) {
    // Not where another rung calls, which has its own scratch memory, nor where rows of outputs don't follow each other in memory: where
    // tiles are narrower than the image, or sums wait for a conversion.
    const index_t most = t.scratch && t.yr == t.ow * t.ys ? most_in_strip<T>(t) : 0;
    if (!most) return all_channels<T>(t, find_shapes<T>(t));
    T* samples = static_cast<T*>(t.scratch);
    const index_t pixels = t.oh * t.ow, strips = ceil_div(pixels, most);
    for (index_t k = 0, first = 0, next; k < strips; ++k, first = next) {
        next = (k + 1) * pixels / strips;
        Strip part = find_strip<T>(t, next - first);
        lay_out_strip(t, first, part, samples);
        part.row.x = samples;
        part.row.y = static_cast<T*>(t.y) + first * t.ys;
        all_channels<T>(part.row, part.shapes);
    }
}
