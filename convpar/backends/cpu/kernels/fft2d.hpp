// Builds on: simd.
// Idea: Overlap-save (Stockham 1966) along both axes: tiles of samples and the filters become spectra, whose products become
//       outputs. A tile is the real part of a transform, its neighbour the imaginary part, and a real filter keeps them
//       apart. Lanes are columns, and rows once the tile is transposed, so that a transform shuffles nothing.
//       Tiles whose magnitudes could break the contract are left to simd.
// Step: a sixth to three tenths of simd's time at 31 x 31 (docs/cpu-speed.md, Steps).
// Limit: arithmetic, some hundred operations an output whatever the filter; what tiles have in common is transformed again.
//        Errors follow the largest samples of two tiles instead of each output's own.

#include "magnitudes.h"

constexpr index_t longest = 256;

// -- roots of unity

struct Angle {
    long double cosine, sine;
};

// Of k/n of a full turn, by Taylor series up to an eighth of one.
constexpr Angle turn_by(index_t k, index_t n) {
    if (8 * k > n) {
        const Angle less = 4 * k >= n ? turn_by(k - n / 4, n) : turn_by(n / 4 - k, n);
        return 4 * k >= n ? Angle{-less.sine, less.cosine} : Angle{less.sine, less.cosine};
    }
    const long double a = 6.283185307179586476925286766559005768L * k / n;
    long double cosine = 1, sine = 1;
    for (int i = 26; i > 0; i -= 2) {
        cosine = 1 - a * a / (i * (i - 1)) * cosine;
        sine = 1 - a * a / (i * (i + 1)) * sine;
    }
    return {cosine, a * sine};
}

// Twiddle factors: the cosine and sine by which each step of a transform turns, in the order of their use.
template <class T, int N, int... Radices>
struct Turns {
    T at[2 * N] = {};
    constexpr Turns() {
        const int radices[] = {Radices...};
        T* to = at;
        int blocks = 1;
        for (const int radix : radices) {
            const int part = N / blocks / radix;
            for (int j = 0; part > 1 && j < part; ++j) {
                for (int q = 1; q < radix; ++q) {
                    const Angle angle = turn_by(q * j * blocks, N);
                    *to++ = T(angle.cosine);
                    *to++ = T(angle.sine);
                }
            }
            blocks *= radix;
        }
    }
};
template <class T, int N, int... Radices>
constexpr Turns<T, N, Radices...> turns;

// How a transform falls into shorter ones.
template <class T>
struct Length {
    index_t n;
    int radices[3], steps;
    const T* turns;
};
template <class T, int N, int... Radices>
constexpr Length<T> length_of = {N, {Radices...}, sizeof...(Radices), turns<T, N, Radices...>.at};

template <class T>
const Length<T>& find_length(index_t n) {
    switch (n) {
        case 32: return length_of<T, 32, 4, 8>;
        case 48: return length_of<T, 48, 3, 4, 4>;
        case 64: return length_of<T, 64, 8, 8>;
        case 80: return length_of<T, 80, 5, 4, 4>;
        case 96: return length_of<T, 96, 3, 4, 8>;
        case 128: return length_of<T, 128, 4, 4, 8>;
        case 160: return length_of<T, 160, 5, 4, 8>;
        case 192: return length_of<T, 192, 3, 8, 8>;
        default: return length_of<T, 256, 4, 8, 8>;
    }
}

// -- transforms of vectors of columns

template <class T>
struct Complex {
    Vec<T> re, im;
};
template <class T>
inline Complex<T> operator+(Complex<T> a, Complex<T> b) {
    return {a.re + b.re, a.im + b.im};
}
template <class T>
inline Complex<T> operator-(Complex<T> a, Complex<T> b) {
    return {a.re - b.re, a.im - b.im};
}
// a - ib and a + ib.
template <class T>
inline Complex<T> less_turned(Complex<T> a, Complex<T> b) {
    return {a.re + b.im, a.im - b.re};
}
template <class T>
inline Complex<T> plus_turned(Complex<T> a, Complex<T> b) {
    return {a.re - b.im, a.im + b.re};
}
template <class T>
inline Complex<T> mac(Complex<T> acc, Complex<T> a, Vec<T> b) {
    return {mac(acc.re, a.re, b), mac(acc.im, a.im, b)};
}
// Turned back by an angle.
template <class T>
inline Complex<T> turned(Complex<T> a, const T* angle) {
    const Vec<T> cosine = broadcast(angle[0]), sine = broadcast(angle[1]);
    return {mac(a.re * cosine, a.im, sine), unmac(a.im * cosine, a.re, sine)};
}

