// Memory for the workspace of one run, to be freed by `free`.
#pragma once
#include <cstdlib>

#include "kernel.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace convpar {

// Beyond what malloc keeps for the next run, the system hands out pages, zeroed, in every run: large ones cost less.
inline void* take_memory(index_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr index_t page = index_t(1) << 21, kept = index_t(1) << 25;
    if (bytes > kept) {
        void* memory;
        if (posix_memalign(&memory, page, bytes) != 0) return nullptr;
        madvise(memory, bytes, MADV_HUGEPAGE);
        return memory;
    }
#endif
    return std::malloc(bytes);
}

}  // namespace convpar
