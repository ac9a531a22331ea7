// Which rungs and ISA levels were built, and which levels this processor runs.
#include "ceilings.h"
#include "kernel.h"

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

}  // namespace

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
    if (__builtin_cpu_supports("x86-64-v4")) return v4;
    if (__builtin_cpu_supports("x86-64-v3")) return v3;
#endif
    return baseline;
}

volatile double sink;

namespace ceilings::baseline {
index_t burn(Arithmetic kind, index_t rounds, double& result);
}
#ifdef CONVPAR_X86
namespace ceilings::v3 {
index_t burn(Arithmetic kind, index_t rounds, double& result);
}
namespace ceilings::v4 {
index_t burn(Arithmetic kind, index_t rounds, double& result);
}
#endif

index_t burn(Arithmetic kind, index_t rounds, const char* isa) {
    double result;
    index_t done;
#ifdef CONVPAR_X86
    if (same(isa, "v4")) {
        done = ceilings::v4::burn(kind, rounds, result);
    } else if (same(isa, "v3")) {
        done = ceilings::v3::burn(kind, rounds, result);
    } else
#endif
        done = ceilings::baseline::burn(kind, rounds, result);
    (void)isa;
    sink = result;
    return done;
}

}  // namespace convpar
