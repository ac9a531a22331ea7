// Builds on: packed.
// Idea: convolution as a product of matrices. The samples under a panel of outputs are laid out as columns, a slice of the
//       taps at a time, and every output channel meets them there: lanes are outputs, whichever rows they are in. It is the classical way,
//       and slower than packed, which reads samples in place; implicit saves the columns.
// Step: a seventh to two fifths longer than packed from 64 to 64 channels, one and a half to twice as long from 4 to 16 (docs/cpu-speed.md,
//       Steps).
// Limit: arithmetic, from about 32 output channels on, and writing and reading again each column; with fewer, laying out
//        columns that packed reads in place.

// Output channels whose sums of a panel stay in registers.
constexpr int block_channels = many_registers ? 8 : 4;

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = block_channels;
    return k;
}

// A panel's sums fill the registers beside its samples and a weight; a slice of it stays in the first cache.
constexpr int panel_vectors = 3, slice_taps = 128;
template <class T>
constexpr int panel = panel_vectors * lanes<T>;
// Output channels whose sums wait in between two slices.
constexpr int most_channels = 128;

// Outputs of a panel that are neighbours in a row.
struct Piece {
    index_t sample, at,
        width;     // where the first one's samples begin, its place in the panel, and how many there are
    index_t room;  // samples from the first one on that may be read
};

// `width` outputs from column `j` of row `i` on; what is beyond a row's end goes on in the next one.
template <class T>
int find_pieces(const Work& t, index_t i, index_t j, index_t width, Piece (&pieces)[panel<T>]) {
    i += j / t.ow;
    j %= t.ow;
    int count = 0;
    for (index_t at = 0; at < width; ++i, j = 0) {
        const index_t left = t.ow - j, taken = left < width - at ? left : width - at;
        pieces[count++] = {i * t.sh * t.xr + j, at, taken, t.in_place ? left : left + lanes<T>};
        at += taken;
    }
    return count;
}

// One row of the columns: the samples of all outputs under one tap. Up to a vector is written beyond its end, most of it
// by the next row again.
template <class T>
inline void lay_out(const T* x, const Piece* pieces, int count, index_t width, T* to) {
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
        const T* from = x + piece->sample;
        T* at = to + piece->at;
        index_t j = 0;
        for (; j + lanes<T> <= piece->width; j += lanes<T>) store(at + j, load(from + j));
        const index_t left = piece->width - j;
        if (left == 0) continue;
        if (j + lanes<T> <= piece->room) {
            store(at + j, load(from + j));
        } else {
            // At the end of a row, which is a vector long or more.
            const Vec<T> last = load(from + piece->width - lanes<T>);
            store(at + j, join<T>(last, last, lanes<T> - left));
        }
    }
    if (width % lanes<T>) store(to + width, Vec<T>{});
}

// Where the sums of R output channels come from and go to: a slice's are those before, or the bias for the first one.
template <class T>
struct Sums {
    const T* bias;  // or null
    T* waiting;     // `panel` elements each
    T* y;           // for the last slice, or null
    index_t yo, width;
};

// Adds the products of `taps` rows of V vectors of columns with the weights of R output channels.
template <int R, int V, class T>
void block(const T* columns, const T* w, index_t taps, const Sums<T>& sums) {
    Vec<T> sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v)
            sum[r][v] =
                sums.bias ? broadcast(sums.bias[r]) : load(sums.waiting + r * panel<T> + v * lanes<T>);
    }
    for (; taps > 0; --taps, columns += panel<T>, w += block_channels) {
        Vec<T> sample[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) sample[v] = held(load(columns + v * lanes<T>));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vec<T> weight = held(broadcast(w[r]));
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) sum[r][v] = mac(sum[r][v], sample[v], weight);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) {
            if (!sums.y) {
                store(sums.waiting + r * panel<T> + v * lanes<T>, sum[r][v]);
            } else if (v < V - 1) {
                store(sums.y + r * sums.yo + v * lanes<T>, sum[r][v]);
            } else {
                store_first(sums.y + r * sums.yo + v * lanes<T>, sum[r][v], sums.width - v * lanes<T>);
            }
        }
    }
}

template <class T>
using block_t = void (*)(const T*, const T*, index_t, const Sums<T>&);

// The product for so many output channels, found among R, R - 1, ..., 1.
template <int V, class T, int R = block_channels>
block_t<T> find_block(index_t channels) {
    if constexpr (R == 1) {
        return block<1, V, T>;
    } else {
        return channels >= R ? block<R, V, T> : find_block<V, T, R - 1>(channels);
    }
}
template <class T>
block_t<T> find_block(index_t vectors, index_t channels) {
    if (vectors == 1) return find_block<1, T>(channels);
    if (vectors == 2) return find_block<2, T>(channels);
    return find_block<3, T>(channels);
}

// `width` outputs from column `j` of row `i` on, of `channels` output channels.
template <class T>
void compute(const Work& t, const T* w, const T* bias, T* y, index_t channels, index_t i, index_t j,
             index_t width) {
    T columns[slice_taps * panel<T> + lanes<T>], waiting[most_channels * panel<T>];
    Piece pieces[panel<T>];
    const int count = find_pieces<T>(t, i, j, width, pieces);
    const index_t taps = t.cg * t.kh * t.kw, vectors = (width - 1) / lanes<T> + 1;
    const T *plane = static_cast<const T*>(t.x), *row = plane;
    index_t p = 0, q = 0;
    for (index_t first = 0; first == 0 || first < taps; first += slice_taps) {
        const index_t taken = taps - first < slice_taps ? taps - first : index_t(slice_taps);
        for (index_t k = 0; k < taken; ++k) {
            lay_out(row + t.taps[q], pieces, count, width, columns + k * panel<T>);
            if (++q < t.kw) continue;
            q = 0;
            row += t.dh * t.xr;
            if (++p < t.kh) continue;
            p = 0;
            row = plane += t.xc;
        }
        const bool last = first + taken == taps;
        for (index_t o = 0; o < channels; o += block_channels) {
            const Sums<T> sums = {first ? nullptr : bias + o, waiting + o * panel<T>,
                                  last ? y + o * t.yo : nullptr, t.yo, width};
            find_block<T>(vectors, channels - o)(columns, w + o * taps + first * block_channels, taken, sums);
        }
    }
}

template <class T>
void work(const Work& t) {
    // Where rows of outputs follow each other in memory, they are one.
    const bool one = t.yr == t.ow;
    const index_t rows = one ? 1 : t.oh, across = one ? t.oh * t.ow : t.ow;
    const index_t taps = t.cg * t.kh * t.kw;
    // Output channels in parts, whose filters stay in the second cache for all outputs.
    for (index_t o = 0; o < t.oc; o += most_channels) {
        const index_t channels = t.oc - o < most_channels ? t.oc - o : index_t(most_channels);
        const T* w = static_cast<const T*>(t.w) + o * taps;
        const T* bias = static_cast<const T*>(t.bias) + o;
        T* y = static_cast<T*>(t.y) + o * t.yo;
        for (index_t i = 0; i < rows; ++i, y += t.yr) {
            for (index_t j = 0; j < across; j += panel<T>) {
                const index_t width = across - j < panel<T> ? across - j : index_t(panel<T>);
                compute(t, w, bias, y + j, channels, i, j, width);
            }
        }
    }
}
