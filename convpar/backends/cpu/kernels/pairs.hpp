// Builds on: packed.
// Idea: products of 16 bits. A lane of 32 bits holds samples of two channels, another their taps, and one operation multiplies both and adds them
//       up; so do samples of 8 bits that were widened. Lanes are neighbouring outputs: samples are laid out so that a vector of these may
//       run on from one row into the next, and a block of output channels x vectors of outputs stays in registers.
// Variants: one instruction multiplies and adds (AVX-512 VNNI), or one multiplies and another adds.
// Step: a quarter of packed's time, from 64 to 64 and from 256 to 256 channels (docs/cpu-speed.md, Steps).
// Limit: arithmetic, twice as many products in an operation as of floats; gathering samples where output channels are few.

#include "words.h"

// Channels of a word, and of a chunk.
constexpr int in_word = 2;
constexpr index_t depth = in_word * chunk_words;

// Output channels x vectors of outputs of a block: their sums, samples, a weight and a product fit the registers.
constexpr int block_channels = many_registers ? 8 : 4, block_vectors = many_registers ? 3 : 2;

// -- filters: [block of output channels][chunk][tap][word][output channel] of words

inline index_t elements(const Work& shape) {
    const index_t words = ceil_div(shape.cg, depth) * chunk_words * shape.kh * shape.kw;
    return shape.cg ? ceil_div(words, shape.cg) : 0;
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t count, void* to) {
    const u32* w = static_cast<const u32*>(packed);
    const index_t taps = shape.kh * shape.kw, apart = taps * block_channels;
    u32* word = static_cast<u32*>(to) + c / depth * taps * chunk_words * block_channels;
    for (index_t tap = 0; tap < taps; ++tap, w += block_channels) {
        for (index_t k = 0; k < chunk_words; ++k) {
            for (index_t o = 0; o < block_channels; ++o) {
                const u32 first = 2 * k < count ? w[2 * k * apart + o] : 0;
                const u32 second = 2 * k + 1 < count ? w[(2 * k + 1) * apart + o] : 0;
                *word++ = (first & 0xffffu) | second << 16;
            }
        }
    }
}

constexpr Packing packing = {in_word, 1, 2 * chunk_words * chunk_words * word_bytes};

// Samples, and where taps are met.
inline index_t scratch_bytes(const Work& shape) {
    return Samples(shape, packing).most_bytes(shape) + Taps::bytes(shape);
}

template <class X>
void work_on(const Work& t);

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T, class X>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.inside = work_on<X>;
    k.packing = block_channels;
    k.transform = {elements, transform_filter, depth};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    k.over_edge = zeros_as_samples;
    return k;
}

template <int Hardware>
inline Vec<u32> add_products(Vec<u32> sum, Vec<u32> a, Vec<u32> b) {
#ifdef CONVPAR_AVX512
    if constexpr (Hardware) {
        // By name: no level tells the compiler of it.
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
    return sum + reinterpret_cast<Vec<u32>>(
                     _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return sum + reinterpret_cast<Vec<u32>>(
                     _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__x86_64__)
    return sum + reinterpret_cast<Vec<u32>>(
                     _mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    const auto lower = [](Vec<u32> v) { return reinterpret_cast<Vec<i32>>(v << 16) >> 16; };
    const auto upper = [](Vec<u32> v) { return reinterpret_cast<Vec<i32>>(v) >> 16; };
    return sum + reinterpret_cast<Vec<u32>>(lower(a) * lower(b)) +
           reinterpret_cast<Vec<u32>>(upper(a) * upper(b));
#endif
}

// Some chunks, of which the last has `words`.
struct Chunks {
    index_t count, words;
    const Taps& taps;
};

// Neighbouring outputs of a block that lie in one row, and in one vector.
struct Piece {
    index_t from, to, count;
};

// Those among the next `count` places from `place` on, which vectors of so many hold.
inline index_t find_pieces(const Work& t, const Samples& s, index_t place, index_t count, index_t vector,
                           Piece* pieces) {
    index_t found = 0;
    const index_t end = place + count < s.outputs ? place + count : s.outputs;
    for (index_t at = place; at < end;) {
        const index_t i = at / s.across.places, j = at % s.across.places;
        if (j >= t.ow) {
            at += s.across.places - j;
            continue;
        }
        index_t width = t.ow - j < end - at ? t.ow - j : end - at;
        const index_t rest = vector - (at - place) % vector;
        width = width < rest ? width : rest;
        pieces[found++] = {at - place, i * t.yr + j, width};
        at += width;
    }
    return found;
}

// A block of outputs of one image from `place` on, in the first pass or a later one.
template <int N, int First, int Hardware, class T>
void block(const Work& t, const Samples& s, const Chunks& chunks, const T* w, const u8* x, index_t place,
           index_t o, T* y) {
    constexpr int M = block_channels, wide = lanes<T>;
    Piece pieces[N * wide];
    const index_t count = find_pieces(t, s, place, N * wide, wide, pieces);
    const index_t left = t.oc - o < M ? t.oc - o : index_t(M);
    y += o * t.yo;
    // Stores to lines that aren't there would hold up what follows.
    for (index_t m = 0; m < left; ++m) {
        for (index_t k = 0; k < count; ++k) fetch_line<1>(y + m * t.yo + pieces[k].to, 0);
    }
    Vec<T> sum[M][N] = {};
    x += place * word_bytes;
    for (index_t chunk = 1; chunk <= chunks.count; ++chunk, x += chunk_words * s.plane) {
        const index_t words = chunk < chunks.count ? chunk_words : chunks.words;
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q, w += (chunk_words - words) * M) {
                const u8* at = x + chunks.taps.rows[p] + chunks.taps.columns[q];
                for (index_t k = 0; k < words; ++k, at += s.plane, w += M) {
                    Vec<T> sample[N];
#pragma GCC unroll 3
                    for (int n = 0; n < N; ++n)
                        sample[n] = held(load(reinterpret_cast<const T*>(at) + n * wide));
#pragma GCC unroll 8
                    for (int m = 0; m < M; ++m) {
                        const Vec<T> weight = held(broadcast(w[m]));
#pragma GCC unroll 3
                        for (int n = 0; n < N; ++n)
                            sum[m][n] = add_products<Hardware>(sum[m][n], sample[n], weight);
                    }
                }
            }
        }
    }
    alignas(64) T done[(M * N + 1) * wide];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 3
        for (int n = 0; n < N; ++n) store(done + (m * N + n) * wide, sum[m][n]);
    }
    const T* bias = static_cast<const T*>(t.bias) + o;
    for (index_t m = 0; m < left; ++m, y += t.yo) {
        const Vec<T> added = broadcast(bias[m]);
        for (const Piece* p = pieces; p < pieces + count; ++p) {
            const Vec<T> before = First ? added : load_first(y + p->to, p->count);
            store_first(y + p->to, before + load(done + m * N * wide + p->from), p->count);
        }
    }
}

