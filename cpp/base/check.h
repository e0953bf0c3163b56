// Error checks. EH2O_CHECK: for arguments of public functions, throws std::invalid_argument (ValueError in
// Python). EH2O_DASSERT: for preconditions of kernels and hot loops, only in debug builds.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace edgeh2o {

template <typename... Args>
[[noreturn, gnu::cold, gnu::noinline]] void throw_invalid(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  throw std::invalid_argument(text.str());
}

}  // namespace edgeh2o

#define EH2O_CHECK(condition, ...)           \
  do {                                       \
    if (!(condition)) [[unlikely]]           \
      ::edgeh2o::throw_invalid(__VA_ARGS__); \
  } while (0)

#ifdef EH2O_DEBUG
#include <cassert>
#define EH2O_DASSERT(condition) assert(condition)
#else
#define EH2O_DASSERT(condition) ((void)0)
#endif
