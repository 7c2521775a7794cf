// Work shared between threads, for ThreadSanitizer: results have the same bits on any number of
// threads, calls at once do not disturb each other, and a pool that is late or idle does no harm.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/pool.h"
#include "tests/cpu/call.h"
#include "tests/cpu/draw.h"
#include "tests/cpu/internals.h"

namespace jaxfp8::tests {
namespace {

int failures = 0;

void Expect(bool holds, const std::string& claim) {
  if (!holds && ++failures <= 20) std::printf("FAILED: %s\n", claim.c_str());
}

// Threads that wait for work, as XLA's do. With `held`, they begin when it is let go.
class Workers : public Pool {
 public:
  explicit Workers(int threads, bool held = false) : held_(held) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Workers() override {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      held_ = false;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t threads() const override { return static_cast<int64_t>(threads_.size()) + 1; }
  void Schedule(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !held_ && (done_ || !tasks_.empty()); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_, done_ = false;
};

// A product large enough to be shared, with one amax that all its threads raise.
struct Work {
  Case of;
  Operands operands;

  Results Run(int threads) const {
    Results results = SoiledResults(of);
    std::string message;
    const int status = Call(of, operands, results, "", threads, message);
    Expect(status == JAXFP8_OK, message);
    return results;
  }
};

bool SameBits(const Array& a, const Array& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

bool SameBits(const Results& a, const Results& b) {
  return SameBits(a.out, b.out) && SameBits(a.amax, b.amax);
}

std::vector<Work> SomeWork() {
  constexpr std::pair<DType, DType> kTypes[] = {
      {DType::kBF16, DType::kE4M3}, {DType::kU8, DType::kS8}, {DType::kF32, DType::kU8}};
  constexpr Sizes kSizes[] = {{1, 2000, 3000}, {65, 520, 1030}, {300, 40, 600}};
  Random random(3);
  std::vector<Work> all;
  for (auto [lhs, rhs] : kTypes) {
    for (const Sizes& sizes : kSizes) {
      Case of = Matrices(lhs, rhs, sizes, static_cast<int>(all.size()) % kLayouts);
      of.rhs.scale = true;
      of.amax = Shape{1, 1};
      Operands operands = DrawOperands(of, Values::kFinite, random);
      all.push_back({std::move(of), std::move(operands)});
    }
  }
  return all;
}

void CheckBits(const std::vector<Work>& all, const std::vector<Results>& alone) {
  for (size_t i = 0; i < all.size(); ++i) {
    for (int threads : {2, 3, 8}) {
      Expect(SameBits(all[i].Run(threads), alone[i]),
             all[i].of.Text() + ": other bits on " + std::to_string(threads) + " threads");
    }
  }
}

void CheckCallsAtOnce(const std::vector<Work>& all, const std::vector<Results>& alone) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (size_t i = 0; i < all.size(); ++i) {
        const size_t mine = (i + 2 * static_cast<size_t>(caller)) % all.size();
        wrong += !SameBits(all[mine].Run(1 + caller % 3), alone[mine]);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  Expect(wrong == 0, "calls at once disturb each other");
}

// The shares of one call, each counted once.
void CheckShares(Pool& pool, const char* name) {
  for (int64_t count : {0, 1, 2, 7, 1000}) {
    std::vector<int> seen(count);
    ParallelFor(pool, pool.threads(), count, [&](int64_t i) { ++seen[i]; });
    for (int times : seen) Expect(times == 1, std::string(name) + ": a share is not done once");
  }
}

void CheckPools() {
  Workers many(8), none(0), two(2);
  CheckShares(many, "eight threads");
  CheckShares(none, "no threads");
  // Callers that share a pool, each with work of its own.
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&two] { CheckShares(two, "a shared pool"); });
  }
  for (std::thread& caller : callers) caller.join();
}

// As many threads as were asked for: each share waits until all have begun.
void CheckOwnThreads() {
  for (int64_t threads : {1, 2, 3}) {
    OwnThreads pool(threads);
    std::mutex mutex;
    std::condition_variable changed;
    int64_t begun = 0;
    ParallelFor(pool, pool.threads(), threads, [&](int64_t) {
      std::unique_lock lock(mutex);
      ++begun;
      changed.notify_all();
      const bool all =
          changed.wait_for(lock, std::chrono::seconds(20), [&] { return begun == threads; });
      Expect(all, "there are fewer than " + std::to_string(threads) + " threads");
    });
  }
}

// A pool that cannot start its second thread.
class Exhausted : public OwnThreads {
 public:
  Exhausted() : OwnThreads(4) {}
  void Schedule(std::function<void()> task) override {
    if (++asked_ % 4 == 2) throw std::system_error(EAGAIN, std::generic_category());
    OwnThreads::Schedule(std::move(task));
  }

 private:
  int asked_ = 0;
};

void CheckExhausted() {
  Exhausted pool;
  CheckShares(pool, "a pool out of threads");
}

// How many of four threads share an int8 product.
int64_t ThreadsFor(int64_t batch, const Sizes& sizes) {
  return PlanOf("", "int8", "int8", batch, sizes, 4).share.threads;
}

// Waking a thread takes longer than a small product, however many shares it has.
void CheckSmall() {
  Expect(ThreadsFor(1, {16, 64, 64}) == 1, "a small product is shared");
  Expect(ThreadsFor(4, {16, 64, 64}) == 1, "a small batch is shared");
  Expect(ThreadsFor(1, {400, 16, 16}) == 1, "a small product of many rows is shared");
  Expect(ThreadsFor(1, {64, 2048, 2048}) == 4, "a large product is not shared");
  Expect(ThreadsFor(1000, {4, 64, 64}) == 4, "a large batch is not shared");
  Expect(ThreadsFor(1, {9000, 16, 64}) == 4, "a large output is not shared");
}

// Helpers that begin after the call has ended touch nothing of it.
void CheckLateHelpers() {
  Workers late(3, /*held=*/true);
  CheckShares(late, "a pool that does not begin");
}

void CheckFailures() {
  Workers pool(3);
  std::atomic<int> begun = 0;
  bool caught = false;
  try {
    ParallelFor(pool, pool.threads(), 100, [&](int64_t i) {
      ++begun;
      if (i == 5) throw std::runtime_error("share 5");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  Expect(caught, "an exception of a share reaches the caller");
  Expect(begun > 5, "shares before the one that fails are begun");
}

}  // namespace
}  // namespace jaxfp8::tests

int main() {
  using namespace jaxfp8::tests;
  const std::vector<Work> all = SomeWork();
  std::vector<Results> alone;
  for (const Work& work : all) alone.push_back(work.Run(1));
  CheckBits(all, alone);
  CheckCallsAtOnce(all, alone);
  CheckPools();
  CheckOwnThreads();
  CheckExhausted();
  CheckSmall();
  CheckLateHelpers();
  CheckFailures();
  std::printf("  threads: %d failures\n", failures);
  return failures != 0;
}
