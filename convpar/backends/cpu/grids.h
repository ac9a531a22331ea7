// Samples as words of 32 bits, each of which has those of two or four neighbouring channels, for products that add a word's up: for every word
// of channels a plane, which falls into grids. A grid has the samples under one tap, and with them those under taps that are a multiple of
// the stride from it, so that under any tap neighbouring outputs have neighbouring samples, and a vector or a tile of them may run on into the
// next row. Included after simd.h.

constexpr index_t word_bytes = 4;

// Words of the channels that are laid out, and summed, together: a chunk.
constexpr index_t chunk_words = 16;

// Bytes of a pass's samples, and of its filters of 32 output channels, at most, so that the second cache has most of both for all
// outputs of an item. Found by trial; splitting.py counts on them.
constexpr index_t pass_bytes = 768 * 1024, filters_bytes = 1536 * 1024;

// How numbers become words: channels of a word, parts of a sample (split.h), each with words of its own, and bytes of the filters of a
// chunk for one tap and 32 output channels.
struct Packing {
    index_t channels, parts, filters;
    index_t depth() const { return channels * chunk_words; }
    index_t chunks(index_t all) const { return ceil_div(all, depth()); }
};

// Grids along one axis: tap k meets number k % count, which begins with the first output's sample under tap number k % count.
struct Along {
    index_t outputs, taps;
    index_t later;   // places from a tap's first sample to that of the next one in the same grid
    index_t count;   // of grids
    index_t places;  // of a grid

    // Apart: each tap has a grid of its own. So it is, too, where fewer samples are split: of a few outputs, or of taps far apart.
    Along(index_t outputs_, index_t taps_, index_t stride, index_t dilation, bool apart)
        : outputs(outputs_), taps(taps_), later(0), count(1) {
        while (count < taps && count * dilation % stride != 0) ++count;
        later = count * dilation / stride;
        if (apart || taps * outputs <= count * needed(0)) count = taps;
        places = needed(0);
    }
    index_t grid(index_t tap) const { return tap % count; }
    index_t place(index_t tap) const { return tap / count * later; }
    // Places of a grid that taps meet; of others than the first they may be fewer.
    index_t needed(index_t grid) const { return outputs + place(taps - 1 - grid); }
};

// Whether filter columns share no samples of what was gathered: so the engine lays out wide dilations.
inline bool lie_apart(const Work& t) {
    const Along shared(t.ow, t.kw, t.sw, t.dw, false);
    for (index_t q = 0; !t.in_place && q < t.kw; ++q) {
        if (t.taps[q] != t.taps[shared.grid(q)] + shared.place(q)) return true;
    }
    return false;
}

// [image][part][word of channels][grid][sample], of as many channels as a pass takes.
struct Samples {
    Along down, across;
    Packing packing;
    index_t grid_bytes, plane, part, image;  // from one grid, word of channels, part and image to the next
    index_t outputs;                         // with those between one row's last and the next one's first
    index_t chunks;                          // of a pass
    Samples(const Work& t, const Packing& packing_)
        : down(t.oh, t.kh, t.sh, t.dh, false), across(t.ow, t.kw, t.sw, t.dw, lie_apart(t)),
          packing(packing_) {
        grid_bytes = down.places * across.places * word_bytes;
        // Room for the last outputs of a vector or a tile, which nobody sees; an odd number of lines spreads planes over the caches.
        plane = ((ceil_div(across.count * down.count * grid_bytes, line_bytes) + 1) | 1) * line_bytes;
        outputs = (t.oh - 1) * across.places + t.ow;
        const index_t all = packing.chunks(t.cg), one = chunk_bytes(t),
                      filters = packing.filters * t.kh * t.kw;
        const index_t samples_fit = pass_bytes / one, filters_fit = filters_bytes / filters,
                      most = samples_fit < filters_fit ? samples_fit : filters_fit, fit = most > 0 ? most : 1;
        // Nearly as many in each.
        chunks = ceil_div(all, ceil_div(all, fit));
        part = plane * chunks * chunk_words;
        image = part * packing.parts;
    }
    // Of a chunk of all images.
    index_t chunk_bytes(const Work& t) const { return t.n * packing.parts * plane * chunk_words; }
    // Of the largest pass of calls that may be smaller, and take more chunks at once.
    index_t most_bytes(const Work& t) const {
        const index_t one = chunk_bytes(t), all = one * packing.chunks(t.cg),
                      most = one < pass_bytes ? pass_bytes : one;
        return all < most ? all : most;
    }
    // Bytes to a row of a grid, and from an output's first sample to that under a filter row and a filter column.
    index_t row(index_t grid_across, index_t grid_down, index_t i) const {
        return (grid_across * down.count + grid_down) * grid_bytes + i * across.places * word_bytes;
    }
    index_t filter_row(index_t p) const { return row(0, down.grid(p), down.place(p)); }
    index_t filter_column(index_t q) const {
        return row(across.grid(q), 0, 0) + across.place(q) * word_bytes;
    }
};

