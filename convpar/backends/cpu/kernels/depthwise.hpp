// Builds on: simd.
// Idea: lanes are channels, each with a filter of its own. Where channels are neighbours in memory, samples and sums are read and
//       stored where they are; planes are turned, as many at once as a vector has lanes, in tiles that stay in the first caches. So rows
//       of any width fill whole vectors, of 7 columns as of 70, and what a filter meets beyond the image is left out.
// Variants: under 3 x 3 columns of samples pass a slab of outputs, and each is read once; where pixels are far apart a slab is brought in
//       the order of memory first.
// Step: a quarter to seven tenths of simd's time where channels are neighbours, a fifth to a thirteenth of planes of 7 x 7
//       (docs/cpu-speed.md, Steps).
// Limit: memory up to 3 x 3 where channels are neighbours, beyond that arithmetic; of planes under small filters the turning.

// Rows and neighbouring columns of outputs whose sums stay in registers, beside a sample and, for each row, the weights of so many filter
// columns.
constexpr int most_rows = many_registers ? 2 : 1;
constexpr int most_pixels = 8, fewer_pixels = 7;
constexpr int most_columns = many_registers ? 7 : 5;

template <class T>
index_t scratch_bytes(const Work& shape);

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.lanes_are_groups = lanes<T>;
    // Of a pack's filters a vector may begin with any of the first half.
    k.packing = 2 * lanes<T>;
    k.scratch = scratch_bytes<T>;
    k.any_width = k.channels_last = k.groups = k.strided = true;
    constexpr index_t any = index_t(1) << 40;
    k.over_edge = {1, any, any, false, 0, any};
    return k;
}

// Columns from an output's window to the next one's, and from its first to the one that filter column q meets; samples that were
// gathered lie as the engine says.
inline index_t stride(const Work& t) { return t.in_place ? t.sw : 1; }
inline index_t column(const Work& t, index_t q) { return t.in_place ? q * t.dw : t.taps[q]; }

// Whether channels are neighbours in memory.
inline bool x_last(const Work& t) { return t.xs != stride(t); }
inline bool y_last(const Work& t) { return t.ys != 1; }

// Rows and columns under all outputs, whether they exist or not.
inline index_t rows_under(const Work& t) { return (t.oh - 1) * t.sh + (t.kh - 1) * t.dh + 1; }
inline index_t columns_under(const Work& t) {
    index_t farthest = 0;
    for (index_t q = 0; q < t.kw; ++q) farthest = column(t, q) > farthest ? column(t, q) : farthest;
    return (t.ow - 1) * stride(t) + farthest + 1;
}

// Samples under a rectangle, of as many channels as there are lanes.
template <class T>
struct Samples {
    const T* first;         // of those that exist
    index_t rows, columns;  // that exist
    index_t row, column;    // elements from one to the next
    // Rows and columns of the first output's window that are missing; below 0: that come before it.
    index_t above, before;
};

template <class T>
Samples<T> in_array(const Work& t) {
    Samples<T> x{static_cast<const T*>(t.x), t.rows.n, t.cols.n, t.xr, t.xs / stride(t), -t.row0, -t.col0};
    if (!t.over_edge) {
        x.rows = rows_under(t);
        x.columns = columns_under(t);
    }
    return x;
}

// -- turning

// So few samples or outputs of each plane are moved one by one: a square takes longer.
constexpr index_t few = 2;

// `count` neighbouring samples of each of `channels` planes become as many vectors.
template <class T>
void turn_in(const T* x, index_t apart, index_t channels, index_t count, T* to) {
    index_t j = 0;
    if (channels == lanes<T>) {
        for (; j + lanes<T> <= count; j += lanes<T>) {
            Vec<T> rows[lanes<T>];
            const T* from = x + j;
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k, from += apart) rows[k] = load(from);
            transpose<T>(rows);
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) store(to + (j + k) * lanes<T>, rows[k]);
        }
    }
    if (count - j > few) {
        for (; j < count; j += lanes<T>) {
            const index_t width = count - j < lanes<T> ? count - j : index_t(lanes<T>);
            Vec<T> rows[lanes<T>];
            const T* from = x + j;
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) {
                rows[k] = k < channels ? load_first(from, width) : Vec<T>{};
                from += k + 1 < channels ? apart : 0;
            }
            transpose<T>(rows);
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) {
                if (k < width) store(to + (j + k) * lanes<T>, rows[k]);
            }
        }
    }
    for (; j < count; ++j) {
        T samples[lanes<T>] = {};
        for (index_t k = 0; k < channels; ++k) samples[k] = x[k * apart + j];
        store(to + j * lanes<T>, load(samples));
    }
}

// And back.
template <class T>
void turn_out(const T* done, index_t count, T* y, index_t apart, index_t channels) {
    const index_t rest = count % lanes<T>, squares = rest > few || channels < lanes<T> ? count : count - rest;
    turn(done, squares, y, apart, channels);
    for (index_t j = squares; j < count; ++j) {
        for (index_t k = 0; k < channels; ++k) y[k * apart + j] = done[j * lanes<T> + k];
    }
}

