// Builds on: simd.
// Idea: lanes are output channels. A sample, sent to all lanes, meets a vector of packed weights, and a row of
//       neighbouring outputs stays in registers: any stride, width and dilation runs at the same speed.
// Limit: arithmetic, where the output channels fill the lanes; lanes beyond them compute for nothing.

// Filters lie as [oc / lanes][cg][kh][kw][lanes].
template <class T>
constexpr index_t packing = lanes<T>;
template <class T>
constexpr factor_t factors = nullptr;
constexpr index_t farthest = 0;
template <class T>
constexpr index_t streams = 0;
template <class T>
constexpr Transform transform = {};

// Neighbouring filter columns that meet a sample while it is in a register. One vector of output channels alone would
// need a load for every product, two don't.
template <int N>
constexpr int most_columns = N == 1 && vector_registers == 32 ? 4 : 1;

// Outputs whose sums fit the registers beside the weights and a sample.
template <int N>
constexpr int most_pixels = (vector_registers - 1 - N * most_columns<N> - (vector_registers == 16)) / N;

// Adds the products of Q filter columns to J outputs. The samples of neighbouring columns are neighbours.
template <int Q, int N, int J, class T>
inline void pass(Vec<T> (&sum)[N][J], const T* x, const T* w, index_t w_block) {
    Vec<T> weight[N][Q];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) weight[n][q] = load(w + n * w_block + q * lanes<T>);
    }
#pragma GCC unroll 32
    for (int k = 0; k < J + Q - 1; ++k) {
        const Vec<T> sample = Q > 1 ? held(broadcast(x[k])) : broadcast(x[k]);
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
            const int j = k - q;
            if (j < 0 || j >= J) continue;
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sum[n][j] = mac(sum[n][j], sample, weight[n][q]);
        }
    }
}

// Fetches what lies so many bytes behind a sample, and maybe behind the array.
template <class T>
inline void prefetch(const T* sample, index_t bytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(sample) + bytes));
}

// Adds the products of all channels and taps, several filter columns at a time.
template <int N, int J, class T>
inline void by_columns(Vec<T> (&sum)[N][J], const Work& t, const T* x, const T* w, index_t w_block) {
    // The image's planes lie too far apart for the processor to foresee.
    const index_t below = ((t.kh - 1) * t.dh + t.sh) * t.xr * index_t(sizeof(T));
    for (index_t c = 0; c < t.cg; ++c, x += t.xc) {
        const T* row = x;
        prefetch(x, below);
        prefetch(x, below + 64);
        for (index_t p = 0; p < t.kh; ++p, row += t.dh * t.xr) {
            for (index_t q = 0; q < t.kw;) {
                const index_t left = t.neighbours ? t.kw - q : 1;
                const int taken = left < most_columns<N> ? int(left) : most_columns<N>;
                switch (taken) {
#define PASS(Q)                                                                        \
    case Q:                                                                            \
        if constexpr (Q <= most_columns<N>) pass<Q>(sum, row + t.taps[q], w, w_block); \
        break;
                    PASS(1)
                    PASS(2)
                    PASS(3)
                    PASS(4)
#undef PASS
                }
                q += taken;
                w += taken * lanes<T>;
            }
        }
    }
}

// The same tap by tap, in one loop over channels and taps without another branch: the processor keeps so short a one
// decoded, and foresees its end.
template <int N, int J, class T>
inline void by_taps(Vec<T> (&sum)[N][J], const Work& t, const T* x, const T* w, index_t w_block) {
    // What was gathered waits in the second cache; in place, the next row of outputs is far from any cache.
    const index_t ahead = (t.in_place ? t.sh * t.xr : t.xc) * index_t(sizeof(T));
    const index_t *step = t.steps, *end = t.steps + t.kh * t.kw;
    for (index_t k = t.cg * t.kh * t.kw; k > 0; --k, w += lanes<T>) {
        prefetch(x, ahead);
        pass<1>(sum, x, w, w_block);
        x += *step++;
        asm("" : "+r"(step));  // else the compiler would branch
        step = step == end ? t.steps : step;
    }
}