// The discrete Fourier transform of a few.
template <class T>
inline void transform_few(Complex<T> (&x)[3]) {
    const Complex<T> sum = x[1] + x[2], difference = x[1] - x[2];
    const Complex<T> middle = mac(x[0], sum, broadcast(T(-0.5)));
    const Vec<T> sine = broadcast(T(0.866025403784438646763723170752936183L));
    const Complex<T> side = {difference.re * sine, difference.im * sine};
    x[0] = x[0] + sum;
    x[1] = less_turned(middle, side);
    x[2] = plus_turned(middle, side);
}
template <class T>
inline void transform_few(Complex<T> (&x)[4]) {
    const Complex<T> a = x[0] + x[2], b = x[0] - x[2], c = x[1] + x[3], d = x[1] - x[3];
    x[0] = a + c;
    x[1] = less_turned(b, d);
    x[2] = a - c;
    x[3] = plus_turned(b, d);
}
template <class T>
inline void transform_few(Complex<T> (&x)[5]) {
    const Vec<T> cosine1 = broadcast(T(0.309016994374947424102293417182819059L));
    const Vec<T> cosine2 = broadcast(T(-0.809016994374947424102293417182819059L));
    const Vec<T> sine1 = broadcast(T(0.951056516295153572116439333379382143L));
    const Vec<T> sine2 = broadcast(T(0.587785252292473129168705954639072769L));
    const Complex<T> near = x[1] + x[4], far = x[2] + x[3], near_less = x[1] - x[4], far_less = x[2] - x[3];
    const Complex<T> a = mac(mac(x[0], near, cosine1), far, cosine2);
    const Complex<T> b = mac(mac(x[0], near, cosine2), far, cosine1);
    const Complex<T> c = mac({near_less.re * sine1, near_less.im * sine1}, far_less, sine2);
    const Complex<T> d = mac({near_less.re * sine2, near_less.im * sine2}, far_less, -sine1);
    x[0] = x[0] + (near + far);
    x[1] = less_turned(a, c);
    x[2] = less_turned(b, d);
    x[3] = plus_turned(b, d);
    x[4] = plus_turned(a, c);
}
template <class T>
inline void transform_few(Complex<T> (&x)[8]) {
    Complex<T> even[4] = {x[0], x[2], x[4], x[6]}, odd[4] = {x[1], x[3], x[5], x[7]};
    transform_few<T>(even);
    transform_few<T>(odd);
    const Vec<T> half = broadcast(T(0.707106781186547524400844362104849039L));
    const Complex<T> one = less_turned(odd[1], odd[1]), three = plus_turned(odd[3], odd[3]);
    x[0] = even[0] + odd[0];
    x[4] = even[0] - odd[0];
    x[1] = mac(even[1], one, half);
    x[5] = mac(even[1], one, -half);
    x[2] = less_turned(even[2], odd[2]);
    x[6] = plus_turned(even[2], odd[2]);
    x[3] = mac(even[3], three, -half);
    x[7] = mac(even[3], three, half);
}

// Columns are in strips of a vector: real and imaginary parts, [rows][2][lanes].
template <class T>
constexpr index_t point = 2 * lanes<T>;

// Where transforms read the columns of samples.
template <class T>
struct Samples {
    const T *re, *im;
    index_t apart;  // rows
};