// Of the samples of `channels` groups those under the rectangle as vectors, `to` and on.
template <class T>
Samples<T> brought(const Work& t, const Samples<T>& from, index_t channels, T* to) {
    const auto skipped = [](index_t missing) { return missing < 0 ? -missing : 0; };
    // Of samples under all outputs those that exist, of which there may be none.
    const auto needed = [](index_t under, index_t missing, index_t rest) {
        const index_t wanted = missing > 0 ? under - missing : under, least = wanted < rest ? wanted : rest;
        return least > 0 ? least : 0;
    };
    Samples<T> x;
    const index_t top = skipped(from.above), left = skipped(from.before);
    x.above = from.above + top;
    x.before = from.before + left;
    x.rows = needed(rows_under(t), from.above, from.rows - top);
    x.columns = needed(columns_under(t), from.before, from.columns - left);
    x.first = to;
    x.column = lanes<T>;
    x.row = x.columns * lanes<T>;
    if (x.rows == 0 || x.columns == 0) return x;
    const T* row = from.first + top * from.row + left * from.column;
    const bool one_row = from.column == 1 && from.row == x.columns;
    const index_t rows = one_row ? 1 : x.rows, count = one_row ? x.rows * x.columns : x.columns;
    for (index_t u = 0; u < rows; ++u, row += from.row, to += x.row) {
        if (from.column == 1) {
            turn_in(row, t.xg, channels, count, to);
        } else {
            for (index_t v = 0; v < count; ++v)
                store(to + v * lanes<T>, load_first(row + v * from.column, channels));
        }
    }
    return x;
}

// -- sums

// Filter columns whose samples are neighbours, or those of neighbouring outputs: they meet a sample while it is in a register.
struct Pass {
    int columns;
    index_t sample, weight;  // columns to the first one's sample and to its weight
    unsigned samples;  // under the columns and a block's outputs: a bit for each that exists and is needed
};

// Rows of samples under one or two rows of outputs, counted from the first one's window on. Those from `shift` on are under the second,
// too, and those from kh on under that alone.
struct Rows {
    index_t first;      // of the samples that exist, the one under row 0
    index_t from, end;  // of rows that exist
    index_t kh, shift;
    index_t sample, weight;  // elements from one to the next
    int taken;               // of outputs
};

// Adds the products of a row of samples with Q filter columns to the sums of the first row of outputs and of the second, whose weights
// are so many elements on.
template <bool First, bool Second, int Q, bool Edge, int R, int J, class T>
[[gnu::always_inline]] inline void meet(Vec<T> (&sum)[R][J], const T* x, index_t step, unsigned samples,
                                        const T* w, index_t w_step, index_t second) {
    Vec<T> weight[R][Q];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
        if constexpr (First) weight[0][q] = held(load(w + q * w_step));
        if constexpr (Second) weight[R - 1][q] = held(load(w + second + q * w_step));
    }
#pragma GCC unroll 16
    for (int k = 0; k < J + Q - 1; ++k, x += step) {
        // Else the compiler would keep an address of each.
        asm("" : "+r"(x));
        if (Edge && !(samples >> k & 1)) continue;
        const Vec<T> sample = held(load(x));
#pragma GCC unroll 8
        for (int q = 0; q < Q; ++q) {
            const int j = k - q;
            if (j < 0 || j >= J) continue;
            if constexpr (First) sum[0][j] = mac(sum[0][j], sample, weight[0][q]);
            if constexpr (Second) sum[R - 1][j] = mac(sum[R - 1][j], sample, weight[R - 1][q]);
        }
    }
}

