// SPDX-License-Identifier: Apache-2.0
//
// The calls of Python that an index and its readers have in common, and what their methods share.
#pragma once

#include <vector>

#include "../python/calls.hpp"
#include "memory.hpp"

namespace flexkv::index {

// Throws PythonError if an item is no whole number.
inline std::vector<Py_ssize_t> numbers_of(PyObject* object) {
  const python::Items items(object);
  std::vector<Py_ssize_t> numbers(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    numbers[static_cast<std::size_t>(i)] = PyLong_AsSsize_t(items[i]);
  }
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return numbers;
}

// Throws PythonError: `is_index` is false.
[[noreturn]] inline void refuse_memory() {
  PyErr_Format(PyExc_ValueError, "the memory is no index of layout %u; allowed: one of this version",
               kLayout);
  throw PythonError{};
}

// A list of whole numbers. Throws PythonError.
template <typename Number>
Reference list_of(const std::vector<Number>& numbers) {
  Reference list = own(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), python::number(numbers[i]).release());
  }
  return list;
}

// `reading_of` gives the table of an object of Python.
template <const Reading& (*reading_of)(PyObject*)>
PyObject* lookup(PyObject* self, PyObject* keys) {
  return python::guarded([&] {
    Py_ssize_t count = 0;
    reading_of(self).look_each(Keys(keys), [&](Py_ssize_t, bool, bool ready) {
      count += ready;
      return ready;
    });
    return python::number(count);
  });
}

template <const Reading& (*reading_of)(PyObject*)>
PyObject* present(PyObject* self, PyObject* keys) {
  return python::guarded([&] {
    const Keys all(keys);
    Reference list = own(PyList_New(all.size()));
    reading_of(self).look_each(all, [&](Py_ssize_t i, bool, bool ready) {
      PyList_SetItem(list.get(), i, share(ready ? Py_True : Py_False).release());
      return true;
    });
    return list;
  });
}

template <const Reading& (*reading_of)(PyObject*)>
PyObject* missing(PyObject* self, PyObject* keys) {
  return python::guarded([&] {
    std::vector<Py_ssize_t> places;
    reading_of(self).look_each(Keys(keys), [&](Py_ssize_t i, bool has, bool) {
      if (!has) {
        places.push_back(i);
      }
      return true;
    });
    return list_of(places);
  });
}

}  // namespace flexkv::index