// One step of a transform of a strip's `n` rows, `blocks` of them side by side: Radix parts of each block become blocks.
// Decimation in frequency turns what it has transformed, decimation in time what it will: one undoes the other's order.
// The latter exchanges real and imaginary parts, and so transforms back. The first step may read from elsewhere.
template <int Radix, bool InTime, bool Turned, bool Elsewhere, class T>
void step_of(const Samples<T>& from, T* strip, index_t n, index_t blocks, const T* turns) {
    constexpr index_t re = InTime ? lanes<T> : 0, im = lanes<T> - re;
    const index_t part = n / blocks / Radix, leap = part * point<T>, apart = from.apart, far = part * apart;
    const T *row_re = from.re, *row_im = from.im;
    for (; blocks > 0; --blocks, strip += (Radix - 1) * leap) {
        const T* angles = turns;
        for (index_t j = 0; j < part; ++j, strip += point<T>) {
            Complex<T> x[Radix];
#pragma GCC unroll 8
            for (int q = 0; q < Radix; ++q) {
                x[q] = Elsewhere ? Complex<T>{load(row_re + q * far), load(row_im + q * far)}
                                 : Complex<T>{load(strip + q * leap + re), load(strip + q * leap + im)};
                if (InTime && Turned && q) x[q] = turned(x[q], angles + 2 * (q - 1));
            }
            transform_few<T>(x);
#pragma GCC unroll 8
            for (int q = 0; q < Radix; ++q) {
                if (!InTime && Turned && q) x[q] = turned(x[q], angles + 2 * (q - 1));
                store(strip + q * leap + re, x[q].re);
                store(strip + q * leap + im, x[q].im);
            }
            angles += 2 * (Radix - 1);
            row_re += apart;
            row_im += apart;
        }
    }
}

template <bool InTime, bool Turned, bool Elsewhere, class T>
void step_of(int radix, const Samples<T>& from, T* strip, index_t n, index_t blocks, const T* turns) {
    switch (radix) {
        case 3: return step_of<3, InTime, Turned, Elsewhere>(from, strip, n, blocks, turns);
        case 4: return step_of<4, InTime, Turned, Elsewhere>(from, strip, n, blocks, turns);
        case 5: return step_of<5, InTime, Turned, Elsewhere>(from, strip, n, blocks, turns);
        default: return step_of<8, InTime, Turned, Elsewhere>(from, strip, n, blocks, turns);
    }
}

// Rows in order become frequencies in an order of their own; from a strip itself, or from elsewhere.
template <bool Elsewhere, class T>
void to_frequencies(const Length<T>& length, const Samples<T>& from, T* strip) {
    const T* turns = length.turns;
    step_of<false, true, Elsewhere>(length.radices[0], from, strip, length.n, 1, turns);
    index_t blocks = length.radices[0];
    for (int k = 1; k < length.steps; ++k) {
        turns += 2 * (length.n / blocks) * (length.radices[k - 1] - 1);
        if (k + 1 < length.steps) {
            step_of<false, true, false>(length.radices[k], {}, strip, length.n, blocks, turns);
        } else {
            step_of<false, false, false>(length.radices[k], {}, strip, length.n, blocks, turns);
        }
        blocks *= length.radices[k];
    }
}

// And back, `n` times as large.
template <class T>
void from_frequencies(const Length<T>& length, T* strip) {
    const int last = length.steps - 1;
    index_t blocks = length.n / length.radices[last];
    step_of<true, false, false>(length.radices[last], {}, strip, length.n, blocks, length.turns);
    for (int k = last - 1; k >= 0; --k) {
        blocks /= length.radices[k];
        const T* turns = length.turns;
        for (index_t i = 0, before = 1; i < k; before *= length.radices[i++]) {
            turns += 2 * (length.n / before / length.radices[i]) * (length.radices[i] - 1);
        }
        step_of<true, true, false>(length.radices[k], {}, strip, length.n, blocks, turns);
    }
}

// -- tiles of such strips

// Rows of memory that are wanted later: they lie too far apart for the processor to see them coming.
template <class T>
struct Ahead {
    const T* row;
    index_t apart, rows, columns, at_once;

    template <int Write>
    void fetch() {
        constexpr index_t line = 64 / index_t(sizeof(T));
        for (index_t k = 0; k < at_once && rows > 0; ++k, --rows, row += apart) {
            // A row may begin late in its first line.
            for (index_t j = 0; j < columns + line; j += line) fetch_line<Write>(row + j, 0);
        }
    }
};

// A strip of `rows` rows becomes as many columns, from `column` on, of a tile's strips of `across` rows each.
template <int Write, class T>
void transpose_strip(const T* strip, index_t rows, T* tile, index_t across, index_t column, Ahead<T>& ahead) {
    T* to = tile + column * point<T>;
    for (index_t i = 0; i < rows; i += lanes<T>, to += across * point<T>) {
        ahead.template fetch<Write>();
        for (index_t part = 0; part < point<T>; part += lanes<T>) {
            Vec<T> block[lanes<T>];
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) block[k] = load(strip + (i + k) * point<T> + part);
            transpose<T>(block);
#pragma GCC unroll 64
            for (int k = 0; k < lanes<T>; ++k) store(to + k * point<T> + part, block[k]);
        }
    }
}

