// Builds on: packed.
// Idea: a processor's unit for products of matrices. It multiplies bfloat16, of 8 bits, but sums float32: a sample and a
//       tap, of 24 bits, are split into three parts each, and of the nine products of parts as few are summed as the
//       contract allows, three for long sums and six for short ones (Henry, Tang and Heinecke 2019). A tile of filters,
//       16 output channels x 32 channels, meets one of samples, 32 channels x 16 neighbouring outputs, for every tap.
//       Images whose magnitudes don't allow exact parts are left to packed.
// Variants: zeros around an image, under filters of 3 x 3 to 5 x 5, are split with the samples, from where these lie. With a stride samples
//       are parted as they are split, so that those of neighbouring outputs are neighbours. Many channels meet the filters in several
//       passes, between which sums wait among the results.
// Step: half of packed's time or less, from 64 to 64 and from 256 to 256 channels (docs/cpu-speed.md, Steps).
// Limit: the unit: 16 cycles for 8192 products of parts, 512 a cycle where vectors make 32 products of floats; and tiles that neither channels nor outputs fill.

#ifndef CONVPAR_AVX512
#define CONVPAR_ABSENT  // no processor with less has the unit
#else

#include "tiles.h"

#include "split.h"

// Channels of a tile.
constexpr index_t depth = 32;

inline index_t chunks_of(const Work& t) { return ceil_div(t.cg, depth); }

// -- filters: [16 output channels][32 channels][tap][part] of tiles, then the magnitudes of each 32 channels

inline index_t filter_tiles(const Work& t) {
    return chunks_of(t) * t.kh * t.kw * parts_of_a(t.tiling.products);
}

inline index_t elements(const Work& shape) {
    const index_t floats = filter_tiles(shape) * tile_bytes / 4 + ceil_div(2 * chunks_of(shape), 16) * 16;
    return shape.cg ? ceil_div(floats, shape.cg * tile_rows) : 0;
}

inline void transform_filter(const Work& shape, const void* packed, index_t c, index_t count, void* to) {
    const float* w = static_cast<const float*>(packed);
    const index_t taps = shape.kh * shape.kw, parts = parts_of_a(shape.tiling.products);
    u8* tile = static_cast<u8*>(to) + c / depth * taps * parts * tile_bytes;
    Range range;
    for (index_t tap = 0; tap < taps; ++tap) {
        Vec<u32> pairs[3][tile_rows];
        for (index_t k = 0; k < tile_rows; ++k) {
            const float* first = w + (2 * k * taps + tap) * tile_rows;
            const Vec<float> even = 2 * k < count ? load(first) : Vec<float>{};
            const Vec<float> odd = 2 * k + 1 < count ? load(first + taps * tile_rows) : Vec<float>{};
            range.meet(even);
            range.meet(odd);
            Vec<u32> part[3];
            split_pairs<3>(even, odd, part);
            for (int s = 0; s < 3; ++s) pairs[s][k] = part[s];
        }
        for (index_t s = 0; s < parts; ++s, tile += tile_bytes) {
            transpose<u32>(pairs[s]);
            for (index_t k = 0; k < tile_rows; ++k)
                store(reinterpret_cast<u32*>(tile + k * row_bytes), pairs[s][k]);
        }
    }
    float* magnitudes = static_cast<float*>(to) + filter_tiles(shape) * tile_bytes / 4 + c / depth * 2;
    magnitudes[0] = range.least();
    magnitudes[1] = range.most();
}

// -- samples: [image][part][pair of channels][grid][sample] of pairs, of as many channels as a pass takes. A grid has the samples under one tap,
// and with them those under taps that are a multiple of the stride from it, so that under any tap neighbouring outputs have
// neighbouring samples, and a tile may run on into the next row. Zeros around the image are laid out with them

// Bytes of a pass's samples, and of its filters of two tiles of output channels, at most, so that the second cache has most of both for all
// outputs of an item. Found by trial; splitting.py counts on them.
constexpr index_t pass_bytes = 768 * 1024, filters_bytes = 1536 * 1024;

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

