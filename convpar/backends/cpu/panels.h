// Under filters of one sample, pixels meet samples alike, whatever rows they are in. Samples of many channels are in as many places, on as
// many pages, and those under outputs that are a stride apart fill no vectors. Kernels lay them out first: a panel holds a block's, those
// of its pixels side by side, and one channel behind the other. Included like simd.h.

// Pixels of a rectangle in the order of the result: `across` of them have their samples `step` elements apart, and the next ones' are
// `down` from these.
struct Pixels {
    index_t across, down, step;

    // Rows that follow each other in the image as they do in the result are one.
    explicit Pixels(const Work& t)
        : across(t.sh * t.xr == t.ow * t.xs ? t.oh * t.ow : t.ow), down(t.sh * t.xr), step(t.xs) {}
    Pixels(index_t across_, index_t down_, index_t step_) : across(across_), down(down_), step(step_) {}
};

// Samples of a channel that lie in one row, a vector's at most, and go to neighbouring places of a panel.
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

// Lays out the parts of all channels, `channel` elements from each other in the image and `pitch` in panels. A part is stored as a whole
// vector: what that overwrites comes later, or is never read. So parts of a panel come all at once, in the order of their places, and behind a panel
// is room for a vector.
template <class T>
void lay_out(const T* x, index_t channel, index_t step, index_t channels, const Part* parts, const Part* end,
             T* to, index_t pitch) {
    for (index_t c = 0; c < channels; ++c, x += channel, to += pitch) {
        for (const Part* part = parts; part < end; ++part) {
            const T* samples = x + part->from;
            fetch<0, 3, 1, 1>(samples, 0, channels_ahead * channel);
            store(to + part->to, load_apart(samples, step, part->width));
        }
    }
}
