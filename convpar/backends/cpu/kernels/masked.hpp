// Builds on: simd.
// Idea: lanes beyond the edge of the image are masked as they are loaded, so that the zeros around it need no copy. Blocks are
//       as wide as a row of a small image, and lower for it: rows are read and written from their beginning to their
//       end, one after the other, which is how they come from memory fastest. Of a wide image only the edges are taken so.
// Step: half of simd's time at 3 x 3 and three quarters at 7 x 7, of planes of 56 x 56 (docs/cpu-speed.md, Steps).
// Limit: memory up to 5 x 5, beyond that arithmetic. A last vector that isn't full takes as long as the others.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // only there masks have registers of their own
#else

// Columns of outputs beyond which simd's taller blocks are faster where there is no edge.
template <class T>
constexpr index_t narrow = 16 * lanes<T>;

// Filter columns whose masks are kept, a power of two. Larger filters gain nothing.
constexpr int most_columns = 16;

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    // The rung before streams what is left to it.
    k.streams = narrow<T> + 1;
    k.over_edge = {1, most_columns, lanes<T>, false, narrow<T>};
    return k;
}

// Vectors of a block, its sums and rows, and filter rows whose weights fit the registers beside the sums and a sample.
constexpr int most_vectors = 4, most_sums = 16, most_rows = 8, pass_rows = 8;

// A row of the image where there is none.
template <class T>
constexpr T zeros[most_vectors * lanes<T> + most_columns] = {};

// A bit for each lane that is loaded; the others become zeros, and nothing is read for them.
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
inline Vec<float> load(const float* p, Mask<float> mask) { return _mm512_maskz_loadu_ps(mask, p); }
inline Vec<double> load(const double* p, Mask<double> mask) { return _mm512_maskz_loadu_pd(mask, p); }

// The samples of one channel, and what surrounds them.
template <class T>
struct Samples {
    const T* first;
    index_t row;            // from one to the next
    index_t rows, columns;  // that there are
    index_t top, left;      // from the first sample under output (0, 0) to sample (0, 0)

    explicit Samples(const Work& t) : first(static_cast<const T*>(t.x)), row(t.xr) {
        const index_t endless = index_t(1) << 40;
        rows = t.over_edge ? t.rows.n : endless;
        columns = t.over_edge ? t.cols.n : endless;
        top = -t.row0;
        left = -t.col0;
    }

    // Addresses of `count` rows from i on, at column j. There may be none.
    void find(index_t i, index_t j, int count, std::uintptr_t* addresses) const {
        auto at = reinterpret_cast<std::uintptr_t>(first) + (i * row + j) * sizeof(T);
        const auto none = reinterpret_cast<std::uintptr_t>(zeros<T>);
#pragma GCC unroll 16
        for (int k = 0; k < count; ++k, at += row * sizeof(T)) {
            // Negative numbers become large ones. Without branches, which are hard to foretell here.
            const bool exists = std::uint64_t(i + k) < std::uint64_t(rows);
            addresses[k] = none ^ ((none ^ at) & -std::uintptr_t(exists));
        }
    }
};

// Where the vectors of a block begin, and which lanes of the samples under them lie in the image.
template <class T>
struct Block {
    index_t j, last;  // of the first; and from there to the last
    int vectors;
    index_t heeded;  // bits of a filter column's number that its masks depend on: none where there is no edge
    Mask<T> masks[most_columns][most_vectors];

    // The last vector of a row reaches back over outputs that are done already.
    void place(const Work& t, index_t j_, int vectors_) {
        j = j_;
        vectors = vectors_;
        last = (vectors - 1) * lanes<T>;
        if (j + last + lanes<T> > t.ow) last = t.ow > lanes<T> ? t.ow - lanes<T> - j : 0;
    }
    void mask(const Work& t, const Samples<T>& x) {
        heeded = t.over_edge ? most_columns - 1 : 0;
        for (index_t q = 0; q < t.kw && q <= heeded; ++q) {
            for (int n = 0; n < vectors; ++n) {
                const index_t from = j + (n < vectors - 1 ? n * lanes<T> : last) + q - x.left;
                masks[q][n] = lanes_between<T>(-from, x.columns - from);
            }
        }
    }
};

