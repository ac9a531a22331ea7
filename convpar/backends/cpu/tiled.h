// Sums of samples and filters that meet as tiles of a matrix unit: the outputs of a pass, by two tiles of output channels and two of neighbours.
// Included after tiles.h and grids.h.
//
// `Factors` tells of what is multiplied: Sum, the type of a sum; filter_parts, the tiles of filters that a tap has in a chunk; and Sums<M, N, Unit>,
// of M x N tiles, a Block as in split.h, whose `add` calls what vectors may do meanwhile `times_beside` times. What is left then, they do at the end.

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

// Outputs among 16 neighbouring places that lie in one row: where the first place's would be, and which there are.
struct Stretch {
    index_t to;
    __mmask16 places;
};

// Whether rows of outputs follow each other as rows of places do: then all are one.
inline bool one_row(const Work& t, const Samples& s) { return s.across.places == t.ow && t.yr == t.ow; }

// How far into a line outputs begin, in bytes, where all channels' do: places begin with it, and each 16 fill one, for stores to two take
// longer. Samples begin as far into a line, behind what may be met before the first, with sums that nobody sees; `aside` is room for both.
template <class Sum>
inline index_t into_line(const Work& t, const Samples& s, const Sum* y) {
    const bool all = one_row(t, s) && t.yo * word_bytes % line_bytes == 0;
    return all ? reinterpret_cast<std::uintptr_t>(y) % line_bytes : 0;
}
constexpr index_t aside = 2 * line_bytes;
template <class Sum>
inline u8* first_sample(const Work& t, const Samples& s, u8* room) {
    return room + line_bytes + into_line(t, s, static_cast<const Sum*>(t.y));
}

// A place among those of an image's outputs, by its number, row and column.
class Place {
    index_t across, rows, columns, to_next_row;
    index_t row = 0, column = 0;

  public:
    index_t number = 0;
    // The first one, of the outputs of an image from `y` on.
    template <class Sum>
    Place(const Work& t, const Samples& s, const Sum* y)
        : across(s.across.places), rows(t.oh), columns(t.ow), to_next_row(t.yr) {
        if (!one_row(t, s)) return;
        across = columns = rows * columns;
        rows = 1;
        number = column = -into_line(t, s, y) / word_bytes;
    }
    // The next 16 are passed.
    void pass() {
        number += tile_rows;
        column += tile_rows;
        for (; column >= across; column -= across) ++row;
    }
    // Their stretches, and how many.
    index_t find(Stretch* stretch) const {
        index_t found = 0;
        Place at = *this;
        for (index_t k = 0; k < tile_rows && at.row < rows; ++at.row) {
            const index_t first = at.column < 0 ? -at.column : k;
            const __mmask16 places = first_places(k + columns - at.column) & ~first_places(first);
            if (places) stretch[found++] = {at.row * to_next_row + at.column - k, places};
            k += across - at.column;
            at.column = 0;
        }
        return found;
    }
};

// Gives the sums of blocks. Vectors add what is to be added, and store what there is, some channels' outputs at a time: beside the products of
// the next block, which leave them idle. Sums that are `Exact` may begin with what is to be added, and where 16 places, and all channels of a
// block, have outputs, the unit stores them by itself. Added is the bias in the `First` pass, and what that stored in later ones.
template <class Sum, bool Exact, bool First>
class Results {
    static constexpr int square = tile_rows * tile_rows, most_tiles = 4, most_vectors = 2;
    const Work& t;
    alignas(64) Sum done[most_tiles * square];
    alignas(64) Sum biases[most_tiles / 2 * square];
    bool biased = false;
    // Of the block whose products are summed: each vector's stretches, and whether it is one, of 16 outputs of all channels.
    struct {
        Stretch stretches[most_vectors][tile_rows];
        index_t count[most_vectors], channels;
        bool whole[most_vectors];
        Sum* to;
    } next;
    // Of the one whose sums are given, of each channel: of the vectors that are left as many stretches as of the one that has most, and where
    // its sums are.
    struct {
        Stretch stretches[most_vectors * tile_rows];
        const Sum* from[most_vectors];
        index_t vectors = 0, each = 0, channels = 0;
        Sum* to = nullptr;
        const Sum* bias = nullptr;
    } given;

    template <int Each>
    void give(index_t channels) {
        const index_t each = Each ? Each : given.each;
        for (; channels > 0; --channels, --given.channels) {
            const Vec<Sum> added = broadcast(*given.bias++);
            const Stretch* stretch = given.stretches;
            for (index_t v = 0; v < given.vectors; ++v, stretch += each) {
                Vec<Sum> sum = load(given.from[v]);
                given.from[v] += tile_rows;
                if (First && !Exact) sum += added;
                for (index_t k = 0; !First && k < each; ++k)
                    sum += load_places(offset_by(given.to, stretch[k].to), stretch[k].places);
                for (index_t k = 0; k < each; ++k)
                    store_places(offset_by(given.to, stretch[k].to), sum, stretch[k].places);
            }
            given.to = offset_by(given.to, t.yo);
        }
    }
    // Of tile K of M in a vector.
    template <int M, int K>
    Sum* to_whole() const {
        return offset_by(next.to, next.stretches[K / M][0].to + K % M * tile_rows * t.yo);
    }
    template <int M, int Tiles, int K, class Unit>
    void begin_sums(Unit& unit) {
        if (Exact && First && biased) {
            unit.template load_tile<K>(reinterpret_cast<const u8*>(biases + K % M * square), row_bytes);
        } else if (Exact && !First && next.whole[K / M]) {
            unit.template load_tile<K>(reinterpret_cast<const u8*>(to_whole<M, K>()), t.yo * word_bytes);
        } else {
            unit.template zero_tile<K>();
        }
        if constexpr (K + 1 < Tiles) begin_sums<M, Tiles, K + 1>(unit);
    }
    template <int M, int Tiles, int K, class Unit>
    void end_sums(Unit& unit) {
        if (Exact && next.whole[K / M]) {
            unit.template store_tile<K>(to_whole<M, K>(), t.yo);
        } else {
            unit.template store_tile<K>(done + K * square, tile_rows);
        }
        if constexpr (K + 1 < Tiles) end_sums<M, Tiles, K + 1>(unit);
    }

