// Sums of samples and filters that meet as tiles of a matrix unit: the outputs of a pass, by two tiles of output channels and two of neighbours.
// Included after tiles.h and grids.h.
//
// `Factors` tells of what is multiplied: Sum, the type of a sum; Sums<M, N, Unit>, of M x N tiles, a Block as in split.h; and filter_parts, the
// tiles of filters that a tap has in a chunk.

// Those of a mask; nothing is read for the others, which become zeros, or stored.
template <class T>
inline Vec<T> load_places(const T* p, __mmask16 mask) {
    return reinterpret_cast<Vec<T>>(_mm512_maskz_loadu_epi32(mask, p));
}
template <class T>
inline void store_places(T* p, Vec<T> v, __mmask16 mask) {
    _mm512_mask_storeu_epi32(p, mask, reinterpret_cast<__m512i>(v));
}

// So many chunks from `first` on. w: their filters, `pack` bytes from one tile of output channels to the next.
struct Pass {
    index_t first, chunks;
    const Taps& taps;
    const u8* w;
    index_t pack;
    const u8* samples;
};

// 16 M channels and 16 N neighbours of one image, in the first pass or a later one.
template <class Factors, int M, int N, bool First, class Unit>
void outputs(Unit& unit, const Work& t, const Samples& s, const Pass& pass, const u8* w, const u8* x,
             index_t place, index_t o, typename Factors::Sum* y) {
    using Sum = typename Factors::Sum;
    using Sums = typename Factors::template Sums<M, N, Unit>;
    constexpr int square = tile_rows * tile_rows;
    Piece pieces[N * tile_rows];
    const index_t count = find_pieces(t, s, place, N * tile_rows, tile_rows, pieces);
    const index_t left = t.oc - o < M * tile_rows ? t.oc - o : index_t(M * tile_rows);
    y += o * t.yo;
    // Stores to lines that aren't there would hold up what follows.
    for (index_t m = 0; m < left; ++m) {
        for (index_t k = 0; k < count; ++k) __builtin_prefetch(y + m * t.yo + pieces[k].to, 1);
    }
    Sums sums{unit};
    zero_sums<Sums::tiles>(unit);
    x += place * word_bytes;
    for (index_t chunk = pass.chunks; chunk > 0; --chunk, x += chunk_words * s.plane) {
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q, w += Factors::filter_parts * tile_bytes) {
                sums.add({w, row_bytes, tile_bytes, pass.pack}, {x + pass.taps.rows[p] + pass.taps.columns[q],
                                                                 s.plane, s.part, tile_rows * word_bytes});
            }
        }
    }
    alignas(64) Sum done[(Sums::tiles + 1) * square];
    store_sums<Sums::tiles>(unit, done);
    // From where they lie among the sums.
    for (Piece* p = pieces; p < pieces + count; ++p)
        p->from = p->from / tile_rows * M * square + p->from % tile_rows;
    const Sum* bias = static_cast<const Sum*>(t.bias) + o;
    for (index_t m = 0; m < left; ++m, y += t.yo) {
        const Vec<Sum> added = broadcast(bias[m]);
        for (const Piece* p = pieces; p < pieces + count; ++p) {
            const Sum* from = done + m * tile_rows + p->from;
            Vec<Sum> sum = load(from);
            for (int k = 1; k < Sums::shares; ++k) sum += load(from + k * M * square);
            const __mmask16 mask = first_places(p->count);
            Sum* to = y + p->to;
            sum += First ? added : load_places(to, mask);
            store_places(to, sum, mask);
        }
    }
}

// All output channels of a pass: those of two tiles meet all images that `takes` says yes to before the next ones come.
template <class Factors, bool First, class Unit, class Takes>
void channels(Unit& unit, const Work& t, const Samples& s, const Pass& pass, Takes takes) {
    const u8* w = pass.w;
    for (index_t o = 0; o < t.oc; o += 2 * tile_rows, w += 2 * pass.pack) {
        const bool two = t.oc - o > tile_rows;
        for (index_t n = 0; n < t.n; ++n) {
            if (!takes(n)) continue;
            const u8* x = pass.samples + n * s.image;
            auto* y = static_cast<typename Factors::Sum*>(t.y) + n * t.yn;
            for (index_t place = 0; place < s.outputs;) {
#define BLOCK(M, N) outputs<Factors, M, N, First>(unit, t, s, pass, w, x, place, o, y)
                if (two && s.outputs - place > tile_rows) {
                    BLOCK(2, 2);
                    place += 2 * tile_rows;
                } else {
                    two ? BLOCK(2, 1) : BLOCK(1, 1);
                    place += tile_rows;
                }
#undef BLOCK
            }
        }
    }
}
template <class Factors, class Unit, class Takes>
void channels(Unit& unit, const Work& t, const Samples& s, Pass pass, Takes takes) {
    pass.w += pass.first * t.kh * t.kw * Factors::filter_parts * tile_bytes;
    if (pass.first == 0) {
        channels<Factors, true>(unit, t, s, pass, takes);
    } else {
        channels<Factors, false>(unit, t, s, pass, takes);
    }
}
