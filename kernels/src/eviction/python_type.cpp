// SPDX-License-Identifier: Apache-2.0
//
// The type `HazardPolicy` for CPython, by the stable ABI: one library serves all versions from 3.11
// on. A policy is called several times for each block, and a call through ctypes alone takes longer
// than the policy may.
#include "python_type.hpp"

#include <cstdint>
#include <iterator>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "../python/object.hpp"
#include "flexkv/hazard_policy.h"

namespace {

using flexkv::eviction::Hazard;
using flexkv::eviction::Hint;
using flexkv::eviction::Key;
using flexkv::eviction::kHigher;
using flexkv::eviction::kLower;
using flexkv::eviction::kNone;
using flexkv::eviction::Request;

PyTypeObject* hazard_type = nullptr;
PyTypeObject* state_type = nullptr;

struct Policy {
  PyObject_HEAD
  Hazard* hazard;
  bool lent;  // to an index
};

Policy& policy_of(PyObject* self) { return *reinterpret_cast<Policy*>(self); }

// False, with an exception set, if an index has the policy.
bool is_own(PyObject* self) {
  if (policy_of(self).lent) {
    PyErr_SetString(PyExc_RuntimeError, "the policy is an index's, which alone tells it of blocks");
    return false;
  }
  return true;
}

std::string_view bytes_of_object(void* object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  PyBytes_AsStringAndSize(static_cast<PyObject*>(object), &data, &size);
  return {data, static_cast<std::size_t>(size)};
}

// False, with an exception set, if the object is no bytes.
bool read_key(PyObject* object, Key& key) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) != 0) {
    return false;
  }
  key = Key({data, static_cast<std::size_t>(size)}, object);
  return true;
}

bool read_text(PyObject* object, std::string_view& text) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
  if (data == nullptr) {
    return false;
  }
  text = {data, static_cast<std::size_t>(size)};
  return true;
}