  public:
    explicit Results(const Work& t_) : t(t_) {}

    // Channels from `o` on.
    void begin_channels(index_t o, index_t channels) {
        const Sum* of = static_cast<const Sum*>(t.bias) + o;
        biased = false;
        for (index_t m = 0; Exact && First && m < channels; ++m) {
            store(biases + m * tile_rows, broadcast(of[m]));
            biased = biased || of[m] != 0;
        }
    }
    // A block of M x N tiles, from channel `o` on: how its sums begin. Its places are passed.
    template <int M, int N, class Sums, class Unit>
    void begin(Unit& unit, Place& place, index_t o, Sum* y) {
        next.channels = t.oc - o < M * tile_rows ? t.oc - o : index_t(M * tile_rows);
        next.to = y + o * t.yo;
        for (int v = 0; v < N; ++v, place.pass()) {
            next.count[v] = place.find(next.stretches[v]);
            next.whole[v] =
                next.channels == M * tile_rows && next.count[v] == 1 && next.stretches[v][0].places == 0xffff;
        }
        begin_sums<M, Sums::tiles, 0>(unit);
    }
    void some(index_t channels) {
        channels = given.channels < channels ? given.channels : channels;
        switch (given.each) {
            case 1: return give<1>(channels);
            case 2: return give<2>(channels);
            case 3: return give<3>(channels);
            default: return give<0>(channels);
        }
    }
    void finish() { some(given.channels); }
    // Channels whose outputs are left.
    index_t left() const { return given.channels; }
    // How they end.
    template <int M, int N, class Sums, class Unit>
    void end(Unit& unit, index_t o) {
        finish();
        end_sums<M, Sums::tiles, 0>(unit);
        for (int k = 1; k < Sums::shares; ++k) {
            for (index_t at = 0; at < M * square; at += tile_rows)
                store(done + at, load(done + at) + load(done + k * M * square + at));
        }
        given.vectors = given.each = 0;
        const auto leaves = [&](int v) { return !Exact || !next.whole[v]; };
        for (int v = 0; v < N; ++v) {
            if (leaves(v) && next.count[v] > given.each) given.each = next.count[v];
        }
        Stretch* stretch = given.stretches;
        for (int v = 0; v < N; ++v) {
            if (!leaves(v)) continue;
            for (index_t k = 0; k < given.each; ++k)
                *stretch++ = k < next.count[v] ? next.stretches[v][k] : Stretch{0, 0};
            given.from[given.vectors++] = done + v * M * square;
        }
        given.channels = given.vectors > 0 ? next.channels : 0;
        given.to = next.to;
        given.bias = static_cast<const Sum*>(t.bias) + o;
    }
};

// 16 M channels and 16 N neighbours of one image.
template <class Factors, int M, int N, class Unit, class Giver>
void outputs(Unit& unit, const Work& t, const Samples& s, const Pass& pass, Giver& results, const u8* w,
             const u8* x, Place& place, index_t o, typename Factors::Sum* y) {
    using Sums = typename Factors::template Sums<M, N, Unit>;
    x += place.number * word_bytes;
    results.template begin<M, N, Sums>(unit, place, o, y);
    const index_t at_once = ceil_div(results.left(), pass.chunks * t.kh * t.kw * Sums::times_beside);
    const auto beside = [&]() __attribute__((always_inline)) { results.some(at_once); };
    Sums sums{unit};
    for (index_t chunk = pass.chunks; chunk > 0; --chunk, x += chunk_words * s.plane) {
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q, w += Factors::filter_parts * tile_bytes) {
                sums.add(
                    {w, row_bytes, tile_bytes, pass.pack},
                    {x + pass.taps.rows[p] + pass.taps.columns[q], s.plane, s.part, tile_rows * word_bytes},
                    beside);
            }
        }
    }
    results.template end<M, N, Sums>(unit, o);
}

// All output channels of a pass: those of two tiles meet all images that `takes` says yes to before the next ones come.
template <class Factors, bool First, class Unit, class Takes>
void channels(Unit& unit, const Work& t, const Samples& s, const Pass& pass, Takes takes) {
    const u8* w = pass.w;
    using Sum = typename Factors::Sum;
    Results<Sum, !std::is_floating_point_v<Sum>, First> results(t);
    for (index_t o = 0; o < t.oc; o += 2 * tile_rows, w += 2 * pass.pack) {
        const bool two = t.oc - o > tile_rows;
        results.begin_channels(o, two ? 2 * tile_rows : tile_rows);
        for (index_t n = 0; n < t.n; ++n) {
            if (!takes(n)) continue;
            const u8* x = pass.samples + n * s.image;
            auto* y = static_cast<Sum*>(t.y) + n * t.yn;
            for (Place place(t, s, y); place.number < s.outputs;) {
#define BLOCK(M, N) outputs<Factors, M, N>(unit, t, s, pass, results, w, x, place, o, y)
                if (two && s.outputs - place.number > tile_rows) {
                    BLOCK(2, 2);
                } else {
                    two ? BLOCK(2, 1) : BLOCK(1, 1);
                }
#undef BLOCK
            }
        }
    }
    results.finish();
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
