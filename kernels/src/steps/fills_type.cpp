// SPDX-License-Identifier: Apache-2.0
//
// The type `FullBlocks` for CPython, by the stable ABI. It reads and writes attributes of
// flexkv.engine.scheduler.request.TrackedRequest.
#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../python/calls.hpp"
#include "flexkv/steps.h"

namespace {

using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::Items;
using flexkv::python::need_arguments;
using flexkv::python::none;
using flexkv::python::number;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;
using flexkv::python::share;

// flexkv.engine.scheduler.request.NEVER
constexpr Py_ssize_t kNever = PY_SSIZE_T_MAX;

// The names of attributes, made once: a look for a name that is made for it takes longer.
struct Names {
  Reference request = intern("request");
  Reference next_fill = intern("next_fill");
  Reference due_step = intern("due_step");
  Reference engine_blocks = intern("engine_blocks");
  Reference request_id = intern("request_id");
  Reference num_computed_tokens = intern("num_computed_tokens");
  Reference block_hashes = intern("block_hashes");

  static Reference intern(const char* name) { return own(PyUnicode_InternFromString(name)); }
};

Py_ssize_t size_of(PyObject* object) {
  const Py_ssize_t size = PyObject_Size(object);
  if (size < 0) {
    throw PythonError{};
  }
  return size;
}

Py_ssize_t number_of(PyObject* object) {
  const Py_ssize_t value = PyLong_AsSsize_t(object);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return value;
}

Reference get(PyObject* object, const Reference& name) {
  return own(PyObject_GetAttr(object, name.get()));
}

Py_ssize_t get_number(PyObject* object, const Reference& name) {
  return number_of(get(object, name).get());
}

void set_number(PyObject* object, const Reference& name, Py_ssize_t value) {
  if (PyObject_SetAttr(object, name.get(), number(value).get()) != 0) {
    throw PythonError{};
  }
}

// Borrowed; null if the dictionary has no such key.
PyObject* item_of(PyObject* dictionary, PyObject* key) {
  PyObject* const item = PyDict_GetItemWithError(dictionary, key);
  if (item == nullptr && PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return item;
}

// The engine's step: its requests by their ids, and the tokens that it computes of each.
struct Step {
  PyObject* scheduled;
  PyObject* requests;
  Py_ssize_t hash_tokens;
};

// See flexkv.engine.scheduler.full_blocks.FullBlocks. All methods may throw PythonError and std::bad_alloc.
class Calendar {
 public:
  Calendar(std::vector<Py_ssize_t> group_tokens, Py_ssize_t alignment)
      : group_tokens_(std::move(group_tokens)), alignment_(alignment) {}

  void watch(PyObject* tracked, Py_ssize_t tokens) {
    const Py_ssize_t step = step_ + std::max<Py_ssize_t>(1, tokens);
    if (get_number(tracked, names_.due_step) != step) {
      set_number(tracked, names_.due_step, step);
      due_[step].push_back(share(tracked));
    }
  }

  // The range of tokens that fills blocks; its end is 0 if there is none.
  std::pair<Py_ssize_t, Py_ssize_t> filled(PyObject* tracked, Py_ssize_t computed,
                                           Py_ssize_t hash_tokens) {
    const Reference request = get(tracked, names_.request);
    const Py_ssize_t start = get_number(tracked, names_.next_fill) - alignment_;
    const Py_ssize_t stop = full(tracked, request.get(), computed, hash_tokens);
    if (stop <= start) {
      return {0, 0};
    }
    set_number(tracked, names_.next_fill, stop + alignment_);
    return {start, stop};
  }

  // A list of requests with the tokens that fill blocks of theirs. After an error with one request,
  // all others are watched on.
  Reference take(const Step& step, bool several) {
    ++step_;
    Reference found = own(PyList_New(0));
    PyObject* error[3] = {};
    for (const Due& each : due(step, several)) {
      try {
        consider(each, step.hash_tokens, found.get());
      } catch (const PythonError&) {
        if (error[0] == nullptr) {
          PyErr_Fetch(&error[0], &error[1], &error[2]);
        } else {
          PyErr_Clear();
        }
      }
    }
    if (error[0] != nullptr) {
      PyErr_Restore(error[0], error[1], error[2]);
      throw PythonError{};
    }
    return found;
  }

 private:
  // A tracked request, with what belongs to it.
  struct Due {
    Reference tracked;
    Reference request;
    PyObject* tokens;  // that the step computes of it; borrowed; null if it is not scheduled
  };

  std::vector<Due> due(const Step& step, bool several) {
    std::vector<Due> found;
    if (const auto entry = due_.find(step_); entry != due_.end()) {
      for (Reference& tracked : entry->second) {
        if (get_number(tracked.get(), names_.due_step) != step_) {
          continue;
        }
        Reference request = get(tracked.get(), names_.request);
        const Reference id = get(request.get(), names_.request_id);
        if (item_of(step.requests, id.get()) == tracked.get()) {  // else it has ended
          PyObject* const tokens = item_of(step.scheduled, id.get());
          found.push_back({std::move(tracked), std::move(request), tokens});
        }
      }
      due_.erase(entry);
    }
    Py_ssize_t position = 0;
    PyObject* id = nullptr;
    PyObject* tokens = nullptr;
    while (several && PyDict_Next(step.scheduled, &position, &id, &tokens) != 0) {
      if (number_of(tokens) > 1) {
        PyObject* const tracked = item_of(step.requests, id);
        if (tracked != nullptr && get_number(tracked, names_.due_step) != step_) {
          found.push_back({share(tracked), get(tracked, names_.request), tokens});
        }
      }
    }
    return found;
  }

  // The tokens before the end of the last block that is full; 0 if the blocks are unknown.
  Py_ssize_t full(PyObject* tracked, PyObject* request, Py_ssize_t computed,
                  Py_ssize_t hash_tokens) const {
    const Reference tables = get(tracked, names_.engine_blocks);
    const Items groups(tables.get());
    const auto count = std::min(static_cast<std::size_t>(groups.size()), group_tokens_.size());
    if (count == 0) {
      return 0;
    }
    Py_ssize_t stop = std::min(computed, size_of(get(request, names_.block_hashes).get()) * hash_tokens);
    for (std::size_t i = 0; i < count; ++i) {
      if (group_tokens_[i] != 0) {
        stop = std::min(stop, size_of(groups[static_cast<Py_ssize_t>(i)]) * group_tokens_[i]);
      }
    }
    return stop / alignment_ * alignment_;
  }

  void consider(const Due& due, Py_ssize_t hash_tokens, PyObject* found) {
    PyObject* const tracked = due.tracked.get();
    const Py_ssize_t next_fill = get_number(tracked, names_.next_fill);
    if (next_fill == kNever) {
      return;
    }
    if (due.tokens == nullptr) {
      watch(tracked, 1);
      return;
    }
    const Py_ssize_t computed =
        get_number(due.request.get(), names_.num_computed_tokens) + number_of(due.tokens);
    Py_ssize_t next = next_fill;
    if (computed >= next_fill) {
      const Py_ssize_t start = next_fill - alignment_;
      const Py_ssize_t stop = full(tracked, due.request.get(), computed, hash_tokens);
      if (stop > start) {
        next = stop + alignment_;
        set_number(tracked, names_.next_fill, next);
        const Reference entry = own(Py_BuildValue("(Onn)", tracked, start, stop));
        if (PyList_Append(found, entry.get()) != 0) {
          throw PythonError{};
        }
      }
    }
    watch(tracked, next - computed);
  }

  Names names_;
  std::vector<Py_ssize_t> group_tokens_;
  Py_ssize_t alignment_;
  Py_ssize_t step_ = 0;
  std::unordered_map<Py_ssize_t, std::vector<Reference>> due_;  // by step
};

using Self = Holder<Calendar>;

Calendar& of(PyObject* self) { return Self::of(self); }

PyObject* watch(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    of(self).watch(args[0], number_of(args[1]));
    return none();
  });
}

