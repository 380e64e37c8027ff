// SPDX-License-Identifier: Apache-2.0
//
// The memory of an object of Python.
#pragma once

#include <cstddef>

#include "object.hpp"

namespace flexkv::python {

// Keeps the object, and its memory in its place.
class Buffer {
 public:
  // Throws PythonError if the object has no memory in one piece, or none that may be written to where
  // `flags` is PyBUF_WRITABLE.
  Buffer(PyObject* object, int flags) {
    if (PyObject_GetBuffer(object, &view_, flags) != 0) {
      throw PythonError{};
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* start() const noexcept { return static_cast<char*>(view_.buf); }
  std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace flexkv::python
