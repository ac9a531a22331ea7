// Vectors as wide as the ISA level has them, by the vector extensions of GCC and Clang: one source serves
// every level. Included like types.h, after <immintrin.h> on x86.

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define CONVPAR_AVX512
#endif

#ifdef CONVPAR_AVX512
constexpr int vector_bytes = 64, vector_registers = 32;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32, vector_registers = 16;
#elif defined(__aarch64__)
constexpr int vector_bytes = 16, vector_registers = 32;
#else
constexpr int vector_bytes = 16, vector_registers = 16;
#endif
constexpr bool many_registers = vector_registers == 32;

// A product that is added at once takes no register of its own.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool fused_products = true;
#else
constexpr bool fused_products = false;
#endif
// Sums of fractions, whose products are added at once.
template <class T>
constexpr bool fused = fused_products && T(0.5) != T(0);

template <class T>
constexpr int lanes = vector_bytes / int(sizeof(T));

// Vec<T> lies in a register; memory is only ever touched through `load` and `store`, at any alignment.
template <class T>
struct Vector {
    typedef T type __attribute__((vector_size(vector_bytes)));
    typedef T unaligned __attribute__((vector_size(vector_bytes), aligned(1), may_alias));
};
template <class T>
using Vec = typename Vector<T>::type;

template <class T>
inline Vec<T> load(const T* p) {
    return *reinterpret_cast<const typename Vector<T>::unaligned*>(p);
}
// A vector that stays in a register: however few its uses, the compiler mayn't load it again for each.
template <class V>
inline V held(V v) {
#ifdef CONVPAR_AVX512
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}
// An address that nothing is known of: what lies there is loaded again, for registers are too few to keep it.
template <class T>
inline const T* elsewhere(const T* p) {
    asm("" : "+r"(p));
    return p;
}
template <class T>
inline void store(T* p, Vec<T> v) {
    *reinterpret_cast<typename Vector<T>::unaligned*>(p) = v;
}
template <class T>
inline Vec<T> broadcast(T v) {
    return v - Vec<T>{};  // not +, which would turn -0 into 0
}

// The products of types.h serve every lane; where the level has an instruction for both steps, it rounds once.
// `unmac` is acc - a * b.
#ifdef CONVPAR_AVX512
inline Vec<float> mac(Vec<float> acc, Vec<float> a, Vec<float> b) { return _mm512_fmadd_ps(a, b, acc); }
inline Vec<double> mac(Vec<double> acc, Vec<double> a, Vec<double> b) { return _mm512_fmadd_pd(a, b, acc); }
inline Vec<float> unmac(Vec<float> acc, Vec<float> a, Vec<float> b) { return _mm512_fnmadd_ps(a, b, acc); }
inline Vec<double> unmac(Vec<double> acc, Vec<double> a, Vec<double> b) {
    return _mm512_fnmadd_pd(a, b, acc);
}
#elif defined(__AVX2__) && defined(__FMA__)
inline Vec<float> mac(Vec<float> acc, Vec<float> a, Vec<float> b) { return _mm256_fmadd_ps(a, b, acc); }
inline Vec<double> mac(Vec<double> acc, Vec<double> a, Vec<double> b) { return _mm256_fmadd_pd(a, b, acc); }
inline Vec<float> unmac(Vec<float> acc, Vec<float> a, Vec<float> b) { return _mm256_fnmadd_ps(a, b, acc); }
inline Vec<double> unmac(Vec<double> acc, Vec<double> a, Vec<double> b) {
    return _mm256_fnmadd_pd(a, b, acc);
}
#elif defined(__aarch64__)
inline Vec<float> mac(Vec<float> acc, Vec<float> a, Vec<float> b) { return vfmaq_f32(acc, a, b); }
inline Vec<double> mac(Vec<double> acc, Vec<double> a, Vec<double> b) { return vfmaq_f64(acc, a, b); }
inline Vec<float> unmac(Vec<float> acc, Vec<float> a, Vec<float> b) { return vfmsq_f32(acc, a, b); }
inline Vec<double> unmac(Vec<double> acc, Vec<double> a, Vec<double> b) { return vfmsq_f64(acc, a, b); }
#else
template <class V>
inline V unmac(V acc, V a, V b) {
    return acc - a * b;
}
#endif

#ifdef CONVPAR_AVX512
// A bit for each byte of the first `count` lanes.
template <class T>
inline __mmask64 first_bytes(index_t count) {
    const index_t bytes = count * index_t(sizeof(T));
    return bytes < 64 ? (__mmask64(1) << bytes) - 1 : ~__mmask64(0);
}
#endif