// The same of all rows of samples, and of Q2 filter columns more if that isn't 0, whose first samples and weights are `next` and
// `w_next` elements on.
template <int Q, int Q2, bool Edge, int R, int J, class T>
[[gnu::always_inline]] inline void meet_rows(Vec<T> (&sum)[R][J], const Rows& rows, const T* x, index_t step,
                                             const Pass* pass, const T* w, index_t w_step, index_t next,
                                             index_t w_next) {
    const index_t second = -rows.shift * rows.weight;
    const unsigned samples = pass[0].samples, others = Q2 > 0 ? pass[1].samples : 0;
    x += rows.from * rows.sample;
    w += rows.from * rows.weight;
    index_t u = rows.from;
    const auto up_to = [&](index_t end, auto first, auto also) __attribute__((always_inline)) {
        for (end = end < rows.end ? end : rows.end; u < end; ++u, x += rows.sample, w += rows.weight) {
            meet<first(), also(), Q, Edge>(sum, x, step, samples, w, w_step, second);
            if constexpr (Q2 > 0)
                meet<first(), also(), Q2, Edge>(sum, x + next, step, others, w + w_next, w_step, second);
        }
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if constexpr (R == 1) return up_to(rows.kh, yes, no);
    up_to(rows.shift < rows.kh ? rows.shift : rows.kh, yes, no);
    up_to(rows.kh, yes, yes);
    // Between windows that have none in common.
    if (rows.shift > u) {
        x += (rows.shift - u) * rows.sample;
        w += (rows.shift - u) * rows.weight;
        u = rows.shift;
    }
    up_to(rows.kh + rows.shift, no, yes);
}

// What is fetched while a block is at work, and from where on: the samples that the block two rows below is the first to read, and its
// outputs. Processors don't follow rows whose pixels are read vector by vector. Into the second cache: the first has no room for rows.
struct Ahead {
    index_t samples, outputs;  // elements
    index_t rows, columns;     // of samples
    index_t row;               // elements from one to the next
};

// The lines of `rows` x `columns` vectors that lie so many elements ahead of `p`, and maybe behind the array.
template <int Write, class T>
[[gnu::always_inline]] inline void fetch_ahead(const T* p, index_t ahead, index_t rows, index_t row,
                                               index_t columns, index_t column) {
    for (index_t i = 0; i < rows; ++i, ahead += row) {
        for (index_t j = 0; j < columns; ++j)
            fetch_line<Write, 2>(p, (ahead + j * column) * index_t(sizeof(T)));
    }
}

// Vectors of channels from which on another one is worth it.
constexpr index_t many = 8;

// The channels of a call, vector by vector. Lines of the cache are met once where vectors begin with them: then the first and the last
// vector overlap others.
template <class T>
struct Channels {
    index_t count, vectors, late;  // of all but the first vector, how many lanes late they are

    explicit Channels(index_t count_, index_t aligned)
        : count(count_), late((lanes<T> - aligned) % lanes<T>) {
        vectors = (count + late - 1) / lanes<T> + 1;
    }
    // The first of vector v.
    index_t operator[](index_t v) const {
        const index_t first = v * lanes<T> - late, farthest = count - lanes<T>;
        return first < 0 ? 0 : first < farthest ? first : farthest;
    }
};

// What blocks have in common.
template <class T>
struct Common {
    Channels<T> channels;
    index_t apart;   // filter columns from one of a pass to the next
    index_t step;    // elements from a sample to the one under the next output
    index_t column;  // elements from a sample's column to the next
    index_t window;  // columns of samples under one output
    const Pass *passes, *end;
    index_t packing, taps;  // weights of a pack: side by side, and of a filter
    index_t row, pixel;     // of outputs, elements from one to the next
    bool in_array;          // samples and outputs are where callers have them
    bool fetches;
    Ahead ahead;
    // Elsewhere: elements to the next channels' samples and outputs. Planes have as many lines as there are turned vectors, and in the
    // same order, so that each vector's own is fetched. 0: none.
    index_t next_samples = 0, next_outputs = 0;

    // The first weight of a vector of channels.
    const T* weights(const T* w, index_t channel) const {
        return w + (channel / lanes<T> * taps * packing + channel % lanes<T>);
    }
};

// Elements from one to the other, in the same array or not.
template <class T>
index_t elements_to(const T* from, const T* to) {
    return (reinterpret_cast<std::intptr_t>(to) - reinterpret_cast<std::intptr_t>(from)) /
           std::intptr_t(sizeof(T));
}

// R rows of J outputs from `y` on, of which so many columns are stored. Q and Q2: filter columns of one pass or two, if these are all; 0: any
// number. Edge: some samples don't exist.
template <int R, int J, int Q, int Q2, bool Edge, class T>
[[gnu::noinline]] void block(const Common<T>& all, const Rows& rows, const T* x, const T* w, const T* bias,
                             T* y, index_t stored) {
    for (index_t v = 0; v < all.channels.vectors; ++v) {
        const index_t c = all.channels[v];
        const T *from = x + c, *pack = all.weights(w, c);
        T* to = y + c;
        if (all.fetches) {
            const Ahead& ahead = all.ahead;
            fetch_ahead<0>(from, ahead.samples, ahead.rows, ahead.row, ahead.columns, all.column);
            fetch_ahead<1>(to, ahead.outputs, R, all.row, J, all.pixel);
        }
        Vec<T> sum[R][J];
        const Vec<T> begun = load(bias + c);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int k = 0; k < J; ++k) sum[r][k] = begun;
        }
        const index_t w_step = all.apart * all.packing;
        for (const Pass* pass = all.passes; pass != all.end; ++pass) {
            const T *samples = from + pass->sample * all.column, *weights = pack + pass->weight * all.packing;
            if constexpr (Q > 0) {
                const index_t next = Q2 > 0 ? (pass[1].sample - pass->sample) * all.column : 0,
                              w_next = Q2 > 0 ? (pass[1].weight - pass->weight) * all.packing : 0;
                meet_rows<Q, Q2, Edge>(sum, rows, samples, all.step, pass, weights, w_step, next, w_next);
                break;
            } else {
                switch (pass->columns) {
#define PASS(Q)                                                                               \
    case Q:                                                                                   \
        if constexpr (Q <= most_columns)                                                      \
            meet_rows<Q, 0, Edge>(sum, rows, samples, all.step, pass, weights, w_step, 0, 0); \
        break;
                    PASS(1) PASS(2) PASS(3) PASS(4) PASS(5) PASS(6) PASS(7)
#undef PASS
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r, to += all.row) {
            T* at = to;
#pragma GCC unroll 8
            for (int k = 0; k < J; ++k, at += all.pixel) {
                if (!Edge || k < stored) store(at, sum[r][k]);
            }
        }
    }
}

template <class T>
using block_t = void (*)(const Common<T>&, const Rows&, const T*, const T*, const T*, T*, index_t);

template <int R, int J, bool Edge, class T>
block_t<T> find_block(const Pass* pass, const Pass* end) {
    // Where the sums stay in registers from the first product to the last: of one pass, or with a stride of two.
    const int first = pass->columns, second = end - pass > 1 ? pass[1].columns : 0;
    if (end - pass == 1) {
        if (first == 3) return block<R, J, 3, 0, Edge, T>;
        if (first == 5) return block<R, J, 5, 0, Edge, T>;
        // Where registers are few no pass has seven.
        if (first == 7) return block<R, J, most_columns, 0, Edge, T>;
    }
    if (end - pass == 2) {
        if (first == 2 && second == 1) return block<R, J, 2, 1, Edge, T>;
        if (first == 3 && second == 2) return block<R, J, 3, 2, Edge, T>;
        if (first == 4 && second == 3) return block<R, J, 4, 3, Edge, T>;
    }
    return block<R, J, 0, 0, Edge, T>;
}

// From a filter column to the one whose samples are its neighbours': with a stride of two every other column's are. The number of columns
// if none is.
inline index_t columns_apart(const Work& t) {
    for (index_t apart = 1; apart < t.kw; ++apart) {
        index_t q = 0;
        while (q + apart < t.kw && column(t, q + apart) - column(t, q) == stride(t)) ++q;
        if (q + apart == t.kw) return apart;
    }
    return t.kw;
}

// The passes of all filter columns. Returns their end.
inline Pass* find_passes(const Work& t, index_t apart, Pass* pass) {
    for (index_t run = 0; run < apart; ++run) {
        const index_t columns = (t.kw - run - 1) / apart + 1;
        const index_t most = (columns - 1) / ((columns - 1) / most_columns + 1) + 1;
        for (index_t q = 0; q < columns; q += most, ++pass) {
            const index_t first = run + q * apart;
            *pass = {int(columns - q < most ? columns - q : most), column(t, first), first, ~0u};
        }
    }
    return pass;
}

// How many of positions `from`, from + step, ... come before `end`.
inline index_t count_before(index_t end, index_t from, index_t step) {
    return from >= end ? 0
           : step == 1 ? end - from
           : step == 2 ? (end - from + 1) / 2
                       : (end - from - 1) / step + 1;
}
inline unsigned lowest(index_t count) { return count < 32 ? (1u << count) - 1 : ~0u; }
// A bit for each of `count` positions from, from + step, ... that lies from 0 on and before `end`.
inline unsigned inside(index_t count, index_t from, index_t step, index_t end) {
    const index_t before = count_before(end, from, step);
    return lowest(count < before ? count : before) & ~lowest(count_before(0, from, step));
}

// The columns of a block: which outputs, and samples of each pass.
template <class T>
struct Columns {
    index_t first, sample;  // output, and column of samples under it
    index_t stored;
    bool edge;

    Columns(const Work& t, const Samples<T>& x, index_t j, index_t wide, index_t width, Pass* passes,
            const Pass* end) {
        // The last block of a row reaches back over outputs that are done already.
        first = t.ow - j >= wide ? j : t.ow < wide ? 0 : t.ow - wide;
        sample = first * stride(t) - x.before;
        stored = t.ow - first;
        edge = t.ow < wide || sample < 0 || sample + width > x.columns;
        for (Pass* pass = passes; edge && pass != end; ++pass) {
            pass->samples = inside(stored + pass->columns - 1, sample + pass->sample, stride(t), x.columns);
        }
    }
};

// All outputs of some channels.
template <int J, class T>
void outputs(const Work& t, const Samples<T>& x, Common<T> all, Pass* passes, const T* w, const T* bias,
             T* y) {
    // With a stride blocks have many new rows, which Intel's processors follow by themselves: to fetch them takes longer.
    if (intel() && t.sh > 1) all.fetches = false;
    const index_t width = all.window + (J - 1) * stride(t);
    const index_t shift = t.sh / t.dh;
    const bool pairs = most_rows > 1 && t.sh % t.dh == 0;
    const block_t<T> blocks[2][2] = {
        {find_block<1, J, false, T>(passes, all.end), find_block<1, J, true, T>(passes, all.end)},
        {find_block<most_rows, J, false, T>(passes, all.end),
         find_block<most_rows, J, true, T>(passes, all.end)}};
    const auto rows_from = [&](index_t i) {
        const int taken = pairs && t.oh - i > 1 ? 2 : 1;
        const index_t all_rows = t.kh + (taken - 1) * shift, first = i * t.sh - x.above;
        Rows rows{first, 0, all_rows, t.kh, shift, t.dh * x.row, t.kw * t.packing, taken};
        if (t.over_edge) {
            // There they aren't dilated.
            rows.from = first < 0 ? -first : 0;
            rows.end = x.rows - first < all_rows ? x.rows - first : all_rows;
        }
        return rows;
    };
    const auto work_on = [&](const Rows& rows, const Columns<T>& at, index_t i) {
        blocks[rows.taken - 1][at.edge](all, rows, x.first + rows.first * x.row + at.sample * x.column, w,
                                        bias, y + i * all.row + at.first * all.pixel, at.stored);
    };
    if (all.in_array) {
        // Memory is read row by row.
        for (index_t i = 0; i < t.oh;) {
            const Rows rows = rows_from(i);
            for (index_t j = 0; j < t.ow; j += J)
                work_on(rows, Columns<T>(t, x, j, J, width, passes, all.end), i);
            i += rows.taken;
        }
    } else {
        // Each block fetches its share of what comes next, if that was turned, or will be.
        const index_t shares = ((t.ow - 1) / J + 1) * (pairs ? (t.oh - 1) / 2 + 1 : t.oh);
        const auto lines_each = [&](index_t next, index_t step, index_t vectors) {
            return next != 0 && step == lanes<T> && vectors > 0 ? (vectors - 1) / shares + 1 : index_t(0);
        };
        const index_t sample_lines = lines_each(all.next_samples, x.column, x.rows * x.columns),
                      output_lines = lines_each(all.next_outputs, all.pixel, t.oh * t.ow);
        const auto fetch_share = [&](const T* first, index_t next, index_t lines,
                                     index_t share) __attribute__((always_inline)) {
            fetch_ahead<0>(first, next + share * lines * lanes<T>, 1, 0, lines, lanes<T>);
        };
        index_t share = 0;
        for (index_t j = 0; j < t.ow; j += J) {
            const Columns<T> at(t, x, j, J, width, passes, all.end);
            for (index_t i = 0; i < t.oh; ++share) {
                const Rows rows = rows_from(i);
                fetch_share(x.first, all.next_samples, sample_lines, share);
                fetch_share(y, all.next_outputs, output_lines, share);
                work_on(rows, at, i);
                i += rows.taken;
            }
        }
    }
}

// -- sums of 3 x 3, in slabs

// Rows of outputs whose sums for three columns stay in registers beside the filter and a sample.
constexpr int least_slab = many_registers ? 4 : 2, most_slab = many_registers ? 7 : 2;
// Of a slab's samples and outputs of all channels, which stay in the second cache while one vector of channels after the other passes.
constexpr index_t slab_bytes = 512 * 1024;
// Pixels that share no more lines of the first cache, those of two columns of samples and results, push out what waits to be stored to.
// Then vectors are gathered, and stored when there are some beside each other.
constexpr index_t crowded_lines = 32;
constexpr int most_beside = 4;
constexpr index_t most_gathered = 28;  // columns of such a slab

// Whether columns of samples slide through slabs: of neighbouring columns, or of every other one.
template <class T>
bool slides(const Work& t, const Samples<T>& x, const Common<T>& all) {
    if (t.kh != 3 || t.kw != 3 || t.dh != 1 || t.oh < least_slab) return false;
    const index_t s = stride(t);
    if (s > 2 || all.apart != s || t.sh != s) return false;
    // Few vectors don't begin with lines. From memory, and with sets of twelve lines, blocks of them were faster.
    if (all.fetches && all.channels.vectors < many && t.set_lines > 8) return false;
    // Of rows that share sets a slab of stride two has more than a set has lines, which two vectors would read, each anew.
    return s == 1 || all.channels.vectors >= many || x.row * index_t(sizeof(T)) % set_bytes != 0;
}

template <class T>
bool crowded(const Work& t) {
    // The largest power of two that divides it; of a single column it may be 0.
    const index_t apart = t.ys * index_t(sizeof(T)), power = apart & -apart;
    return set_bytes / (0 < power && power < set_bytes ? power : set_bytes) * t.set_lines <= crowded_lines;
}
template <class T>
index_t gathered_room(const Work& t) {
    const index_t columns = t.ow < most_gathered ? t.ow : most_gathered;
    return t.kh == 3 && t.kw == 3 && crowded<T>(t) ? columns * most_slab * most_beside * lanes<T> : 0;
}

// Of a vector of channels a slab of outputs, and the samples under it.
template <class T>
struct Slab {
    const T* x;           // sample (0, 0) of the first output's window, whether it exists or not
    index_t row, column;  // elements from one to the next
    unsigned rows;        // that exist: a bit for each
    index_t from, end;    // columns that exist and are needed
    index_t columns;      // of outputs
    T* y;
    index_t y_row, pixel;
    index_t ahead, y_ahead;  // elements to what is fetched meanwhile
};

// R rows of outputs: each sample is read once, and meets all weights that it has to.
template <int R, int S, class T>
[[gnu::noinline]] void slide(const Slab<T>& slab, const T* w, index_t w_step, const T* bias) {
    constexpr int under = (R - 1) * S + 3;
    // Columns of outputs over a sample.
    constexpr int open = 2 / S + 1;
    Vec<T> weight[3][3];
#pragma GCC unroll 9
    for (int k = 0; k < 9; ++k) weight[k / 3][k % 3] = held(load(w + k * w_step));
    const Vec<T> begun = load(bias);
    Vec<T> sum[open][R];
#pragma GCC unroll 3
    for (int j = 0; j < open; ++j) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[j][r] = begun;
    }
    const T* x = slab.x;
    T* y = slab.y;
    index_t column = 0;
    // The next column of samples, which meets filter columns `first`, first + S, ...
    const auto meet_next = [&](auto first) __attribute__((always_inline)) {
        if (column >= slab.from && column < slab.end) {
            const T* at = x;
#pragma GCC unroll 16
            for (int k = 0; k < under; ++k, at += slab.row) {
                // Else the compiler would keep an address of each.
                asm("" : "+r"(at));
                if (!(slab.rows >> k & 1)) continue;
                const Vec<T> sample = held(load(at));
                fetch<0, 2, 1, 1>(at, 0, slab.ahead);
#pragma GCC unroll 3
                for (int p = k % S; p < 3; p += S) {
                    const int r = (k - p) / S;
                    if (k < p || r >= R) continue;
#pragma GCC unroll 3
                    for (int q = first(); q < 3; q += S) {
                        Vec<T>& sum_of = sum[open - 1 - q / S][r];
                        sum_of = mac(sum_of, sample, weight[p][q]);
                    }
                }
            }
        }
        ++column;
        x += slab.column;
    };
    for (index_t j = 1 - open; j < slab.columns; ++j) {
        meet_next(std::integral_constant<int, 0>());
        if (j >= 0) {
            T* to = y;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r, to += slab.y_row) {
                asm("" : "+r"(to));
                store(to, sum[0][r]);
                fetch<1, 2, 1, 1>(to, 0, slab.y_ahead);
            }
            y += slab.pixel;
        }
        if constexpr (S == 2) meet_next(std::integral_constant<int, 1>());
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
            for (int k = 0; k + 1 < open; ++k) sum[k][r] = sum[k + 1][r];
            sum[open - 1][r] = begun;
        }
    }
}

