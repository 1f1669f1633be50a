// The threads of the native kernels: one pool per process, shared by every kernel.
//
// A job is a number of items and a body. Items are handed out one by one from an atomic counter, to the calling thread
// and to the helpers alike: a helper that the system doesn't run costs only the item it holds, and one that never
// wakes costs nothing. Which thread runs an item must never change a result; kernels write disjoint outputs per item.
//
// Helpers spin for a bounded time after a job (the next kernel of a layer follows within microseconds) and then sleep.
// Calls from several threads are served one after another. A body must not start a job itself. After fork() the child
// builds its own helpers at its first job. Every body runs with the default floating-point environment (round to
// nearest, denormals kept), whatever the calling thread had set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace unison {

using JobBody = void (*)(void* context, int64_t item, int worker);

// Runs body(context, item, worker) for every item in [0, num_items); worker is 0 for the caller, else 1..threads-1.
void run_job(int64_t num_items, JobBody body, void* context);

// Threads that take part in a job, the caller included.
int num_threads();

// Runs body(item, worker) for each item of [0, num_items).
template <class Body> inline void parallel_for(int64_t num_items, Body&& body) {
    using Plain = typename std::remove_reference<Body>::type;
    run_job(
        num_items, [](void* context, int64_t item, int worker) { (*static_cast<Plain*>(context))(item, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// At least `bytes` of memory of the calling thread, 64-byte aligned, contents unspecified. `slot` (0..3) names
// independent buffers; a buffer stays valid until this thread asks for the same slot again, and may be read by the
// helpers of a job meanwhile.
void* scratch(int slot, size_t bytes);

}  // namespace unison

// Functions that Python calls: extern "C" UNISON_EXPORT. Everything else stays inside the library.
#ifndef UNISON_EXPORT
#define UNISON_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {
// Sets the number of threads, the caller included (1..256); returns the number now in force, which is lower where the
// system refuses threads, or -1 for a number out of range.
UNISON_EXPORT int unison_set_threads(int count);
UNISON_EXPORT int unison_get_threads();
}
