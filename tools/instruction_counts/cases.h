// What both programs compute: sizes like those of models of one to two billion parameters, small enough for
// an emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

constexpr size_t kRows = 256, kDepth = 2048, kOutputs = 1024; // matrix products
constexpr size_t kHeads = 8, kKvHeads = 2, kHeadDim = 64;     // attention
constexpr size_t kPromptTokens = 512, kCachedTokens = 2048;   // prefill, decode
constexpr double kPromptPairs = kPromptTokens * (kPromptTokens + 1) / 2.0;

inline std::vector<float> random_floats(size_t n) {
  static uint32_t state = 2463534242u;
  std::vector<float> values(n);
  for (float& value : values) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    value = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
  }
  return values;
}

struct Case {
  const char* name;
  double macs;  // multiply-accumulates of one repetition that the result needs
  void (*run)(size_t repetitions);
};

// Runs `case` `repetitions` times and prints its multiply-accumulates; without arguments lists the cases.
inline int run_case(int argc, char** argv, const Case* cases, size_t n_cases) {
  for (size_t i = 0; i < n_cases; ++i) {
    if (argc < 3) {
      std::printf("%s\n", cases[i].name);
    } else if (!std::strcmp(cases[i].name, argv[1])) {
      cases[i].run(std::strtoul(argv[2], nullptr, 10));
      std::printf("macs %.0f\n", cases[i].macs);
      return 0;
    }
  }
  return argc < 3 ? 0 : 2;
}
