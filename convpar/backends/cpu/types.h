// Element types and the arithmetic of sums. Included inside each kernel's own anonymous namespace, so that
// no two ISA levels share a function; that is also why nothing here comes from std.

// Sums of integers are kept in unsigned types: they wrap modulo 2**bits, where signed overflow is undefined.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
using f32 = float;
using f64 = double;

inline index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }

struct f16 {
    u16 bits;
};

template <class T>
struct complex {
    T re, im;
};
using c64 = complex<float>;
using c128 = complex<double>;

// IEEE binary16 to binary32, exactly, subnormals, infinities and NaN included. Patterns and numbers are single ones or vectors.
template <class Number, class Pattern>
inline Number widened(Pattern half) {
    const Pattern magnitude = half & 0x7fffu, none{};
    const Pattern normal =
        (magnitude << 13) + (magnitude < 0x7c00u ? none + (112u << 23) : none + (224u << 23));
    // As the last digits of 0.5, so that a processor told to flush subnormals makes no difference.
    const Pattern raised = magnitude | 0x3f000000u;
    Number value;
    __builtin_memcpy(&value, &raised, sizeof value);
    value -= 0.5f;
    Pattern bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    bits = (magnitude < 0x0400u ? bits : normal) | (half & 0x8000u) << 16;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
inline float widen(f16 h) { return widened<float>(u32(h.bits)); }

template <class Sum>
struct To {
    template <class X>
    static Sum from(X v) {
        return static_cast<Sum>(v);
    }
    static Sum from(f16 v) { return static_cast<Sum>(widen(v)); }
};
template <class T>
struct To<complex<T>> {
    template <class X>
    static complex<T> from(X v) {
        return {static_cast<T>(v), T(0)};
    }
    static complex<T> from(f16 v) { return {static_cast<T>(widen(v)), T(0)}; }
    template <class U>
    static complex<T> from(complex<U> v) {
        return {static_cast<T>(v.re), static_cast<T>(v.im)};
    }
};

// acc + a * b. Every product is formed, whatever the values.
template <class Sum>
inline Sum mac(Sum acc, Sum a, Sum b) {
    return acc + a * b;
}
// Narrow operands would be promoted to int, where 65535 * 65535 overflows.
inline u8 mac(u8 acc, u8 a, u8 b) { return static_cast<u8>(acc + u32(a) * u32(b)); }
inline u16 mac(u16 acc, u16 a, u16 b) { return static_cast<u16>(acc + u32(a) * u32(b)); }
// The plain four products, as SciPy forms them.
template <class T>
inline complex<T> mac(complex<T> acc, complex<T> a, complex<T> b) {
    return {acc.re + (a.re * b.re - a.im * b.im), acc.im + (a.re * b.im + a.im * b.re)};
}
