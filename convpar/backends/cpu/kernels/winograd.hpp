// Builds on: packed.
// Idea: Winograd's minimal filtering F(4x4, 3x3) (Lavin and Gray 2016): 36 products make 16 outputs of a filter. Tiles of
//       6x6 samples and filters are transformed, 36 matrix products over the channels follow, and their sums are
//       transformed back; in all three, lanes are channels.
//       Images whose magnitudes could break the contract are left to packed.
// Step: two fifths to half of packed's time from 64 to 64 channels (docs/cpu-speed.md, Steps).
// Limit: arithmetic, a quarter of the direct sums', and the transforms; with many channels, loads of the transformed
//        filters. Errors follow the largest samples of a tile instead of each output's own.

#include "magnitudes.h"

// A tile of tile x tile outputs is made of across x across samples.
constexpr int tile = 4, across = tile + 2, products = across * across;

// Polynomials are evaluated at 0, a, -a, b, -b and infinity. These points lie around 1, have squares that differ by
// 1, and all coefficients but the filters' are exact; 0, 1, -1, 2, -2, the usual ones, lose two bits more.
constexpr double a = 0.75, b = 1.25;

// Three taps become six factors.
template <class T>
inline void spread_filter(const Vec<T> (&w)[3], Vec<T> (&u)[across]) {
    const Vec<T> at_a = mac(w[0], w[2], broadcast(T(a * a))), at_b = mac(w[0], w[2], broadcast(T(b * b)));
    const Vec<T> by_a = broadcast(T(1 / (2 * a * a * (a * a - b * b))));
    const Vec<T> by_b = broadcast(T(1 / (2 * b * b * (b * b - a * a))));
    u[0] = w[0] * broadcast(T(1 / (a * a * b * b)));
    u[1] = mac(at_a, w[1], broadcast(T(a))) * by_a;
    u[2] = mac(at_a, w[1], broadcast(T(-a))) * by_a;
    u[3] = mac(at_b, w[1], broadcast(T(b))) * by_b;
    u[4] = mac(at_b, w[1], broadcast(T(-b))) * by_b;
    u[5] = w[2];
}

// Six samples become the other six factors.
template <class T>
inline void spread_samples(const Vec<T> (&x)[across], Vec<T> (&v)[across]) {
    const Vec<T> minus_aa = broadcast(T(-a * a)), minus_bb = broadcast(T(-b * b));
    const Vec<T> both = broadcast(T(-(a * a + b * b))), product = broadcast(T(a * a * b * b));
    const Vec<T> even_a = mac(x[4], x[2], minus_bb), odd_a = mac(x[3], x[1], minus_bb);
    const Vec<T> even_b = mac(x[4], x[2], minus_aa), odd_b = mac(x[3], x[1], minus_aa);
    v[0] = mac(mac(x[4], x[2], both), x[0], product);
    v[1] = mac(even_a, odd_a, broadcast(T(a)));
    v[2] = mac(even_a, odd_a, broadcast(T(-a)));
    v[3] = mac(even_b, odd_b, broadcast(T(b)));
    v[4] = mac(even_b, odd_b, broadcast(T(-b)));
    v[5] = mac(mac(x[5], x[3], both), x[1], product);
}

// Six sums of products become four outputs.
template <class T>
inline void gather_outputs(const Vec<T> (&m)[across], Vec<T> (&y)[tile]) {
    const Vec<T> even_a = m[1] + m[2], odd_a = m[1] - m[2], even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + (even_a + even_b);
    y[1] = mac(odd_a * broadcast(T(a)), odd_b, broadcast(T(b)));
    y[2] = mac(even_a * broadcast(T(a * a)), even_b, broadcast(T(b * b)));
    y[3] = mac(mac(m[5], odd_a, broadcast(T(a * a * a))), odd_b, broadcast(T(b * b * b)));
}

// -- where transformed sums keep the contract

// Bounds of the magnitudes of samples, of taps, and in `keeps` of the sums of their products: within them nothing overflows or
// loses bits below the normal numbers.
template <class T>
constexpr T most = sizeof(T) == 4 ? T(0x1p100) : T(0x1p900);
template <class T>
constexpr T least = 1 / most<T>;

// How much brighter than the others the samples at a rectangle's edge may be.
constexpr int edge_over_inner = 2;

