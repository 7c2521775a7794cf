// Which kernel computes a problem, or why a given one cannot. Pure: no data, no device.

#ifndef JAXFP8_CPU_ROUTE_H_
#define JAXFP8_CPU_ROUTE_H_

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels/kernel.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Every kernel compiled in, best first within what it sums.
const std::vector<const Kernel*>& AllKernels();

struct Route {
  const Kernel* kernel = nullptr;
  std::string reason;  // why there is none
};

// The best kernel for the problem on a CPU with `features`, or the one called `name`.
Route RouteTo(const Problem& problem, unsigned features, std::string_view name);

}  // namespace jaxfp8

#endif  // JAXFP8_CPU_ROUTE_H_
