// What a .cu file finds instead of a GPU: it stands before the kernel's text when the emulator compiles it.
//
// The threads of a block are fibers that runtime.cpp switches between; only one runs at a time. `state` says
// which one, and leads to the runtime. Shared memory is reached through `Shared<T>`, which checks every
// access.
#pragma once
#define CONVPAR_EMULATED 1

#include <cstdint>
#include <cstring>
#include <utility>

#define CONVPAR_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

struct Dim3 {
    unsigned x, y, z;
};

// What is known of one byte of shared memory. Epochs count barriers and never start anew.
struct Shadow {
    std::uint32_t written;       // block epoch of the last write; before the block's first epoch: never
    std::uint32_t written_warp;  // warp epoch of the last write
    std::uint32_t read;          // block epoch of the last read
    std::uint32_t read_warp;     // warp epoch of the last read
    std::uint16_t writer;        // thread of the last write
    std::uint16_t reader;        // thread of the last read
    std::uint8_t readers;        // in that epoch: one thread, several of a warp, several warps
    std::uint8_t atomic;         // whether the last write was atomic
};

// One launch, as the runtime and a kernel share it.
struct State {
    Dim3 thread, block, block_size, grid_size;
    unsigned index;  // of the thread in its block
    unsigned char* shared;
    std::uint32_t shared_size;
    std::uint32_t checked;
    std::uint32_t epoch;       // of the block
    std::uint32_t warp_epoch;  // of the thread's warp
    void (*barrier)(int line);
    void (*warp_barrier)(unsigned mask);
    const void* (*exchange)(const void* mine, unsigned size);
    void (*access)(std::uint64_t offset, unsigned size, int kind);
    void (*copy_later)(unsigned char* to, const void* from, unsigned size, int valid);
    void (*commit_copies)();
    void (*land_copies)(unsigned groups);
    void (*fail)(const char* message);
};

enum Access { READ, WRITE, ATOMIC };

static State* state;

inline void check(const unsigned char* at, unsigned size, Access kind) {
    if (state->checked) state->access(std::uint64_t(at) - std::uint64_t(state->shared), size, kind);
}

// Stands for an element of shared memory.
template <class T>
class Element {
    T* at_;

  public:
    explicit Element(T* at) : at_(at) {}
    operator T() const {
        check(reinterpret_cast<unsigned char*>(at_), sizeof(T), READ);
        T value;
        std::memcpy(&value, at_, sizeof(T));
        return value;
    }
    Element& operator=(const T& value) {
        check(reinterpret_cast<unsigned char*>(at_), sizeof(T), WRITE);
        std::memcpy(at_, &value, sizeof(T));
        return *this;
    }
    Element& operator=(const Element& other) { return *this = T(other); }
    Element& operator+=(const T& value) { return *this = T(*this) + value; }
    T* address() const { return at_; }
};

// Stands for a pointer into shared memory.
template <class T>
class SharedPointer {
    T* at_ = nullptr;

  public:
    SharedPointer() = default;
    explicit SharedPointer(T* at) : at_(at) {}
    Element<T> operator[](long long i) const { return Element<T>(at_ + i); }
    Element<T> operator*() const { return Element<T>(at_); }
    SharedPointer operator+(long long i) const { return SharedPointer(at_ + i); }
    SharedPointer& operator+=(long long i) {
        at_ += i;
        return *this;
    }
    T* raw() const { return at_; }
};

// The values that all lanes of the warp gave, for shuffles and matrix units. All of them must call it.
template <class T>
const T* all_lanes(const T& mine) {
    return static_cast<const T*>(state->exchange(&mine, sizeof(T)));
}

inline void copy_later(void* to, const void* from, unsigned size, bool valid) {
    state->copy_later(static_cast<unsigned char*>(to), from, size, valid);
}
inline void commit_copies() { state->commit_copies(); }
inline void land_copies(unsigned groups) { state->land_copies(groups); }

template <class... P, std::size_t... i>
void call(void (*kernel)(P...), void* const* arguments, std::index_sequence<i...>) {
    kernel(*static_cast<P*>(arguments[i])...);
}
// Runs one thread of `kernel`; `arguments` points to each argument, as in a CUDA launch.
template <class... P>
void call(void (*kernel)(P...), void* const* arguments) {
    call(kernel, arguments, std::index_sequence_for<P...>());
}

}  // namespace emulator

template <class T>
using Shared = emulator::SharedPointer<T>;

template <class T>
inline Shared<T> dynamic_shared(int offset) {
    return Shared<T>(reinterpret_cast<T*>(emulator::state->shared + offset));
}
template <class T, class U>
inline Shared<T> shared_cast(Shared<U> pointer) {
    return Shared<T>(reinterpret_cast<T*>(pointer.raw()));
}

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (emulator::state->thread)
#define blockIdx (emulator::state->block)
#define blockDim (emulator::state->block_size)
#define gridDim (emulator::state->grid_size)
#define __syncthreads() emulator::state->barrier(__LINE__)
#define __syncwarp(...) emulator::state->warp_barrier(0xffffffffu)

using std::memcpy;