struct Samples {
    Along down, across;
    index_t grid_bytes, plane, part, image;  // from one grid, pair of channels, part and image to the next
    index_t outputs;                         // with those between one row's last and the next one's first
    index_t chunks;                          // of a pass
    explicit Samples(const Work& t)
        : down(t.oh, t.kh, t.sh, t.dh, false), across(t.ow, t.kw, t.sw, t.dw, lie_apart(t)) {
        grid_bytes = down.places * across.places * 4;
        // Room for a tile's last outputs, which nobody sees; an odd number of lines spreads planes over the caches.
        plane = ((ceil_div(across.count * down.count * grid_bytes, row_bytes) + 1) | 1) * row_bytes;
        outputs = (t.oh - 1) * across.places + t.ow;
        const index_t all = chunks_of(t), parts = parts_of_b(t.tiling.products), one = chunk_bytes(t);
        const index_t filters = 2 * tile_bytes * t.kh * t.kw * parts_of_a(t.tiling.products);
        const index_t samples_fit = pass_bytes / one, filters_fit = filters_bytes / filters,
                      most = samples_fit < filters_fit ? samples_fit : filters_fit, fit = most > 0 ? most : 1;
        // Nearly as many in each.
        chunks = ceil_div(all, ceil_div(all, fit));
        part = plane * chunks * (depth / 2);
        image = part * parts;
    }
    // Of a chunk of all images.
    index_t chunk_bytes(const Work& t) const {
        return t.n * parts_of_b(t.tiling.products) * plane * (depth / 2);
    }
    // Of the largest pass of calls that may be smaller, and take more chunks at once.
    index_t most_bytes(const Work& t) const {
        const index_t one = chunk_bytes(t), all = one * chunks_of(t),
                      most = one < pass_bytes ? pass_bytes : one;
        return all < most ? all : most;
    }
    // Bytes to a row of a grid, and from an output's first sample to that under a filter row and a filter column.
    index_t row(index_t grid_across, index_t grid_down, index_t i) const {
        return (grid_across * down.count + grid_down) * grid_bytes + i * across.places * 4;
    }
    index_t filter_row(index_t p) const { return row(0, down.grid(p), down.place(p)); }
    index_t filter_column(index_t q) const { return row(across.grid(q), 0, 0) + across.place(q) * 4; }
};

// An image's magnitudes so far, and whether they allow exact parts.
struct Image {
    Range range;
    bool exact;
};

// Places of a grid's row whose samples exist, the first of which is in column `start`.
struct Existing {
    index_t start, from, to;
};

// Images, samples, where filter rows and columns begin, and what exists in rows of grids.
inline index_t scratch_bytes(const Work& shape) {
    return shape.n * index_t(sizeof(Image)) + Samples(shape).most_bytes(shape) +
           (shape.kh + shape.kw) * index_t(sizeof(index_t)) + shape.kw * index_t(sizeof(Existing));
}

// What the engine asks of every kernel: see Kernel in kernel.h.
template <class T>
constexpr Kernel kernel() {
    Kernel k = over_vectors<T>();
    k.packing = tile_rows;
    k.transform = {elements, transform_filter, depth};
    k.scratch = scratch_bytes;
    k.any_width = k.strided = true;
    // As packed takes them, to which some images are left.
    k.over_edge = {3, 5, 2, false, 0, 2, true};
    k.over_edge.dilated = true;
    return k;
}

// Of 16 places so many.
inline __mmask16 first_places(index_t count) {
    return static_cast<__mmask16>(count <= 0 ? 0 : count < 16 ? (1u << count) - 1 : 0xffffu);
}

// Those of a mask, `step` elements apart; the other lanes are zeros.
inline Vec<float> load_existing(const float* p, index_t step, __mmask16 mask) {
    if (step == 1) return _mm512_maskz_loadu_ps(mask, p);
    if (step == 2) {
        const unsigned every_other_one = _pdep_u32(mask, 0x55555555u);
        return every_other<0, float>(_mm512_maskz_loadu_ps(__mmask16(every_other_one), p),
                                     _mm512_maskz_loadu_ps(__mmask16(every_other_one >> 16), p + 16));
    }
    float samples[16] = {};
    for (index_t k = 0; k < 16; ++k) {
        if (mask >> k & 1) samples[k] = p[k * step];
    }
    return load(samples);
}

// One row of a pair of channels. The next pair's lie on other pages, where processors don't look ahead: they are fetched on request.
template <int Parts>
void take_row(const Work& t, const Samples& s, const float* from, bool second, index_t first, index_t end,
              bool fetches, u8* to, Range& range) {
    constexpr index_t line = line_bytes / index_t(sizeof(float));
    const index_t lines = t.xs < 4 ? t.xs : 4;
    for (index_t j = 0; j < s.across.places; j += 16) {
        const __mmask16 mask = first_places(end - j) & ~first_places(first - j);
        const float* at = elsewhere(from + j * t.xs);
        for (index_t k = 0; fetches && k < lines; ++k) {
            fetch<0, 2, 1, 1>(at, 0, 2 * t.xc + k * line);
            fetch<0, 2, 1, 1>(at, 0, 3 * t.xc + k * line);
        }
        const Vec<float> even = load_existing(at, t.xs, mask);
        const Vec<float> odd = load_existing(at + (second ? t.xc : 0), t.xs, second ? mask : __mmask16(0));
        range.meet(even);
        range.meet(odd);
        Vec<u32> part[Parts];
        split_pairs<Parts>(even, odd, part);
#pragma GCC unroll 3
        for (int k = 0; k < Parts; ++k)
            _mm512_mask_storeu_epi32(to + k * s.part + j * 4, first_places(s.across.places - j),
                                     reinterpret_cast<__m512i>(part[k]));
    }
}

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