// A lane's largest tap for each channel follows the 36 factors; NaN where it isn't safe.
template <class T>
void transform_filter(const Work& shape, const void* packed, index_t c, index_t, void* to) {
    const T* w = static_cast<const T*>(packed);
    const index_t apart = shape.cg * lanes<T>;
    T* u = static_cast<T*>(to) + c * lanes<T>;
    Vec<T> rows[3][across], columns[across][3];
    Lanes<T> largest = {};
    for (int p = 0; p < 3; ++p) {
        Vec<T> taps[3];
        for (int q = 0; q < 3; ++q) {
            taps[q] = load(w + (p * 3 + q) * lanes<T>);
            largest = larger<T>(largest, taps[q]);
        }
        spread_filter<T>(taps, rows[p]);
    }
    for (int l = 0; l < across; ++l) {
        for (int p = 0; p < 3; ++p) columns[l][p] = rows[p][l];
        Vec<T> done[across];
        spread_filter<T>(columns[l], done);
        for (int k = 0; k < across; ++k) store(u + (k * across + l) * apart, done[k]);
    }
    T taps[lanes<T>];
    store(taps, reinterpret_cast<Vec<T>>(largest));
    for (T& tap : taps) tap = safe(tap, most<T>) ? tap : T(__builtin_nan(""));
    store(u + products * apart, load(taps));
}

// How a rectangle falls into tiles, and a thread's scratch memory.
template <class T>
struct Parts {
    index_t down, beside, tiles;   // tiles of an image along rows and columns, and of all images
    index_t vectors;               // of input channels
    index_t strip, inputs, sums;   // elements of a row of samples, and from one of 36 matrices to the next
    index_t bright, input, total;  // elements before and behind each
    Parts(index_t n, index_t cg, index_t oh, index_t ow) {
        down = (oh - 1) / tile + 1;
        beside = (ow - 1) / tile + 1;
        tiles = n * down * beside;
        vectors = (cg + lanes<T> - 1) / lanes<T>;
        strip = ((beside * tile + 2 - 1) / lanes<T> + 1) * lanes<T> * lanes<T>;
        // The 36 streams mustn't fall into the same few lines of a cache.
        inputs = (vectors * tiles + 1) * lanes<T>;
        sums = (2 * tiles + 1) * lanes<T>;
        bright = across * strip;
        input = bright + 2 * n * vectors * lanes<T>;
        total = input + products * (inputs + sums);
    }
};

template <class T>
index_t scratch_bytes(const Work& shape) {
    return Parts<T>(shape.n, shape.cg, shape.oh, shape.ow).total * index_t(sizeof(T));
}

inline index_t elements(const Work&) { return products + 1; }

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = lanes<T>;
    k.transform = {elements, transform_filter<T>};
    k.scratch = scratch_bytes<T>;
    return k;
}

// A row of samples of up to a vector of channels, which become lanes, and zeros up to `width` columns.
template <class T>
void take_row(const Work& t, const T* x, index_t channels, index_t columns, index_t width, T* to) {
    for (index_t j = 0; j < columns; j += lanes<T>) {
        // What isn't gathered may end where the image does.
        const index_t at = t.in_place && j + lanes<T> > columns ? columns - lanes<T> : j;
        const T* row = x + at;
        Vec<T> rows[lanes<T>];
#pragma GCC unroll 64
        for (int k = 0; k < lanes<T>; ++k) {
            rows[k] = load(row);
            row += k + 1 < channels ? t.xc : 0;
        }
        transpose<T>(rows);
#pragma GCC unroll 64
        for (int k = 0; k < lanes<T>; ++k) store(to + (at + k) * lanes<T>, rows[k]);
    }
    for (index_t j = columns; j < width; ++j) store(to + j * lanes<T>, Vec<T>{});
}

template <class T>
inline Lanes<T> largest_of(const T* strip, index_t from, index_t to, Lanes<T> so_far) {
    for (index_t j = from; j < to; ++j) so_far = larger<T>(so_far, load(strip + j * lanes<T>));
    return so_far;
}

