// How large the samples and taps of a transform may be, and are. Included after simd.h.

// As integers, magnitudes of floating-point numbers are in order, and infinity and NaN above all others.
template <class T>
inline Lanes<T> larger(Lanes<T> so_far, Vec<T> v) {
    const Lanes<T> sign = reinterpret_cast<Lanes<T>>(broadcast(-T(0)));
    const Lanes<T> magnitude = reinterpret_cast<Lanes<T>>(v) & ~sign;
    return magnitude > so_far ? magnitude : so_far;
}

// Zero, or a magnitude whose products and sums neither overflow nor lose bits below the normal numbers.
template <class T>
inline bool safe(T v, T most) {
    return v == 0 || (v >= 1 / most && v <= most);
}