PyObject* filled(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    const auto [start, stop] = of(self).filled(args[0], number_of(args[1]), number_of(args[2]));
    return stop > 0 ? own(Py_BuildValue("(nn)", start, stop)) : none();
  });
}

PyObject* take(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 4);
    if (PyDict_Check(args[0]) == 0 || PyDict_Check(args[1]) == 0) {
      PyErr_SetString(PyExc_TypeError, "requests and their tokens are dictionaries");
      throw PythonError{};
    }
    const Step step{args[0], args[1], number_of(args[2])};
    return of(self).take(step, args[3] == Py_True);
  });
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* group_tokens = nullptr;
  Py_ssize_t alignment = 0;
  if (PyArg_ParseTuple(args, "On", &group_tokens, &alignment) == 0) {
    return nullptr;
  }
  if (alignment < 1) {
    PyErr_Format(PyExc_ValueError, "an alignment of %zd; allowed: from 1 on", alignment);
    return nullptr;
  }
  return guarded([&] {
    const Items items(group_tokens);
    std::vector<Py_ssize_t> tokens;
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
      tokens.push_back(number_of(items[i]));
    }
    return Self::make(type, std::move(tokens), alignment);
  });
}

PyMethodDef methods[] = {
    {"watch", erased(watch), METH_FASTCALL, nullptr},
    {"filled", erased(filled), METH_FASTCALL, nullptr},
    {"take", erased(take), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.steps.FullBlocks", sizeof(Self), 0,
                    Py_TPFLAGS_DEFAULT, slots};

}  // namespace

// A new reference to the type; null, with an exception set, if it cannot be made.
PyObject* fkv_fill_calendar_type(void) { return PyType_FromSpec(&spec); }
