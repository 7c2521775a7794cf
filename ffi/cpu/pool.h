// Work for the calling thread and the threads lent by a pool.

#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace jaxfp8 {

class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() const = 0;  // available to a call, with the caller's
  virtual void Schedule(std::function<void()> task) = 0;
};

// Calls `body(i)` once for each i in [0, count), on at most `threads` threads. The caller takes its
// share and waits only for work begun elsewhere. A busy pool, an empty one or one unable to start a
// thread costs speed and nothing else. An exception in any share is thrown to the caller once all
// shares are at rest.
void ParallelFor(Pool& pool, int64_t threads, int64_t count,
                 const std::function<void(int64_t)>& body);

// Threads for one call, if the caller has no pool to lend.
class OwnThreads : public Pool {
 public:
  explicit OwnThreads(int64_t threads) : threads_(threads) {}
  ~OwnThreads() override {
    for (std::thread& thread : started_) thread.join();
  }
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;

  int64_t threads() const override { return threads_; }
  void Schedule(std::function<void()> task) override { started_.emplace_back(std::move(task)); }

 private:
  const int64_t threads_;
  std::vector<std::thread> started_;
};

}  // namespace jaxfp8
