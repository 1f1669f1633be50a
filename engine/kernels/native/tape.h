// Calls whose arguments are plain words, so that a list of them can be replayed (tape.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace unison {

template <class T> inline T from_word(int64_t word) {
    if constexpr (std::is_pointer<T>::value) {
        return reinterpret_cast<T>(word);
    } else {
        static_assert(std::is_same<T, float>::value || std::is_same<T, int64_t>::value, "words hold these");
        T out;
        std::memcpy(&out, &word, sizeof out);  // a float's bits are the low half
        return out;
    }
}

template <class R, class... A, size_t... I>
int call_words(R (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void<R>::value) {
        function(from_word<A>(words[I])...);
        return 0;
    } else {
        return function(from_word<A>(words[I])...);
    }
}

template <class R, class... A> int call_words(R (*function)(A...), const int64_t* words) {
    return call_words(function, words, std::index_sequence_for<A...>{});
}

}  // namespace unison

// Defines NAME_words(words), which calls NAME and returns its result, or 0 where it has none. In extern "C".
#define UNISON_WORDS(NAME) \
    UNISON_EXPORT int NAME##_words(const int64_t* words) { return unison::call_words(&NAME, words); }
