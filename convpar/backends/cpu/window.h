// How a kernel sees its input: as the sample under each tap of each output, wherever that sample really lies.
// Stride, dilation, memory layout and border are settled here. Included like types.h.

// Every tap of the rectangle is inside the image. Dense: neighbouring samples and neighbouring taps are
// neighbours in memory, so that a tap's column is a constant offset.
template <class X, class Sum, bool Dense>
struct Inside {
    const X* x;
    index_t channel, down, right, tap_down, tap_right;  // elements from one to the next

    explicit Inside(const Work& t)
        : x(static_cast<const X*>(t.x) + t.row0 * t.xr + t.col0 * t.xs), channel(t.xc), down(t.sh * t.xr),
          right(t.sw * t.xs), tap_down(t.dh * t.xr), tap_right(t.dw * t.xs) {}

    // Row i of the outputs, row p of the filter.
    struct Row {
        const X* x;
        index_t channel, right, tap_right;
        // Channel c, column j of the outputs, column q of the filter.
        Sum at(index_t c, index_t j, index_t q) const {
            return To<Sum>::from(x[c * channel + j * right + q * (Dense ? 1 : tap_right)]);
        }
    };
    Row row(index_t i, index_t p) const { return {x + i * down + p * tap_down, channel, right, tap_right}; }
    Sum at(index_t c, index_t i, index_t p, index_t j, index_t q) const { return row(i, p).at(c, j, q); }
};

// The rectangle reaches over the edge: positions outside the image go through the border's maps.
template <class X, class Sum>
struct Bordered {
    const X* x;
    index_t channel, row_stride, column, sh, sw, dh, dw, row0, col0;
    Axis rows, cols;
    Sum fill;

    explicit Bordered(const Work& t)
        : x(static_cast<const X*>(t.x)), channel(t.xc), row_stride(t.xr), column(t.xs), sh(t.sh), sw(t.sw),
          dh(t.dh), dw(t.dw), row0(t.row0), col0(t.col0), rows(t.rows), cols(t.cols),
          fill(*static_cast<const Sum*>(t.fill)) {}

    struct Row {
        const X* x;  // null: the whole row is fill
        index_t channel, column, sw, dw, col0;
        Axis cols;
        Sum fill;
        Sum at(index_t c, index_t j, index_t q) const {
            if (!x) return fill;
            const index_t source = cols.source(col0 + j * sw + q * dw);
            return source < 0 ? fill : To<Sum>::from(x[c * channel + source * column]);
        }
    };
    Row row(index_t i, index_t p) const {
        const index_t source = rows.source(row0 + i * sh + p * dh);
        return {source < 0 ? nullptr : x + source * row_stride, channel, column, sw, dw, col0, cols, fill};
    }
    Sum at(index_t c, index_t i, index_t p, index_t j, index_t q) const { return row(i, p).at(c, j, q); }
};
