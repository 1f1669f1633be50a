// The gated activation of one row, element by element: round(silu(gate)) * up. On its own (rows.cpp), and behind the linear
// layer that computes both (linear.cpp, linear_dot.cpp).
#pragma once

#include <cstdint>

#include "row_sum.h"
#include "simd.h"

namespace unison {

template <class T> inline void silu_mul_span(const T* gate, const T* up, T* out, int64_t count) {
    eights(
        count, [&](int64_t k) { store8(out + k, mul8(round_to<T>(silu8(load8(gate + k))), load8(up + k))); },
        [&](int64_t k, int n) {
            store_part(out + k, mul8(round_to<T>(silu8(load_part(gate + k, n))), load_part(up + k, n)), n);
        });
}

}  // namespace unison
