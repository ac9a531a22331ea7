// Builds on: private.
// Idea: the filter loops are unrolled at compile time, and a pointer to each row under the filter stays in a register. No product pays for
//       loop control or for finding its address.
// Step: a third to three quarters of private's time at 7 x 7 (docs/cpu-speed.md, Steps).
// Limit: two loads for every product, one of the sample and one of the filter, and one product at a time.

template <class Sum, int KH, int KW, class Window>
void work(const Work t, const Window x) {
    for (index_t o = 0; o < t.oc; ++o) {
        for (index_t i = 0; i < t.oh; ++i) {
            typename Window::Row rows[KH];
#pragma GCC unroll 8
            for (int p = 0; p < KH; ++p) rows[p] = x.row(i, p);
            for (index_t j = 0; j < t.ow; ++j) {
                const Sum* w = static_cast<const Sum*>(t.w) + o * t.cg * KH * KW;
                Sum sum = static_cast<const Sum*>(t.bias)[o];
                for (index_t c = 0; c < t.cg; ++c, w += KH * KW) {
#pragma GCC unroll 8
                    for (int p = 0; p < KH; ++p) {
#pragma GCC unroll 8
                        for (int q = 0; q < KW; ++q) {
                            sum = mac(sum, rows[p].at(c, j, q), w[p * KW + q]);
                        }
                    }
                }
                static_cast<Sum*>(t.y)[o * t.yo + i * t.yr + j * t.ys] = sum;
            }
        }
    }
}
