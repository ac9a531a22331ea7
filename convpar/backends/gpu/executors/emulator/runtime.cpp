// Runs the blocks of a launch one after another, and the threads of a block as fibers on one thread of the
// host.
//
// A fiber runs until it meets a barrier or ends; the scheduler then goes on to the next thread in its order.
// A barrier opens when all threads of the block (or warp) stand at it. Shared memory is filled with poison
// before each block, and each of its bytes remembers who wrote and read it last and in which epoch, so that
// an access that no barrier separates from another thread's is found whatever order the threads ran in.
//
// A fault ends the launch: its message is kept, and the fibers are left where they stand. Kernels own
// nothing.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

#include "emulator.hpp"

// The library's switch asks the kernel about signals each time, about ten times slower.
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(CONVPAR_UCONTEXT)
#define OWN_SWITCH 1
#else
#include <ucontext.h>
#endif

// Saves the registers that a call preserves, stores the stack pointer in *from, and goes on where `to` was
// left.
extern "C" void convpar_switch(void** from, void* to);

namespace {

using emulator::Access;
using emulator::Dim3;
using emulator::Shadow;
using emulator::State;

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 256 * 1024, PAGE = 16 * 1024;
constexpr unsigned char POISON = 0xff;   // NaN in every float type, -1 in the integers
constexpr unsigned char GUARDED = 0xfd;  // something else, or writing what was read there would go unseen
constexpr std::size_t GUARD = 256;       // bytes on both sides of shared memory

// -- Switching stacks

#ifdef OWN_SWITCH

struct Context {
    void* stack_pointer = nullptr;
};

#if defined(__APPLE__)
#define NAME "_convpar_switch"
#else
#define NAME "convpar_switch"
#endif

#if defined(__x86_64__)
asm(".text\n.globl " NAME "\n" NAME
    ":\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
    "ret\n");

void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    auto* top = reinterpret_cast<void**>(stack + STACK);
    *--top = nullptr;  // where entry would return to; it never does
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}
#else
asm(".text\n.globl " NAME "\n" NAME
    ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");

void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    auto* frame = reinterpret_cast<void**>(stack + STACK - 160);
    std::memset(frame, 0, 160);
    frame[11] = reinterpret_cast<void*>(entry);  // x30, the link register
    context.stack_pointer = frame;
}
#endif

void switch_to(Context& from, Context& to) { convpar_switch(&from.stack_pointer, to.stack_pointer); }

#else

struct Context {
    ucontext_t registers;
};

void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = stack;
    context.registers.uc_stack.ss_size = STACK;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
}

