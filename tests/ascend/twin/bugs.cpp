// Runs the kernels with seeded bugs, for test_twin_bugs.py.
#include "harness.h"
#include "json.h"

namespace twin_tests {

std::map<std::string, Bug>& bugs() {
  static std::map<std::string, Bug> all;
  return all;
}

}  // namespace twin_tests

using namespace twin_tests;

extern "C" {

char* twin_bug_names() {
  return strdup(
      ("[" + ascend_twin::joined(bugs(), [](auto& bug) { return ascend_twin::quoted(bug.first); }) + "]").c_str());
}

char* twin_bug(const char* name, bool seeded, bool strict, const char* dropped_sync) {
  const Bug& bug = bugs().at(name);
  std::vector<float> x(kElements, 1.0f), y(kElements), z(kElements), workspace(kElements);
  const Arguments arguments{x.data(), y.data(), z.data(), workspace.data()};
  const uint64_t bytes = kElements * sizeof(float);
  const std::vector<ascend_twin::GlobalBuffer> buffers = {{"x", x.data(), bytes, Use::kInput},
                                                          {"y", y.data(), bytes, bug.y},
                                                          {"z", z.data(), bytes, Use::kWorkspace},
                                                          {"workspace", workspace.data(), bytes, Use::kWorkspace}};
  return ascend_twin::to_c_string(ascend_twin::launch({name, strict, dropped_sync}, bug.cores, bug.blocks, buffers,
                                                      [&] { bug.kernel(arguments, seeded); }));
}
}
