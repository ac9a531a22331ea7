// The two ceilings of a machine, measured: multiply-accumulates a second, and bytes copied a second.
#pragma once
#include "kernel.h"

namespace convpar {

enum Arithmetic : int { FMA_F32, FMA_F64, MAC_I32 };

// Copies `bytes` bytes, whole cache lines from the start of one on.
using copy_t = void (*)(char* to, const char* from, index_t bytes);

struct Ceilings {
    // Runs `rounds` rounds of independent multiply-accumulates in registers; returns how many it did.
    index_t (*burn)(Arithmetic kind, index_t rounds);
    // Which copy is faster depends on the processor: stores through the caches may read the target first.
    copy_t cached;    // as the C library does it
    copy_t streamed;  // stores past the caches
};

// Of an ISA level that was built; null for others.
const Ceilings* find_ceilings(const char* isa);

// Keeps the result of `burn` alive.
extern volatile double sink;

}  // namespace convpar