// Transforms the tiles of one image and one vector of channels; `bright` is told the channels' largest samples, and the
// largest of those that meet every tap.
template <class T>
void take(const Work& t, const Parts<T>& parts, const T* x, index_t channels, T* strip, T* v, T* bright) {
    const index_t columns = t.ow + 2, width = parts.beside * tile + 2;
    Lanes<T> edge = {}, inner = {};
    index_t taken = 0;
    for (index_t i = 0; i < parts.down; ++i) {
        for (; taken < i * tile + across; ++taken) {
            T* to = strip + taken % across * parts.strip;
            if (taken >= t.oh + 2) {
                for (index_t j = 0; j < width; ++j) store(to + j * lanes<T>, Vec<T>{});
                continue;
            }
            take_row(t, x + taken * t.xr, channels, columns, width, to);
            const bool within = taken >= 2 && taken < t.oh;
            edge = largest_of<T>(to, 0, within ? 2 : columns, edge);
            if (!within) continue;
            inner = largest_of<T>(to, 2, t.ow, inner);
            edge = largest_of<T>(to, t.ow > 2 ? t.ow : 2, columns, edge);
        }
        const T* rows[across];
        for (int k = 0; k < across; ++k) rows[k] = strip + (i * tile + k) % across * parts.strip;
        for (index_t j = 0; j < parts.beside; ++j, v += lanes<T>) {
            Vec<T> half[across][across];
#pragma GCC unroll 6
            for (int l = 0; l < across; ++l) {
                Vec<T> column[across];
#pragma GCC unroll 6
                for (int k = 0; k < across; ++k) column[k] = load(rows[k] + (j * tile + l) * lanes<T>);
                Vec<T> done[across];
                spread_samples<T>(column, done);
#pragma GCC unroll 6
                for (int k = 0; k < across; ++k) half[k][l] = done[k];
            }
#pragma GCC unroll 6
            for (int k = 0; k < across; ++k) {
                Vec<T> done[across];
                spread_samples<T>(half[k], done);
#pragma GCC unroll 6
                for (int l = 0; l < across; ++l) store(v + (k * across + l) * parts.inputs, done[l]);
            }
        }
    }
    store(bright, reinterpret_cast<Vec<T>>(larger<T>(edge, reinterpret_cast<Vec<T>>(inner))));
    store(bright + lanes<T>, reinterpret_cast<Vec<T>>(inner));
}

// Whether transformed sums of one image keep the contract, whose measure is the largest sum of magnitudes. Samples at
// the edge meet some of the taps only, and yet the others' part of the error: they mustn't outshine those that meet all.
template <class T>
bool keeps(const Work& t, const T* bright) {
    bool dark = true;
    for (index_t c = 0; c < t.cg; ++c) {
        const T all = bright[c / lanes<T> * 2 * lanes<T> + c % lanes<T>];
        if (!safe(all, most<T>)) return false;
        dark = dark && all == 0;
    }
    for (index_t o = 0; o < t.oc; o += lanes<T>) {
        const T* largest = static_cast<const T*>(t.transformed) +
                           (o / lanes<T> * (products + 1) + products) * t.cg * lanes<T>;
        Vec<T> all = {}, inner = {}, taps = {};
        for (index_t c = 0; c < t.cg; ++c) {
            const T* sample = bright + c / lanes<T> * 2 * lanes<T> + c % lanes<T>;
            const Vec<T> tap = load(largest + c * lanes<T>);
            all = mac(all, broadcast(sample[0]), tap);
            inner = mac(inner, broadcast(sample[lanes<T>]), tap);
            taps += tap;
        }
        for (index_t k = 0; k < lanes<T> && o + k < t.oc; ++k) {
            const bool nothing = all[k] == 0 && (dark || taps[k] == 0);
            if (nothing) continue;
            if (!(all[k] >= least<T> && all[k] <= most<T> && all[k] <= edge_over_inner * inner[k]))
                return false;
        }
    }
    return true;
}

// -- the matrix products

// Of a block: sums of two vectors of output channels, their weights and a sample fill the registers.
constexpr int most_tiles = (vector_registers - 1 - 2 - (many_registers ? 0 : 1)) / 2;

// J tiles and N vectors of output channels, over all input channels.
template <int N, int J, class T>
void product(const T* u, index_t u_next, const T* v, index_t v_next, index_t channels, T* m, index_t m_next) {
    Vec<T> sum[N][J] = {};
    for (index_t first = 0; first < channels; first += lanes<T>, v += v_next) {
        const index_t left = channels - first;
        for (index_t c = 0; c < (left < lanes<T> ? left : lanes<T>); ++c, u += lanes<T>) {
            Vec<T> weight[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) {
                weight[n] = load(u + n * u_next);
                // The next product's filters come from beyond the second cache.
                fetch<0, 2, 1, 1>(u + n * u_next, 0, channels * lanes<T>);
            }
#pragma GCC unroll 16
            for (int j = 0; j < J; ++j) {
                const Vec<T> sample = broadcast(v[j * lanes<T> + c]);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n) sum[n][j] = mac(sum[n][j], sample, weight[n]);
            }
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 16
        for (int j = 0; j < J; ++j) store(m + n * m_next + j * lanes<T>, sum[n][j]);
    }
}

template <class T>
using product_t = void (*)(const T*, index_t, const T*, index_t, index_t, T*, index_t);

// The product of `tiles` tiles, found among J, J - 1, ..., 1.
template <int N, int J, class T>
product_t<T> find_product(index_t tiles) {
    if constexpr (J == 1) {
        return product<N, 1, T>;
    } else {
        return tiles == J ? product<N, J, T> : find_product<N, J - 1, T>(tiles);
    }
}

