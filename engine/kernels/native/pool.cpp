#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace unison {
namespace {

constexpr int kMaxThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(100);

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Default rounding and denormals for the life of this object; a thread may have asked torch to flush them.
class DefaultFloats {
#if defined(__x86_64__)
  public:
    DefaultFloats() : saved_(_mm_getcsr()) {
        if ((saved_ & kControl) != kDefault) _mm_setcsr((saved_ & ~kControl) | kDefault);
    }
    ~DefaultFloats() {
        if ((saved_ & kControl) != kDefault) _mm_setcsr(saved_);
    }

  private:
    static constexpr unsigned kControl = 0xffc0, kDefault = 0x1f80;
    unsigned saved_;
#elif defined(__aarch64__)
  public:
    DefaultFloats() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
    }
    ~DefaultFloats() {
        if (saved_ != 0) asm volatile("msr fpcr, %0" ::"r"(saved_));
    }

  private:
    uint64_t saved_;
#else
  public:
    DefaultFloats() {}
#endif
};

int allowed_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return 1;
}

class Pool {
  public:
    explicit Pool(int threads) { resize(threads); }

    int threads() const { return threads_.load(std::memory_order_relaxed); }

    int set_threads(int count) {
        std::lock_guard<std::mutex> one_caller(callers_);
        resize(count);
        return threads();
    }

    void run(int64_t num_items, JobBody body, void* context) {
        std::lock_guard<std::mutex> one_caller(callers_);
        if (helpers_.empty()) {
            for (int64_t item = 0; item < num_items; ++item) body(context, item, 0);
            return;
        }
        body_ = body;
        context_ = context;
        num_items_ = num_items;
        done_.store(0, std::memory_order_relaxed);
        remaining_.store(num_items, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
        work(0);
        wait_for(num_items);
    }

  private:
    struct Helper {
        std::thread thread;
        std::atomic<bool> leave{false};
    };

    // Takes items until none is left. The job's fields are read only after an item is held: from then on until it is
    // counted as done the caller stays in run(), so they can't change.
    void work(int worker) {
        int64_t left = remaining_.load(std::memory_order_acquire);
        while (left > 0) {
            if (!remaining_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
            body_(context_, num_items_ - left, worker);
            done_.fetch_add(1, std::memory_order_acq_rel);
            left = remaining_.load(std::memory_order_acquire);
        }
    }

    void wait_for(int64_t num_items) {
        for (int spins = 0; done_.load(std::memory_order_acquire) != num_items; ++spins) {
            if (spins < 4000) pause_briefly();
            else sched_yield();  // a helper was descheduled with an item in hand: let it run
        }
    }

    void wake() {
        { std::lock_guard<std::mutex> lock(sleep_); }
        work_or_leave_.notify_all();
    }

    bool spin_for_work(const Helper& self) {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        for (int spins = 1;; ++spins) {
            if (remaining_.load(std::memory_order_acquire) > 0) return true;
            if (self.leave.load(std::memory_order_acquire)) return true;
            pause_briefly();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() >= until) return false;
        }
    }

    void sleep_until_work(const Helper& self) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        work_or_leave_.wait(lock, [&] {
            return remaining_.load(std::memory_order_seq_cst) > 0 || self.leave.load(std::memory_order_acquire);
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

    void help(Helper* self, int worker) {
        const DefaultFloats floats;
        while (!self->leave.load(std::memory_order_acquire)) {
            work(worker);
            if (!spin_for_work(*self)) sleep_until_work(*self);
        }
    }

    void resize(int count) {
        while (threads() > count) {
            helpers_.back()->leave.store(true, std::memory_order_release);
            wake();
            helpers_.back()->thread.join();
            helpers_.pop_back();
            threads_.fetch_sub(1, std::memory_order_relaxed);
        }
        while (threads() < count) {
            auto helper = std::make_unique<Helper>();
            Helper* self = helper.get();
            const int worker = threads();
            try {
                helper->thread = std::thread([this, self, worker] { help(self, worker); });
            } catch (const std::system_error&) {
                return;  // the system has no more threads: fewer helpers, same results
            }
            helpers_.push_back(std::move(helper));
            threads_.fetch_add(1, std::memory_order_relaxed);
        }
    }

    std::mutex callers_;
    std::vector<std::unique_ptr<Helper>> helpers_;
    std::atomic<int> threads_{1};
    JobBody body_ = nullptr;
    void* context_ = nullptr;
    int64_t num_items_ = 0;
    std::mutex sleep_;
    std::condition_variable work_or_leave_;
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<int64_t> remaining_{0};
    alignas(64) std::atomic<int64_t> done_{0};
};

// Never destroyed: helpers may outlive static destructors, and a forked child can't join threads it doesn't have.
std::atomic<Pool*> the_pool{nullptr};
std::atomic<int> wanted_threads{0};
std::mutex creation;

void forget_pool_in_child() {
    the_pool.store(nullptr);
    new (&creation) std::mutex;  // another thread of the parent may have held it
}

Pool& pool() {
    Pool* current = the_pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    std::lock_guard<std::mutex> lock(creation);
    current = the_pool.load(std::memory_order_acquire);
    if (current == nullptr) {
        static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
        (void)registered;
        if (wanted_threads.load() == 0) wanted_threads.store(std::min(allowed_cpus(), kMaxThreads));
        current = new Pool(wanted_threads.load());
        the_pool.store(current, std::memory_order_release);
    }
    return *current;
}

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    ~Buffer() { std::free(data); }
};

}  // namespace

void run_job(int64_t num_items, JobBody body, void* context) {
    const DefaultFloats floats;
    if (num_items <= 1) {  // alone: no need to wait for other callers
        if (num_items == 1) body(context, 0, 0);
        return;
    }
    pool().run(num_items, body, context);
}

int num_threads() { return pool().threads(); }

void* scratch(int slot, size_t bytes) {
    static thread_local Buffer buffers[4];
    Buffer& buffer = buffers[slot];
    if (buffer.bytes < bytes) {
        std::free(buffer.data);
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(4096, size);
        buffer.bytes = buffer.data != nullptr ? size : 0;
        if (buffer.data == nullptr) std::abort();  // out of memory by a few hundred KiB: nothing sensible is left to do
    }
    return buffer.data;
}

}  // namespace unison

extern "C" {

int unison_set_threads(int count) {
    if (count < 1 || count > unison::kMaxThreads) return -1;
    unison::wanted_threads.store(count);
    return unison::pool().set_threads(count);
}

int unison_get_threads() { return unison::num_threads(); }

}  // extern "C"
