// Which thread takes which work item: at first each its own share, neighbours, so that neighbouring rows stay in one core's
// cache. A thread that is done helps with the share that has most left, until that is empty too, and so on. Cores that share
// their units with somebody else's work, or are of two kinds, take up to twice as long as others for the same items. A result
// is the same whoever computes it.
#pragma once
#include <atomic>

#include "kernel.h"

namespace convpar {

// Neighbouring items, taken from the first on. In a line of the cache of its own: others look at it.
class alignas(64) Share {
    std::atomic<index_t> next;
    index_t end;

  public:
    Share(index_t k, index_t threads, index_t items)
        : next(k * items / threads), end((k + 1) * items / threads) {}
    // An item, or -1 if all are taken. `contended`: several threads take, in a way for which x86 waits until all stores before
    // it have left the core.
    index_t take(bool contended) {
        index_t item;
        if (contended) {
            item = next.fetch_add(1, std::memory_order_relaxed);
        } else {
            item = next.load(std::memory_order_relaxed);
            next.store(item + 1, std::memory_order_relaxed);
        }
        return item < end ? item : -1;
    }
    // At most 0 if all are taken.
    index_t left() const { return end - next.load(std::memory_order_relaxed); }
};

}  // namespace convpar
