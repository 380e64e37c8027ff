// SPDX-License-Identifier: Apache-2.0
//
// The type `AccessLog` for CPython, by the stable ABI. A call takes all of a step's blocks where it can.
#include <algorithm>
#include <vector>

#include "../python/calls.hpp"
#include "flexkv/steps.h"
#include "uses.hpp"

namespace {

using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::Items;
using flexkv::python::need_arguments;
using flexkv::python::none;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;
using flexkv::python::share;
using flexkv::steps::Table;
using flexkv::steps::Uses;

std::uint32_t block_of(PyObject* object) {
  const long long block = PyLong_AsLongLong(object);
  if (block == -1 && PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  if (block < 0 || block >= Uses::kMostBlocks) {
    PyErr_Format(PyExc_ValueError, "block %lld; allowed: 0 to %u", block, Uses::kMostBlocks - 1);
    throw PythonError{};
  }
  return static_cast<std::uint32_t>(block);
}

Table blocks_of(PyObject* object) {
  const Items items(object);
  Table blocks(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    blocks[static_cast<std::size_t>(i)] = block_of(items[i]);
  }
  return blocks;
}

// The blocks of all requests, by the ids of these, and their uses.
class Requests {
 public:
  Requests() : places_(own(PyDict_New())) {}

  std::int64_t step() const noexcept { return uses_.step(); }

  void begin_step(const Items& ended) {
    uses_.begin_step();
    for (Py_ssize_t i = 0; i < ended.size(); ++i) {
      forget(ended[i]);
    }
  }

  void touched(const Table& blocks) {
    for (const std::uint32_t block : blocks) {
      uses_.touch(block);
    }
  }

  std::int64_t last_use(const Table& blocks) const noexcept {
    std::int64_t last = lost_ ? Uses::kEverything : 0;
    for (const std::uint32_t block : blocks) {
      last = std::max(last, uses_.last_use(block));
    }
    return last;
  }

  void give(PyObject* id, const Table& blocks) {
    forget(id);
    std::size_t place = tables_.size();
    if (free_.empty()) {
      tables_.emplace_back();
    } else {
      place = free_.back();
      free_.pop_back();
    }
    const Reference number = own(PyLong_FromSize_t(place));
    if (PyDict_SetItem(places_.get(), id, number.get()) != 0) {
      throw PythonError{};
    }
    extend(tables_[place], blocks);
  }

  void add(PyObject* id, const Table& blocks) {
    Table* const table = find(id);
    if (table == nullptr) {
      lose();
    } else {
      extend(*table, blocks);
    }
  }

  // Whether the blocks of all these requests, the keys of a dictionary, are known.
  bool knows(PyObject* requests) const {
    Py_ssize_t position = 0;
    PyObject* id = nullptr;
    while (PyDict_Next(requests, &position, &id, nullptr) != 0) {
      const int known = PyDict_Contains(places_.get(), id);
      if (known < 0) {
        throw PythonError{};
      }
      if (known == 0) {
        return false;
      }
    }
    return true;
  }

  void lose() noexcept {
    lost_ = true;
    PyDict_Clear(places_.get());
    tables_.clear();
    free_.clear();
    uses_.clear();
  }

 private:
  Table* find(PyObject* id) {
    PyObject* const number = PyDict_GetItemWithError(places_.get(), id);
    if (number == nullptr) {
      if (PyErr_Occurred() != nullptr) {
        throw PythonError{};
      }
      return nullptr;
    }
    return &tables_[PyLong_AsSize_t(number)];
  }

  void forget(PyObject* id) {
    Table* const table = find(id);
    if (table == nullptr) {
      return;
    }
    free_.push_back(static_cast<std::size_t>(table - tables_.data()));
    uses_.release(*table);
    table->clear();
    if (PyDict_DelItem(places_.get(), id) != 0) {
      throw PythonError{};
    }
  }

  void extend(Table& table, const Table& blocks) {
    table.reserve(table.size() + blocks.size());
    for (const std::uint32_t block : blocks) {
      uses_.hold(block);
      table.push_back(block);
    }
  }

  Uses uses_;
  Reference places_;  // by the id of a request the place of its table
  std::vector<Table> tables_;
  std::vector<std::size_t> free_;
  bool lost_ = false;
};

using Self = Holder<Requests>;

Requests& of(PyObject* self) { return Self::of(self); }

PyObject* begin_step(PyObject* self, PyObject* ended) {
  return guarded([&] {
    of(self).begin_step(Items(ended));
    return none();
  });
}

PyObject* touched(PyObject* self, PyObject* blocks) {
  return guarded([&] {
    of(self).touched(blocks_of(blocks));
    return none();
  });
}

PyObject* last_use(PyObject* self, PyObject* blocks) {
  return guarded([&] { return own(PyLong_FromLongLong(of(self).last_use(blocks_of(blocks)))); });
}

PyObject* give(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    of(self).give(args[0], blocks_of(args[1]));
    return none();
  });
}

// The lists are the engine's: a request's place in one is its place in the other.
PyObject* follow(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    const Items ids(args[0]);
    const Items tables(args[1]);
    for (Py_ssize_t i = 0; i < tables.size(); ++i) {
      PyObject* const given = tables[i];
      if (given == Py_None) {
        continue;
      }
      const Items groups(given);
      if (groups.size() != 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd groups; allowed: those of one", groups.size());
        throw PythonError{};
      }
      const int replaced = PySet_Contains(args[2], ids[i]);
      if (replaced < 0) {
        throw PythonError{};
      }
      const Table blocks = blocks_of(groups[0]);
      replaced != 0 ? of(self).give(ids[i], blocks) : of(self).add(ids[i], blocks);
    }
    return none();
  });
}

PyObject* check(PyObject* self, PyObject* computed) {
  return guarded([&] {
    if (PyDict_Check(computed) == 0) {
      PyErr_Format(PyExc_TypeError, "%R is no dictionary", computed);
      throw PythonError{};
    }
    if (!of(self).knows(computed)) {
      of(self).lose();
    }
    return none();
  });
}

PyObject* lose(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).lose();
    return none();
  });
}

PyObject* get_step(PyObject* self, void*) {
  return guarded([&] { return own(PyLong_FromLongLong(of(self).step())); });
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  if (PyArg_ParseTuple(args, "") == 0) {
    return nullptr;
  }
  return guarded([&] { return Self::make(type); });
}

PyMethodDef methods[] = {
    {"begin_step", begin_step, METH_O, nullptr},
    {"touched", touched, METH_O, nullptr},
    {"last_use", last_use, METH_O, nullptr},
    {"give", erased(give), METH_FASTCALL, nullptr},
    {"follow", erased(follow), METH_FASTCALL, nullptr},
    {"check", check, METH_O, nullptr},
    {"lose", lose, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"step", get_step, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.steps.AccessLog", sizeof(Self), 0, Py_TPFLAGS_DEFAULT,
                    slots};

}  // namespace

// A new reference to the type; null, with an exception set, if it cannot be made.
PyObject* fkv_block_uses_type(void) { return PyType_FromSpec(&spec); }
