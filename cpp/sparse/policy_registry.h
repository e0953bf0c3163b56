// The policies by name. A policy's source file registers it, and nothing else names it.
#pragma once

#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "sparse/sparse_policy.h"

namespace edgeh2o {

// The settings of a policy as a binding hands them over. The getters throw std::invalid_argument for a value
// of another kind; a setting that is missing has the value `otherwise`.
class PolicyOptions {
 public:
  using Counts = std::vector<std::optional<size_t>>;
  using Value = std::variant<bool, int64_t, double, std::string, Counts>;

  explicit PolicyOptions(std::map<std::string, Value> values) : values_(std::move(values)) {}

  size_t count(const char* name, size_t otherwise);
  float number(const char* name, float otherwise);
  bool flag(const char* name, bool otherwise);
  std::string text(const char* name, const char* otherwise);
  Counts counts(const char* name, const std::optional<Counts>& otherwise = std::nullopt);

  // Throws std::invalid_argument that names a setting which no getter asked for.
  void check_all_read() const;

 private:
  template <typename T>
  std::optional<T> take(const char* name, const char* kind);

  std::map<std::string, Value> values_;
};

// Made as a static constant of the policy's source file.
struct PolicyRegistration {
  using Make = std::shared_ptr<SparsePolicy> (*)(PolicyOptions& options);

  // first_options: those that may be given without their names, in this order.
  PolicyRegistration(const char* name, std::initializer_list<const char*> first_options, Make make);

  std::string name;
  std::vector<std::string> first_options;
  Make make;
};

// By name.
const std::map<std::string, const PolicyRegistration*>& registered_policies();

// Throws std::invalid_argument for an unknown name or setting and for bad values.
std::shared_ptr<SparsePolicy> make_policy(const std::string& name, PolicyOptions options);

}  // namespace edgeh2o