bool has_arguments(Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
  if (count < least || count > most) {
    PyErr_Format(PyExc_TypeError, "%zd arguments; allowed: %zd to %zd", count, least, most);
    return false;
  }
  return true;
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

PyObject* unknown_block(PyObject* key) {
  PyErr_SetObject(PyExc_KeyError, key);
  return nullptr;
}

// Owns one reference.
struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, Release>;

// What RequestContext says; the texts belong to the attributes, which `kept` owns.
bool read_request(PyObject* context, Request& request, Reference (&kept)[4]) {
  const char* const names[] = {"request_id", "session", "returns", "priority"};
  for (std::size_t i = 0; i < std::size(names); ++i) {
    kept[i].reset(PyObject_GetAttrString(context, names[i]));
    if (!kept[i]) {
      return false;
    }
  }
  if (!read_text(kept[0].get(), request.id) || !read_text(kept[1].get(), request.session)) {
    return false;
  }
  int overflow = 0;
  const long priority = PyLong_AsLongAndOverflow(kept[3].get(), &overflow);
  if (priority == -1 && overflow == 0 && PyErr_Occurred() != nullptr) {
    return false;
  }
  const int sign = overflow != 0 ? overflow : static_cast<int>(priority > 0) - static_cast<int>(priority < 0);
  if (sign != 0) {
    request.level = sign > 0 ? kHigher : kLower;
  }
  if (kept[2].get() != Py_None) {
    const int returns = PyObject_IsTrue(kept[2].get());
    if (returns < 0) {
      return false;
    }
    request.hint = returns != 0 ? Hint::returns : Hint::leaves;
  } else if (!request.session.empty()) {
    request.hint = Hint::session;
  }
  return true;
}

Hazard& of(PyObject* self) { return *policy_of(self).hazard; }

PyObject* began(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments(count, 3, 3)) {
    return nullptr;
  }
  const Reference list(PySequence_List(args[0]));
  const double now = PyFloat_AsDouble(args[2]);
  if (!list || PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  Request request;
  Reference kept[4];
  if (!read_request(args[1], request, kept)) {
    return nullptr;
  }
  try {
    std::vector<Key> keys(static_cast<std::size_t>(PyList_Size(list.get())));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (!read_key(PyList_GetItem(list.get(), static_cast<Py_ssize_t>(i)), keys[i])) {
        return nullptr;
      }
    }
    of(self).began(keys, request, now);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  return none();
}

PyObject* ended(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  std::string_view id;
  if (!has_arguments(count, 3, 3) || !read_text(args[0], id)) {
    return nullptr;
  }
  const long tokens = PyLong_AsLong(args[1]);
  const double now = PyFloat_AsDouble(args[2]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  try {
    of(self).ended(id, static_cast<std::uint32_t>(tokens < 0 ? 0 : tokens), now);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  return none();
}

PyObject* inserted(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Key key;
  Key after;
  if (!is_own(self) || !has_arguments(count, 2, 3) || !read_key(args[0], key) ||
      (args[1] != Py_None && !read_key(args[1], after))) {
    return nullptr;
  }
  const int fetched = count == 3 ? PyObject_IsTrue(args[2]) : 0;
  if (fetched < 0) {
    return nullptr;
  }
  try {
    Hazard& hazard = of(self);
    const bool is_first = args[1] == Py_None;
    const std::uint32_t before = is_first ? kNone : hazard.find(after);
    if (hazard.find(key) != kNone ||
        hazard.inserted(key, is_first ? nullptr : &after, before, fetched != 0) == kNone) {
      PyErr_SetString(PyExc_ValueError, "the block is there already, or the tier is full");
      return nullptr;
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_INCREF(args[0]);
  return none();
}

PyObject* nothing(PyObject*, PyObject* const*, Py_ssize_t) { return none(); }

PyObject* held(PyObject* self, PyObject* key) {
  Key read;
  if (!is_own(self) || !read_key(key, read)) {
    return nullptr;
  }
  const std::uint32_t block = of(self).find(read);
  if (block == kNone) {
    return unknown_block(key);
  }
  of(self).held(block);
  return none();
}

PyObject* released(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Key key;
  if (!is_own(self) || !has_arguments(count, 2, 2) || !read_key(args[0], key)) {
    return nullptr;
  }
  const std::uint32_t block = of(self).find(key);
  if (block == kNone) {
    return unknown_block(args[0]);
  }
  of(self).released(block);
  return none();
}

PyObject* evicted(PyObject* self, PyObject* key) {
  Key read;
  if (!is_own(self) || !read_key(key, read)) {
    return nullptr;
  }
  const std::uint32_t block = of(self).find(read);
  if (block == kNone) {
    return unknown_block(key);
  }
  Py_DECREF(static_cast<PyObject*>(of(self).evicted(block, read, false)));
  return none();
}

PyObject* victim(PyObject* self, PyObject*) {
  if (!is_own(self)) {
    return nullptr;
  }
  auto* const object = static_cast<PyObject*>(of(self).victim());
  if (object == nullptr) {
    return none();
  }
  Py_INCREF(object);
  return object;
}

void drop_key(void* object) { Py_DECREF(static_cast<PyObject*>(object)); }

PyObject* clear(PyObject* self, PyObject*) {
  if (!is_own(self)) {
    return nullptr;
  }
  of(self).clear(drop_key);
  return none();
}

// See flexkv.eviction.GuardState.
PyObject* guard_state(PyObject* self, PyObject*) {
  const flexkv::eviction::Guard& guard = of(self).guard();
  const flexkv::eviction::GuardCounts& counts = guard.counts();
  Reference state(PyStructSequence_New(state_type));
  if (!state) {
    return nullptr;
  }
  PyObject* const values[] = {PyBool_FromLong(guard.trusts_hazard() ? 1 : 0),
                              PyFloat_FromDouble(guard.credit()),
                              PyLong_FromUnsignedLong(guard.immune()),
                              PyLong_FromUnsignedLongLong(counts.hits),
                              PyLong_FromUnsignedLongLong(counts.lru_hits),
                              PyLong_FromUnsignedLongLong(counts.switches)};
  for (std::size_t i = 0; i < std::size(values); ++i) {
    PyStructSequence_SetItem(state.get(), static_cast<Py_ssize_t>(i), values[i]);
  }
  return PyErr_Occurred() == nullptr ? state.release() : nullptr;
}

PyObject* size_in_bytes(PyObject* self, PyObject*) {
  return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(of(self).bytes()),
                       static_cast<Py_ssize_t>(of(self).learned_bytes()));
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  long long capacity = 0;
  if (PyArg_ParseTuple(args, "L", &capacity) == 0) {
    return nullptr;
  }
  if (capacity < 1 || capacity >= (1 << 24)) {
    PyErr_Format(PyExc_ValueError, "capacity is %lld; allowed: 1 to %d blocks", capacity, (1 << 24) - 1);
    return nullptr;
  }
  auto* const allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  Reference made(allocate(type, 0));
  if (!made) {
    return nullptr;
  }
  try {
    reinterpret_cast<Policy*>(made.get())->hazard =
        new Hazard(static_cast<std::uint32_t>(capacity), bytes_of_object);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  return made.release();
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* const policy = reinterpret_cast<Policy*>(self);
  if (policy->hazard != nullptr) {
    policy->hazard->clear(drop_key);
    delete policy->hazard;
  }
  auto* const release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
  release(self);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction erased(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"began", erased(began), METH_FASTCALL, nullptr},
    {"ended", erased(ended), METH_FASTCALL, nullptr},
    {"inserted", erased(inserted), METH_FASTCALL, nullptr},
    {"hit", erased(nothing), METH_FASTCALL, nullptr},
    {"touched", erased(nothing), METH_FASTCALL, nullptr},
    {"held", held, METH_O, nullptr},
    {"released", erased(released), METH_FASTCALL, nullptr},
    {"evicted", evicted, METH_O, nullptr},
    {"victim", victim, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"guard_state", guard_state, METH_NOARGS, nullptr},
    {"size_in_bytes", size_in_bytes, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.hazard.HazardPolicy", sizeof(Policy), 0, Py_TPFLAGS_DEFAULT,
                    slots};

PyStructSequence_Field state_fields[] = {
    {"trusts_hazard", nullptr}, {"credit", nullptr},   {"immune_blocks", nullptr},
    {"hits", nullptr},          {"lru_hits", nullptr}, {"switches", nullptr},
    {nullptr, nullptr},
};

PyStructSequence_Desc state_description = {"flexkv_kernels.hazard.GuardState", nullptr, state_fields,
                                           static_cast<int>(std::size(state_fields)) - 1};

}  // namespace

// A new reference to the type; null, with an exception set, if it cannot be made.
PyObject* fkv_hazard_policy_type(void) {
  if (state_type == nullptr) {
    state_type = PyStructSequence_NewType(&state_description);
  }
  PyObject* const type = state_type == nullptr ? nullptr : PyType_FromSpec(&spec);
  hazard_type = reinterpret_cast<PyTypeObject*>(type);
  return type;
}

namespace flexkv::eviction {

bool is_hazard(PyObject* object) noexcept { return Py_TYPE(object) == hazard_type; }

HazardLoan::HazardLoan(PyObject* policy, BlockTable::BytesOf bytes_of)
    : policy_(policy), hazard_(&of(policy)) {
  if (!is_own(policy)) {
    throw python::PythonError{};
  }
  if (hazard_->size() > 0) {
    PyErr_SetString(PyExc_ValueError, "the policy has blocks of before");
    throw python::PythonError{};
  }
  hazard_->read_keys_by(bytes_of);
  policy_of(policy).lent = true;
}

HazardLoan::~HazardLoan() {
  hazard_->clear([](void*) {});
  hazard_->read_keys_by(bytes_of_object);
  policy_of(policy_).lent = false;
}

}  // namespace flexkv::eviction
