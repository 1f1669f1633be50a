// A recorded list of kernel calls, run again without anybody in between.
#include <cstdint>

#include "pool.h"

extern "C" {

// Runs calls 0 .. count-1: functions[i](words + starts[i]). Stops at the first that returns something else than 0; returns
// its index and puts the result into *fault. Returns -1 when all have run.
UNISON_EXPORT int64_t unison_replay(int (*const* functions)(const int64_t*), const int64_t* starts,
                                    const int64_t* words, int64_t count, int* fault) {
    for (int64_t i = 0; i < count; ++i) {
        *fault = functions[i](words + starts[i]);
        if (*fault != 0) return i;
    }
    return -1;
}
}