// Blocks down whose rows are fetched ahead: processors that follow the loads of a row by themselves may not follow masked ones.
// AMD's family 26 takes twice as long without from memory, and 1.2 times from the shared cache; in the caches of a core fetching
// takes up to a tenth.
constexpr index_t blocks_ahead = 4;

// Adds to R rows x N vectors of sums the products of P rows of filter column q, whose samples are in R + P - 1 rows.
template <int P, int R, int N, class T>
[[gnu::always_inline]] inline void column(Vec<T> (&sum)[R][N], const std::uintptr_t* rows,
                                          const Block<T>& block, const T* w, index_t kw, index_t q) {
    const index_t last = block.last;
    Vec<T> weight[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) weight[p] = broadcast(w[p * kw + q]);
    Mask<T> masks[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
        masks[n] = block.masks[q & block.heeded][n];
        // Each in a register of its own.
        asm("" : "+Yk"(masks[n]));
    }
#pragma GCC unroll 16
    for (int k = 0; k < R + P - 1; ++k) {
        const T* row = reinterpret_cast<const T*>(rows[k]);
        // Else the compiler would keep a pointer to each row and vector, in more registers than there are.
        asm("" : "+r"(row));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const Vec<T> sample = held(load(row + q + (n < N - 1 ? n * lanes<T> : last), masks[n]));
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                const int r = k - p;
                if (r >= 0 && r < R) sum[r][n] = mac(sum[r][n], sample, weight[p]);
            }
        }
    }
}

// The same of all columns: K, or if K is 0 any number.
template <int P, int K, int R, int N, class T>
[[gnu::always_inline]] inline void pass(Vec<T> (&sum)[R][N], const Samples<T>& x, index_t i,
                                        const Block<T>& block, const T* w, index_t kw) {
    std::uintptr_t rows[R + P - 1];
    x.find(i, block.j - x.left, R + P - 1, rows);
    if constexpr (K > 0) {
#pragma GCC unroll 8
        for (int q = 0; q < K; ++q) column<P>(sum, rows, block, w, K, q);
    } else {
        for (index_t q = 0; q < kw; ++q) column<P>(sum, rows, block, w, kw, q);
    }
}