// Samples of some channels of one image, and zeros for those that a chunk lacks; of what lies between rows nobody sees the sums.
template <int Parts>
void take(const Work& t, const Samples& s, const Existing* existing, const float* x, index_t channels, u8* to,
          Range& so_far) {
    Range range = so_far;
    const index_t pairs = ceil_div(channels, 2), planes = ceil_div(channels, depth) * (depth / 2);
    for (index_t pair = 0; pair < pairs; ++pair, x += 2 * t.xc, to += s.plane) {
        for (index_t i = 0; i < s.down.places; ++i) {
            for (index_t down = 0; down < s.down.count && i < s.down.needed(down); ++down) {
                const index_t at = t.row0 + down * t.dh + i * t.sh;
                const bool exists = !t.over_edge || (0 <= at && at < t.rows.n);
                for (index_t across = 0; across < s.across.count; ++across) {
                    const Existing& those = existing[across];
                    take_row<Parts>(t, s, elsewhere(x + at * t.xr + those.start), 2 * pair + 1 < channels,
                                    exists ? those.from : 0, exists ? those.to : 0,
                                    t.in_place && exists && across == 0, to + s.row(across, down, i), range);
                }
            }
        }
    }
    for (int k = 0; k < Parts; ++k) __builtin_memset(to + k * s.part, 0, (planes - pairs) * s.plane);
    so_far = range;
}

// -- outputs

// Neighbouring outputs of a block that lie in one row.
struct Piece {
    index_t from, to, count;
};

// The first of them among the next `count` places from `place` on.
inline index_t find_pieces(const Work& t, const Samples& s, index_t place, index_t count, Piece* pieces) {
    index_t found = 0;
    const index_t end = place + count < s.outputs ? place + count : s.outputs;
    for (index_t at = place; at < end;) {
        const index_t i = at / s.across.places, j = at % s.across.places;
        if (j >= t.ow) {
            at += s.across.places - j;
            continue;
        }
        index_t width = t.ow - j < end - at ? t.ow - j : end - at;
        // Of one tile.
        const index_t rest = tile_rows - (at - place) % tile_rows;
        width = width < rest ? width : rest;
        pieces[found++] = {at - place, i * t.yr + j, width};
        at += width;
    }
    return found;
}

// 16 M channels and 16 N neighbours of one image, in the first pass or a later one, of so many chunks.
template <int Products, int M, int N, bool First, class Unit>
void outputs(Unit& unit, const Work& t, const Samples& s, index_t chunks, const index_t* rows,
             const index_t* columns, const u8* w, index_t pack, const u8* x, index_t place, index_t o,
             float* y) {
    using Sums = Block<M, N, Products, Unit>;
    constexpr int square = tile_rows * tile_rows;
    Piece pieces[N * tile_rows];
    const index_t count = find_pieces(t, s, place, N * tile_rows, pieces);
    const index_t left = t.oc - o < M * tile_rows ? t.oc - o : index_t(M * tile_rows);
    y += o * t.yo;
    // Stores to lines that aren't there would hold up what follows.
    for (index_t m = 0; m < left; ++m) {
        for (index_t k = 0; k < count; ++k) __builtin_prefetch(y + m * t.yo + pieces[k].to, 1);
    }
    Sums sums{unit};
    zero_sums<Sums::tiles>(unit);
    x += place * 4;
    for (index_t chunk = chunks; chunk > 0; --chunk, x += depth / 2 * s.plane) {
        for (index_t p = 0; p < t.kh; ++p) {
            for (index_t q = 0; q < t.kw; ++q, w += parts_of_a(Products) * tile_bytes) {
                sums.add({w, row_bytes, tile_bytes, pack},
                         {x + rows[p] + columns[q], s.plane, s.part, tile_rows * 4});
            }
        }
    }
    alignas(64) float done[(Sums::tiles + 1) * square];
    store_sums<Sums::tiles>(unit, done);
    const float* bias = static_cast<const float*>(t.bias) + o;
    for (index_t m = 0; m < left; ++m, y += t.yo) {
        const Vec<float> added = broadcast(bias[m]);
        for (const Piece* p = pieces; p < pieces + count; ++p) {
            const float* from = done + m * tile_rows + p->from / tile_rows * M * square + p->from % tile_rows;
            Vec<float> sum = load(from);
            for (int k = 1; k < Sums::shares; ++k) sum += load(from + k * M * square);
            store_first(y + p->to, sum + (First ? added : load_first(y + p->to, p->count)), p->count);
        }
    }
}

