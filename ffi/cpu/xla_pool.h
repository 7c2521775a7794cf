// XLA's threads as a pool. Only handlers include this: nothing else here sees XLA's headers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "common/xla_call.h"
#include "cpu/pool.h"

namespace jaxfp8 {

class XlaPool : public Pool {
 public:
  explicit XlaPool(ffi::ThreadPool& pool)
      : pool_(pool), threads_(std::max<int64_t>(pool.num_threads(), 1)) {}

  int64_t threads() const override { return threads_; }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
  int64_t threads_;
};

}  // namespace jaxfp8

// Defines a handler that answers with the status of `Call`, given the threads, all operands, all
// results and all attributes.
#define JAXFP8_CPU_HANDLER(name, Call)            \
  JAXFP8_HANDLER(name, Call,                      \
                 xla::ffi::Ffi::Bind()            \
                     .Ctx<xla::ffi::ThreadPool>() \
                     .RemainingArgs()             \
                     .RemainingRets()             \
                     .Attrs<xla::ffi::Dictionary>())
