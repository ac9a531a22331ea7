// Samples as vectors of sums and sums as results, of the same type; or, where a vector is a line of the cache, both of pictures: bytes,
// which become floats as they are loaded, and floats, which are rounded, saturated and packed as they are stored. Included like
// simd.h, after it.

template <class T>
inline Vec<T> load_as(const T* p) {
    return load(p);
}
template <int N, class T>
inline void store_as(T* p, const Vec<T> (&v)[N]) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(p + n * lanes<T>, v[n]);
}

#ifdef CONVPAR_AVX512

constexpr __mmask16 all16 = 0xffff;

// To nearest, ties to even. What is no number stays it until it becomes 0, or the lowest integer; packing saturates.
template <class Out>
inline __m512i rounded(__m512 v) {
    constexpr float most = std::numeric_limits<Out>::max();
    const __m512 high = _mm512_set1_ps(most);
    const __mmask16 number = std::is_signed_v<Out> ? _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q) : all16;
    return _mm512_maskz_cvtps_epi32(number, _mm512_maskz_min_ps(all16, high, v));
}

// As many vectors as a vector of Out has lanes for.
template <class Out>
inline __m512i packed(const __m512i (&whole)[4 / sizeof(Out)]) {
    // Packing goes by quarters of vectors.
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

template <class T>
inline Vec<T> load_as(const u8* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_maskz_cvtepi32_ps(all16, _mm512_maskz_cvtepu8_epi32(all16, bytes));
}
template <int N>
inline void store_as(u8* p, const Vec<float> (&v)[N]) {
    __m512i whole[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) whole[n] = n < N ? rounded<u8>(v[n]) : __m512i{};
    const __m512i bytes = packed<u8>(whole);
    if constexpr (N == 4) {
        _mm512_storeu_si512(p, bytes);
    } else {
        static_assert(N == 3);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_extracti64x4_epi64(0xf, bytes, 0));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 32), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 2));
    }
}

#endif
