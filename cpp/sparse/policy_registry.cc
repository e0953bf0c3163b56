#include "sparse/policy_registry.h"

#include "base/check.h"

namespace edgeh2o {
namespace {

// A function's own, because the constants that fill it are made in no known order.
std::map<std::string, const PolicyRegistration*>& registry() {
  static std::map<std::string, const PolicyRegistration*> policies;
  return policies;
}

}  // namespace

// The value, which is then spent; nothing if it is missing.
template <typename T>
std::optional<T> PolicyOptions::take(const char* name, const char* kind) {
  const auto found = values_.find(name);
  if (found == values_.end()) return std::nullopt;
  const T* value = std::get_if<T>(&found->second);
  EH2O_CHECK(value != nullptr, name, " must be ", kind);
  std::optional<T> result = *value;
  values_.erase(found);
  return result;
}

size_t PolicyOptions::count(const char* name, size_t otherwise) {
  const auto value = take<int64_t>(name, "an integer");
  EH2O_CHECK(value.value_or(0) >= 0, name, " must not be negative, got ", value.value_or(0));
  return value ? static_cast<size_t>(*value) : otherwise;
}

float PolicyOptions::number(const char* name, float otherwise) {
  const auto found = values_.find(name);
  if (found != values_.end() && std::holds_alternative<int64_t>(found->second)) {
    found->second = static_cast<double>(std::get<int64_t>(found->second));
  }
  const auto value = take<double>(name, "a number");
  return value ? static_cast<float>(*value) : otherwise;
}

bool PolicyOptions::flag(const char* name, bool otherwise) {
  return take<bool>(name, "true or false").value_or(otherwise);
}

std::string PolicyOptions::text(const char* name, const char* otherwise) {
  return take<std::string>(name, "text").value_or(otherwise);
}

PolicyOptions::Counts PolicyOptions::counts(const char* name, const std::optional<Counts>& otherwise) {
  const auto value = take<Counts>(name, "a list of integers");
  EH2O_CHECK(value || otherwise, name, " is missing");
  return value ? *value : *otherwise;
}

void PolicyOptions::check_all_read() const {
  EH2O_CHECK(values_.empty(), "there is no setting '", values_.begin()->first, "'");
}

PolicyRegistration::PolicyRegistration(const char* name, std::initializer_list<const char*> first_options,
                                       Make make)
    : name(name), first_options(first_options.begin(), first_options.end()), make(make) {
  registry()[name] = this;
}

const std::map<std::string, const PolicyRegistration*>& registered_policies() { return registry(); }

std::shared_ptr<SparsePolicy> make_policy(const std::string& name, PolicyOptions options) {
  const auto found = registry().find(name);
  EH2O_CHECK(found != registry().end(), "there is no policy '", name, "'");
  std::shared_ptr<SparsePolicy> policy = found->second->make(options);
  options.check_all_read();
  return policy;
}

}  // namespace edgeh2o