// How the tiles of a rectangle lie, and a thread's scratch memory.
template <class T>
struct Parts {
    index_t down, beside;             // tiles of an image along rows and columns
    index_t strip, tile;              // elements
    index_t samples, outputs, total;  // elements before and behind each
    Parts(const Tiling& a, index_t cg, index_t oh, index_t ow) {
        down = (oh - 1) / a.out_rows + 1;
        beside = (ow - 1) / a.out_columns + 1;
        strip = (a.rows > a.columns ? a.rows : a.columns) * point<T>;
        tile = 2 * a.rows * a.columns;
        samples = strip;
        outputs = samples + cg * tile;
        total = outputs + tile + 2 * cg;
    }
};

template <class T>
index_t scratch_bytes(const Work& shape) {
    return Parts<T>(shape.tiling, shape.cg, shape.oh, shape.ow).total * index_t(sizeof(T));
}

// -- where spectra keep the contract

// Magnitudes whose products and sums neither overflow nor lose bits below the normal numbers.
template <class T>
constexpr T most = sizeof(T) == 4 ? T(0x1p60) : T(0x1p480);
template <class T>
constexpr T least = 1 / most<T>;

// How much brighter samples may be than those that surely meet a filter's largest tap.
constexpr int brighter = 2;

// The largest magnitude of a rectangle, NaN and infinity above all others.
template <class T>
T largest_of(const T* x, index_t apart, index_t rows, index_t columns) {
    constexpr int several = 4;
    Lanes<T> so_far[several] = {};
    for (index_t i = 0; i < rows; ++i, x += apart) {
        index_t j = 0;
        for (; j + several * lanes<T> <= columns; j += several * lanes<T>) {
#pragma GCC unroll 4
            for (int k = 0; k < several; ++k) so_far[k] = larger<T>(so_far[k], load(x + j + k * lanes<T>));
        }
        for (; j + lanes<T> <= columns; j += lanes<T>) so_far[0] = larger<T>(so_far[0], load(x + j));
        if (j == columns) continue;
        const Vec<T> rest = j ? load(x + columns - lanes<T>) : load_first(x, columns);
        so_far[1] = larger<T>(so_far[1], rest);
    }
    SignedOf<T> largest = 0;
    for (int k = 0; k < several; ++k) {
        for (int l = 0; l < lanes<T>; ++l) largest = so_far[k][l] > largest ? so_far[k][l] : largest;
    }
    T value;
    __builtin_memcpy(&value, &largest, sizeof value);
    return value;
}

// What precedes a filter's spectrum.
template <class T>
struct Facts {
    T largest;      // tap; NaN where it isn't safe
    T row, column;  // where it is
};
template <class T>
constexpr index_t head = lanes<T> > 4 ? lanes<T> : 4;

template <class T>
index_t elements(const Work& shape) {
    return head<T> + 2 * shape.tiling.rows * shape.tiling.columns;
}

// A filter's conjugate spectrum, transposed as a tile's is, divided by the number of points.
template <class T>
void transform_filter(const Work& shape, const void* packed, index_t c, index_t, void* to) {
    const Tiling& a = shape.tiling;
    const index_t kh = shape.kh, kw = shape.kw;
    const T* w = static_cast<const T*>(packed);
    T* u = static_cast<T*>(to) + c * elements<T>(shape);
    Facts<T> facts = {0, 0, 0};
    bool finite = true;
    for (index_t p = 0; p < kh; ++p) {
        for (index_t q = 0; q < kw; ++q) {
            const T tap = w[p * kw + q] < 0 ? -w[p * kw + q] : w[p * kw + q];
            finite = finite && tap <= most<T>;
            if (tap > facts.largest) facts = {tap, T(p), T(q)};
        }
    }
    if (!finite || !safe(facts.largest, most<T>)) facts.largest = T(__builtin_nan(""));
    u[0] = facts.largest;
    u[1] = facts.row;
    u[2] = facts.column;
    u += head<T>;
    const Length<T>&down = find_length<T>(a.rows), &beside = find_length<T>(a.columns);
    alignas(64) T strip[longest * point<T>];
    const T share = T(1) / T(a.rows * a.columns);
    Ahead<T> none = {};
    for (index_t q = 0; q < a.columns; q += lanes<T>) {
        for (index_t p = 0; p < a.rows; ++p) {
            const index_t left = p < kh ? kw - q : 0;
            const Vec<T> taps =
                left > 0 ? load_first(w + p * kw + q, left < lanes<T> ? left : lanes<T>) : Vec<T>{};
            store(strip + p * point<T>, taps * broadcast(share));
            store(strip + p * point<T> + lanes<T>, Vec<T>{});
        }
        to_frequencies<false, T>(down, {}, strip);
        transpose_strip<0>(strip, a.rows, u, a.columns, q, none);
    }
    for (index_t i = 0; i < a.rows; i += lanes<T>) {
        T* row = u + i * 2 * a.columns;
        to_frequencies<false, T>(beside, {}, row);
        for (index_t j = 0; j < a.columns; ++j, row += point<T>) store(row + lanes<T>, -load(row + lanes<T>));
    }
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.transform = {elements<T>, transform_filter<T>};
    k.scratch = scratch_bytes<T>;
    return k;
}

