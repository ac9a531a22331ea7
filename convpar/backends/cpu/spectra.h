// Sums of products of spectra: what cpu-fft computes between the transforms of rows and their inverses.
#pragma once
#include "kernel.h"

namespace convpar {

// Spectra are rows of `bins` complex numbers, real and imaginary part side by side. Output row i of output channel o is
// the sum over c and p of row i + p*apart of channel c times the filters' row (o, c, p).
struct Spectral {
    index_t groups, oc, cg, kh;  // output channels and channels are those of a group
    index_t apart;               // the vertical dilation
    index_t rows;                // of the output
    index_t strips, bins;        // spectra side by side that meet the same filters; numbers in each
    // [groups][cg][rows + (kh - 1) * apart] pointers to `strips` spectra.
    const void* const* x;
    // [groups][oc][cg][kh][2][bins]: the real parts, each twice, and the imaginary parts, each twice, of the filters'
    // rows. What they multiply is their conjugates, as cross-correlation has it.
    const void* w;
    void* y;  // [groups][oc][rows][strips][bins]
};

struct Spectra {
    void (*f32)(const Spectral&);
    void (*f64)(const Spectral&);
};

// Of an ISA level that was built; null for others.
const Spectra* find_spectra(const char* isa);

}  // namespace convpar
