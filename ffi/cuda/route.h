// Which path computes a problem on a device, and why the others do not. Pure: no GPU is asked.

#ifndef JAXFP8_CUDA_ROUTE_H_
#define JAXFP8_CUDA_ROUTE_H_

#include <string>
#include <string_view>
#include <vector>

#include "cuda/path.h"

namespace jaxfp8::cuda {

// Every path there is.
const std::vector<const Path*>& AllPaths();

struct Choice {
  const Path* path;
  std::string why_not;  // "" where it can compute the problem
};

// Every path, best first for this problem on this device: the first that can, does.
std::vector<Choice> Choices(const Problem& problem, const Device& device);

struct Route {
  const Path* path = nullptr;
  std::string reason;  // why there is none
};

// The best path for the problem on the device, or the one called `name`.
Route RouteTo(const Problem& problem, const Device& device, std::string_view name);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_ROUTE_H_
