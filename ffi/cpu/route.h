// The kernel for a problem's form, or why a given one cannot compute it. Pure: a form has no data,
// and no device is asked.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/kernel_calls.h"
#include "cpu/form.h"
#include "cpu/kernels/kernel.h"

namespace jaxfp8 {

// Every kernel compiled in, best first within its type of sums.
const std::vector<const Kernel*>& AllKernels();

using Calls = KernelCalls<Kernel, AllKernels>;

struct Route {
  const Kernel* kernel = nullptr;
  std::string reason;  // why there is no kernel
};

// The best kernel for the form on a CPU with `features`, or the one called `name`.
Route RouteTo(const Form& form, unsigned features, std::string_view name);

}  // namespace jaxfp8