// -- pairs of tiles

template <class T>
struct Tile {
    const T* x;
    T* y;
    index_t image, column, oh, ow;  // outputs
    index_t rows, columns;          // samples
    T* largest;                     // of each channel
};

// Whether a row of the samples that meet a tap holds one not much less than the largest.
template <class T>
bool meets(const Work& t, const Tile<T>& tile, const T* x, const T* filter, T largest) {
    const index_t row = index_t(filter[1]), column = index_t(filter[2]);
    const index_t rows = tile.rows - row, columns = tile.columns - column;
    x += row * t.xr + column;
    for (index_t i = 0; i < (tile.oh < rows ? tile.oh : rows); ++i, x += t.xr) {
        const T met = largest_of(x, t.xr, 1, tile.ow < columns ? tile.ow : columns);
        if (largest <= brighter * met) return true;
    }
    return false;
}

// Whether spectra of a tile, or two of a plane, keep the contract, whose measure is the plane's largest sum of magnitudes.
template <class T>
bool keeps(const Work& t, const Tile<T>& a, const Tile<T>* b, const T* filters) {
    if (b && a.image != b->image) {
        const Tile<T>* none = nullptr;
        return keeps(t, a, none, filters) && keeps(t, *b, none, filters);
    }
    for (index_t c = 0; c < t.cg; ++c, filters += elements<T>(t)) {
        const T tap = filters[0], largest = b && b->largest[c] > a.largest[c] ? b->largest[c] : a.largest[c];
        if (!(tap >= 0)) return false;
        if (tap == 0 || largest == 0) continue;
        if (!(largest * tap >= least<T> && largest * tap <= most<T>)) return false;
        if (!meets(t, a, a.x + c * t.xc, filters, largest) &&
            !(b && meets(t, *b, b->x + c * t.xc, filters, largest)))
            return false;
    }
    return true;
}

// Direct sums of `channels` output channels.
template <class T>
void sum_directly(const Work& t, const Tile<T>& tile, index_t channel, index_t channels) {
    Work part = t;
    // What isn't gathered may end where the image does.
    const index_t back = t.in_place && tile.ow < lanes<T> ? lanes<T> - tile.ow : 0;
    const index_t shift = back < tile.column ? back : tile.column;
    part.n = 1;
    part.oc = channels;
    part.oh = tile.oh;
    part.ow = tile.ow + shift;
    part.x = tile.x - shift;
    part.y = tile.y + channel * t.yo - shift;
    part.w = static_cast<const T*>(t.w) + channel * t.cg * t.kh * t.kw;
    part.bias = static_cast<const T*>(t.bias) + channel;
    t.otherwise(part);
}

// A strip of samples of one tile or none, from `column` on, times a power of two.
template <class T>
void take_strip(const Work& t, const Tile<T>* tile, const T* x, index_t column, index_t rows, T times,
                T* to) {
    const index_t some = tile ? tile->rows : 0, left = tile ? tile->columns - column : 0;
    const Vec<T> factor = broadcast(times);
    if (left >= lanes<T>) {
        for (index_t i = 0; i < some; ++i) store(to + i * point<T>, load(x + i * t.xr + column) * factor);
    } else if (left > 0) {
        for (index_t i = 0; i < some; ++i)
            store(to + i * point<T>, load_first(x + i * t.xr + column, left) * factor);
    }
    for (index_t i = left > 0 ? some : 0; i < rows; ++i) store(to + i * point<T>, Vec<T>{});
}

