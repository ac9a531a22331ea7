// Builds on: im2col.
// Idea: the same product of matrices, but its columns are never written ("implicit GEMM"): samples under neighbouring outputs are loaded
//       where they lie, tap by tap, and meet the weights of several output channels. A block takes a few such vectors, whichever rows
//       they are in. A few blocks, as many as the first cache holds the samples of, take all output channels in turn. Sums are whole
//       vectors of a row: they are stored as they are.
// Variants: columns that would fill a part of a vector in every row are turned, so that vectors lie along them. Under filters of one
//       sample, samples of 64 channels and more that meet 8192 weights, or under outputs that are a stride apart, are laid out first: then
//       rows are one.
// Step: half to two thirds of im2col's time on Intel's processors (docs/cpu-speed.md, Steps).
// Limit: arithmetic. With few taps, as under 3 x 3 of three channels, storing the sums; with many channels loading samples, which don't stay in
//        the first cache.

#include "panels.h"

// Output channels of a block, whose weights lie side by side, and its vectors: the sums fill the registers beside a weight, the samples and,
// unless it is added at once, a product.
constexpr int block_channels = many_registers ? 8 : 4;
template <class T>
constexpr int block_vectors = many_registers || fused<T> ? 3 : 2;

template <class T>
index_t scratch_bytes(const Work& shape);

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = block_channels;
    k.scratch = scratch_bytes<T>;
    k.strided_points = true;
    return k;
}

// Outputs of all channels that vectors lie along: rows of an image, or columns whose samples were turned.
template <class T>
struct Lines {
    index_t count, length;  // lines, and outputs of each
    const T* x;
    index_t apart, channel;  // elements from one line's samples, and from one channel's, to the next one's
    T* y;
    index_t y_apart, y_step;  // from one line of outputs, and from one output of it, to the next
    // Elements from an output's first sample to those under all taps. One list makes one loop: three short ones, over channels, rows and
    // columns, end so often that a tenth to a fourth of the time goes by.
    const index_t *taps, *end;
    T* panel;       // where samples are laid out, or null
    Pixels pixels;  // of such samples: a line may be several rows of the image
};

// Where a vector of outputs has its first samples, laid out or not, and lies in a plane; of all outputs of a plane, its first one's number.
template <class T>
struct Place {
    const T* x;
    index_t y, first;
};

// N vectors of outputs of M channels, so many lanes of each; Scattered: each lane goes to a row of its own. Not inline, for what calls it takes
// registers of its own.
template <int M, int N, bool Scattered, class T>
[[gnu::noinline]] void block(const Work& t, const Lines<T>& lines, const Place<T>* places, const T* w,
                             const T* bias, T* y, index_t width) {
    Vec<T> sum[M][N];
    const T* x[N];
#pragma GCC unroll 3
    for (int n = 0; n < N; ++n) x[n] = places[n].x;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) {
            sum[m][n] = broadcast(bias[m]);
            // Stores to lines that aren't there would hold up what follows.
            if (!Scattered && t.out_in_place) fetch<1, 3, 1, 1>(y + places[n].y, 0, m * t.yo);
        }
    }
    for (const index_t* tap = lines.taps; tap != lines.end; ++tap, w += block_channels) {
        Vec<T> sample[N];
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) sample[n] = held(load(x[n] + *tap));
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Vec<T> weight = held(broadcast(w[m]));
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) sum[m][n] = mac(sum[m][n], sample[n], weight);
        }
    }
    if constexpr (Scattered) {
        T all[M][N][lanes<T>];
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) store(all[m][n], sum[m][n]);
        }
#pragma GCC unroll 1
        for (int m = 0; m < M; ++m, y += t.yo) {
#pragma GCC unroll 1
            for (int n = 0; n < N; ++n) {
                T* to = y + places[n].y;
                for (index_t k = 0; k < width; ++k, to += lines.y_step) *to = all[m][n][k];
            }
        }
    } else {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m, y += t.yo) {
#pragma GCC unroll 3
            for (int n = 0; n < N; ++n) {
                if (width == lanes<T>) {
                    store(y + places[n].y, sum[m][n]);
                } else {
                    store_first(y + places[n].y, sum[m][n], width);
                }
            }
        }
    }
}