#if defined(__AVX2__) && !defined(CONVPAR_AVX512)
// From the (8 - n)-th word on a mask of the first n words of a vector.
constexpr i32 first_words[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
#endif

// The first `count` lanes; nothing is read for the others, which become zeros. Like `load`, at any alignment.
template <class T>
inline Vec<T> load_first(const T* p, index_t count) {
#ifdef CONVPAR_AVX512
    return reinterpret_cast<Vec<T>>(_mm512_maskz_loadu_epi8(first_bytes<T>(count), p));
#else
    if (count == lanes<T>) return load(p);
#ifdef __AVX2__
    // What is stored lane by lane would have to reach the cache before it can be loaded as a vector.
    if constexpr (sizeof(T) >= 4) {
        const i32* mask = first_words + 8 - count * index_t(sizeof(T) / 4);
        return reinterpret_cast<Vec<T>>(_mm256_maskload_epi32(
            reinterpret_cast<const int*>(p), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask))));
    }
#endif
    T part[lanes<T>] = {};
    const char* from = reinterpret_cast<const char*>(p);
    for (index_t k = 0; k < count; ++k) __builtin_memcpy(part + k, from + k * sizeof(T), sizeof(T));
    return load(part);
#endif
}

// The first `count` lanes.
template <class T>
inline void store_first(T* p, Vec<T> v, index_t count) {
#ifdef CONVPAR_AVX512
    _mm512_mask_storeu_epi8(p, first_bytes<T>(count), reinterpret_cast<__m512i>(v));
#else
    if (count == lanes<T>) return store(p, v);
    T part[lanes<T>];
    store(part, v);
    char* to = reinterpret_cast<char*>(p);
    for (index_t k = 0; k < count; ++k) __builtin_memcpy(to + k * sizeof(T), part + k, sizeof(T));
#endif
}

// Stores past the caches; `p` is aligned to a vector.
template <class T>
inline void stream(T* p, Vec<T> v) {
#ifdef CONVPAR_AVX512
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(v));
#elif defined(__x86_64__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), reinterpret_cast<__m128i>(v));
#elif defined(__aarch64__)
    const auto halves = reinterpret_cast<Vec<double>>(v);
    asm("stnp %d1, %d2, %0"
        : "=Q"(*reinterpret_cast<typename Vector<T>::unaligned*>(p))
        : "w"(halves[0]), "w"(halves[1]));
#else
    store(p, v);
#endif
}

// What was streamed is there before anything that is stored later.
inline void stream_end() {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

// Fetches the line that lies so many bytes from p on, maybe beyond the array, to be read or written; Cache as __builtin_prefetch
// numbers them: 3 is the first. Always inline, as all that only fetch: to compilers a call of such a function does nothing, and they
// leave it out.
template <int Write = 0, int Cache = 3>
[[gnu::always_inline]] inline void fetch_line(const void* p, index_t bytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(p) + bytes), Write,
                       Cache);
}

// Fetches R rows and N vectors, `ahead` elements from p on.
template <int Write, int Cache, int R, int N, class T>
[[gnu::always_inline]] inline void fetch(const T* p, index_t step, index_t ahead) {
    index_t bytes = ahead * index_t(sizeof(T));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, bytes += step * index_t(sizeof(T))) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) fetch_line<Write, Cache>(p, bytes + n * vector_bytes);
    }
}

// Signed integers as wide as T.
template <int Size>
struct SignedOfSize;
template <>
struct SignedOfSize<1> {
    using type = i8;
};
template <>
struct SignedOfSize<2> {
    using type = i16;
};
template <>
struct SignedOfSize<4> {
    using type = i32;
};
template <>
struct SignedOfSize<8> {
    using type = i64;
};
template <class T>
using SignedOf = typename SignedOfSize<sizeof(T)>::type;

// Lane numbers, for shuffles.
template <class T>
using Lanes = Vec<SignedOf<T>>;

// 0, 1, ..., N - 1.
template <int... I>
struct Numbers {};
template <int N, int... I>
struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I>
struct UpTo<0, I...> {
    using type = Numbers<I...>;
};
// Numbers of all lanes.
template <class T>
using All = typename UpTo<lanes<T>>::type;

#ifdef CONVPAR_AVX512
// The lanes of `a` and `b` from `first` on, of two bytes or more.
template <class T, int... I>
inline __m512i lanes_from(__m512i a, __m512i b, index_t first, Numbers<I...>) {
    const auto numbers = reinterpret_cast<__m512i>(Lanes<T>{I...} + static_cast<SignedOf<T>>(first));
    if constexpr (sizeof(T) == 2) return _mm512_permutex2var_epi16(a, numbers, b);
    if constexpr (sizeof(T) == 4) return _mm512_permutex2var_epi32(a, numbers, b);
    if constexpr (sizeof(T) == 8) return _mm512_permutex2var_epi64(a, numbers, b);
}
#endif

