// Builds on: nothing. This is the sum of the definition, written down.
// Idea: each product is added to the output array, where the result will stand.
// Limit: a store of the output after every product. The output might be the memory that is read, so the compiler
//        may not keep the sum in a register.

template <class Sum, int, int, class Window>
void work(const Work t, const Window x) {
    for (index_t o = 0; o < t.oc; ++o) {
        for (index_t i = 0; i < t.oh; ++i) {
            for (index_t j = 0; j < t.ow; ++j) {
                Sum* y = static_cast<Sum*>(t.y) + o * t.yo + i * t.yr + j * t.ys;
                const Sum* w = static_cast<const Sum*>(t.w) + o * t.cg * t.kh * t.kw;
                *y = static_cast<const Sum*>(t.bias)[o];
                for (index_t c = 0; c < t.cg; ++c) {
                    for (index_t p = 0; p < t.kh; ++p) {
                        for (index_t q = 0; q < t.kw; ++q) {
                            *y = mac(*y, x.at(c, i, p, j, q), *w++);
                        }
                    }
                }
            }
        }
    }
}
