// Vectors some of whose lanes lie beyond an image: their masks, rows of samples with zeros where there are none, blocks of columns, and
// how the planes of a call follow each other, alone or in pairs. Included after simd.h, where there are masked loads.

// Rows and columns of samples from an output to the next, at most.
constexpr int most_stride = 2;

// Filter columns whose masks are kept, a power of two. Larger filters gain nothing.
constexpr int most_columns = 16;

template <class T>
constexpr int half = lanes<T> / 2;

// Vectors of a block.
constexpr int most_vectors = 4;

// Calls `with` with their number as a constant.
template <class F>
void with_vectors(int count, F with) {
    switch (count) {
        case 1: return with(std::integral_constant<int, 1>());
        case 2: return with(std::integral_constant<int, 2>());
        case 3: return with(std::integral_constant<int, 3>());
        case 4: return with(std::integral_constant<int, 4>());
    }
}

// A row of the image where there is none, under a block and behind it as many columns as masks are kept for, or a vector.
template <class T>
constexpr T
    zeros[most_stride * most_vectors * lanes<T> + (most_columns > lanes<T> ? most_columns : lanes<T>)] = {};

#ifdef CONVPAR_AVX512

// A bit for each lane that is loaded or stored; the others become zeros, and nothing is read for them.
template <class T>
struct MaskOf {
    using type = __mmask16;
};
template <>
struct MaskOf<double> {
    using type = __mmask8;
};
template <class T>
using Mask = typename MaskOf<T>::type;

inline unsigned lowest(index_t count) {
    const index_t least = count < 0 ? 0 : count;
    return _bzhi_u32(~0u, unsigned(least < 32 ? least : 32));
}
// Lanes from `first` on, up to `end`.
template <class T>
inline Mask<T> lanes_between(index_t first, index_t end) {
    return Mask<T>(lowest(end) & ~lowest(first));
}
// Half as many lanes on.
template <class T>
inline Mask<T> in_second_half(Mask<T> mask) {
    return Mask<T>(mask << half<T>);
}
template <class T>
inline bool any_lane(Mask<T> mask) {
    return mask != 0;
}
inline Vec<float> load(const float* p, Mask<float> mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline Vec<double> load(const double* p, Mask<double> mask) { return _mm512_maskz_loadu_pd(mask, p); }
// The same into a vector that keeps the other lanes.
inline Vec<float> load_into(Vec<float> v, const float* p, Mask<float> mask) {
    return _mm512_mask_loadu_ps(v, mask, p);
}
inline Vec<double> load_into(Vec<double> v, const double* p, Mask<double> mask) {
    return _mm512_mask_loadu_pd(v, mask, p);
}
inline void store(float* p, Vec<float> v, Mask<float> mask) { _mm512_mask_storeu_ps(p, mask, v); }
inline void store(double* p, Vec<double> v, Mask<double> mask) { _mm512_mask_storeu_pd(p, mask, v); }

// In a register of its own.
template <class M>
inline M held_mask(M mask) {
    asm("" : "+Yk"(mask));
    return mask;
}

#else

// With AVX2 a mask is a vector, of whose lanes the first bit counts. All of them wait in memory: registers are too few.
template <class T>
using Mask = Lanes<T>;

template <class T, int... I>
inline Mask<T> numbers_between(index_t first, index_t end, Numbers<I...>) {
    const auto within = [](index_t lane) {
        return SignedOf<T>(lane < 0 ? 0 : lane < lanes<T> ? lane : lanes<T>);
    };
    const Lanes<T> number{I...};
    return (number >= within(first)) & (number < within(end));
}
template <class T>
inline Mask<T> lanes_between(index_t first, index_t end) {
    return numbers_between<T>(first, end, All<T>());
}
template <class T, int... I>
inline Mask<T> move_half(Mask<T> mask, Numbers<I...>) {
    return pick<SignedOf<T> >(Mask<T>{}, mask, Numbers<(I < half<T> ? I : lanes<T> + I - half<T>)...>());
}
template <class T>
inline Mask<T> in_second_half(Mask<T> mask) {
    return move_half<T>(mask, All<T>());
}
template <class T>
inline bool any_lane(Mask<T> mask) {
    return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
}
inline Vec<float> load(const float* p, Mask<float> mask) {
    return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(mask));
}
inline Vec<double> load(const double* p, Mask<double> mask) {
    return _mm256_maskload_pd(p, reinterpret_cast<__m256i>(mask));
}
// `v` has zeros there.
template <class T>
inline Vec<T> load_into(Vec<T> v, const T* p, Mask<T> mask) {
    return reinterpret_cast<Vec<T> >(reinterpret_cast<__m256i>(v) | reinterpret_cast<__m256i>(load(p, mask)));
}
// Most stores are whole, and AMD's processors take long for masked ones.
inline void store(float* p, Vec<float> v, Mask<float> mask) {
    const auto bits = reinterpret_cast<__m256i>(mask);
    if (_mm256_movemask_epi8(bits) == -1) return store(p, v);
    _mm256_maskstore_ps(p, bits, v);
}
inline void store(double* p, Vec<double> v, Mask<double> mask) {
    const auto bits = reinterpret_cast<__m256i>(mask);
    if (_mm256_movemask_epi8(bits) == -1) return store(p, v);
    _mm256_maskstore_pd(p, bits, v);
}
template <class M>
inline M held_mask(M mask) {
    return mask;
}