// The lanes of `a` from `skip` on, then those of `b`.
template <class T>
inline Vec<T> join(Vec<T> a, Vec<T> b, index_t skip) {
#ifdef CONVPAR_AVX512
    const auto first = reinterpret_cast<__m512i>(a), second = reinterpret_cast<__m512i>(b);
    if constexpr (sizeof(T) == 1) {
        // This level permutes no bytes, but pairs of them: half of each comes from its neighbour where `skip` is odd.
        const __m128i bits = _mm_cvtsi64_si128(skip % 2 * 8), others = _mm_cvtsi64_si128(16 - skip % 2 * 8);
        const __m512i low = lanes_from<u16>(first, second, skip / 2, All<u16>());
        const __m512i high = lanes_from<u16>(first, second, skip / 2 + 1, All<u16>());
        return reinterpret_cast<Vec<T>>(_mm512_srl_epi16(low, bits) | _mm512_sll_epi16(high, others));
    } else {
        return reinterpret_cast<Vec<T>>(lanes_from<T>(first, second, skip, All<T>()));
    }
#else
    T both[2 * lanes<T>];
    store(both, a);
    store(both + lanes<T>, b);
    return load(both + skip);
#endif
}

// The lanes `I` of `a` and, from the number of lanes on, `b`: constants, so that the compiler finds the instruction.
template <class T, int... I>
inline Vec<T> pick(Vec<T> a, Vec<T> b, Numbers<I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, Lanes<T>{I...});
#endif
}

// Every other lane of two vectors, from the first or the second on.
template <class T, int First, int... I>
inline Vec<T> every_other_of(Vec<T> a, Vec<T> b, Numbers<I...>) {
    return pick<T>(a, b, Numbers<(2 * I + First)...>());
}
template <int First, class T>
[[gnu::always_inline]] inline Vec<T> every_other(Vec<T> a, Vec<T> b) {
    return every_other_of<T, First>(a, b, All<T>());
}

template <class T, int Skip, int... I>
inline Vec<T> join_at(Vec<T> a, Vec<T> b, Numbers<I...>) {
    return pick<T>(a, b, Numbers<(Skip + I)...>());
}
// As `join` with a constant: of four bytes and eight, one instruction. With masks, for else compilers warn of what it overwrites.
template <int Skip, class T>
inline Vec<T> join(Vec<T> a, Vec<T> b) {
#ifdef CONVPAR_AVX512
    const auto first = reinterpret_cast<__m512i>(a), second = reinterpret_cast<__m512i>(b);
    if constexpr (sizeof(T) == 4)
        return reinterpret_cast<Vec<T>>(_mm512_maskz_alignr_epi32(__mmask16(-1), second, first, Skip));
    if constexpr (sizeof(T) == 8)
        return reinterpret_cast<Vec<T>>(_mm512_maskz_alignr_epi64(__mmask8(-1), second, first, Skip));
#endif
    return join_at<T, Skip>(a, b, All<T>());
}

// Exchanges the lanes of `a` whose number has the bit Half with those of `b` that lack it.
template <int Half, class T, int... I>
inline void exchange(Vec<T>& a, Vec<T>& b, Numbers<I...>) {
    constexpr int n = lanes<T>;
    const Vec<T> c = a;
    a = pick<T>(c, b, Numbers<(I & Half ? n + I - Half : I)...>());
    b = pick<T>(c, b, Numbers<(I & Half ? n + I : I + Half)...>());
}

// Lane k of row r becomes lane r of row k, by exchanging ever smaller quarters.
template <class T, int Half = lanes<T> / 2>
inline void transpose(Vec<T> (&rows)[lanes<T>]) {
#pragma GCC unroll 64
    for (int r = 0; r < lanes<T>; ++r) {
        if (!(r & Half)) exchange<Half, T>(rows[r], rows[r + Half], All<T>());
    }
    if constexpr (Half > 1) transpose<T, Half / 2>(rows);
}

// `pixels` vectors of output channels, with room to read on to a multiple of the lanes, become rows of pixels, one for
// each of the `channels`.
template <class T>
void turn(const T* done, index_t pixels, T* y, index_t apart, index_t channels) {
    for (index_t j = 0; j < pixels; j += lanes<T>, done += lanes<T> * lanes<T>) {
        const index_t width = pixels - j < lanes<T> ? pixels - j : index_t(lanes<T>);
        Vec<T> rows[lanes<T>];
#pragma GCC unroll 64
        for (int k = 0; k < lanes<T>; ++k) rows[k] = load(done + k * lanes<T>);
        transpose<T>(rows);
        T* to = y + j;
#pragma GCC unroll 64
        for (int k = 0; k < lanes<T>; ++k, to += apart) {
            if (k < channels) store_first(to, rows[k], width);
        }
    }
}
