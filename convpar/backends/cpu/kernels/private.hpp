// Builds on: naive.
// Idea: the sum lives in a private variable, which the compiler keeps in a register; one store per output.
// Step: two thirds of naive's time to all of it at 7 x 7, by processor (docs/cpu-speed.md, Steps).
// Limit: loop control and address arithmetic for every product, and the chain of additions into one sum.

template <class Sum, int, int, class Window>
void work(const Work t, const Window x) {
    for (index_t o = 0; o < t.oc; ++o) {
        for (index_t i = 0; i < t.oh; ++i) {
            for (index_t j = 0; j < t.ow; ++j) {
                const Sum* w = static_cast<const Sum*>(t.w) + o * t.cg * t.kh * t.kw;
                Sum sum = static_cast<const Sum*>(t.bias)[o];
                for (index_t c = 0; c < t.cg; ++c) {
                    for (index_t p = 0; p < t.kh; ++p) {
                        for (index_t q = 0; q < t.kw; ++q) {
                            sum = mac(sum, x.at(c, i, p, j, q), *w++);
                        }
                    }
                }
                static_cast<Sum*>(t.y)[o * t.yo + i * t.yr + j * t.ys] = sum;
            }
        }
    }
}
