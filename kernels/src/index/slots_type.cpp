// SPDX-License-Identifier: Apache-2.0
//
// The type `SlotIndex` for CPython, by the stable ABI. A call takes many blocks where it can.
#include <vector>

#include "calls.hpp"
#include "flexkv/block_index.h"
#include "slots.hpp"

namespace {

using namespace flexkv::index;
using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::need_arguments;
using flexkv::python::none;
using flexkv::python::number;

using Self = Holder<Slots>;

PyTypeObject* slots_type = nullptr;

Slots& of(PyObject* self) { return Self::of(self); }

Reference boolean(bool value) { return share(value ? Py_True : Py_False); }

std::size_t size_in(PyObject* object) {
  const std::size_t size = PyLong_AsSize_t(object);
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return size;
}

Slot checked(PyObject* self, Py_ssize_t slot) {
  if (!of(self).has(slot)) {
    PyErr_Format(PyExc_ValueError, "slot %zd is none of %zu", slot, of(self).size());
    throw PythonError{};
  }
  return static_cast<Slot>(slot);
}

Slot slot_in(PyObject* self, PyObject* object) {
  const Py_ssize_t slot = PyLong_AsSsize_t(object);
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return checked(self, slot);
}

Slot used_slot_in(PyObject* self, PyObject* object) {
  const Slot slot = slot_in(self, object);
  if (of(self).row(slot).uses == 0) {
    PyErr_Format(PyExc_ValueError, "slot %d is not in use", slot);
    throw PythonError{};
  }
  return slot;
}

// The bytes of a checksum.
const char* checksum_in(PyObject* object) {
  const KeyView bytes = view_of(object);
  if (bytes.size() != kChecksumBytes) {
    PyErr_Format(PyExc_ValueError, "a checksum has %zu bytes; allowed: %zu", bytes.size(),
                 kChecksumBytes);
    throw PythonError{};
  }
  return bytes.data();
}

// A key that a slot can hold.
KeyView key_in(PyObject* object) {
  const KeyView key = view_of(object);
  if (key.size() > kMostKeyBytes) {
    PyErr_Format(PyExc_ValueError, "a key has %zu bytes; allowed: up to %zu", key.size(),
                 kMostKeyBytes);
    throw PythonError{};
  }
  return key;
}

// A list of what `function` makes of each item.
template <typename Function>
Reference listed(Py_ssize_t size, Function function) {
  Reference list = own(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyList_SetItem(list.get(), i, function(i).release());
  }
  return list;
}

// The same of the slot of each key, or none.
template <typename Function>
PyObject* found(PyObject* self, PyObject* object, Function function) {
  return guarded([&] {
    const Keys keys(object);
    return listed(keys.size(), [&](Py_ssize_t i) { return function(of(self).find(keys[i])); });
  });
}

PyObject* present(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 1, 1);
    const std::size_t oldest = count == 2 ? size_in(args[1]) : 0;
    return own(found(self, args[0], [&](Slot slot) {
      return boolean(of(self).is_ready(slot) && of(self).time_of(slot) >= oldest);
    }));
  });
}

PyObject* has_all(PyObject* self, PyObject* keys) {
  return found(self, keys, [](Slot slot) { return boolean(slot != kNoSlot); });
}

PyObject* ready_slots(PyObject* self, PyObject* keys) {
  return found(self, keys,
               [&](Slot slot) { return of(self).is_ready(slot) ? number(slot) : none(); });
}

// The slot, in use, or none if its block is not ready.
Reference leased(PyObject* self, Slot slot) {
  if (!of(self).is_ready(slot)) {
    return none();
  }
  of(self).lease(slot);
  return number(slot);
}

PyObject* lease_all(PyObject* self, PyObject* keys) {
  return found(self, keys, [&](Slot slot) { return leased(self, slot); });
}

PyObject* lease(PyObject* self, PyObject* key) {
  return guarded([&] { return leased(self, of(self).find(view_of(key))); });
}

// enter(records)
PyObject* enter(PyObject* self, PyObject* records) {
  return guarded([&] {
    std::vector<Slot> outdated;
    long long last = 0;
    std::size_t latest = 0;
    const flexkv::python::Items all(records);
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
      const flexkv::python::Items items(all[i]);
      const Slot slot = slot_in(self, items[0]);
      if (of(self).row(slot).state != SlotState::none) {
        PyErr_Format(PyExc_ValueError, "slot %d has two records", slot);
        throw PythonError{};
      }
      const long long generation = PyLong_AsLongLong(items[3]);
      const std::size_t time = items.size() > 4 ? size_in(items[4]) : 0;
      const Slot lost = of(self).enter(slot, key_in(items[1]), checksum_in(items[2]), generation,
                                       static_cast<std::uint32_t>(time));
      last = std::max(last, generation);
      latest = std::max(latest, time);
      if (lost != kNoSlot) {
        outdated.push_back(lost);
      }
    }
    return own(Py_BuildValue("(LnN)", last, static_cast<Py_ssize_t>(latest),
                             list_of(outdated).release()));
  });
}

