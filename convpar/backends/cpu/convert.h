// Elements from any type, byte order and alignment to the sum's type, and sums to any output.
#pragma once
#include "kernel.h"

namespace convpar {

enum Overflow : int { WRAP, SATURATE, RAISE };

// Bytes of an element.
index_t size_of(Type t);

// Elements of an array, in rows: bytes from a row to the next, and from an element to the next.
struct Source {
    const char* first;
    index_t row, element;
    bool swapped;
};
// `rows` rows of `count` elements to rows of type `sum`, `pitch` bytes apart.
using gather_t = void (*)(const Source& from, index_t rows, index_t count, char* to, index_t pitch);
// The same of `channels` at once, whose elements are neighbours in memory, to planes `plane` bytes apart.
using part_t = void (*)(const Source& from, index_t rows, index_t count, index_t channels, char* to,
                        index_t pitch, index_t plane);
// Where elements go: bytes from a row to the next, and from an element to the next.
struct Target {
    char* first;
    index_t row, element;
    bool swapped;
};
// `rows` rows of `count` sums, `pitch` bytes apart; the number of the first one that doesn't fit, under RAISE, or -1.
using scatter_t = index_t (*)(const char* from, index_t pitch, index_t rows, index_t count, const Target& to,
                              Overflow rule);

// The same of `channels` at once, from planes `plane` bytes apart to neighbours in memory; not under RAISE.
using join_t = void (*)(const char* from, index_t pitch, index_t plane, index_t rows, index_t count,
                        index_t channels, const Target& to, Overflow rule);

// `rows` rows of `count` neighbouring sums, `apart` bytes from each other, become `count` columns of `packing`, with zeros
// beyond the rows.
using pack_t = void (*)(const char* from, index_t apart, index_t rows, index_t count, index_t packing,
                        char* to);

// The conversions of one ISA level. Null for pairs that the spec rules out (complex to real, floating point to an
// integer sum).
struct Converters {
    gather_t (*gather)(Type from, Type sum);
    scatter_t (*scatter)(Type sum, Type to);
    pack_t (*pack)(Type sum);  // null for sums that no kernel packs
    // Null for sums of other than 4 and 8 bytes, too.
    part_t (*part)(Type from, Type sum);
    join_t (*join)(Type sum, Type to);
};

// Null where the level wasn't built.
const Converters* find_converters(const char* isa);

}  // namespace convpar
