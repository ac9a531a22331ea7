// Under filters of one sample pixels meet samples alike, whatever rows they are in. Samples of many channels are in as many places, on as
// many pages; kernels lay those of some pixels out first, channel by channel, where many output channels meet them. Included like simd.h.

// Pixels in the order of the result: `across` of them have their samples `step` elements apart in a row of the image, and the next row's
// are `down` from these.
struct Pixels {
    index_t across, down, step;
};

// Samples of a channel that lie in one row of the image, a vector's at most, and go to neighbouring places of a panel.
struct Part {
    index_t from, to, width;
};

// Those of `count` pixels from `first` on, which lie from `to` on. Where they end: there are no more than pixels.
template <class T>
Part* find_parts(const Pixels& pixels, index_t first, index_t count, index_t to, Part* part) {
    index_t i = first / pixels.across, j = first % pixels.across;
    while (count > 0) {
        const index_t left = count < pixels.across - j ? count : pixels.across - j;
        const index_t width = left < lanes<T> ? left : index_t(lanes<T>);
        *part++ = {i * pixels.down + j * pixels.step, to, width};
        to += width;
        count -= width;
        j += width;
        if (j < pixels.across) continue;
        j = 0;
        ++i;
    }
    return part;
}

// So many samples, a vector's at most, `step` elements from each other; the other lanes are zeros.
template <class T>
Vec<T> load_apart(const T* p, index_t step, index_t count) {
    if (step == 1) return load_first(p, count);
    if (step == 2) {
        const index_t reach = 2 * count - 1, more = reach - lanes<T>;
        const Vec<T> first = load_first(p, more > 0 ? index_t(lanes<T>) : reach);
        return every_other<0, T>(first, more > 0 ? load_first(p + lanes<T>, more) : Vec<T>{});
    }
    T samples[lanes<T>] = {};
    for (index_t k = 0; k < count; ++k) samples[k] = p[k * step];
    return load(samples);
}

// Channels ahead whose samples are fetched: each is on another page, where processors don't look ahead.
constexpr index_t channels_ahead = 4;

// Lays out the parts of all channels, `apart` elements from each other in the image and `pitch` in panels. Behind a panel is room for a
// vector: what a part overwrites comes later, or is never read.
template <class T>
void lay_out(const T* x, index_t apart, index_t step, index_t channels, const Part* parts, const Part* end,
             T* to, index_t pitch) {
    for (index_t c = 0; c < channels; ++c, x += apart, to += pitch) {
        for (const Part* part = parts; part < end; ++part) {
            const T* samples = x + part->from;
            fetch<0, 3, 1, 1>(samples, 0, channels_ahead * apart);
            store(to + part->to, load_apart(samples, step, part->width));
        }
    }
}
