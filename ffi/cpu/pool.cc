#include "cpu/pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "cpu/float_mode.h"

namespace jaxfp8 {
namespace {

// Shared by the caller and its helpers; outlives the call if a helper starts late.
struct Shares {
  int64_t count;
  const std::function<void(int64_t)>* body;  // the caller's: touched only while a share is open
  std::atomic<int64_t> next{1};              // the first is the caller's
  std::mutex mutex;
  std::condition_variable rest;
  int64_t done = 0;
  std::exception_ptr failure;
};

void Take(Shares& shares, int64_t first) {
  const FloatMode mode;
  int64_t taken = 0;
  std::exception_ptr failure;
  for (int64_t i = first; i < shares.count; i = shares.next.fetch_add(1), ++taken) {
    if (failure) continue;
    try {
      (*shares.body)(i);
    } catch (...) {  // of any type, carried to the caller
      failure = std::current_exception();
    }
  }
  if (taken == 0) return;
  const std::lock_guard lock(shares.mutex);
  shares.done += taken;
  if (failure) shares.failure = failure;
  if (shares.done == shares.count) shares.rest.notify_all();
}

void Invite(Pool& pool, int64_t helpers, const std::shared_ptr<Shares>& shares) {
  try {
    for (int64_t i = 0; i < helpers; ++i)
      pool.Schedule([shares] { Take(*shares, shares->next.fetch_add(1)); });
  } catch (const std::exception&) {
    // Fewer helpers then; the caller does their part.
  }
}

}  // namespace

void ParallelFor(Pool& pool, int64_t threads, int64_t count,
                 const std::function<void(int64_t)>& body) {
  const auto shares = std::make_shared<Shares>();
  shares->count = count;
  shares->body = &body;
  Invite(pool, std::min(threads, count) - 1, shares);
  Take(*shares, 0);
  std::unique_lock lock(shares->mutex);
  shares->rest.wait(lock, [&] { return shares->done == shares->count; });
  if (shares->failure) std::rethrow_exception(shares->failure);
}

}  // namespace jaxfp8