template <class T>
using slide_t = void (*)(const Slab<T>&, const T*, index_t, const T*);

template <int S, class T>
slide_t<T> find_slide(index_t rows) {
    if constexpr (!many_registers) {
        return slide<2, S, T>;
    } else {
        constexpr slide_t<T> slides[] = {slide<4, S, T>, slide<5, S, T>, slide<6, S, T>, slide<7, S, T>};
        return slides[rows - least_slab];
    }
}

// Stores what was gathered of `count` vectors that begin with these channels.
template <class T>
void spread(const T* gathered, index_t rows, index_t columns, const index_t* channel, int count, T* y,
            index_t row, index_t pixel, index_t ahead) {
    for (index_t i = 0; i < rows; ++i, y += row) {
        T* to = y;
        for (index_t j = 0; j < columns; ++j, to += pixel) {
            for (int k = 0; k < count; ++k, gathered += lanes<T>) {
                store(to + channel[k], load(gathered));
                fetch<1, 2, 1, 1>(to + channel[k], 0, ahead);
            }
        }
    }
}

// Bytes from where an instruction loads to where it does the next time, as far as processors follow it: Intel's.
constexpr index_t followed_bytes = 2048;

// Brings the samples of `rows`, a bit for each, into the second cache in the order of memory, in which processors read on. The loads of
// a vector of channels are a pixel or two apart. Measured where the cache that cores share is slow: 1.1 to 1.8 times as fast from there,
// where that is too far to be followed.
template <class T>
[[gnu::always_inline]] inline void bring_in_order(const T* first, unsigned rows, index_t row, index_t from,
                                                  index_t end, index_t column, index_t channels) {
    constexpr index_t line = line_bytes / index_t(sizeof(T));
    for (; rows != 0; rows >>= 1, first += row) {
        if (!(rows & 1)) continue;
        for (index_t j = from; j < end; ++j) {
            for (index_t c = 0; c < channels; c += line) fetch<0, 2, 1, 1>(first, 0, j * column + c);
        }
    }
}