// The same of the output channels from `o` on: a block of them, or those that are left.
template <int N, bool Scattered, int M = block_channels, class T>
void channels_from(const Work& t, index_t o, const Lines<T>& lines, const Place<T>* places, const T* w,
                   index_t width) {
    if constexpr (M > 1) {
        if (t.oc - o < M) return channels_from<N, Scattered, M - 1>(t, o, lines, places, w, width);
    }
    block<M, N, Scattered>(t, lines, places, w, static_cast<const T*>(t.bias) + o, lines.y + o * t.yo, width);
}

// All output channels of `count` vectors.
template <bool Scattered, class T>
void strip(const Work& t, const Lines<T>& lines, const Place<T>* places, index_t count, index_t width) {
    constexpr int N = block_vectors<T>;
    const index_t pack = t.cg * t.kh * t.kw * block_channels;
    const T* w = static_cast<const T*>(t.w);
    for (index_t o = 0; o < t.oc; o += block_channels, w += pack) {
        index_t k = 0;
        for (; k + N <= count; k += N) channels_from<N, Scattered>(t, o, lines, places + k, w, width);
        if (count - k == 1) channels_from<1, Scattered>(t, o, lines, places + k, w, width);
        if constexpr (N > 2) {
            if (count - k == 2) channels_from<2, Scattered>(t, o, lines, places + k, w, width);
        }
    }
}

constexpr index_t most_blocks = 64;

// Vectors of outputs, in whole blocks, each of which has so many bytes of samples of its own. Not counted is what they have in common.
template <class T>
index_t vectors_within(index_t bytes, index_t own) {
    // Without channels there are none.
    const index_t fit = bytes / ((own > 0 ? own : 1) * block_vectors<T>);
    return (fit < 1 ? 1 : fit < most_blocks ? fit : most_blocks) * block_vectors<T>;
}

// Bytes of samples that stay in the first cache while all output channels meet them, beside a block's weights and sums.
constexpr index_t kept_bytes = 20'000;

// Under filters of one sample: bytes of samples laid out, which stay in the second cache, and channels and weights from which on it is worth it
// though outputs be neighbours.
constexpr index_t panel_bytes = 1 << 18, least_channels = 64, least_weights = 8192;

template <class T>
index_t panel_vectors(const Work& t) {
    const bool many = t.cg >= least_channels && t.cg * t.oc >= least_weights;
    if (t.kh != 1 || t.kw != 1 || !(many || t.xs != 1)) return 0;
    return vectors_within<T>(panel_bytes, t.cg * vector_bytes);
}

// Elements of a channel in a block's panel, and from one panel to the next.
template <class T>
constexpr index_t panel_line = block_vectors<T> * lanes<T>;
template <class T>
index_t panel_pitch(const Work& t) {
    return t.cg * panel_line<T> + lanes<T>;
}
// Bytes of all panels.
template <class T>
index_t all_panels(const Work& t) {
    return panel_vectors<T>(t) / block_vectors<T> * panel_pitch<T>(t) * index_t(sizeof(T));
}

// Parts that are laid out together, at most, but for those of a last panel.
constexpr index_t most_parts = 256;

template <class T>
void lay_out_places(const Work& t, const Lines<T>& lines, Place<T>* places, index_t count, index_t width) {
    constexpr int N = block_vectors<T>;
    Part parts[most_parts + panel_line<T>], *end = parts;
    for (index_t k = 0; k < count; ++k) {
        const index_t to = k / N * panel_pitch<T>(t) + k % N * lanes<T>;
        end = find_parts<T>(lines.pixels, places[k].first, width, to, end);
        places[k].x = lines.panel + to;
        // Whole panels, for a part overwrites what follows.
        if (k + 1 < count && (k % N < N - 1 || end - parts < most_parts)) continue;
        lay_out(lines.x, lines.channel, lines.pixels.step, t.cg, parts, end, lines.panel, panel_line<T>);
        end = parts;
    }
}