// All output channels of a pass: those of two tiles meet all images before the next ones come.
template <int Products, bool First, class Unit>
void channels(Unit& unit, const Work& t, const Samples& s, index_t chunks, const Image* images,
              const index_t* rows, const index_t* columns, const u8* w, index_t pack, const u8* samples) {
    for (index_t o = 0; o < t.oc; o += 2 * tile_rows, w += 2 * pack) {
        const bool two = t.oc - o > tile_rows;
        for (index_t n = 0; n < t.n; ++n) {
            if (!images[n].exact) continue;
            const u8* x = samples + n * s.image;
            float* y = static_cast<float*>(t.y) + n * t.yn;
            for (index_t place = 0; place < s.outputs;) {
#define BLOCK(M, N) outputs<Products, M, N, First>(unit, t, s, chunks, rows, columns, w, pack, x, place, o, y)
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

template <int Products, int Hardware, class T>
void images(const Work& t) {
    const Samples s(t);
    const float* x = static_cast<const float*>(t.x);
    const u8* w = static_cast<const u8*>(t.transformed);
    const index_t pack = t.cg * elements(t) * tile_rows * 4;
    Range taps;
    for (index_t o = 0; o < t.oc; o += tile_rows) {
        const u8* filters = w + o / tile_rows * pack;
        const float* magnitudes = reinterpret_cast<const float*>(filters + filter_tiles(t) * tile_bytes);
        for (index_t k = 0; k < chunks_of(t); ++k) taps.meet(magnitudes[2 * k], magnitudes[2 * k + 1]);
    }
    Image* images = static_cast<Image*>(t.scratch);
    for (index_t n = 0; n < t.n; ++n) images[n] = {Range(), true};
    u8* samples = reinterpret_cast<u8*>(images + t.n);
    index_t* rows = reinterpret_cast<index_t*>(samples + t.n * s.image);
    index_t* columns = rows + t.kh;
    for (index_t p = 0; p < t.kh; ++p) rows[p] = s.filter_row(p);
    for (index_t q = 0; q < t.kw; ++q) columns[q] = s.filter_column(q);
    Existing* existing = reinterpret_cast<Existing*>(columns + t.kw);
    find_existing(t, s, existing);
    Tiles<Hardware> unit;
    const index_t all = chunks_of(t);
    for (index_t first = 0; first < all; first += s.chunks) {
        const index_t chunks = all - first < s.chunks ? all - first : s.chunks;
        const index_t c = first * depth, left = t.cg - c,
                      taken = left < chunks * depth ? left : chunks * depth;
        for (index_t n = 0; n < t.n; ++n) {
            Image& image = images[n];
            if (!image.exact) continue;
            take<parts_of_b(Products)>(t, s, existing, x + n * t.xn + c * t.xc, taken, samples + n * s.image,
                                       image.range);
            image.exact = exact(image.range, taps, t.cg * t.kh * t.kw);
        }
        const u8* filters = w + first * t.kh * t.kw * parts_of_a(Products) * tile_bytes;
        if (first == 0) {
            channels<Products, true>(unit, t, s, chunks, images, rows, columns, filters, pack, samples);
        } else {
            channels<Products, false>(unit, t, s, chunks, images, rows, columns, filters, pack, samples);
        }
    }
    for (index_t n = 0; n < t.n; ++n) {
        if (images[n].exact) continue;
        Work image = t;
        image.n = 1;
        image.x = x + n * t.xn;
        image.y = static_cast<float*>(t.y) + n * t.yn;
        // What is there is this rung's, and as large as that asks for.
        image.scratch = nullptr;
        t.otherwise(image);
    }
}

template <int Hardware, class T>
void by_products(const Work& t) {
    switch (t.tiling.products) {
        case 3: images<3, Hardware, T>(t); break;
        case 4: images<4, Hardware, T>(t); break;
        case 5: images<5, Hardware, T>(t); break;
        default: images<6, Hardware, T>(t); break;
    }
}

template <class T>
void work(const Work& t) {
    t.tiling.emulated ? by_products<0, T>(t) : by_products<1, T>(t);
}

#endif
