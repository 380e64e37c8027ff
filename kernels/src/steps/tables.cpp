// SPDX-License-Identifier: Apache-2.0
//
// The function `extend_tables` for CPython, by the stable ABI. It changes the attribute `engine_blocks` of
// flexkv.engine.scheduler.request.TrackedRequest.
#include <vector>

#include "../python/calls.hpp"
#include "flexkv/steps.h"

namespace {

using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Items;
using flexkv::python::need_arguments;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;

PyObject* engine_blocks_name = nullptr;

void append(PyObject* list, const Items& blocks) {
  for (Py_ssize_t i = 0; i < blocks.size(); ++i) {
    if (PyList_Append(list, blocks[i]) != 0) {
      throw PythonError{};
    }
  }
}

// Appends a request's new blocks of the cached groups to its tables, unless these are unknown.
void extend(PyObject* tracked, const Items& groups, const Items& members) {
  const Reference tables = own(PyObject_GetAttr(tracked, engine_blocks_name));
  const Items known(tables.get());
  if (known.size() == 0) {
    return;
  }
  for (Py_ssize_t i = 0; i < members.size(); ++i) {
    if (PyList_Check(known[i]) == 0) {
      PyErr_SetString(PyExc_TypeError, "a table of blocks is no list");
      throw PythonError{};
    }
    append(known[i], Items(groups[PyLong_AsSsize_t(members[i])]));
  }
}

// Whether any group has blocks.
bool has_any(const Items& groups) {
  for (Py_ssize_t i = 0; i < groups.size(); ++i) {
    if (Items(groups[i]).size() > 0) {
      return true;
    }
  }
  return false;
}

// See flexkv.engine.scheduler.tables.ExtendTables.
PyObject* extend_tables(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 5);
    PyObject* const requests = args[0];
    const Items ids(args[1]);
    const Items given(args[2]);
    PyObject* const replaced = args[3];
    const Items members(args[4]);
    const Reference written = own(PyList_New(0));
    bool is_complete = true;
    for (Py_ssize_t i = 0; i < given.size(); ++i) {
      if (given[i] == Py_None) {
        continue;
      }
      const int skip = PySet_Contains(replaced, ids[i]);
      if (skip < 0) {
        throw PythonError{};
      }
      if (skip != 0) {
        continue;
      }
      const Items groups(given[i]);
      is_complete = is_complete && has_any(groups);
      for (Py_ssize_t group = 0; group < groups.size(); ++group) {
        append(written.get(), Items(groups[group]));
      }
      PyObject* const tracked = PyDict_GetItemWithError(requests, ids[i]);
      if (tracked != nullptr) {
        extend(tracked, groups, members);
      } else if (PyErr_Occurred() != nullptr) {
        throw PythonError{};
      }
    }
    return own(PyTuple_Pack(2, written.get(), is_complete ? Py_True : Py_False));
  });
}

PyMethodDef definition = {"extend_tables", erased(extend_tables), METH_FASTCALL, nullptr};

}  // namespace

// A new reference to the function; null, with an exception set, if it cannot be made.
PyObject* fkv_extend_tables(void) {
  engine_blocks_name = PyUnicode_InternFromString("engine_blocks");
  return engine_blocks_name == nullptr ? nullptr : PyCFunction_New(&definition, nullptr);
}