// All outputs.
template <bool Scattered, class T>
void each_strip(const Work& t, const Lines<T>& lines) {
    const index_t across = ceil_div(lines.length, index_t(lanes<T>));
    const index_t most =
        lines.panel ? panel_vectors<T>(t) : vectors_within<T>(kept_bytes, t.cg * t.sh * t.sw * vector_bytes);
    // The last vector of a line reaches back over outputs that another has, unless it is the only one.
    const bool narrow = lines.length < lanes<T>;
    const index_t last = narrow ? 0 : lines.length - lanes<T>,
                  width = narrow ? lines.length : index_t(lanes<T>);
    Place<T> places[most_blocks * block_vectors<T>];
    index_t count = 0;
    for (index_t i = 0; i < lines.count; ++i) {
        for (index_t v = 0; v < across; ++v) {
            const index_t j = v + 1 < across ? v * lanes<T> : last;
            const T* samples = lines.panel ? nullptr : lines.x + i * lines.apart + j;
            places[count++] = {samples, i * lines.y_apart + j * lines.y_step, i * lines.length + j};
            if (count < most && (i + 1 < lines.count || v + 1 < across)) continue;
            if (lines.panel) lay_out_places(t, lines, places, count, width);
            strip<Scattered>(t, lines, places, count, width);
            count = 0;
        }
    }
}

// -- columns beyond the last whole vector of a row

// Samples of a channel, turned, so that vectors lie along columns.
struct Turned {
    index_t columns, rows, pitch;  // from one column to the next

    index_t elements() const { return columns * pitch; }
};

// Bytes of them that stay in the second cache, and are worth turning.
constexpr index_t turned_bytes = 1 << 19;

// Under so many columns of outputs. Vectors of fewer rows than lanes read on beyond the last one.
template <class T>
Turned find_turned(const Work& t, index_t outputs) {
    const index_t rows = t.oh + (t.kh - 1) * t.dh;
    return {outputs + t.kw - 1, rows, (ceil_div(rows, index_t(lanes<T>)) + 1) * lanes<T>};
}

// Bytes of them, at most. None where neighbouring outputs or taps don't have neighbouring samples.
template <class T>
index_t most_turned(const Work& t) {
    if (t.ow < lanes<T> || t.sh != 1 || t.sw != 1 || t.dw != 1) return 0;
    return t.cg * find_turned<T>(t, lanes<T> - 1).elements() * index_t(sizeof(T));
}

// Products of a vector that take as long as to store a lane by itself.
constexpr index_t worth_apart = 4;

// Columns of outputs that are: those that would fill a part of a vector in every row, where that saves enough products.
template <class T>
index_t turned_columns(const Work& t) {
    const index_t left = t.ow % lanes<T>, vectors = left * ceil_div(t.oh, index_t(lanes<T>));
    const index_t saved = (t.oh - vectors) * t.cg * t.kh * t.kw;
    const bool worth = t.oc >= block_channels && saved >= worth_apart * vectors * lanes<T>;
    const index_t most = most_turned<T>(t);
    return worth && 0 < most && most <= turned_bytes ? left : 0;
}