#endif

// Rows whose samples and outputs are fetched ahead: processors that follow the loads of a row by themselves may not follow masked
// ones. AMD's family 26 takes twice as long without from memory, and 1.2 times from the shared cache; in the caches of a core
// fetching takes up to a tenth.
constexpr index_t rows_ahead = 16;

// The samples of one channel, and what surrounds them.
template <class T>
struct Samples {
    const T* first;
    index_t row;            // from one to the next
    index_t rows, columns;  // that there are
    index_t top, left;      // from the first sample under output (0, 0) to sample (0, 0)
    index_t ahead;          // from a sample to one that is fetched with it

    explicit Samples(const Work& t) : first(static_cast<const T*>(t.x)), row(t.xr) {
        rows = t.over_edge ? t.rows.n : (t.oh - 1) * t.sh + t.kh;
        columns = t.over_edge ? t.cols.n : (t.ow - 1) * t.sw + t.kw;
        top = -t.row0;
        left = -t.col0;
        ahead = rows_ahead * row;
    }

    bool exists(index_t i) const { return std::uint64_t(i) < std::uint64_t(rows); }
    // Row i from column j on, or zeros. Not a pointer at first: it may lie before the array. Without branches, which are hard to
    // foretell here.
    const T* row_or_zeros(index_t i, index_t j) const {
        const auto at = reinterpret_cast<std::uintptr_t>(first) + (i * row + j) * sizeof(T);
        const auto none = reinterpret_cast<std::uintptr_t>(zeros<T>);
        return reinterpret_cast<const T*>(none ^ ((none ^ at) & -std::uintptr_t(exists(i))));
    }
};

// Vectors of samples that need masks, of a block that slides: none, the first, or any.
enum Edges { NONE, FIRST, ANY };

// Whether what a block that slides meets of its columns after the first is joined of what it has loaded. With AVX2 that takes two
// instructions, as long as two loads.
constexpr bool joins = many_registers;

// The columns of a block, and which lanes of the samples under them lie in the image: of S vectors under a vector of outputs of stride S.
template <int S, class T>
struct Block {
    index_t j, last;  // of the first; and from there to the last
    int vectors;
    Edges edges;            // of blocks that slide without a stride
    bool followed = false;  // by columns that are folded, which are fetched with it
    Mask<T> outputs;        // of the last
    index_t heeded;         // bits of a filter column's number that the masks depend on
    Mask<T> masks[most_columns][S * most_vectors];

