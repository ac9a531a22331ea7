// Tiles of matrices and their products: eight registers of 16 rows of 64 bytes, as Intel's AMX has them, or the same in
// memory where a processor lacks them. Included after simd.h, at a level whose vectors are as long as a row.

// Rows of a tile; sums of a row; and pairs of parts in a row.
constexpr int tile_rows = 16;
constexpr int row_bytes = 64;
constexpr index_t tile_bytes = tile_rows * row_bytes;

// A thread's registers, by numbers that are known at compile time. A product adds, for every row of `A` and column of
// `B`, its 16 pairs of bfloat16 to a float of `Sum`: row k of `B` has the pairs that the pairs of `A`'s column k meet.
template <int Hardware>
struct Tiles;

#ifndef CONVPAR_NO_TILES
template <>
struct Tiles<1> {
    Tiles() {
        struct alignas(64) {
            u8 palette = 1, first_row = 0, unused[14] = {};
            u16 row_bytes[16] = {};
            u8 rows[16] = {};
        } shapes;
        for (int k = 0; k < 8; ++k) {
            shapes.row_bytes[k] = row_bytes;
            shapes.rows[k] = tile_rows;
        }
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    // Tiles in use would be kept for the thread, and hold the processor's unit awake.
    ~Tiles() { asm volatile("tilerelease"); }
    // After half a microsecond without a store, the next would take a quarter of a microsecond more. This one, of 1 kB,
    // is for nobody.
    void stay_awake() { store_tile<0>(unread, tile_rows); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int Sum>
    void zero_tile() {
        asm volatile("tilezero %%tmm%c0" ::"i"(Sum));
    }
    template <int To>
    void load_tile(const u8* from, index_t apart) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(To) : "memory");
    }
    template <int From, class Sum>
    void store_tile(Sum* to, index_t apart) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(apart * index_t(sizeof(Sum))), "i"(From)
                     : "memory");
    }
    template <int Sum, int A, int B>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    }
    // The same of four bytes in place of a pair, each factor's with a sign or without.
    template <int Sum, int A, int B, bool SignA, bool SignB>
    void multiply_bytes() {
        if constexpr (SignA && SignB)
            asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
        if constexpr (SignA && !SignB)
            asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
        if constexpr (!SignA && SignB)
            asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
        if constexpr (!SignA && !SignB)
            asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    }

  private:
    alignas(64) float unread[tile_rows * tile_rows];
};
#endif

template <>
struct Tiles<0> {
    void stay_awake() {}
    template <int Sum>
    void zero_tile() {
        __builtin_memset(tile[Sum], 0, tile_bytes);
    }
    template <int To>
    void load_tile(const u8* from, index_t apart) {
        for (int k = 0; k < tile_rows; ++k, from += apart) {
            __builtin_memcpy(tile[To] + k * row_bytes, from, row_bytes);
        }
    }
    template <int From, class Sum>
    void store_tile(Sum* to, index_t apart) {
        for (int k = 0; k < tile_rows; ++k, to += apart) {
            __builtin_memcpy(to, tile[From] + k * row_bytes, row_bytes);
        }
    }
    // Rounds as the unit does: the first of each pair are summed apart from the second. Subnormal numbers, which the unit
    // takes for zeros, `exact` (split.h) rules out.
    template <int Sum, int A, int B>
    void multiply() {
        for (int m = 0; m < tile_rows; ++m) {
            float* sums = reinterpret_cast<float*>(tile[Sum] + m * row_bytes);
            Vec<float> first = {}, second = {};
            for (int k = 0; k < tile_rows; ++k) {
                u32 pair;
                __builtin_memcpy(&pair, tile[A] + m * row_bytes + k * 4, 4);
                const Vec<u32> a = broadcast(pair), b = words_of(B, k);
                first =
                    mac(first, reinterpret_cast<Vec<float>>(a << 16), reinterpret_cast<Vec<float>>(b << 16));
                second = mac(second, reinterpret_cast<Vec<float>>(a & 0xffff0000u),
                             reinterpret_cast<Vec<float>>(b & 0xffff0000u));
            }
            store(sums, load(sums) + (first + second));
        }
    }
    template <int Sum, int A, int B, bool SignA, bool SignB>
    void multiply_bytes() {
        using First = std::conditional_t<SignA, i8, u8>;
        for (int m = 0; m < tile_rows; ++m) {
            u32* sums = reinterpret_cast<u32*>(tile[Sum] + m * row_bytes);
            Vec<u32> sum = load(sums);
            for (int k = 0; k < tile_rows; ++k) {
                const Vec<u32> four = words_of(B, k);
                for (int byte = 0; byte < 4; ++byte) {
                    const auto a = static_cast<First>(tile[A][m * row_bytes + k * 4 + byte]);
                    const Vec<u32> upper = four << (24 - 8 * byte);
                    const Vec<u32> b =
                        SignB ? reinterpret_cast<Vec<u32>>(reinterpret_cast<Vec<i32>>(upper) >> 24)
                              : upper >> 24;
                    sum += broadcast(u32(i32(a))) * b;
                }
            }
            store(sums, sum);
        }
    }

  private:
    alignas(64) u8 tile[8][tile_bytes];
    Vec<u32> words_of(int b, int row) const {
        return load(reinterpret_cast<const u32*>(tile[b] + row * row_bytes));
    }
};

// Where the assembler doesn't know the unit, nothing asks for it.
#ifdef CONVPAR_NO_TILES
template <>
struct Tiles<1> : Tiles<0> {};
#endif

// So many elements behind one, and maybe outside the array: lanes that aren't there are masked.
template <class T>
inline T* offset_by(T* element, index_t elements) {
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(element) + elements * sizeof(T));
}

// Of 16 places so many.
inline __mmask16 first_places(index_t count) {
    return static_cast<__mmask16>(count <= 0 ? 0 : count < 16 ? (1u << count) - 1 : 0xffffu);
}

// Tiles of one factor, `a`, and of the other, `b`: from one row to the next, one part to the next, one tile to the next, in
// bytes.
struct Factor {
    const u8* first;
    index_t row, part, tile;
};

// A block's sums begin, and end as its tiles, column by column and share by share.
template <int Tiles, int K = 0, class Unit>
inline void zero_sums(Unit& unit) {
    unit.template zero_tile<K>();
    if constexpr (K + 1 < Tiles) zero_sums<Tiles, K + 1>(unit);
}
template <int Tiles, int K = 0, class Unit, class Sum>
inline void store_sums(Unit& unit, Sum* sums) {
    unit.template store_tile<K>(sums + K * tile_rows * tile_rows, tile_rows);
    if constexpr (K + 1 < Tiles) store_sums<Tiles, K + 1>(unit, sums);
}
