// A checked call, computed.

#pragma once

#include <string_view>

#include "common/spec.h"
#include "common/status.h"
#include "cpu/pool.h"
#include "cpu/problem.h"

namespace jaxfp8 {

// Routes and runs. Fails if the problem has no kernel, or the kernel called `name` cannot take it.
Status Run(const ScaledDotSpec& spec, const Buffers& buffers, std::string_view name, Pool& pool);

}  // namespace jaxfp8
