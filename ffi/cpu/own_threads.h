// Threads for one call, if the caller has no pool to lend.

#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/pool.h"

namespace jaxfp8 {

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
