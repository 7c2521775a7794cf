#include "tests/cpu/bound.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "tests/cpu/formats.h"
#include "tests/cpu/offsets.h"

namespace jaxfp8::tests {
namespace {

bool CloseWide(DType dtype, double found, double y, double error) {
  if (std::isnan(y)) return std::isnan(found);
  if (std::isnan(found)) return false;
  if (found == y) return true;
  if (std::isinf(y)) return false;
  if (std::isinf(found)) return std::abs(y) + error >= HighestOf(dtype);
  const double bound = error + HalfUlp(dtype, y) + HalfUlp(dtype, std::abs(y) + error);
  return std::abs(found - y) <= bound;
}

bool CloseCode(DType dtype, double found, double y, double error, double scale) {
  if (std::isnan(y / scale)) return IsInt8(dtype) ? found == 0 : std::isnan(found);
  if (std::isnan(found)) return false;
  const double a = RoundedTo(dtype, (y - error) / scale);
  const double b = RoundedTo(dtype, (y + error) / scale);
  return std::min(a, b) <= found && found <= std::max(a, b);
}

bool Close(DType dtype, double found, double y, double error, double scale) {
  if (dtype == DType::kS32) return found == y;
  if (IsEightBit(dtype)) return CloseCode(dtype, found, y, error, scale);
  return CloseWide(dtype, found, y, error);
}

std::string Sentence(const char* name, int64_t i, double found, double y, double error) {
  char text[160];
  std::snprintf(text, sizeof text, "%s[%lld] is %.9g, but needs %.9g within %.3g", name,
                static_cast<long long>(i), found, y, error);
  return text;
}

// The largest |y| of the output elements that share one amax. Each may be off by the largest error
// of all.
std::string WhyWrongAmax(const Case& from, const Exact& exact, const Array& amax) {
  const Shape out = from.OutShape();
  const std::vector<int64_t> offsets = Along(*from.amax, AllAxes(out), out);
  std::vector<double> largest(amax.count(), 0.0);
  double error = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    double& seen = largest[offsets[i]];
    const double y = std::abs(exact.y[i]);
    if (y > seen || std::isnan(y)) seen = std::isnan(seen) ? seen : y;
    if (std::isfinite(exact.error[i])) error = std::max(error, exact.error[i]);
  }
  for (int64_t i = 0; i < amax.count(); ++i) {
    const double found = ValueOf(amax, i);
    if (!CloseWide(DType::kF32, found, largest[i], error)) {
      return Sentence("amax", i, found, largest[i], error);
    }
  }
  return "";
}

}  // namespace

std::string WhyBeyondBound(const Case& from, const Exact& exact, const Results& results) {
  for (int64_t i = 0; i < results.out.count(); ++i) {
    const double found = ValueOf(results.out, i);
    const double error = std::isfinite(exact.error[i]) ? exact.error[i] : 0.0;
    if (!Close(from.out_dtype, found, exact.y[i], error, exact.out_scale[i])) {
      return Sentence("out", i, found, exact.y[i] / exact.out_scale[i], error / exact.out_scale[i]);
    }
  }
  return from.amax ? WhyWrongAmax(from, exact, results.amax) : "";
}

std::string WhyNotExact(const Exact& exact, const Results& results) {
  for (int64_t i = 0; i < results.out.count(); ++i) {
    const double found = ValueOf(results.out, i), y = exact.y[i];
    if (found != y && !(std::isnan(found) && std::isnan(y))) return Sentence("out", i, found, y, 0);
  }
  return "";
}

std::string WhyBeyondError(const Exact& exact, const Results& results) {
  for (int64_t i = 0; i < results.out.count(); ++i) {
    const double found = ValueOf(results.out, i);
    if (!(std::abs(found - exact.y[i]) <= exact.error[i])) {
      return Sentence("out", i, found, exact.y[i], exact.error[i]);
    }
  }
  return "";
}

}  // namespace jaxfp8::tests
