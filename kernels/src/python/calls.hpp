// SPDX-License-Identifier: Apache-2.0
//
// What the methods of our types for Python share.
#pragma once

#include <new>
#include <utility>

#include "object.hpp"

namespace flexkv::python {

// Calls `function`, and returns what it returns; null if an exception of Python is set then.
template <typename Function>
PyObject* guarded(Function function) noexcept {
  try {
    return function().release();
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

inline Reference none() { return share(Py_None); }
inline Reference number(Py_ssize_t value) { return own(PyLong_FromSsize_t(value)); }

// Throws PythonError, with an exception of Python set.
inline void need_arguments(Py_ssize_t count, Py_ssize_t needed, Py_ssize_t optional = 0) {
  if (count < needed || count > needed + optional) {
    PyErr_Format(PyExc_TypeError, "%zd arguments; allowed: %zd to %zd", count, needed,
                 needed + optional);
    throw PythonError{};
  }
}

// A method with METH_FASTCALL, as a table of methods names it.
template <typename Function>
PyCFunction erased(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// An object of Python that owns a `T`.
template <typename T>
struct Holder {
  PyObject_HEAD
  T* held;

  static T& of(PyObject* self) noexcept { return *reinterpret_cast<Holder*>(self)->held; }

  // A new object of `type`. Throws PythonError, and what the constructor of `T` throws.
  template <typename... Arguments>
  static Reference make(PyTypeObject* type, Arguments&&... arguments) {
    Reference made = own(PyType_GenericAlloc(type, 0));
    reinterpret_cast<Holder*>(made.get())->held = new T(std::forward<Arguments>(arguments)...);
    return made;
  }

  // For the slot `tp_dealloc`.
  static void destroy(PyObject* self) noexcept {
    PyTypeObject* const type = Py_TYPE(self);
    delete reinterpret_cast<Holder*>(self)->held;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
  }
};

}  // namespace flexkv::python