    // What would reach beyond the row's end reaches back over outputs that are done already, if there are so many: the block if it
    // slides, else only its last vector. If it slides, only the first or the last vector needs masks under columns after the first, or
    // where vectors aren't joined all do; and with a stride none does.
    void place(const Work& t, const Samples<T>& x, bool slides, index_t j_, int vectors_) {
        vectors = vectors_;
        const index_t farthest = t.ow - vectors * lanes<T>;
        j = !slides || farthest < 0 || j_ <= farthest ? j_ : farthest;
        last = (vectors - 1) * lanes<T>;
        if (!slides && j + last + lanes<T> > t.ow) last = t.ow > lanes<T> ? t.ow - lanes<T> - j : 0;
        outputs = lanes_between<T>(0, t.ow - j - last);
        edges = j + last + lanes<T> + t.kw - 1 - x.left > x.columns ? ANY : j < x.left ? FIRST : NONE;
        // Wider filters are met only where no edge is.
        heeded = t.kw <= most_columns ? most_columns - 1 : 0;
        const index_t masked = slides && S > 1 ? 1 : t.kw;
        for (index_t q = 0; q < masked && q <= heeded; ++q) {
            for (int n = slides && joins && q > 0 && edges != FIRST ? vectors - 1 : 0; n < vectors; ++n) {
                index_t from = S * (j + column(n, vectors)) + q - x.left;
                for (int s = 0; s < S; ++s, from += lanes<T>)
                    masks[q][S * n + s] = lanes_between<T>(-from, x.columns - from);
            }
        }
        for (int s = 0; heeded == 0 && s < S; ++s) {
            const index_t samples = S * (t.ow - j - last - 1) + 1;
            masks[0][S * (vectors - 1) + s] = lanes_between<T>(0, samples - s * lanes<T>);
        }
    }
    // Of samples whose vector holds another plane's too the first half.
    void halve(index_t columns) {
        for (index_t q = 0; S == 1 && q < columns && q <= heeded; ++q)
            masks[q][0] &= lanes_between<T>(0, half<T>);
    }
    // Of N vectors the n-th one's, from the block's first.
    index_t column(int n, int N) const { return n < N - 1 ? n * lanes<T> : last; }
};

// All blocks of a row of outputs, or of its first columns. Only the first and the last of them meet the image's edges, and where the last
// is a single vector the one before it.
template <int S, class T>
struct Row {
    index_t blocks, least, wider;
    bool meets_edge;  // the one before the last, if that isn't the second
    Block<S, T> first, between, before_final, final;

    // Of `most` vectors at most.
    Row(const Work& t, const Samples<T>& x, index_t columns, bool slides, index_t most) {
        if (t.gap < t.after_gap) {
            // Nothing reaches over an edge by more than a vector.
            blocks = (t.gap > 0) + (t.after_gap < t.ow);
            least = 1;
            wider = 0;
        } else {
            const index_t vectors = (columns - 1) / lanes<T> + 1;
            blocks = (vectors - 1) / most + 1;
            least = vectors / blocks;
            wider = vectors % blocks;
        }
        first.place(t, x, slides, begin(t, 0), vectors(0));
        // As one that doesn't slide: the number of its vectors changes, so that all need masks.
        if (blocks > 2) between.place(t, x, false, begin(t, 1), vectors(1));
        meets_edge = blocks > 3 && vectors(blocks - 1) == 1;
        if (meets_edge) before_final.place(t, x, false, begin(t, blocks - 2), vectors(blocks - 2));
        if (blocks > 1) final.place(t, x, slides, begin(t, blocks - 1), vectors(blocks - 1));
        (blocks > 1 ? final : first).followed = columns < t.ow;
    }
    int vectors(index_t b) const { return int(least + (b < wider)); }
    index_t begin(const Work& t, index_t b) const {
        if (t.gap < t.after_gap) return b == 0 && t.gap > 0 ? 0 : t.after_gap;
        return (b * least + (b < wider ? b : wider)) * lanes<T>;
    }
    const Block<S, T>& at(const Work& t, index_t b) {
        if (b == 0) return first;
        if (b == blocks - 1) return final;
        if (meets_edge && b == blocks - 2) return before_final;
        between.j = begin(t, b);
        between.vectors = vectors(b);
        between.last = (between.vectors - 1) * lanes<T>;
        return between;
    }
};

