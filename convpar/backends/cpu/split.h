// Floats as sums of bfloat16, for units that multiply those. Included after tiles.h.
//
// A float's first part is it, rounded to 8 bits; the second is what that left, rounded to 8 bits again; the third is the
// rest, which has no more than 8. With u = 2**-24, the second is at most 2**-8 of the float and the third 2**-17. Of the
// nine products of the parts of two floats the largest are summed, by number from the largest:
//
//     number   1.1 1.2 2.1 2.2 1.3 3.1   left out, at most
//     3        yes yes yes               514 u
//     4        yes yes yes yes           258 u
//     5        yes yes yes yes yes       130 u
//     6        yes yes yes yes yes yes     2 u
//
// each relative to the magnitude of the floats' product. Of factors of 16 significant bits, which have no third part, three
// leave out 385 u, four 129 u and five 1 u; of those of 8 bits, which have one, two products leave out 128 u (1.3), and three
// nothing. The products themselves are exact, and so are all sums of
// magnitudes that `exact` allows but for their rounding: 15 of the pairs in a tile's row, one as both halves meet, one for
// each product of tiles so far, and one for the bias. `_products` in splitting.py counts them against the contract.

// Parts of the first and of the second factor that so many products need.
constexpr int parts_of_a(index_t products) { return products > 5 ? 3 : 2; }
constexpr int parts_of_b(index_t products) { return products > 4 ? 3 : 2; }
// The same of the second where the first has so many.
constexpr int parts_beside(index_t parts_of_first, index_t products) {
    return parts_of_first == 1 ? int(products) : parts_of_b(products);
}

// The parts of two vectors, side by side in each lane as a tile has pairs. Three parts may be truncated in place of rounded, which takes fewer
// operations: then the second is at most 2**-7 of the float and the third 2**-15, and with the other factor rounded, six products leave out little more than
// 3 u.
template <int N, bool Truncated = false>
inline void split_pairs(Vec<float> even, Vec<float> odd, Vec<u32> (&part)[N]) {
    static_assert(!Truncated || N == 3, "what two truncated parts leave is too much for the table above");
    constexpr u32 upper = 0xffff0000u, half = Truncated ? 0 : 0x8000u;
#pragma GCC unroll 3
    for (int k = 0; k < N; ++k) {
        const bool last = k == 2;
        auto first = reinterpret_cast<Vec<u32>>(even), second = reinterpret_cast<Vec<u32>>(odd);
        if (!last) {
            first = (first + half) & upper;
            second = (second + half) & upper;
            even -= reinterpret_cast<Vec<float>>(first);
            odd -= reinterpret_cast<Vec<float>>(second);
        }
        part[k] = (first >> 16) | (second & upper);
    }
}

// The magnitudes of floats that aren't zero.
class Range {
    // As integers they are in order, infinity and NaN above all others; zero is made the last.
    Vec<u32> smallest = ~Vec<u32>{}, largest = {};

  public:
    void meet(Vec<float> v) {
        const Vec<u32> magnitude = reinterpret_cast<Vec<u32>>(v) & 0x7fffffffu;
        const Vec<u32> less = magnitude - 1;
        largest = magnitude > largest ? magnitude : largest;
        smallest = less < smallest ? less : smallest;
    }
    // A range that was written down.
    void meet(float least, float most) {
        meet(broadcast(least));
        meet(broadcast(most));
    }
    // 0 if there are none.
    float least() const {
        u32 bits = ~0u;
        for (int k = 0; k < lanes<u32>; ++k) bits = smallest[k] < bits ? smallest[k] : bits;
        return float_of(bits + 1);
    }
    float most() const {
        u32 bits = 0;
        for (int k = 0; k < lanes<u32>; ++k) bits = largest[k] > bits ? largest[k] : bits;
        return float_of(bits);
    }

  private:
    static float float_of(u32 bits) {
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
};

// Whether sums of `count` products neither overflow nor lose bits below the normal numbers, which the unit takes for
// zeros. The last bit of a part is more than 2**-24 of its float, and sums are multiples of the products of such bits.
inline bool exact(const Range& samples, const Range& taps, index_t count) {
    const double least = double(samples.least()) * taps.least(), most = double(samples.most()) * taps.most();
    const auto normal = [](float v) { return v == 0 || v >= 0x1p-100f; };
    return normal(samples.least()) && normal(taps.least()) && (least == 0 || least >= 0x1p-78) &&
           most * double(count) < 0x1p126 && samples.most() < 0x1p127f && taps.most() < 0x1p127f;
}

// Sums of the products of M x N tiles in registers: M of `a`, below each other, and N of `b`, side by side.
template <int M, int N, int Products, class Unit, int PartsOfA = parts_of_a(Products)>
struct Block;

// One tile of `a`, or two, meet all parts of one of `b` while those stay in registers. A sum's products wait for each
// other, 52 cycles each; several registers share them.
template <int M, int Products, class Unit>
struct Block<M, 1, Products, Unit, parts_of_a(Products)> {
    static constexpr int shares = Products < 4 / M ? Products : 4 / M;
    static constexpr int tiles = M * shares, times_beside = 1;
    Unit& unit;

