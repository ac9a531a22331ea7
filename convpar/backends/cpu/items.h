// Work items: what a call is cut into, and how one item is computed by a rung's kernel.
#pragma once
#include "convert.h"
#include "kernel.h"
#include "shares.h"

namespace convpar {

// One array of a call: element type, bytes between elements along the canonical axes, byte order.
struct Array {
    Type type;
    index_t stride[4];
    bool swapped;
    index_t step[4];  // strides in elements, where it is read or written in place; derived by `complete`
};

// Bits that tell which paths ran; engine.pyx gives Python their names in this order.
enum Path : unsigned {
    PATH_INSIDE = 1,  // rectangle without border
    PATH_BORDER = 2,  // rectangle that reaches over the edge
    PATH_STAGED =
        4,  // input gathered tile by tile: other byte order, odd alignment, or what the kernel can't load
    PATH_CONVERTED = 8,      // sums converted to the output tile by tile
    PATH_SECOND_ROWS = 16,   // a second tile along the rows
    PATH_SECOND_COLS = 32,   // along the columns
    PATH_SECOND_BLOCK = 64,  // a second block of output channels
    PATH_SERIAL = 128,
    PATH_PARALLEL = 256,
    PATH_STREAMED = 512,   // outputs stored past the caches
    PATH_FACTORED = 1024,  // a filter whose values allowed a shorter way
    PATH_STOLEN = 2048,    // an item of another thread's share
};

// Neighbouring samples of a staged row: positions start + step * k under an output of column k, k < columns + excess,
// kept from `offset` on.
struct Run {
    index_t start, step, excess, offset;
};

// Everything decided for a problem; filled in by engine.pyx, constant afterwards.
struct Task {
    index_t n, c, h, w, oc, kh, kw, oh, ow, groups;
    index_t sh, sw, dh, dw, top, left;
    bool flip;
    Overflow overflow;
    Array x, filter, bias, y;
    bool has_bias;
    Type sum;
    Axis rows, cols;
    char fill[16];
    Kernel kernel;
    kernel_t otherwise, otherwise_narrow;  // of the rung it builds on
    index_t tile_rows, tile_cols, block;   // outputs of an item; output channels of an item
    // Outputs whose samples are gathered at once, of an item that the kernel would take in place (OverEdge).
    index_t piece_rows, piece_cols;
    index_t together;     // groups of an item; `complete` may find reasons for others
    Tiling tiling;        // of transforms and parts; whether emulated
    bool stage, convert;  // gather the input, convert the output, tile by tile
    bool stream;          // store the output past the caches
    bool off_core;        // input and output are too large for the caches of one core
    bool far;             // and for the one that cores share, or results go past them all
    index_t set_lines;    // that a set of the first cache holds
    bool zeros;           // what lies beyond the image is zeros
    index_t* taps;        // room for 2 * kw offsets of filter columns: in place, staged
    Run* runs;            // room for kw

    // Derived by `complete`.
    gather_t gather_x, gather_w, gather_bias;
    pack_t pack;           // null where filters don't lie as it takes them
    bool packs_converted;  // what it takes is of another type, or in another byte order
    scatter_t scatter_y;
    part_t part_x;  // null where channels aren't neighbours in memory, or can't be taken together
    join_t join_y;
    index_t inner_top, inner_bottom, inner_left, inner_right;  // outputs whose taps are all inside
    index_t images;                                            // of an item
    index_t blocks, row_tiles, col_tiles, items;
    index_t group_parts;  // items that the groups of a tile make
    bool beside;          // channels lie nearer to each other than columns, in the image or the result
    bool filters_stay;    // a block's meet all images in turn, being larger than a tile's samples
    // Each thread packs the filters of a block when it comes to it, in place of all together at first: they stay in its core's cache then, and
    // take neither the way to memory nor the room.
    bool packs_late;
    bool of_given;             // filters are transformed from where they lie (Transform::bytes)
    bool factored;             // the kernel looks at the filters' values
    bool over_edge;            // the kernel takes zeros around the image by itself (OverEdge)
    bool leaves_middle;        // and what is gathered, to the rung before (OverEdge::narrow_if_slow)
    bool narrow;               // and samples narrower than sums, but where it needs them gathered (Narrow)
    bool skips;                // products with what lies above and below the image may be left out
    index_t run_count, pitch;  // of a staged row of a dense kernel, in elements
    index_t staged_rows;       // from one channel to the next
    index_t packed_groups;     // groups that share no pack of filters
    index_t packs;             // filters of such a group, in packs of kernel.packing
    index_t elements;          // that a filter of one channel is transformed into
    unsigned paths;            // that a run may take
    bool steals;               // threads that are done take items of others
    // Multiples of 64: of the whole call, and of each thread. Packed filters are either.
    index_t packed_bytes, transformed_bytes, bias_bytes, factor_bytes;
    index_t block_bytes, stage_bytes, scratch_bytes, sums_bytes;
};

// What `prepare` leaves for the kernels, each part a multiple of 64 bytes.
struct Prepared {
    char *filters, *transformed, *bias, *factors;
    bool finite;    // the filters, where that is asked
    bool factored;  // `factor` has found something
    // Not null: the filters as they were given, where threads pack late; a thread's own copy of this record has its `filters`, which begin
    // with pack `first`.
    const char* given;
    index_t first;
};

// One thread's part of the workspace and what it has to tell.
struct Thread {
    char *staged, *scratch, *sums;
    index_t first_bad;  // lowest index of an output that doesn't fit, or -1
    unsigned paths;
};

// The threads of a call: first their shares, then each one's record and tiles, so many bytes apart. The records are written by
// the threads themselves, so that new pages lie near them.
struct Team {
    char* first;
    index_t apart, threads;
    Share& share(index_t k) const { return reinterpret_cast<Share*>(first)[k]; }
    Thread& operator[](index_t k) const {
        return *reinterpret_cast<Thread*>(first + threads * index_t(sizeof(Share)) + k * apart);
    }
};

// The output channels of an item never cross a group unless it has whole ones, and it has several images only if they are whole. False if a
// conversion doesn't exist.
bool complete(Task& task, const Converters& converters);
// Part `part` of `parts`: filters and bias in the sum's type. Not 0: the filters aren't finite, where that is asked.
index_t prepare(const Task& task, index_t part, index_t parts, const char* w, const char* b,
                const Prepared& prepared);
// Once all parts are done: what the kernel finds in the filters' values. Returns the path that it opens, or 0.
unsigned factor(const Task& task, Prepared& prepared);
// Bytes of all that a team keeps.
index_t team_bytes(const Task& task, index_t threads);
// Deals the items to the threads, which keep what they need from `first` on, a multiple of 64.
Team deal(const Task& task, char* first, index_t threads);
// Thread k's work: its share, and then what is left of the others'.
void run_share(const Task& task, const Team& team, index_t k, const char* x, const Prepared& prepared,
               char* y);

}  // namespace convpar