// All outputs of some channels; `gathered`: room for results that wait.
template <class T>
void slabs(const Work& t, const Samples<T>& x, const Common<T>& all, const T* w, const T* bias, T* y,
           T* gathered) {
    const index_t s = stride(t), vectors = all.channels.vectors;
    // Where few vectors share lines, and these come from memory, they are still in the first cache when the next vector passes.
    const bool narrow = all.fetches && vectors < many;
    // Parts as even as can be.
    const index_t even = ceil_div(t.oh, ceil_div(t.oh, index_t(most_slab))),
                  rows = even < least_slab ? least_slab : even;
    const bool waits = all.in_array && crowded<T>(t);
    const bool in_order = all.in_array && t.off_core && !all.fetches && vectors > 1 &&
                          s * x.column * index_t(sizeof(T)) > followed_bytes;
    const index_t under = (rows - 1) * s + 3;
    const index_t column = (under * s + rows) * all.channels.count * index_t(sizeof(T));
    index_t most = narrow ? most_pixels : slab_bytes / column;
    if (waits && most > most_gathered) most = most_gathered;
    if (most < most_pixels) most = most_pixels;
    const index_t columns = ceil_div(t.ow, ceil_div(t.ow, most));
    const slide_t<T> slide_on = s == 1 ? find_slide<1, T>(rows) : find_slide<2, T>(rows);
    for (index_t i = 0; i < t.oh; i += rows) {
        // The last slab reaches back over outputs that are done already.
        const index_t first_row = i + rows <= t.oh ? i : t.oh - rows, row = first_row * s - x.above;
        const unsigned exist = t.over_edge ? inside(under, row, 1, x.rows) : lowest(under);
        for (index_t j = 0; j < t.ow; j += columns) {
            const index_t wide = t.ow - j < columns ? t.ow - j : columns, col = j * s - x.before;
            const index_t needed = (wide - 1) * s + 3, existing = t.over_edge ? x.columns - col : needed;
            const T* first = x.first + row * x.row + col * x.column;
            T* to = y + first_row * all.row + j * all.pixel;
            const index_t from = col < 0 ? -col : 0, end = existing < needed ? existing : needed;
            if (in_order) {
                // The slab above, if it was the last one, left the rows that both meet in the cache.
                const bool left = i > 0 && columns >= t.ow;
                bring_in_order(first, left ? exist & ~lowest(3 - s) : exist, x.row, from, end, x.column,
                               all.channels.count);
            }
            index_t channel[most_beside];
            int beside = 0;
            for (index_t v = 0; v < vectors; ++v) {
                const index_t c = all.channels[v];
                const bool last = v + 1 == vectors;
                const index_t next = all.channels[last ? 0 : v + 1] - c;
                // Of a narrow slab the one to the right, or else the next vector; at the end the slab below, `pixel` elements a column.
                const auto ahead = [&](index_t pixel, index_t below, index_t elsewhere) {
                    if (!all.fetches) return elsewhere;
                    if (narrow) return j + wide < t.ow ? wide * pixel : below - j * pixel;
                    return last ? below + next : next;
                };
                Slab<T> slab{first + c,
                             x.row,
                             x.column,
                             exist,
                             from,
                             end,
                             wide,
                             to + c,
                             all.row,
                             all.pixel,
                             ahead(s * x.column, rows * s * x.row, all.next_samples),
                             ahead(all.pixel, rows * all.row, all.next_outputs)};
                if (waits) {
                    const index_t group = vectors - (v - beside);
                    slab.pixel = (group < most_beside ? group : most_beside) * lanes<T>;
                    slab.y_row = wide * slab.pixel;
                    slab.y = gathered + beside * lanes<T>;
                    slab.y_ahead = 0;
                    channel[beside++] = c;
                }
                slide_on(slab, all.weights(w, c), all.packing, bias + c);
                if (waits && (last || beside == most_beside)) {
                    spread(gathered, rows, wide, channel, beside, to, all.row, all.pixel,
                           ahead(all.pixel, rows * all.row, 0));
                    beside = 0;
                }
            }
        }
    }
}

