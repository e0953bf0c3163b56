// The Python module edgeh2o._core: objects with a lifetime. One file per group of classes.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/parallel.h"
#include "bindings/register.h"
#include "isa/select.h"
#include "ops/attention_sizes.h"
#include "quant/packed_matrix.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, module) {
  using namespace edgeh2o;
  module.doc() = "Compiled core of edgeh2o; see _core.pyi";
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const KernelTable* table : available_kernel_tables()) names.emplace_back(table->name);
    return names;
  });
  module.def("active_isa", [] { return active_kernel_table().name; });
  module.def("attention_precisions", [] { return attention_precisions(active_kernel_table()); });
  module.def("best_attention_precision",
             [] { return attention_precision_name(active_kernel_table().best_precision); });
  module.def("use_isa", &use_isa, py::arg("name"));
  module.def("set_num_threads", &set_num_threads, py::arg("n"));
  module.def("num_threads", &num_threads);
  module.def("release_threads", &release_threads, py::call_guard<py::gil_scoped_release>());
  module.def("supported_types", [] {
    std::vector<std::string> names;
    for (const FormatInfo& info : supported_formats()) {
      if (info.is_of_files) names.emplace_back(info.type_name);
    }
    return names;
  });
  bind_attention(module);
  bind_matmul(module);
  bind_model(module);
  bind_packed_weights(module);
  bind_sequence(module);
  bind_drafting(module);
  bind_device(module);
  bind_chunked_attention(module);
  bind_strings(module);
}