    // `beside` is called `times_beside` times: what vectors may do meanwhile.
    template <class Beside>
    void add(const Factor& a, const Factor& b, Beside beside) {
        unit.stay_awake();
        beside();
        unit.template load_tile<4>(b.first, b.row);
        unit.template load_tile<5>(b.first + b.part, b.row);
        if constexpr (parts_of_b(Products) > 2) unit.template load_tile<6>(b.first + 2 * b.part, b.row);
        // The small products first.
        if constexpr (parts_of_a(Products) > 2) part<2>(a);
        part<1>(a);
        part<0>(a);
    }

  private:
    template <int Part, int K = 0>
    void part(const Factor& a) {
        constexpr int reg = parts_of_b(Products) > 2 ? 7 : 6 + (Part + K) % 2;
        unit.template load_tile<reg>(a.first + Part * a.part + K * a.tile, a.row);
        if constexpr (Products > 4 && Part == 0) product<K, Part, 2, reg>();
        if constexpr (Part == 0 || (Part == 1 && Products > 3)) product<K, Part, 1, reg>();
        product<K, Part, 0, reg>();
        if constexpr (K + 1 < M) part<Part, K + 1>(a);
    }
    template <int K, int PartA, int PartB, int Reg>
    void product() {
        constexpr int rank = PartA > 1 ? 1 : PartB > 1 ? 2 : 2 * PartA + PartB;
        unit.template multiply<K + rank % shares * M, Reg, 4 + PartB>();
    }
};

// Two tiles of either factor: half as many come from the caches for each product. Each step loads one factor's.
template <int Products, class Unit, int PartsOfA>
struct Block<2, 2, Products, Unit, PartsOfA> {
    static constexpr int shares = 1, tiles = 4, times_beside = Products;
    Unit& unit;

    // First, Second: which tiles of `b` are met. `beside` is called once for each product of parts: what vectors may do meanwhile.
    template <bool First = true, bool Second = true, class Beside>
    [[gnu::always_inline]] void add(const Factor& a, const Factor& b, Beside beside) {
        const auto take_b = [&](index_t part) __attribute__((always_inline)) {
            if constexpr (First) unit.template load_tile<6>(b.first + part * b.part, b.row);
            if constexpr (Second) unit.template load_tile<7>(b.first + part * b.part + b.tile, b.row);
        };
        const auto take_a = [&](index_t part) __attribute__((always_inline)) {
            unit.template load_tile<4>(a.first + part * a.part, a.row);
            unit.template load_tile<5>(a.first + part * a.part + a.tile, a.row);
        };
        const auto multiply = [&]() __attribute__((always_inline)) {
            beside();
            if constexpr (First) {
                unit.template multiply<0, 4, 6>();
                unit.template multiply<1, 5, 6>();
            }
            if constexpr (Second) {
                unit.template multiply<2, 4, 7>();
                unit.template multiply<3, 5, 7>();
            }
        };
        unit.stay_awake();
        if constexpr (PartsOfA == 1) {
            take_a(0);
            if constexpr (Products > 2) take_b(2), multiply();
            take_b(1), multiply();
            take_b(0), multiply();
        } else if constexpr (Products == 3) {
            take_a(0), take_b(1), multiply();
            take_b(0), multiply();
            take_a(1), multiply();
        } else if constexpr (Products == 4) {
            take_a(1), take_b(1), multiply();
            take_a(0), multiply();
            take_b(0), multiply();
            take_a(1), multiply();
        } else if constexpr (Products == 5) {
            take_a(0), take_b(2), multiply();
            take_b(1), multiply();
            take_a(1), multiply();
            take_b(0), multiply();
            take_a(0), multiply();
        } else {
            take_a(0), take_b(2), multiply();
            take_b(1), multiply();
            take_a(1), multiply();
            take_b(0), multiply();
            take_a(2), multiply();
            take_a(0), multiply();
        }
    }
};
