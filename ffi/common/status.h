// Success, or a sentence about a failure.

#pragma once

#include <string>
#include <utility>

namespace jaxfp8 {

// Success without a message. Support checks (`WhyNot`) return one too: their message gives the
// reason against a problem.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // From sentences, so that functions return them as they are.
  Status(std::string message) : message_(std::move(message)) {}
  Status(const char* message) : message_(message) {}

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }
  // A failure with the name of its place in front.
  Status In(const std::string& place) const { return ok() ? Status() : place + ": " + message_; }

 private:
  std::string message_;
};

}  // namespace jaxfp8

// Returns from the function if an expression fails.
#define JAXFP8_RETURN_IF_ERROR(expression) \
  if (::jaxfp8::Status status_ = (expression); !status_.ok()) return status_