// All tiles and N vectors of output channels; tiles fall into blocks of nearly equal size.
template <int N, class T>
void multiply(const Work& t, const Parts<T>& parts, const T* u, const T* v, T* m) {
    const index_t blocks = (parts.tiles - 1) / most_tiles + 1;
    const index_t few = parts.tiles / blocks, larger_blocks = parts.tiles % blocks;
    const product_t<T> more_tiles = find_product<N, most_tiles, T>(larger_blocks ? few + 1 : few);
    const product_t<T> few_tiles = find_product<N, most_tiles, T>(few);
    const index_t u_next = (products + 1) * t.cg * lanes<T>;
    for (int k = 0; k < products; ++k) {
        index_t done = 0;
        for (index_t block = 0; block < blocks; ++block) {
            (block < larger_blocks ? more_tiles : few_tiles)(
                u + k * t.cg * lanes<T>, u_next, v + k * parts.inputs + done * lanes<T>,
                parts.tiles * lanes<T>, t.cg, m + k * parts.sums + done * lanes<T>, parts.tiles * lanes<T>);
            done += few + (block < larger_blocks);
        }
    }
}

// Transforms one vector of output channels of one image back, and turns it into rows.
template <class T>
void give(const Work& t, const Parts<T>& parts, const T* m, const T* bias, T* strip, T* y, index_t channels) {
    const Vec<T> added = load(bias);
    for (index_t i = 0; i < parts.down; ++i, y += tile * t.yr) {
        for (index_t j = 0; j < parts.beside; ++j, m += lanes<T>) {
            Vec<T> half[tile][across];
#pragma GCC unroll 6
            for (int l = 0; l < across; ++l) {
                Vec<T> column[across], done[tile];
#pragma GCC unroll 6
                for (int k = 0; k < across; ++k) column[k] = load(m + (k * across + l) * parts.sums);
                gather_outputs<T>(column, done);
#pragma GCC unroll 4
                for (int k = 0; k < tile; ++k) half[k][l] = done[k];
            }
#pragma GCC unroll 4
            for (int k = 0; k < tile; ++k) {
                Vec<T> done[tile];
                gather_outputs<T>(half[k], done);
#pragma GCC unroll 4
                for (int l = 0; l < tile; ++l)
                    store(strip + k * parts.strip + (j * tile + l) * lanes<T>, done[l] + added);
            }
        }
        for (index_t k = 0; k < tile && i * tile + k < t.oh; ++k) {
            turn(strip + k * parts.strip, t.ow, y + k * t.yr, t.yo, channels);
        }
    }
}

template <class T>
void work(const Work& t) {
    const Parts<T> parts(t.n, t.cg, t.oh, t.ow);
    T* strip = static_cast<T*>(t.scratch);
    T *bright = strip + parts.bright, *v = strip + parts.input, *m = v + products * parts.inputs;
    const T* x = static_cast<const T*>(t.x);
    T* y = static_cast<T*>(t.y);
    const index_t tiles = parts.down * parts.beside;
    bool kept = true;
    for (index_t n = 0; n < t.n && kept; ++n) {
        T* brightness = bright + n * parts.vectors * 2 * lanes<T>;
        for (index_t c = 0; c < parts.vectors; ++c) {
            const index_t left = t.cg - c * lanes<T>;
            take(t, parts, x + n * t.xn + c * lanes<T> * t.xc, left < lanes<T> ? left : lanes<T>, strip,
                 v + (c * parts.tiles + n * tiles) * lanes<T>, brightness + c * 2 * lanes<T>);
        }
        kept = keeps<T>(t, brightness);
    }
    if (!kept) {
        for (index_t n = 0; n < t.n; ++n) {
            Work image = t;
            image.n = 1;
            image.x = x + n * t.xn;
            image.y = y + n * t.yn;
            t.otherwise(image);
        }
        return;
    }
    const T* u = static_cast<const T*>(t.transformed);
    const T* bias = static_cast<const T*>(t.bias);
    for (index_t o = 0; o < t.oc; o += 2 * lanes<T>, u += 2 * (products + 1) * t.cg * lanes<T>) {
        if (t.oc - o > lanes<T>) {
            multiply<2>(t, parts, u, v, m);
        } else {
            multiply<1>(t, parts, u, v, m);
        }
        for (index_t p = o; p < t.oc && p < o + 2 * lanes<T>; p += lanes<T>) {
            for (index_t n = 0; n < t.n; ++n) {
                const T* sums = m + ((p - o) / lanes<T> * parts.tiles + n * tiles) * lanes<T>;
                give(t, parts, sums, bias + p, strip, y + n * t.yn + p * t.yo,
                     t.oc - p < lanes<T> ? t.oc - p : index_t(lanes<T>));
            }
        }
    }
}