// Scratch memory: passes, samples, and then outputs, of which squares are turned; or where nothing is turned, outputs that wait.
inline index_t passes_bytes(const Work& t) {
    return (t.kw * index_t(sizeof(Pass)) + line_bytes - 1) / line_bytes * line_bytes;
}
template <class T>
index_t samples_room(const Work& t) {
    const auto existing = [&](index_t under, index_t all) {
        return t.over_edge && all < under ? all : under;
    };
    return existing(rows_under(t), t.rows.n) * existing(columns_under(t), t.cols.n) * lanes<T>;
}
template <class T>
index_t scratch_bytes(const Work& shape) {
    const bool as_they_lie = x_last(shape) && y_last(shape) && shape.groups >= lanes<T>;
    const index_t turned =
        as_they_lie ? 0 : samples_room<T>(shape) + (shape.oh * shape.ow + lanes<T>)*lanes<T>;
    // Where these groups are too few to be taken as they lie others may be enough.
    const index_t gathered = x_last(shape) && y_last(shape) ? gathered_room<T>(shape) : 0;
    return passes_bytes(shape) + (turned > gathered ? turned : gathered) * index_t(sizeof(T));
}

// Outputs in scratch memory, of `channels` groups, to where they belong.
template <class T>
void leave(const Work& t, const T* done, index_t channels, T* y) {
    if (!y_last(t)) {
        const bool one_row = t.yr == t.ow;
        const index_t rows = one_row ? 1 : t.oh, count = one_row ? t.oh * t.ow : t.ow;
        for (index_t i = 0; i < rows; ++i)
            turn_out(done + i * t.ow * lanes<T>, count, y + i * t.yr, t.yg, channels);
        return;
    }
    for (index_t i = 0; i < t.oh; ++i, y += t.yr) {
        for (index_t j = 0; j < t.ow; ++j, done += lanes<T>) store_first(y + j * t.ys, load(done), channels);
    }
}

