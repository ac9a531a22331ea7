// Samples as vectors of sums and sums as results, of the same type; or, from AVX2 on, narrow ones, of pictures: integers of 8 and 16
// bits, which become floats as they are loaded, and floats, which are rounded, saturated and packed as they are stored. Included like simd.h, after it.

#ifdef __AVX2__
#define CONVPAR_NARROW
#endif

// Whether samples and results X aren't of the sums' type T.
template <class X, class T>
constexpr bool converts = !std::is_same_v<X, T>;

// Lines of the cache that samples of N vectors are fetched by.
template <class X, class T, int N>
constexpr int fetched_lines = (N * int(sizeof(X)) + int(sizeof(T)) - 1) / int(sizeof(T));

// The sums of N vectors, as results; `load_as` below makes sums of samples.
template <int N, class T>
inline void store_as(T* p, const Vec<T> (&v)[N]) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(p + n * lanes<T>, v[n]);
}

// Whether vectors of floats are rounded to Out, saturated and packed: SSE2 has nothing for unsigned integers of two bytes.
#ifdef __AVX2__
template <class Out>
constexpr bool packs = std::is_integral_v<Out> && sizeof(Out) <= 2;
#elif defined(__x86_64__)
template <class Out>
constexpr bool packs = std::is_same_v<Out, u8> || std::is_same_v<Out, i8> || std::is_same_v<Out, i16>;
#else
template <class Out>
constexpr bool packs = false;
#endif

#ifdef __x86_64__

// As many vectors of floats as fill one of Out.
template <class Out>
constexpr int packed_together = 4 / sizeof(Out);

// `rounded`: to nearest, ties to even. What is no number stays it until it becomes 0, or the lowest integer; packing saturates, and goes by
// quarters of vectors, or halves.
#ifdef CONVPAR_AVX512

constexpr __mmask16 all16 = 0xffff;

template <class Out>
inline __m512i rounded(__m512 v) {
    constexpr float most = std::numeric_limits<Out>::max();
    const __mmask16 number = std::is_signed_v<Out> ? _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q) : all16;
    return _mm512_maskz_cvtps_epi32(number, _mm512_maskz_min_ps(all16, _mm512_set1_ps(most), v));
}
template <class Out>
inline __m512i packed(const __m512i (&whole)[packed_together<Out>]) {
    if constexpr (sizeof(Out) == 2) {
        const __m512i pairs = std::is_signed_v<Out> ? _mm512_packs_epi32(whole[0], whole[1])
                                                    : _mm512_packus_epi32(whole[0], whole[1]);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        return _mm512_maskz_permutexvar_epi64(0xff, order, pairs);
    } else {
        const __m512i first = _mm512_packs_epi32(whole[0], whole[1]);
        const __m512i second = _mm512_packs_epi32(whole[2], whole[3]);
        const __m512i fours =
            std::is_signed_v<Out> ? _mm512_packs_epi16(first, second) : _mm512_packus_epi16(first, second);
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_maskz_permutexvar_epi32(all16, order, fours);
    }
}

#elif defined(__AVX2__)

