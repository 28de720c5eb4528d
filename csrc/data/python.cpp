#include "data/python.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "data/index.h"

namespace mindspeed::data {

namespace {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
void shuffle_array(RandomState& random, Array<T>& values) {
  T* data = values.mutable_data();
  const py::gil_scoped_release release;
  random.shuffle(data, values.size());
}

Array<int64_t> accumulated(const Array<int32_t>& lengths, const Array<int32_t>& order) {
  const auto [least, most] = std::minmax_element(order.data(), order.data() + order.size());
  if (order.size() && (*least < 0 || *most >= lengths.size())) throw std::out_of_range("the order has no such length");
  Array<int64_t> starts(order.size() + 1);
  int64_t* data = starts.mutable_data();
  const py::gil_scoped_release release;
  accumulate_lengths(lengths.data(), order.data(), order.size(), data);
  return starts;
}

py::tuple blended(const Array<double>& weights, int64_t size, const std::optional<Array<int64_t>>& limits) {
  if (weights.size() > INT16_MAX) throw std::invalid_argument("more data sets than an int16 can number");
  if (weights.size() == 0 || (limits && limits->size() != weights.size())) {
    throw std::invalid_argument("there must be a weight, and with limits a limit, for every data set");
  }
  if (!std::all_of(weights.data(), weights.data() + weights.size(),
                   [](double weight) { return std::isfinite(weight); })) {
    throw std::invalid_argument("a weight is not finite");
  }
  if (limits && size > std::accumulate(limits->data(), limits->data() + limits->size(), int64_t{0})) {
    throw std::invalid_argument("the limits do not add up to the size");
  }
  Array<int16_t> dataset(size);
  Array<int64_t> sample(size);
  {
    int16_t* dataset_data = dataset.mutable_data();
    int64_t* sample_data = sample.mutable_data();
    const py::gil_scoped_release release;
    blend(weights.data(), limits ? limits->data() : nullptr, weights.size(), size, dataset_data, sample_data);
  }
  return py::make_tuple(dataset, sample);
}

}  // namespace

void bind(py::module_& m) {
  py::module_ data = m.def_submodule("data", "Builders of data orders.");
  py::class_<RandomState>(data, "RandomState", "The generator of numpy.random.RandomState(seed).")
      .def(py::init<uint32_t>(), py::arg("seed"))
      .def("shuffle", shuffle_array<int32_t>, py::arg("values").noconvert(),
           "RandomState.shuffle of a vector, in place.")
      .def("shuffle", shuffle_array<int64_t>, py::arg("values").noconvert());
  data.def("accumulate_lengths", accumulated, py::arg("lengths").noconvert(), py::arg("order").noconvert(),
           "Where each element of the order begins, int64 [count + 1], when they have these lengths (int32).");
  data.def("blend", blended, py::arg("weights"), py::arg("size"), py::arg("limits") = py::none(),
           "Data set (int16) and sample in it (int64) of every position of a blend.");
}

}  // namespace mindspeed::data