// Places of a grid's row whose samples exist, the first of which is in column `start`.
struct Existing {
    index_t start, from, to;
};

// What exists in the rows of each grid.
inline void find_existing(const Work& t, const Samples& s, Existing* existing) {
    for (index_t grid = 0; grid < s.across.count; ++grid) {
        const index_t start = t.col0 + t.taps[grid], left = t.cols.n - start, needed = s.across.needed(grid);
        existing[grid] = {start, 0, needed};
        if (!t.over_edge) continue;
        const index_t behind = left > 0 ? ceil_div(left, t.sw) : 0;
        existing[grid].from = start < 0 ? ceil_div(-start, t.sw) : 0;
        existing[grid].to = behind < needed ? behind : needed;
    }
}

// Where filter rows and columns begin in a plane, and what exists in rows of grids: `kh` and `kw` of them.
struct Taps {
    index_t *rows, *columns;
    Existing* existing;
    Taps(const Work& t, void* room)
        : rows(static_cast<index_t*>(room)), columns(rows + t.kh),
          existing(reinterpret_cast<Existing*>(columns + t.kw)) {}
    static index_t bytes(const Work& t) {
        return (t.kh + t.kw) * index_t(sizeof(index_t)) + t.kw * index_t(sizeof(Existing));
    }
    void find(const Work& t, const Samples& s) {
        for (index_t p = 0; p < t.kh; ++p) rows[p] = s.filter_row(p);
        for (index_t q = 0; q < t.kw; ++q) columns[q] = s.filter_column(q);
        find_existing(t, s, existing);
    }
};

// Samples of some channels of one image, and zeros for those that a chunk lacks; of what lies between rows nobody sees the sums. `take_row(from,
// channels, first, end, fetches, to)` makes a row of words of so many channels, whose places from `first` to `end` exist; the next word's
// samples may be worth fetching.
template <class T, class Row>
[[gnu::always_inline]] inline void take(const Work& t, const Samples& s, const Existing* existing, const T* x,
                                        index_t channels, u8* to, Row take_row) {
    const index_t in_word = s.packing.channels, words = ceil_div(channels, in_word),
                  planes = s.packing.chunks(channels) * chunk_words;
    for (index_t left = channels; left > 0; left -= in_word, x += in_word * t.xc, to += s.plane) {
        for (index_t i = 0; i < s.down.places; ++i) {
            for (index_t down = 0; down < s.down.count && i < s.down.needed(down); ++down) {
                const index_t at = t.row0 + down * t.dh + i * t.sh;
                const bool exists = !t.over_edge || (0 <= at && at < t.rows.n);
                for (index_t across = 0; across < s.across.count; ++across) {
                    const Existing& those = existing[across];
                    take_row(elsewhere(x + at * t.xr + those.start), left < in_word ? left : in_word,
                             exists ? those.from : 0, exists ? those.to : 0,
                             t.in_place && exists && across == 0, to + s.row(across, down, i));
                }
            }
        }
    }
    for (index_t k = 0; k < s.packing.parts; ++k)
        __builtin_memset(to + k * s.part, 0, (planes - words) * s.plane);
}

// As many channels at a time as a pass has: `take_pass(n, c, count)` lays out `count` channels of image n from c on, for all images;
// then `sum_pass(first, chunks)` sums what these chunks come to, beside what the first ones did.
template <class TakePass, class SumPass>
void in_passes(const Work& t, const Samples& s, TakePass take_pass, SumPass sum_pass) {
    const index_t all = s.packing.chunks(t.cg), depth = s.packing.depth();
    for (index_t first = 0; first < all; first += s.chunks) {
        const index_t chunks = all - first < s.chunks ? all - first : s.chunks;
        const index_t c = first * depth, left = t.cg - c, most = chunks * depth;
        for (index_t n = 0; n < t.n; ++n) take_pass(n, c, left < most ? left : most);
        sum_pass(first, chunks);
    }
}