template <class Out>
inline __m256i rounded(__m256 v) {
    constexpr float most = std::numeric_limits<Out>::max();
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(most), v));
    return std::is_signed_v<Out>
               ? _mm256_and_si256(whole, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_ORD_Q)))
               : whole;
}
template <class Out>
inline __m256i packed(const __m256i (&whole)[packed_together<Out>]) {
    if constexpr (sizeof(Out) == 2) {
        const __m256i pairs = std::is_signed_v<Out> ? _mm256_packs_epi32(whole[0], whole[1])
                                                    : _mm256_packus_epi32(whole[0], whole[1]);
        return _mm256_permute4x64_epi64(pairs, 0b11'01'10'00);
    } else {
        const __m256i first = _mm256_packs_epi32(whole[0], whole[1]);
        const __m256i second = _mm256_packs_epi32(whole[2], whole[3]);
        const __m256i fours =
            std::is_signed_v<Out> ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second);
        return _mm256_permutevar8x32_epi32(fours, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
}

#else

template <class Out>
inline __m128i rounded(__m128 v) {
    constexpr float most = std::numeric_limits<Out>::max();
    const __m128i whole = _mm_cvtps_epi32(_mm_min_ps(_mm_set1_ps(most), v));
    return std::is_signed_v<Out> ? _mm_and_si128(whole, _mm_castps_si128(_mm_cmpord_ps(v, v))) : whole;
}
template <class Out>
inline __m128i packed(const __m128i (&whole)[packed_together<Out>]) {
    const __m128i first = _mm_packs_epi32(whole[0], whole[1]);
    if constexpr (sizeof(Out) == 2) {
        return first;
    } else {
        const __m128i second = _mm_packs_epi32(whole[2], whole[3]);
        return std::is_signed_v<Out> ? _mm_packs_epi16(first, second) : _mm_packus_epi16(first, second);
    }
}

#endif
#endif

#ifdef CONVPAR_AVX512

inline Vec<float> floats(const u8* p) {
    const __m128i samples = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_maskz_cvtepi32_ps(all16, _mm512_maskz_cvtepu8_epi32(all16, samples));
}
inline Vec<float> floats(const u16* p) {
    const __m256i samples = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_maskz_cvtepi32_ps(all16, _mm512_maskz_cvtepu16_epi32(all16, samples));
}
inline Vec<float> floats(const i16* p) {
    const __m256i samples = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_maskz_cvtepi32_ps(all16, _mm512_maskz_cvtepi16_epi32(all16, samples));
}

// The first quarters of a vector.
template <int Quarters>
inline void store_quarters(void* p, __m512i v) {
    char* to = static_cast<char*>(p);
    if constexpr (Quarters == 4) _mm512_storeu_si512(to, v);
    if constexpr (Quarters == 1)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_extracti32x4_epi32(0xf, v, 0));
    if constexpr (Quarters == 2 || Quarters == 3) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_extracti64x4_epi64(0xf, v, 0));
    }
    if constexpr (Quarters == 3) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32), _mm512_maskz_extracti32x4_epi32(0xf, v, 2));
    }
}

template <int N, class Y, class = std::enable_if_t<packs<Y> > >
inline void store_as(Y* p, const Vec<float> (&v)[N]) {
    constexpr int together = packed_together<Y>, quarters = int(sizeof(Y));
#pragma GCC unroll 2
    for (int n = 0; n < N; n += together) {
        __m512i whole[together];
        // Those that are missing may be any.
#pragma GCC unroll 4
        for (int k = 0; k < together; ++k) whole[k] = n + k < N ? rounded<Y>(v[n + k]) : whole[0];
        const __m512i results = packed<Y>(whole);
        if (n + together <= N) {
            store_quarters<4>(p + n * lanes<float>, results);
        } else {
            store_quarters<N % together * quarters>(p + n * lanes<float>, results);
        }
    }
}

#elif defined(CONVPAR_NARROW)

inline Vec<float> floats(const u8* p) {
    const __m128i samples = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(samples));
}
inline Vec<float> floats(const u16* p) {
    const __m128i samples = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(samples));
}
inline Vec<float> floats(const i16* p) {
    const __m128i samples = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(samples));
}
template <int N, class Y, class = std::enable_if_t<packs<Y> > >
inline void store_as(Y* p, const Vec<float> (&v)[N]) {
    static_assert(N <= 2);
    const __m256i first = rounded<Y>(v[0]), second = rounded<Y>(v[N - 1]);
    if constexpr (sizeof(Y) == 2) {
        const __m256i whole[2] = {first, second}, results = packed<Y>(whole);
        if constexpr (N == 1)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(results));
        if constexpr (N == 2) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), results);
    } else {
        // The eight of the first vector in the lower half, those of the second in the upper one.
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0b11'01'10'00);
        const __m128i lower = _mm256_castsi256_si128(pairs), upper = _mm256_extracti128_si256(pairs, 1);
        const __m128i results =
            std::is_signed_v<Y> ? _mm_packs_epi16(lower, upper) : _mm_packus_epi16(lower, upper);
        if constexpr (N == 1) _mm_storel_epi64(reinterpret_cast<__m128i*>(p), results);
        if constexpr (N == 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(p), results);
    }
}

#endif

template <class T, class X>
inline Vec<T> load_as(const X* p) {
    if constexpr (converts<X, T>) {
        return floats(p);
    } else {
        return load(p);
    }
}