void switch_to(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

#endif

// -- Threads

enum Status : unsigned char { READY, AT_BARRIER, AT_WARP_BARRIER, DONE };

struct Copy {
    unsigned char* to;
    const void* from;
    unsigned size;
    bool valid;
};

struct Fiber {
    unsigned char* stack;
    Context context;
};

struct Thread {
    Dim3 place;
    Status status;
    int line;            // of the barrier it stands at
    Fiber* fiber;        // while it has begun and not ended
    unsigned exchanges;  // so far, for turning between two buffers
    std::vector<Copy> copies;
    std::vector<std::size_t> groups;  // copies in each group under way, oldest first
};

struct Warp {
    std::uint32_t epoch;
    std::vector<unsigned char> lanes[2];
};

State state;
Context scheduler;
std::vector<Fiber*> idle;
std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<Shadow> shadow;
std::vector<unsigned char> shared;
std::uint32_t first_epoch = 1;  // of the block that runs
void (*kernel)(void* const*);
void* const* arguments;
bool failed;
char* message;
std::size_t message_size;

Thread& current() { return threads[state.index]; }

void leave() { switch_to(current().fiber->context, scheduler); }

__attribute__((format(printf, 1, 2))) void fault(const char* format, ...) {
    failed = true;
    int used =
        std::snprintf(message, message_size, "block (%u, %u, %u), thread (%u, %u, %u): ", state.block.x,
                      state.block.y, state.block.z, state.thread.x, state.thread.y, state.thread.z);
    std::va_list list;
    va_start(list, format);
    std::vsnprintf(message + used, message_size - used, format, list);
    va_end(list);
}

// From inside a fiber: it is never resumed.
void fail(const char* text) {
    fault("%s", text);
    leave();
}

void fiber_main() {
    for (;;) {
        kernel(arguments);
        current().status = DONE;
        leave();
    }
}

Fiber* take_fiber() {
    if (!idle.empty()) {
        Fiber* fiber = idle.back();
        idle.pop_back();
        return fiber;
    }
    auto* fiber = new Fiber;
    // A page below the stack that can't be touched turns an overflow into a fault instead of damage.
    auto* memory = static_cast<unsigned char*>(
        mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory == MAP_FAILED) {
        delete fiber;
        return nullptr;
    }
    mprotect(memory, PAGE, PROT_NONE);
    fiber->stack = memory + PAGE;
    prepare(fiber->context, fiber->stack, fiber_main);
    return fiber;
}

// -- What kernels call

void barrier(int line) {
    current().status = AT_BARRIER;
    current().line = line;
    leave();
}

void warp_barrier(unsigned) {
    current().status = AT_WARP_BARRIER;
    leave();
}

const void* exchange(const void* mine, unsigned size) {
    Warp& warp = warps[state.index / WARP];
    // A lane can be one exchange ahead of the others, but not two: two buffers suffice.
    auto& lanes = warp.lanes[current().exchanges++ % 2];
    if (lanes.size() < size * WARP) lanes.resize(size * WARP);
    std::memcpy(lanes.data() + size * (state.index % WARP), mine, size);
    warp_barrier(~0u);
    return lanes.data();
}

// Whether this thread's access comes after one that `other` made in `epoch` and `warp_epoch`.
bool ordered(std::uint32_t epoch, std::uint32_t warp_epoch, unsigned other) {
    return epoch != state.epoch || other == state.index ||
           (other / WARP == state.index / WARP && warp_epoch < state.warp_epoch);
}

enum Readers : std::uint8_t { NONE, ONE, ONE_WARP, MANY };

void access(std::uint64_t offset, unsigned size, int kind) {
    if (offset >= state.shared_size || offset + size > state.shared_size) {
        fault("%s %u bytes of shared memory at offset %lld, and the block has %u",
              kind == Access::READ ? "reads" : "writes", size, static_cast<long long>(offset),
              state.shared_size);
        leave();
    }
    for (std::uint64_t i = offset; i < offset + size; ++i) {
        Shadow& byte = shadow[i];
        const bool atomics = kind == Access::ATOMIC && byte.atomic;
        if (byte.written >= first_epoch && !atomics &&
            !ordered(byte.written, byte.written_warp, byte.writer)) {
            fault("%s shared memory at offset %llu, which thread %u writes with no barrier between them",
                  kind == Access::READ ? "reads" : "writes", static_cast<unsigned long long>(i), byte.writer);
            leave();
        }
        if (kind == Access::READ) {
            if (byte.written < first_epoch) {
                fault("reads shared memory at offset %llu, which no thread of the block has written",
                      static_cast<unsigned long long>(i));
                leave();
            }
            const bool again = byte.read == state.epoch && byte.readers != NONE;
            if (!again || (byte.readers == ONE && byte.reader == state.index)) {
                byte.readers = ONE;
            } else {
                const bool same_warp = byte.readers != MANY && byte.reader / WARP == state.index / WARP;
                byte.readers = same_warp ? ONE_WARP : MANY;
            }
            byte.read = state.epoch;
            byte.read_warp = state.warp_epoch;
            byte.reader = static_cast<std::uint16_t>(state.index);
            continue;
        }
        if (byte.read == state.epoch && byte.readers != NONE) {
            const bool own = byte.readers == ONE && byte.reader == state.index;
            const bool later = byte.readers != MANY && byte.reader / WARP == state.index / WARP &&
                               byte.read_warp < state.warp_epoch;
            if (!own && !later) {
                fault(
                    "writes shared memory at offset %llu, which thread %u reads with no barrier between them",
                    static_cast<unsigned long long>(i), byte.reader);
                leave();
            }
        }
        byte.written = state.epoch;
        byte.written_warp = state.warp_epoch;
        byte.writer = static_cast<std::uint16_t>(state.index);
        byte.atomic = kind == Access::ATOMIC;
    }
}

void copy_later(unsigned char* to, const void* from, unsigned size, int valid) {
    if (reinterpret_cast<std::uintptr_t>(to) % size || reinterpret_cast<std::uintptr_t>(from) % size) {
        fault("copies %u bytes asynchronously between addresses that aren't aligned to as many", size);
        leave();
    }
    // From here on neither the old value nor the new one may be counted on.
    emulator::check(to, size, Access::WRITE);
    std::memset(to, POISON, size);
    current().copies.push_back({to, from, size, valid != 0});
}

void commit_copies() {
    Thread& thread = current();
    std::size_t grouped = 0;
    for (std::size_t n : thread.groups) grouped += n;
    thread.groups.push_back(thread.copies.size() - grouped);
}

void land_copies(unsigned left) {
    Thread& thread = current();
    while (thread.groups.size() > left) {
        const std::size_t count = thread.groups.front();
        for (std::size_t i = 0; i < count; ++i) {
            const Copy& copy = thread.copies[i];
            emulator::check(copy.to, copy.size, Access::WRITE);
            if (copy.valid) {
                std::memcpy(copy.to, copy.from, copy.size);
            } else {
                std::memset(copy.to, 0, copy.size);
            }
        }
        thread.copies.erase(thread.copies.begin(), thread.copies.begin() + count);
        thread.groups.erase(thread.groups.begin());
    }
}

// -- Scheduling

enum Order { FORWARD, REVERSE, SHUFFLE };

std::uint64_t random_state;

std::uint64_t next_random() {  // splitmix64
    std::uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

template <class T>
void arrange(std::vector<T>& order, int how) {
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = T(how == REVERSE ? order.size() - 1 - i : i);
    if (how != SHUFFLE) return;
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
}

void run_thread(unsigned index) {
    Thread& thread = threads[index];
    if (thread.fiber == nullptr && (thread.fiber = take_fiber()) == nullptr) {
        state.index = index;
        fault("no memory for its stack");
        return;
    }
    state.index = index;
    state.thread = thread.place;
    state.warp_epoch = warps[index / WARP].epoch;
    switch_to(scheduler, thread.fiber->context);
    if (thread.status == DONE && !failed) {
        idle.push_back(thread.fiber);
        thread.fiber = nullptr;
    }
}

// Opens the barrier of every warp whose threads all stand at one.
bool open_warp_barriers() {
    bool any = false;
    for (unsigned first = 0; first < threads.size(); first += WARP) {
        const unsigned last = first + WARP < threads.size() ? first + WARP : unsigned(threads.size());
        unsigned waiting = 0, gone = 0;
        for (unsigned i = first; i < last; ++i) {
            waiting += threads[i].status == AT_WARP_BARRIER;
            gone += threads[i].status == DONE;
        }
        if (waiting == 0 || waiting + gone < last - first) continue;
        ++warps[first / WARP].epoch;
        for (unsigned i = first; i < last; ++i) {
            if (threads[i].status == AT_WARP_BARRIER) threads[i].status = READY;
        }
        any = true;
    }
    return any;
}

// Opens the block's barrier, or says why it never opens.
void open_barrier(unsigned done) {
    int line = 0;
    for (unsigned i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        if (thread.status == DONE) continue;
        state.index = i;
        state.thread = thread.place;
        if (thread.status == AT_WARP_BARRIER) {
            return fault("waits at a warp's barrier that other threads of its warp don't reach");
        }
        if (done > 0) {
            return fault("waits at the barrier of line %d, and %u threads of the block have ended",
                         thread.line, done);
        }
        if (line != 0 && thread.line != line) {
            return fault("waits at the barrier of line %d, and others at that of line %d", thread.line, line);
        }
        line = thread.line;
    }
    ++state.epoch;
    for (Thread& thread : threads) thread.status = READY;
}

void run_block(int how, std::vector<unsigned>& order) {
    std::memset(state.shared, POISON, state.shared_size);
    first_epoch = ++state.epoch;
    for (Thread& thread : threads) {
        thread.status = READY;
        thread.exchanges = 0;
        thread.copies.clear();
        thread.groups.clear();
    }
    for (unsigned done = 0; done < threads.size() && !failed;) {
        bool ran = false;
        arrange(order, how);
        for (unsigned index : order) {
            if (threads[index].status != READY) continue;
            run_thread(index);
            if (failed) return;
            ran = true;
            done += threads[index].status == DONE;
        }
        if (!open_warp_barriers() && !ran) open_barrier(done);
    }
    for (std::size_t i = 1; i <= GUARD && !failed; ++i) {
        const auto* end = state.shared + state.shared_size;
        if (state.shared[-std::ptrdiff_t(i)] != GUARDED || end[i - 1] != GUARDED)
            fault("wrote outside its shared memory");
    }
}

}  // namespace

// Runs a launch. Returns 0, or 1 with a message that says what was wrong. One launch at a time.
CONVPAR_EXPORT int convpar_emulate(void (*bind)(State*), void (*thread)(void* const*), void* const* given,
                                   const unsigned* grid, const unsigned* block, unsigned shared_size, int how,
                                   std::uint64_t seed, int checked, char* text, std::size_t text_size) {
    kernel = thread;
    arguments = given;
    failed = false;
    message = text;
    message_size = text_size;
    random_state = seed;

    shared.assign(shared_size + 2 * GUARD + 16, GUARDED);
    shadow.resize(shared_size);
    auto* start = shared.data() + GUARD;
    start += (16 - reinterpret_cast<std::uintptr_t>(start) % 16) % 16;
    const std::uint32_t epoch = state.epoch;
    state = State{};
    state.epoch = epoch;
    state.shared = start;
    state.shared_size = shared_size;
    state.checked = checked != 0;
    state.block_size = {block[0], block[1], block[2]};
    state.grid_size = {grid[0], grid[1], grid[2]};
    state.barrier = barrier;
    state.warp_barrier = warp_barrier;
    state.exchange = exchange;
    state.access = access;
    state.copy_later = copy_later;
    state.commit_copies = commit_copies;
    state.land_copies = land_copies;
    state.fail = fail;
    emulator::state = &state;
    bind(&state);

    const unsigned count = block[0] * block[1] * block[2];
    threads.assign(count, Thread{});
    for (unsigned i = 0; i < count; ++i) {
        threads[i].place = {i % block[0], i / block[0] % block[1], i / (block[0] * block[1])};
    }
    warps.assign((count + WARP - 1) / WARP, Warp{});

    std::vector<unsigned> order(count);
    std::vector<std::uint64_t> blocks(std::uint64_t(grid[0]) * grid[1] * grid[2]);
    arrange(blocks, how);
    for (std::uint64_t b : blocks) {
        state.block = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]),
                       unsigned(b / grid[0] / grid[1])};
        run_block(how, order);
        if (failed) break;
    }
    if (failed) {
        // Fibers in the middle of a kernel begin anew for the next one.
        for (Thread& t : threads) {
            if (t.fiber == nullptr) continue;
            prepare(t.fiber->context, t.fiber->stack, fiber_main);
            idle.push_back(t.fiber);
            t.fiber = nullptr;
        }
    }
    return failed ? 1 : 0;
}