// Channels before the first whose samples begin a line of the cache, in all pixels; 0 where that doesn't matter, or isn't so.
template <class T>
index_t aligned_channels(const Work& t) {
    const index_t line = line_bytes / index_t(sizeof(T)), column = t.xs / stride(t);
    if (t.groups < many * lanes<T> || vector_bytes != line_bytes || t.xr % line != 0 || column % line != 0)
        return 0;
    const auto first = reinterpret_cast<std::uintptr_t>(t.x);
    return first % sizeof(T) == 0 ? index_t(-first % line_bytes / sizeof(T)) : 0;
}

template <class T>
void work(const Work& t) {
    const T *w = static_cast<const T*>(t.w), *bias = static_cast<const T*>(t.bias);
    Samples<T> lain = in_array<T>(t);
    T* y = static_cast<T*>(t.y);
    Pass* passes = static_cast<Pass*>(t.scratch);
    T* room = reinterpret_cast<T*>(static_cast<char*>(t.scratch) + passes_bytes(t));
    T* done = room + samples_room<T>(t);
    const index_t apart = columns_apart(t), window = columns_under(t) - (t.ow - 1) * stride(t);
    const Pass* end = find_passes(t, apart, passes);
    const auto waste = [&](index_t pixels) { return ((t.ow - 1) / pixels + 1) * pixels; };
    const auto blocks =
        waste(fewer_pixels) < waste(most_pixels) ? outputs<fewer_pixels, T> : outputs<most_pixels, T>;
    index_t taken = 0;
    const auto all = [&](const Samples<T>& x, Common<T> common, T* to) {
        if (!common.in_array && t.off_core) {
            common.next_samples = elements_to<T>(x.first, lain.first + taken * t.xg);
            common.next_outputs = elements_to<T>(to, y + taken * t.yg);
        }
        slides(t, x, common) ? slabs(t, x, common, w, bias, to, room)
                             : blocks(t, x, common, passes, w, bias, to);
    };
    // With larger strides most of what is fetched would meet no filter.
    const bool fetches = t.far && t.sh <= 2 && t.sw <= 2;
    const auto common = [&](const Samples<T>& x, Channels<T> channels, index_t row, index_t pixel,
                            bool in_array) {
        const index_t below = (t.kh - 1) * t.dh + 1 + most_rows * t.sh;
        const Ahead ahead{below * x.row, 2 * row, most_rows * t.sh, most_pixels * t.sw, x.row};
        return Common<T>{channels,
                         apart,
                         stride(t) * x.column,
                         x.column,
                         window,
                         passes,
                         end,
                         t.packing,
                         t.kh * t.kw,
                         row,
                         pixel,
                         in_array,
                         in_array && fetches,
                         ahead};
    };
    for (index_t left = t.groups; left > 0; left -= taken) {
        if (x_last(t) && y_last(t) && left >= lanes<T>) {
            taken = left;
            const Channels<T> channels(left, aligned_channels<T>(t));
            all(lain, common(lain, channels, t.yr, t.ys, true), y);
        } else {
            taken = left < lanes<T> ? left : index_t(lanes<T>);
            const bool whole = taken == lanes<T>;
            const Channels<T> one(lanes<T>, 0);
            const Samples<T> x = x_last(t) && whole ? lain : brought(t, lain, taken, room);
            if (y_last(t) && whole) {
                all(x, common(x, one, t.yr, t.ys, false), y);
            } else {
                all(x, common(x, one, t.ow * lanes<T>, lanes<T>, false), done);
                leave(t, done, taken, y);
            }
        }
        lain.first += taken * t.xg;
        y += taken * t.yg;
        w += taken / lanes<T> * t.kh * t.kw * t.packing;
        bias += taken;
    }
}
