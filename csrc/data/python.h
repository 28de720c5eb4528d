#pragma once

#include <pybind11/pybind11.h>

namespace mindspeed::data {

// Adds the submodule `data`: the index builders on numpy arrays.
void bind(pybind11::module_& m);

}  // namespace mindspeed::data