// All outputs of a pass: a block's samples, which stay in the first cache, meet all output channels before the next ones come.
template <int First, int Hardware, class T>
void all_outputs(const Work& t, const Samples& s, const Chunks& chunks, const T* filters, index_t pack,
                 const u8* samples) {
    constexpr index_t wide = lanes<T>;
    for (index_t n = 0; n < t.n; ++n, samples += s.image) {
        T* y = static_cast<T*>(t.y) + n * t.yn;
        const index_t vectors = ceil_div(s.outputs, wide), blocks = ceil_div(vectors, index_t(block_vectors));
        for (index_t b = 0, place = 0; b < blocks; ++b) {
            // Of nearly the same width.
            const index_t taken = vectors / blocks + (b < vectors % blocks);
            const T* w = filters;
            for (index_t o = 0; o < t.oc; o += block_channels, w += pack) {
                switch (taken) {
                    case 1: block<1, First, Hardware>(t, s, chunks, w, samples, place, o, y); break;
                    case 2: block<2, First, Hardware>(t, s, chunks, w, samples, place, o, y); break;
                    default:
                        block<block_vectors, First, Hardware>(t, s, chunks, w, samples, place, o, y);
                        break;
                }
            }
            place += taken * wide;
        }
    }
}

template <int Hardware, class X>
void with(const Work& t) {
    const Samples s(t, packing);
    u8* samples = static_cast<u8*>(t.scratch);
    Taps taps(t, samples + t.n * s.image);
    taps.find(t, s);
    const auto take_pass = [&](index_t n, index_t c, index_t count) {
        const index_t first = n * t.xn + c * t.xc;
        u8* to = samples + n * s.image;
        t.in_place ? take_words<in_word>(t, s, taps, static_cast<const X*>(t.x) + first, count, to)
                   : take_words<in_word>(t, s, taps, static_cast<const u32*>(t.x) + first, count, to);
    };
    const u32* w = static_cast<const u32*>(t.transformed);
    const index_t pack = t.cg * elements(t) * block_channels;
    in_passes(t, s, take_pass, [&](index_t first, index_t chunks) {
        const index_t left = t.cg - (first + chunks - 1) * depth;
        const Chunks some{chunks, left < depth ? ceil_div(left, in_word) : chunk_words, taps};
        const u32* filters = w + first * chunk_words * t.kh * t.kw * block_channels;
        first == 0 ? all_outputs<1, Hardware>(t, s, some, filters, pack, samples)
                   : all_outputs<0, Hardware>(t, s, some, filters, pack, samples);
    });
}

template <class X>
void work_on(const Work& t) {
#ifdef CONVPAR_AVX512
    if (!t.tiling.emulated) return with<1, X>(t);
#endif
    with<0, X>(t);
}
// Of samples that were gathered.
template <class T>
void work(const Work& t) {
    work_on<T>(t);
}