// Spectra of one channel of two tiles, transposed, but for the transforms along the rows.
template <class T>
void take(const Work& t, const Tile<T>& a, const Tile<T>* b, index_t c, T times, T* strip, T* to,
          Ahead<T>& ahead) {
    const Length<T>& down = find_length<T>(t.tiling.rows);
    const T *re = a.x + c * t.xc, *im = b ? b->x + c * t.xc : nullptr;
    for (index_t j = 0; j < t.tiling.columns; j += lanes<T>) {
        const index_t wide = b && b->columns < a.columns ? b->columns : a.columns;
        if (b && times == 1 && a.rows == down.n && b->rows == down.n && j + lanes<T> <= wide) {
            to_frequencies<true, T>(down, {re + j, im + j, t.xr}, strip);
        } else {
            take_strip<T>(t, &a, re, j, down.n, T(1), strip);
            take_strip<T>(t, b, im, j, down.n, times, strip + lanes<T>);
            to_frequencies<false, T>(down, {}, strip);
        }
        transpose_strip<1>(strip, down.n, to, t.tiling.columns, j, ahead);
    }
}

// Products of a strip of spectra and the filters', summed over the channels.
template <class T>
void multiply(const T* x, index_t x_next, const T* w, index_t w_next, index_t channels, index_t n, T* to) {
    for (index_t j = 0; j < n; ++j, x += point<T>, w += point<T>, to += point<T>) {
        Vec<T> re = {}, im = {};
        for (index_t c = 0; c < channels; ++c) {
            const Vec<T> xr = load(x + c * x_next), xi = load(x + c * x_next + lanes<T>);
            const Vec<T> wr = load(w + c * w_next), wi = load(w + c * w_next + lanes<T>);
            re = unmac(mac(re, xr, wr), xi, wi);
            im = mac(mac(im, xi, wr), xr, wi);
        }
        store(to, re);
        store(to + lanes<T>, im);
    }
}

// Rows of one vector of columns of a tile's outputs.
template <class T>
void give_strip(const Work& t, const Tile<T>& tile, const T* strip, index_t j, index_t channel, T times) {
    const index_t width = tile.ow - j < lanes<T> ? tile.ow - j : index_t(lanes<T>);
    const Vec<T> factor = broadcast(times), bias = broadcast(static_cast<const T*>(t.bias)[channel]);
    T* y = tile.y + channel * t.yo + j;
    if (width == lanes<T>) {
        for (index_t i = 0; i < tile.oh; ++i) store(y + i * t.yr, load(strip + i * point<T>) * factor + bias);
    } else if (width > 0) {
        for (index_t i = 0; i < tile.oh; ++i) {
            store_first(y + i * t.yr, load(strip + i * point<T>) * factor + bias, width);
        }
    }
}