PyObject* begin(PyObject* self, PyObject*) {
  bool is_done = true;
  PyThreadState* const state = PyEval_SaveThread();  // nobody else has the index yet
  try {
    of(self).begin();
  } catch (const std::bad_alloc&) {
    is_done = false;
  }
  // If the process ends, a daemon's thread ends here: there is nothing to destroy, and no noexcept.
  PyEval_RestoreThread(state);
  if (!is_done) {
    return PyErr_NoMemory();
  }
  return guarded([&] {
    if (of(self).policy() != nullptr) {
      of(self).report_restored(of(self).size());
    }
    return none();
  });
}

// reserve(key, after, behind)
PyObject* reserve(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 1, 2);
    const KeyView after = count > 1 && args[1] != Py_None ? view_of(args[1]) : KeyView();
    const Slot behind = count > 2 && args[2] != Py_None ? used_slot_in(self, args[2]) : kNoSlot;
    const Slot slot =
        of(self).reserve(key_in(args[0]), after.data() == nullptr ? nullptr : &after, behind);
    return slot == kNoSlot ? none() : number(slot);
  });
}

PyObject* publish(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    return boolean(of(self).publish(used_slot_in(self, args[0]), checksum_in(args[1])));
  });
}

template <void (Slots::*method)(Slot)>
PyObject* with_slot(PyObject* self, PyObject* slot) {
  return guarded([&] {
    (of(self).*method)(used_slot_in(self, slot));
    return none();
  });
}

PyObject* key_of(PyObject* self, PyObject* object) {
  return guarded([&] {
    const KeyView key = of(self).key_of(slot_in(self, object));
    return key.data() == nullptr
               ? none()
               : own(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size())));
  });
}

// A list of what `function` makes of each slot.
template <typename Function>
PyObject* of_slots(PyObject* self, PyObject* object, Function function) {
  return guarded([&] {
    const flexkv::python::Items slots(object);
    return listed(slots.size(), [&](Py_ssize_t i) { return function(slot_in(self, slots[i])); });
  });
}

PyObject* checksums(PyObject* self, PyObject* slots) {
  return of_slots(self, slots, [&](Slot slot) {
    return own(PyBytes_FromStringAndSize(of(self).row(slot).checksum, kChecksumBytes));
  });
}

PyObject* times(PyObject* self, PyObject* slots) {
  return of_slots(self, slots, [&](Slot slot) { return number(of(self).known_time_of(slot)); });
}

PyObject* set_times(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    const std::vector<Py_ssize_t> slots = numbers_of(args[0]);
    const std::vector<Py_ssize_t> all = numbers_of(args[1]);
    for (std::size_t i = 0; i < std::min(slots.size(), all.size()); ++i) {
      of(self).set_time(checked(self, slots[i]), static_cast<std::uint32_t>(all[i]));
    }
    return none();
  });
}

PyObject* touch(PyObject* self, PyObject* keys) {
  return guarded([&] { return list_of(of(self).touch(Keys(keys))); });
}

PyObject* end_uses(PyObject* self, PyObject* object) {
  return guarded([&] {
    std::vector<Slot> used;
    for (const Py_ssize_t slot : numbers_of(object)) {
      used.push_back(checked(self, slot));
    }
    return list_of(of(self).end_uses(used));
  });
}

PyObject* take_old(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    return list_of(of(self).take_old(static_cast<std::uint32_t>(size_in(args[0])),
                                     size_in(args[1]), size_in(args[2])));
  });
}

// follow(policy, other): as the index `other` does, if that is given.
PyObject* follow(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 1, 1);
    if (count == 2 && Py_TYPE(args[1]) != slots_type) {
      PyErr_Format(PyExc_TypeError, "%R is no index of slots", args[1]);
      throw PythonError{};
    }
    of(self).follow(args[0] == Py_None ? nullptr
                    : count == 2       ? of(args[1]).policy()
                                       : std::make_shared<SharedPolicy>(args[0]));
    return none();
  });
}

template <void (Slots::*method)(std::size_t)>
PyObject* with_limit(PyObject* self, PyObject* limit) {
  return guarded([&] {
    (of(self).*method)(size_in(limit));
    return none();
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  of(self).clear();
  return none().release();
}

PyObject* watch(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).watch();
    return none();
  });
}