// Outputs whose sums wait until they become rows of pixels, so that most of these are whole vectors: eight blocks of 14
// outputs are seven vectors of 16.
constexpr int strip = 112;

// One row of J outputs and N vectors of output channels.
template <int N, int J, class T>
void block(const Work& t, const T* x, const T* w, const T* bias, T* done) {
    const index_t w_block = t.cg * t.kh * t.kw * lanes<T>;
    Vec<T> sum[N][J];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 32
        for (int j = 0; j < J; ++j) sum[n][j] = load(bias + n * lanes<T>);
    }
    if constexpr (most_columns<N> > 1) {
        by_columns(sum, t, x, w, w_block);
    } else {
        by_taps(sum, t, x, w, w_block);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 32
        for (int j = 0; j < J; ++j) store(done + (n * strip + j) * lanes<T>, sum[n][j]);
    }
}

template <class T>
using block_t = void (*)(const Work&, const T*, const T*, const T*, T*);

// The block of `pixels` outputs, found among J, J - 1, ..., 1.
template <int N, int J, class T>
block_t<T> find_block(index_t pixels) {
    if constexpr (J == 1) {
        return block<N, 1, T>;
    } else {
        return pixels == J ? block<N, J, T> : find_block<N, J - 1, T>(pixels);
    }
}

// N vectors of output channels over the whole rectangle; rows fall into blocks of nearly equal width.
template <int N, class T>
void channels(const Work& t, const T* w, const T* bias, T* y, index_t last) {
    const index_t blocks = (t.ow - 1) / most_pixels<N> + 1, narrow = t.ow / blocks, wider = t.ow % blocks;
    const block_t<T> wide_block = find_block<N, most_pixels<N>, T>(wider ? narrow + 1 : narrow);
    const block_t<T> narrow_block = find_block<N, most_pixels<N>, T>(narrow);
    T done[N * strip * lanes<T>];
    index_t taken = 0, given = 0;
    const auto give = [&](index_t pixels) {
        for (int n = 0; n < N; ++n) {
            turn(done + (n * strip + given) * lanes<T>, pixels, y + n * lanes<T> * t.yo + given, t.yo,
                 n + 1 < N ? index_t(lanes<T>) : last);
        }
        given += pixels;
    };
    const auto give_all = [&] {
        give(taken - given);
        y += taken;
        taken = given = 0;
    };
    for (index_t i = 0; i < t.oh; ++i) {
        const T* x = static_cast<const T*>(t.x) + i * t.sh * t.xr;
        for (index_t b = 0; b < blocks; ++b) {
            const index_t width = narrow + (b < wider);
            if (taken + width > strip) give_all();
            // Stores to lines that aren't there would hold up what follows.
            for (index_t k = 0; k < (N - 1) * lanes<T> + last; ++k)
                prefetch(y + k * t.yo + taken + width - 1, 0);
            (b < wider ? wide_block : narrow_block)(t, x, w, bias, done + taken * lanes<T>);
            taken += width;
            x += width;
            give((taken - given) / lanes<T> * lanes<T>);
        }
        // Where rows of outputs follow each other in memory, they are one.
        if (t.yr != t.ow || i + 1 == t.oh) {
            give_all();
            y += t.yr - t.ow;
        }
    }
}

template <class T>
void work(const Work& t) {
    const index_t w_block = t.cg * t.kh * t.kw * lanes<T>;
    const T* bias = static_cast<const T*>(t.bias);
    for (index_t o = 0; o < t.oc;) {
        const T* w = static_cast<const T*>(t.w) + o / lanes<T> * w_block;
        T* y = static_cast<T*>(t.y) + o * t.yo;
        const index_t left = t.oc - o;
        if (left > lanes<T>) {
            channels<2, T>(t, w, bias + o, y, left < 2 * lanes<T> ? left - lanes<T> : lanes<T>);
            o += 2 * lanes<T>;
        } else {
            channels<1, T>(t, w, bias + o, y, left);
            o += lanes<T>;
        }
    }
}