// All outputs of one or two tiles; samples of the second count `times` as much.
template <class T>
void compute(const Work& t, const Parts<T>& parts, const Tile<T>& a, const Tile<T>* b, T times) {
    const Tiling& tiling = t.tiling;
    const Length<T>&down = find_length<T>(tiling.rows), &beside = find_length<T>(tiling.columns);
    T* strip = static_cast<T*>(t.scratch);
    T *samples = strip + parts.samples, *outputs = strip + parts.outputs;
    const T* filters = static_cast<const T*>(t.transformed);
    const index_t size = elements<T>(t);
    bool taken = false;
    // Tiles lie beside each other, as a rule, and so do the next two.
    const index_t blocks = tiling.rows * tiling.columns / (lanes<T> * lanes<T>),
                  both = 2 * tiling.out_columns;
    Ahead<T> results = {a.y, t.yr, a.oh, both, a.oh / blocks + 1};
    Ahead<T> next = {a.x + both, t.xr, a.rows, both + t.kw - 1, a.rows / blocks + 1};
    if (a.column + both >= t.ow) next.rows = 0;
    for (index_t o = 0; o < t.oc; ++o, filters += t.cg * size) {
        if (!keeps(t, a, b, filters)) {
            sum_directly(t, a, o, 1);
            if (b) sum_directly(t, *b, o, 1);
            continue;
        }
        if (!taken) {
            for (index_t c = 0; c < t.cg; ++c) {
                take(t, a, b, c, times, strip, samples + c * parts.tile, results);
            }
        }
        for (index_t i = 0; i < tiling.rows; i += lanes<T>) {
            T* x = samples + i * 2 * tiling.columns;
            if (t.cg * t.oc == 1) {
                // The tile's lines, which nobody asks for again, needn't be written back to the next cache.
                to_frequencies<true, T>(beside, {x, x + lanes<T>, point<T>}, strip);
                x = strip;
            }
            for (index_t c = 0; c < t.cg && !taken && x != strip; ++c) {
                to_frequencies<false, T>(beside, {}, x + c * parts.tile);
            }
            multiply(x, parts.tile, filters + head<T> + i * 2 * tiling.columns, size, t.cg, tiling.columns,
                     strip);
            from_frequencies<T>(beside, strip);
            transpose_strip<0>(strip, tiling.columns, outputs, tiling.rows, i, next);
        }
        taken = true;
        for (index_t j = 0; j < tiling.columns && j < (b && b->ow > a.ow ? b->ow : a.ow); j += lanes<T>) {
            T* done = outputs + j * 2 * tiling.rows;
            from_frequencies<T>(down, done);
            give_strip(t, a, done, j, o, T(1));
            if (b) give_strip(t, *b, done + lanes<T>, j, o, 1 / times);
        }
    }
}

// The power of two that makes samples of the second tile as large as the first one's, nearly.
template <class T>
T balance(T first, T second) {
    T times = 1;
    while (second * times > first) times /= 2;
    while (second * times * 2 <= first) times *= 2;
    return times;
}

template <class T>
void work(const Work& t) {
    const Tiling& tiling = t.tiling;
    const Parts<T> parts(tiling, t.cg, t.oh, t.ow);
    const index_t tiles = parts.down * parts.beside;
    T* largest = static_cast<T*>(t.scratch) + parts.total - 2 * t.cg;
    Tile<T> waiting = {};
    for (index_t k = 0; k < t.n * tiles; ++k) {
        Tile<T> tile;
        tile.image = k / tiles;
        const index_t row = k % tiles / parts.beside * tiling.out_rows;
        tile.column = k % parts.beside * tiling.out_columns;
        tile.oh = t.oh - row < tiling.out_rows ? t.oh - row : tiling.out_rows;
        tile.ow = t.ow - tile.column < tiling.out_columns ? t.ow - tile.column : tiling.out_columns;
        const index_t rows = tile.oh + t.kh - 1, columns = tile.ow + t.kw - 1;
        // A transform goes round: where only zeros surround the image it needs the border of one side only, and samples beyond it
        // are zeros (`_made` in cpu/items.py).
        tile.rows = rows < tiling.rows ? rows : tiling.rows;
        tile.columns = columns < tiling.columns ? columns : tiling.columns;
        tile.x = static_cast<const T*>(t.x) + tile.image * t.xn + row * t.xr + tile.column;
        tile.y = static_cast<T*>(t.y) + tile.image * t.yn + row * t.yr + tile.column;
        tile.largest = waiting.largest == largest ? largest + t.cg : largest;
        bool kept = true;
        for (index_t c = 0; c < t.cg; ++c) {
            tile.largest[c] = largest_of(tile.x + c * t.xc, t.xr, tile.rows, tile.columns);
            kept = kept && safe(tile.largest[c], most<T>);
        }
        if (!kept) {
            sum_directly(t, tile, 0, t.oc);
            continue;
        }
        if (!waiting.x) {
            waiting = tile;
            continue;
        }
        // Planes of their own mustn't lend each other their errors.
        const bool together = waiting.image == tile.image;
        if (together || (t.cg == 1 && waiting.largest[0] > 0 && tile.largest[0] > 0)) {
            compute(t, parts, waiting, &tile, together ? T(1) : balance(waiting.largest[0], tile.largest[0]));
            waiting = {};
        } else {
            compute(t, parts, waiting, static_cast<const Tile<T>*>(nullptr), T(1));
            waiting = tile;
        }
    }
    if (waiting.x) compute(t, parts, waiting, static_cast<const Tile<T>*>(nullptr), T(1));
}