PyObject* has_changes_before(PyObject* self, PyObject* stop) {
  return guarded([&] { return boolean(of(self).has_changes_before(size_in(stop))); });
}

PyObject* note_changes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    if (of(self).changes() == nullptr) {
      return none();
    }
    of(self).note_changes(size_in(args[0]), size_in(args[1]));
    return share(of(self).changes());
  });
}

PyObject* is_reported(PyObject* self, PyObject* key) {
  return guarded([&] { return boolean(of(self).is_reported(view_of(key))); });
}

template <std::size_t (Slots::*method)() const noexcept>
PyObject* get_number(PyObject* self, void*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>((of(self).*method)())); });
}

template <auto method>
PyObject* get_boolean(PyObject* self, void*) {
  return guarded([&] { return boolean((of(self).*method)()); });
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(of(self).ready()); }

int contains(PyObject* self, PyObject* key) {
  try {
    return of(self).is_ready(of(self).find(view_of(key))) ? 1 : 0;
  } catch (const PythonError&) {
    return -1;
  }
}

constexpr long long kMostSlots = (1LL << 31) - 2;

// SlotIndex(slots)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  long long slots = 0;
  if (PyArg_ParseTuple(args, "L", &slots) == 0) {
    return nullptr;
  }
  if (slots < 0 || slots > kMostSlots) {
    PyErr_Format(PyExc_ValueError, "%lld slots; allowed: 0 to %lld", slots, kMostSlots);
    return nullptr;
  }
  return guarded([&] { return Self::make(type, static_cast<std::size_t>(slots)); });
}

PyMethodDef methods[] = {
    {"present", erased(present), METH_FASTCALL, nullptr},
    {"has_all", has_all, METH_O, nullptr},
    {"ready_slots", ready_slots, METH_O, nullptr},
    {"lease", lease, METH_O, nullptr},
    {"lease_all", lease_all, METH_O, nullptr},
    {"release", with_slot<&Slots::release>, METH_O, nullptr},
    {"discard", with_slot<&Slots::discard>, METH_O, nullptr},
    {"enter", enter, METH_O, nullptr},
    {"begin", begin, METH_NOARGS, nullptr},
    {"report_restored", with_limit<&Slots::report_restored>, METH_O, nullptr},
    {"follow", erased(follow), METH_FASTCALL, nullptr},
    {"reserve", erased(reserve), METH_FASTCALL, nullptr},
    {"publish", erased(publish), METH_FASTCALL, nullptr},
    {"key_of", key_of, METH_O, nullptr},
    {"checksums", checksums, METH_O, nullptr},
    {"times", times, METH_O, nullptr},
    {"set_times", erased(set_times), METH_FASTCALL, nullptr},
    {"touch", touch, METH_O, nullptr},
    {"end_uses", end_uses, METH_O, nullptr},
    {"take_old", erased(take_old), METH_FASTCALL, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"sweep", with_limit<&Slots::sweep>, METH_O, nullptr},
    {"watch", watch, METH_NOARGS, nullptr},
    {"has_changes_before", has_changes_before, METH_O, nullptr},
    {"note_changes", erased(note_changes), METH_FASTCALL, nullptr},
    {"is_reported", is_reported, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"num_slots", get_number<&Slots::num_slots>, nullptr, nullptr, nullptr},
    {"free_slots", get_number<&Slots::free_slots>, nullptr, nullptr, nullptr},
    {"usable_slots", get_number<&Slots::usable_slots>, nullptr, nullptr, nullptr},
    {"stale_blocks", get_number<&Slots::stale>, nullptr, nullptr, nullptr},
    {"evictions", get_number<&Slots::evictions>, nullptr, nullptr, nullptr},
    {"noted_slots", get_number<&Slots::noted>, nullptr, nullptr, nullptr},
    {"has_changes", get_boolean<&Slots::has_changes>, nullptr, nullptr, nullptr},
    {"has_room", get_boolean<&Slots::has_room>, nullptr, nullptr, nullptr},
    {"has_victim", get_boolean<&Slots::has_victim>, nullptr, nullptr, nullptr},
    {"is_reporting", get_boolean<&Slots::is_reporting>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(Self::destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_sq_contains, reinterpret_cast<void*>(contains)},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.SlotIndex", sizeof(Self), 0, Py_TPFLAGS_DEFAULT,
                    slots};

}  // namespace

PyObject* fkv_slot_index_type(void) {
  return guarded([] {
    Reference type = own(PyType_FromSpec(&spec));
    slots_type = reinterpret_cast<PyTypeObject*>(share(type.get()).release());
    return type;
  });
}
