// SPDX-License-Identifier: Apache-2.0
//
// Objects of Python: references that end by themselves, and the items of a sequence.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

namespace flexkv::python {

// Thrown where an exception of Python is set.
struct PythonError {};

struct Release {
  void operator()(PyObject* object) const noexcept { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, Release>;

// Owns what a call returned. Throws PythonError if that is null.
inline Reference own(PyObject* object) {
  if (object == nullptr) {
    throw PythonError{};
  }
  return Reference(object);
}

inline Reference share(PyObject* object) {
  Py_INCREF(object);
  return Reference(object);
}

// The items of a list, a tuple, or what can be iterated over. Throws PythonError.
class Items {
 public:
  explicit Items(PyObject* object)
      : is_tuple_(PyTuple_Check(object) != 0),
        sequence_(is_tuple_ || PyList_Check(object) ? share(object) : own(PySequence_List(object))),
        size_(is_tuple_ ? PyTuple_Size(object) : PyList_Size(sequence_.get())) {}

  Py_ssize_t size() const noexcept { return size_; }

  // Borrowed.
  PyObject* operator[](Py_ssize_t i) const {
    PyObject* const item = is_tuple_ ? PyTuple_GetItem(sequence_.get(), i)
                                     : PyList_GetItem(sequence_.get(), i);
    if (item == nullptr) {
      throw PythonError{};
    }
    return item;
  }

  // A list or a tuple.
  PyObject* sequence() const noexcept { return sequence_.get(); }

 private:
  bool is_tuple_;
  Reference sequence_;
  Py_ssize_t size_;
};

}  // namespace flexkv::python
