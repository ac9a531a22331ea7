// How a kernel sees its input: by position, wherever the sample really lies. Included like types.h.

// Every tap of the rectangle is inside the image: position and sample are one address.
template <class X, class Sum>
struct Inside {
    const X* x;
    index_t channel, row_stride, column;

    explicit Inside(const Work& t)
        : x(static_cast<const X*>(t.x) + t.row0 * t.xr + t.col0 * t.xs),
          channel(t.xc), row_stride(t.xr), column(t.xs) {}

    Sum at(index_t c, index_t r, index_t q) const {
        return To<Sum>::from(x[c * channel + r * row_stride + q * column]);
    }

    // One row, for kernels that keep a pointer to it.
    struct Row {
        const X* x;
        index_t channel, column;
        Sum at(index_t c, index_t q) const { return To<Sum>::from(x[c * channel + q * column]); }
    };
    Row row(index_t r) const { return {x + r * row_stride, channel, column}; }
};

// The rectangle reaches over the edge: positions outside the image go through the border's maps.
template <class X, class Sum>
struct Bordered {
    const X* x;
    index_t channel, row_stride, column, row0, col0;
    Axis rows, cols;
    Sum fill;

    explicit Bordered(const Work& t)
        : x(static_cast<const X*>(t.x)), channel(t.xc), row_stride(t.xr), column(t.xs),
          row0(t.row0), col0(t.col0), rows(t.rows), cols(t.cols),
          fill(*static_cast<const Sum*>(t.fill)) {}

    Sum at(index_t c, index_t r, index_t q) const { return row(r).at(c, q); }

    struct Row {
        const X* x;  // null: the whole row is fill
        index_t channel, column, col0;
        Axis cols;
        Sum fill;
        Sum at(index_t c, index_t q) const {
            if (!x) return fill;
            const index_t j = cols.source(col0 + q);
            return j < 0 ? fill : To<Sum>::from(x[c * channel + j * column]);
        }
    };
    Row row(index_t r) const {
        const index_t i = rows.source(row0 + r);
        return {i < 0 ? nullptr : x + i * row_stride, channel, column, col0, cols, fill};
    }
};