// Calls `with` for every filter of every group: the samples of its group, its number there, weights, bias and outputs.
template <class T, class F>
void each_filter(const Work& t, Samples<T> x, F with) {
    const T *w = static_cast<const T*>(t.w), *bias = static_cast<const T*>(t.bias);
    for (index_t g = 0; g < t.groups; ++g, x.first += t.xg) {
        T* y = static_cast<T*>(t.y) + g * t.yg;
        for (index_t o = 0; o < t.oc; ++o, w += t.cg * t.kh * t.kw, ++bias, y += t.yo)
            with(x, o, w, *bias, y);
    }
}

// Weights of planes that are taken in pairs, at most.
constexpr int most_paired = 9 * 9;

// Whether planes are taken in pairs: each has a filter of its own, and rows fill half a vector at most.
template <class T>
bool pairs(const Work& t) {
    return t.groups > 1 && t.cg == 1 && t.oc == 1 && t.ow <= half<T> && t.kh * t.kw <= most_paired;
}

template <class T, int... I>
inline Vec<T> both(T a, T b, Numbers<I...>) {
    return Vec<T>{(I < half<T> ? a : b)...};
}

// Where `p` lies `back` elements before, and maybe before the array: only what is in the array is loaded or stored there.
template <class T>
inline T* back(T* p, index_t elements) {
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(p) - elements * sizeof(T));
}

// What half the lanes load of a plane and the others of the next one's same row. The mask is the first half's.
template <class T>
[[gnu::always_inline]] inline Vec<T> load_both(const T* p, const T* next, Mask<T> mask) {
    return load_into(load(p, mask), back(next, half<T>), in_second_half<T>(mask));
}
template <class T>
[[gnu::always_inline]] inline void store_both(T* p, T* next, Vec<T> v, Mask<T> mask) {
    store(p, v, mask);
    store(back(next, half<T>), v, in_second_half<T>(mask));
}

// Calls `with` for every pair: the first one's samples, both planes' weights, a vector each, and biases, and the first one's outputs.
template <class T, class F>
void each_pair(const Work& t, Samples<T> x, F with) {
    const T *w = static_cast<const T*>(t.w), *bias = static_cast<const T*>(t.bias);
    T* y = static_cast<T*>(t.y);
    const index_t taps = t.kh * t.kw;
    alignas(vector_bytes) T weights[most_paired * lanes<T>];
    index_t left = t.groups;
    for (; left > 1; left -= 2, x.first += 2 * t.xg, w += 2 * taps, bias += 2, y += 2 * t.yg) {
        for (index_t k = 0; k < taps; ++k) store(weights + k * lanes<T>, both(w[k], w[taps + k], All<T>()));
        with(x, weights, both(bias[0], bias[1], All<T>()), y);
    }
    if (left == 0) return;
    Work last = t;
    last.groups = 1;
    last.x = x.first;
    last.w = w;
    last.bias = bias;
    last.y = y;
    work<T>(last);
}

// The sums that a bias, or both planes', begins with.
template <class T>
inline Vec<T> begun(T bias) {
    return broadcast(bias);
}
template <class T>
inline Vec<T> begun(Vec<T> biases) {
    return biases;
}

// Weight number k, of a pair both planes'.
template <bool Pair, class T>
inline Vec<T> weight_at(const T* w, index_t k) {
    return Pair ? load(w + k * lanes<T>) : broadcast(w[k]);
}