// By squares, as many rows and columns as a vector has lanes. What lanes meet that hold no output is zeros: it mustn't be subnormal.
template <class T>
void turn_samples(const Work& t, const T* x, const Turned& turned, T* to) {
    const index_t end = t.oh < lanes<T> ? turned.pitch : turned.rows;
    for (index_t c = 0; c < t.cg; ++c, x += t.xc, to += turned.elements()) {
        for (index_t j = 0; j < turned.columns; j += lanes<T>) {
            const index_t left = turned.columns - j, wide = left < lanes<T> ? left : index_t(lanes<T>);
            for (index_t i = 0; i < end; i += lanes<T>) {
                Vec<T> square[lanes<T>];
#pragma GCC unroll 64
                for (int k = 0; k < lanes<T>; ++k) {
                    square[k] = Vec<T>{};
                    if (i + k < turned.rows) square[k] = load_first(x + (i + k) * t.xr + j, wide);
                }
                transpose<T>(square);
                T* column = to + j * turned.pitch + i;
                for (index_t k = 0; k < wide; ++k, column += turned.pitch) store(column, square[k]);
            }
        }
    }
}

// -- all outputs

// Taps, samples that were turned, and samples that are laid out; each begins with a line of the cache.
index_t padded(index_t bytes) { return ceil_div(bytes, line_bytes) * line_bytes; }
index_t tap_bytes(const Work& t) { return padded(t.cg * t.kh * t.kw * index_t(sizeof(index_t))); }
template <class T>
index_t scratch_bytes(const Work& shape) {
    // Smaller rectangles may have more columns turned, but no longer ones; of the largest there may be none because they are too long.
    const index_t most = most_turned<T>(shape), turned = most < turned_bytes ? most : turned_bytes;
    return tap_bytes(shape) + padded(turned) + all_panels<T>(shape);
}

// Rows that follow each other in the result and in the image, or whose samples are laid out, under filters of one sample are one.
template <class T>
Work joined(const Work& t) {
    Work all = t;
    const bool follow = Pixels(t).across == t.oh * t.ow;
    if (t.kh == 1 && t.kw == 1 && t.yr == t.ow && (follow || panel_vectors<T>(t) > 0)) {
        all.ow = t.oh * t.ow;
        all.oh = 1;
    }
    return all;
}

// Lists the taps of `lines`, whose samples lie in rows `row` elements apart under one filter column and the next as `column` says. Where the end is.
template <class T, class F>
index_t* list_taps(const Work& t, const Lines<T>& lines, index_t row, F column, index_t* to) {
    for (index_t c = 0; c < t.cg; ++c) {
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q)
                *to++ = lines.panel ? c * panel_line<T> : c * lines.channel + p * row + column(q);
        }
    }
    return to;
}

// No rung builds on this one, so that there is always scratch memory.
template <class T>
void work(const Work& rectangle) {
    const Work t = joined<T>(rectangle);
    const T* x = static_cast<const T*>(t.x);
    T* y = static_cast<T*>(t.y);
    const index_t columns = turned_columns<T>(t), whole = t.ow - columns;
    const Turned turned = find_turned<T>(t, columns);
    char* scratch = static_cast<char*>(t.scratch);
    index_t* taps = reinterpret_cast<index_t*>(scratch);
    T* samples = reinterpret_cast<T*>(scratch += tap_bytes(t));
    scratch += columns > 0 ? padded(t.cg * turned.elements() * index_t(sizeof(T))) : 0;
    T* panel = panel_vectors<T>(t) > 0 ? reinterpret_cast<T*>(scratch) : nullptr;

    Pixels pixels(rectangle);
    if (t.oh > 1) pixels.across = whole;
    Lines<T> rows{t.oh, whole, x, t.sh * t.xr, t.xc, y, t.yr, 1, taps, taps, panel, pixels};
    rows.end = list_taps(t, rows, t.dh * t.xr, [&](index_t q) { return t.taps[q]; }, taps);
    each_strip<false>(t, rows);
    if (columns == 0) return;
    turn_samples(t, x + whole, turned, samples);
    Lines<T> beside{columns, t.oh, samples, turned.pitch, turned.elements(),      y + whole, 1,
                    t.yr,    taps, taps,    panel,        {t.oh, turned.pitch, 1}};
    beside.end = list_taps(t, beside, t.dh, [&](index_t q) { return q * turned.pitch; }, taps);
    each_strip<true>(t, beside);
}
