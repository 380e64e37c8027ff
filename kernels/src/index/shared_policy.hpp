// SPDX-License-Identifier: Apache-2.0
//
// The policy of a tier on disk, whose directories have an index each.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../eviction/python_type.hpp"
#include "memory.hpp"

namespace flexkv::index {

class Slots;

// One policy of flexkv.eviction for the indexes of a tier. What it keeps of a key is where an index has it:
// its size and its bytes. `hazard` gets no call of Python for each block.
class SharedPolicy {
 public:
  // Throws PythonError.
  explicit SharedPolicy(PyObject* policy) : object_(share(policy)) {
    if (eviction::is_hazard(policy)) {
      hazard_.emplace(policy, [](void* key) { return view(static_cast<const char*>(key)); });
    }
  }

  void inserted(const char* key, const char* after) {
    if (!hazard_) {
      call("inserted", object_of(key), after == nullptr ? share(Py_None) : object_of(after));
      return;
    }
    const eviction::Key before = after == nullptr ? eviction::Key() : stored(after);
    const std::uint32_t number = after == nullptr ? eviction::kNone : number_of(after);
    if (number_of(key) != eviction::kNone ||
        (*hazard_)->inserted(stored(key), after == nullptr ? nullptr : &before, number, false) ==
            eviction::kNone) {
      PyErr_SetString(PyExc_ValueError, "the block is there already, or the tier is full");
      throw PythonError{};
    }
  }
  void held(const char* key) {
    hazard_ ? (*hazard_)->held(known(key)) : call("held", object_of(key));
  }
  void released(const char* key) {
    hazard_ ? (*hazard_)->released(known(key))
            : call("released", object_of(key), own(PyLong_FromLong(0)));
  }
  void evicted(const char* key) {
    if (hazard_) {
      (*hazard_)->evicted(known(key), stored(key), false);
    } else {
      call("evicted", object_of(key));
    }
  }

  // Calls `function` with the key of the block to evict next, and returns what that returns; none without
  // such a block.
  template <typename Function>
  Slot with_victim(Function function) {
    if (hazard_) {
      const void* const key = (*hazard_)->victim();
      return key == nullptr ? kNoSlot : function(view(static_cast<const char*>(key)));
    }
    const Reference key = own(PyObject_CallMethod(object_.get(), "victim", nullptr));
    return key.get() == Py_None ? kNoSlot : function(view_of(key.get()));
  }

  std::vector<Slots*> indexes;                    // null for one that has ended
  std::vector<std::shared_ptr<const void>> keys;  // of them, as long as the policy may read them

 private:
  static KeyView view(const char* key) { return {key + 1, static_cast<std::uint8_t>(*key)}; }
  static eviction::Key stored(const char* key) { return {view(key), const_cast<char*>(key)}; }

  static Reference object_of(const char* key) {
    return own(PyBytes_FromStringAndSize(key + 1, static_cast<std::uint8_t>(*key)));
  }

  template <typename... Arguments>
  void call(const char* name, const Arguments&... arguments) {
    const Reference method = own(PyObject_GetAttrString(object_.get(), name));
    own(PyObject_CallFunctionObjArgs(method.get(), arguments.get()..., nullptr));
  }

  std::uint32_t number_of(const char* key) { return (*hazard_)->find(stored(key)); }
  std::uint32_t known(const char* key) {
    const std::uint32_t number = number_of(key);
    if (number == eviction::kNone) {
      PyErr_SetObject(PyExc_KeyError, object_of(key).get());
      throw PythonError{};
    }
    return number;
  }

  const Reference object_;
  std::optional<eviction::HazardLoan> hazard_;
};

}  // namespace flexkv::index
