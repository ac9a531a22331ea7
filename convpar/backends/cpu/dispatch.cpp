// Which rungs and ISA levels were built, and which levels this processor runs.
#include "ceilings.h"
#include "convert.h"
#include "kernel.h"
#include "spectra.h"

#ifdef CONVPAR_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#endif
#ifdef __unix__
#include <unistd.h>
#endif

namespace convpar {

#ifdef CONVPAR_X86
#define RUNG(name, ...)               \
    namespace rung_##name::baseline { \
        extern const Rung table;      \
    }                                 \
    namespace rung_##name::v3 {       \
        extern const Rung table;      \
    }                                 \
    namespace rung_##name::v4 {       \
        extern const Rung table;      \
    }
#else
#define RUNG(name, ...)               \
    namespace rung_##name::baseline { \
        extern const Rung table;      \
    }
#endif
#include "rungs.inc"
#undef RUNG

namespace {

bool same(const char* a, const char* b) {
    while (*a && *a == *b) ++a, ++b;
    return *a == *b;
}

struct Entry {
    const char* name;
    const char* isa;
    const Rung* rung;
};

#ifdef CONVPAR_X86
#define RUNG(name, ...)                                                             \
    {#name, "v4", &rung_##name::v4::table}, {#name, "v3", &rung_##name::v3::table}, \
        {#name, "baseline", &rung_##name::baseline::table},
#else
#define RUNG(name, ...) {#name, "baseline", &rung_##name::baseline::table},
#endif
const Entry entries[] = {
#include "rungs.inc"
};
#undef RUNG

#ifdef CONVPAR_X86
// Not by the levels' names, which Clang before 18 doesn't know, nor some of their features.
bool runs_v3() {
    unsigned a, b, c, basic, extended;
    if (!__get_cpuid(1, &a, &b, &basic, &c) || !__get_cpuid(0x80000001, &a, &b, &extended, &c)) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && (basic & bit_F16C) && (basic & bit_MOVBE) &&
           (extended & bit_LZCNT);
}

bool runs_v4() {
    return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

#if defined(CONVPAR_X86) && defined(__linux__) && !defined(CONVPAR_NO_TILES)
// The system keeps a process's tiles, 8 kB a thread, only where that was asked for.
bool asks_for_tiles() {
    constexpr unsigned tile_unit = 1u << 24, bfloat16 = 1u << 22, bytes = 1u << 25;
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (~d & (tile_unit | bfloat16 | bytes))) return false;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#else
bool asks_for_tiles() { return false; }
#endif

}  // namespace

index_t set_lines() {
    constexpr index_t mostly = 8;
#ifdef _SC_LEVEL1_DCACHE_ASSOC
    static const index_t lines = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
    return lines > 0 ? lines : mostly;
#else
    return mostly;
#endif
}

bool intel() {
#ifdef CONVPAR_X86
    __builtin_cpu_init();
    static const bool is = __builtin_cpu_is("intel");
    return is;
#else
    return false;
#endif
}

bool matrix_unit() {
    static const bool has = asks_for_tiles();
    return has;
}

bool pair_unit() {
#ifdef CONVPAR_X86
    __builtin_cpu_init();
    static const bool has = __builtin_cpu_supports("avx512vnni");
    return has;
#else
    return false;
#endif
}

bool word_unit() {
#ifdef CONVPAR_X86
    __builtin_cpu_init();
    // Intel's take two operations for products of 32 bits, AMD's one.
    static const bool has = intel() && __builtin_cpu_supports("avx512ifma");
    return has;
#else
    return false;
#endif
}

const Rung* find_rung(const char* name, const char* isa) {
    for (const Entry& e : entries) {
        if (same(e.name, name) && same(e.isa, isa)) return e.rung;
    }
    return nullptr;
}

const char* const* isa_levels() {
    static const char* const baseline[] = {"baseline", nullptr};
#ifdef CONVPAR_X86
    static const char* const v3[] = {"v3", "baseline", nullptr};
    static const char* const v4[] = {"v4", "v3", "baseline", nullptr};
    __builtin_cpu_init();
    if (runs_v4()) return v4;
    if (runs_v3()) return v3;
#endif
    return baseline;
}

// Parts of the engine that are built for every level.
#ifdef CONVPAR_X86
#define LEVELS(part, Table)                                              \
    namespace part::baseline {                                           \
    extern const Table table;                                            \
    }                                                                    \
    namespace part::v3 {                                                 \
    extern const Table table;                                            \
    }                                                                    \
    namespace part::v4 {                                                 \
    extern const Table table;                                            \
    }                                                                    \
    const Table* find_##part(const char* isa) {                          \
        if (same(isa, "v4")) return &part::v4::table;                    \
        if (same(isa, "v3")) return &part::v3::table;                    \
        return same(isa, "baseline") ? &part::baseline::table : nullptr; \
    }
#else
#define LEVELS(part, Table)                                              \
    namespace part::baseline {                                           \
    extern const Table table;                                            \
    }                                                                    \
    const Table* find_##part(const char* isa) {                          \
        return same(isa, "baseline") ? &part::baseline::table : nullptr; \
    }
#endif
LEVELS(converters, Converters)
LEVELS(ceilings, Ceilings)
LEVELS(spectra, Spectra)
#undef LEVELS

volatile double sink;

index_t size_of(Type t) {
    static const index_t sizes[TYPES] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16};
    return sizes[t];
}

}  // namespace convpar