// R rows of outputs from row i on, N vectors of each. The filter has K rows and columns, or if K is 0 any number.
template <int K, int R, int N, class T>
[[gnu::always_inline]] inline void sums(const Work& t, Samples<T> x, const Block<T>& block, const T* w,
                                        T bias, T* y, index_t i) {
    Vec<T> sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[r][n] = broadcast(bias);
    }
    const index_t first = i - x.top;
    y += i * t.yr + block.j;
    if (t.off_core && t.out_in_place) fetch<1, 3, R, N>(y, t.yr, blocks_ahead * R * t.yr);
    for (index_t c = 0; c < t.cg; ++c, x.first += t.xc, w += t.kh * t.kw) {
        if (t.off_core && t.in_place)
            fetch<0, 3, R, N>(x.first, x.row, (first + t.kh - 1 + blocks_ahead * R) * x.row + block.j);
        if constexpr (K > 0) {
            pass<K, K>(sum, x, first, block, w, K);
        } else {
            // As few passes as there are with so many rows at most, all equal but the last.
            const index_t passes = (t.kh - 1) / pass_rows + 1, most = (t.kh - 1) / passes + 1;
            for (index_t p = 0, count; p < t.kh; p += count) {
                count = t.kh - p < most ? t.kh - p : most;
                const T* weights = w + p * t.kw;
                switch (count) {
#define PASS(P) \
    case P: pass<P, 0>(sum, x, first + p, block, weights, t.kw); break;
                    PASS(1) PASS(2) PASS(3) PASS(4) PASS(5) PASS(6) PASS(7) PASS(8)
#undef PASS
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, y += t.yr) {
        if (N == 1 && t.ow < lanes<T>) {
            store_first(y, sum[r][0], t.ow);
        } else {
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) store(y + (n < N - 1 ? n * lanes<T> : block.last), sum[r][n]);
        }
    }
}

// Rows i to end of outputs in one block's columns, R at once. Apart from what calls it, which takes registers of its own.
template <int K, int R, int N, class T>
[[gnu::noinline]] void strip(const Work& t, const Samples<T>& x, const Block<T>& block, const T* w, T bias,
                             T* y, index_t i, index_t end) {
    for (; i < end; i += R) sums<K, R, N>(t, x, block, w, bias, y, i);
}

// The same for the number of vectors that the block has.
template <int K, int R, class T>
void of_rows(const Work& t, const Samples<T>& x, const Block<T>& block, const T* w, T bias, T* y, index_t i,
             index_t end) {
    switch (block.vectors) {
#define VECTORS(N)                                                                         \
    case N:                                                                                \
        if constexpr (R * N <= most_sums) strip<K, R, N>(t, x, block, w, bias, y, i, end); \
        break;
        VECTORS(1) VECTORS(2) VECTORS(3) VECTORS(4)
#undef VECTORS
    }
}

// All blocks of a row. Only the first and the last of them meet the image's edges.
template <class T>
struct Row {
    index_t blocks, least, wider;
    Block<T> first, between, final;

    Row(const Work& t, const Samples<T>& x) {
        if (t.gap < t.after_gap) {
            // Nothing reaches over an edge by more than a vector.
            blocks = (t.gap > 0) + (t.after_gap < t.ow);
            least = 1;
            wider = 0;
        } else {
            const index_t vectors = (t.ow - 1) / lanes<T> + 1;
            blocks = (vectors - 1) / most_vectors + 1;
            least = vectors / blocks;
            wider = vectors % blocks;
        }
        place(t, 0).mask(t, x);
        if (blocks > 2) place(t, 1).mask(t, x);
        if (blocks > 1) place(t, blocks - 1).mask(t, x);
    }
    Block<T>& place(const Work& t, index_t b) {
        Block<T>& block = b == 0 ? first : b < blocks - 1 ? between : final;
        index_t j;
        if (t.gap < t.after_gap) {
            j = b == 0 && t.gap > 0 ? 0 : t.after_gap;
        } else {
            j = (b * least + (b < wider ? b : wider)) * lanes<T>;
        }
        block.place(t, j, int(least + (b < wider)));
        return block;
    }
};

template <int K, class T>
void planes(const Work& t) {
    const Samples<T> x(t);
    Row<T> row(t, x);
    const index_t widest = row.least + (row.wider > 0);
    const index_t tall = widest == 1 ? most_rows : widest == 2 ? most_sums / 2 : most_sums / 4;
    for (index_t o = 0; o < t.oc; ++o) {
        const T* w = static_cast<const T*>(t.w) + o * t.cg * t.kh * t.kw;
        const T bias = static_cast<const T*>(t.bias)[o];
        T* y = static_cast<T*>(t.y) + o * t.yo;
        index_t taken = tall;
        for (index_t i = 0, end; i < t.oh; i = end) {
            while (taken > t.oh - i) taken /= 2;
            // All rows of one block, or all blocks of one row.
            end = row.blocks == 1 ? t.oh - (t.oh - i) % taken : i + taken;
            for (index_t b = 0; b < row.blocks; ++b) {
                const Block<T>& block = row.blocks == 1 ? row.first : row.place(t, b);
                switch (taken) {
                    case 1: of_rows<K, 1>(t, x, block, w, bias, y, i, end); break;
                    case 2: of_rows<K, 2>(t, x, block, w, bias, y, i, end); break;
                    case 4: of_rows<K, 4>(t, x, block, w, bias, y, i, end); break;
                    case 8: of_rows<K, 8>(t, x, block, w, bias, y, i, end); break;
                }
            }
        }
    }
}

template <class T>
void work(const Work& t) {
    // The filters that are met most: without a loop over columns they take less time.
    if (t.kh == t.kw) {
        switch (t.kh) {
            case 3: return planes<3, T>(t);
            case 5: return planes<5, T>(t);
            case 7: return planes<7, T>(t);
        }
    }
    planes<0, T>(t);
}

#endif
