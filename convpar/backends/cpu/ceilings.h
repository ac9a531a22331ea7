// The two ceilings of a machine, measured: multiply-accumulates a second, and bytes copied a second.
#pragma once
#include "kernel.h"

namespace convpar {

enum Arithmetic : int { FMA_F32, FMA_F64, MAC_I32 };

// Runs `rounds` rounds of independent multiply-accumulates in registers; returns how many it did.
index_t burn(Arithmetic kind, index_t rounds, const char* isa);

// Keeps the result of `burn` alive.
extern volatile double sink;

}  // namespace convpar
