// SPDX-License-Identifier: Apache-2.0
//
// The type `BlockIndex` for CPython, by the stable ABI. A call takes many blocks where it can: the
// step of an engine waits for it.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../python/buffer.hpp"
#include "calls.hpp"
#include "flexkv/block_index.h"
#include "handle.hpp"
#include "index.hpp"

namespace {

using flexkv::index::Block;
using flexkv::index::kNoSlot;
using flexkv::index::KeyView;
using flexkv::index::Index;
using flexkv::index::Keys;
using flexkv::index::list_of;
using flexkv::index::numbers_of;
using flexkv::index::Reading;
using flexkv::index::kNoTenant;
using flexkv::index::kUnknownTenant;
using flexkv::index::Slot;
using flexkv::index::State;
using flexkv::index::Tenant;
using flexkv::python::Buffer;
using flexkv::python::erased;
using flexkv::python::guarded;
using flexkv::python::Holder;
using flexkv::python::need_arguments;
using flexkv::python::none;
using flexkv::python::number;
using flexkv::python::own;
using flexkv::python::PythonError;
using flexkv::python::Reference;
using flexkv::python::share;

using Self = Holder<Index>;

Index& of(PyObject* self) { return Self::of(self); }

const Reading& reading_of(PyObject* self) { return of(self).reading(); }

Reference block_or_none(PyObject* self, Block* block) {
  return block == nullptr ? none() : flexkv::index::handle_of(of(self).store(), block);
}

Reference blocks_in(PyObject* self, const std::vector<Block*>& blocks) {
  return flexkv::index::make_blocks(self, of(self).store(), blocks);
}

std::vector<Block*> blocks_of(PyObject* self, PyObject* object) {
  return flexkv::index::blocks_of(of(self).store(), object);
}

// A slot that `take_slots` took and that has no block yet.
Slot taken(PyObject* self, Py_ssize_t slot) {
  if (slot < 0 || static_cast<std::size_t>(slot) >= of(self).slots() ||
      !of(self).is_taken(static_cast<Slot>(slot))) {
    PyErr_Format(PyExc_ValueError, "slot %zd was not taken", slot);
    throw PythonError{};
  }
  return static_cast<Slot>(slot);
}

// The number of a tenant.
Tenant tenant_in(PyObject* object) {
  const unsigned long tenant = PyLong_AsUnsignedLong(object);
  if (PyErr_Occurred() == nullptr && tenant >= kUnknownTenant) {
    PyErr_Format(PyExc_ValueError, "tenant %lu; allowed: below %u", tenant, kUnknownTenant);
  }
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return static_cast<Tenant>(tenant);
}

// The tenant of each of `count` keys. None for all if the object is None.
std::vector<Tenant> tenants_in(PyObject* object, Py_ssize_t count) {
  if (object == Py_None) {
    return {};
  }
  const flexkv::python::Items items(object);
  if (items.size() != count) {
    PyErr_Format(PyExc_ValueError, "%zd tenants for %zd keys", items.size(), count);
    throw PythonError{};
  }
  std::vector<Tenant> tenants;
  tenants.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    tenants.push_back(tenant_in(items[i]));
  }
  return tenants;
}

PyObject* watch(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).watch();
    return none();
  });
}

PyObject* collect(PyObject* self, PyObject* blocks) {
  return guarded([&] { return blocks_in(self, blocks_of(self, blocks)); });
}

PyObject* lease(PyObject* self, PyObject* keys) {
  return guarded([&] {
    const Keys all(keys);
    const std::vector<Block*> blocks = of(self).lease(all);
    return blocks.empty() && all.size() != 0 ? none() : blocks_in(self, blocks);
  });
}

PyObject* reserve(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2, 1);
    const KeyView key = flexkv::index::view_of(args[0]);
    const bool is_first = args[1] == Py_None;
    const KeyView after = is_first ? KeyView() : flexkv::index::view_of(args[1]);
    return block_or_none(self, of(self).reserve(key, of(self).reading().hash(key),
                                                is_first ? nullptr : &after, nullptr, false,
                                                count == 3 ? tenant_in(args[2]) : kNoTenant));
  });
}

// Reserves slots for the blocks at some positions of `keys`, those of `slots` unless that is empty.
// `of_tenants` is the tenant of each key, or None.
Reference reserve_at(PyObject* self, PyObject* const* args, bool is_fetch,
                     const std::vector<Py_ssize_t>& slots, PyObject* of_tenants) {
  const Keys keys(args[0]);
  const std::vector<Tenant> tenants = tenants_in(of_tenants, keys.size());
  const std::vector<Py_ssize_t> positions = numbers_of(args[1]);
  std::vector<Py_ssize_t> prefix_starts = numbers_of(args[2]);
  std::sort(prefix_starts.begin(), prefix_starts.end());
  const auto is_first = [&](Py_ssize_t position) {
    return std::binary_search(prefix_starts.begin(), prefix_starts.end(), position);
  };
  if (!slots.empty() && slots.size() != positions.size()) {
    PyErr_Format(PyExc_ValueError, "%zu slots for %zu blocks", slots.size(), positions.size());
    throw PythonError{};
  }
  std::vector<Py_hash_t> hashes;
  hashes.reserve(positions.size());
  for (const Py_ssize_t position : positions) {
    if (position < (is_first(position) ? 0 : 1) || position >= keys.size()) {
      PyErr_Format(PyExc_IndexError, "position %zd of %zd keys", position, keys.size());
      throw PythonError{};
    }
    hashes.push_back(of(self).reading().hash(keys[position]));
  }
  std::vector<Block*> made;
  made.reserve(positions.size());
  for (std::size_t i = 0; i < positions.size(); ++i) {
    if (i + Reading::kAtOnce < positions.size()) {
      of(self).reading().prefetch(hashes[i + Reading::kAtOnce]);
    }
    const Py_ssize_t position = positions[i];
    const KeyView after = is_first(position) ? KeyView() : keys[position - 1];
    Block* const block = of(self).reserve(
        keys[position], hashes[i], is_first(position) ? nullptr : &after,
        made.empty() ? nullptr : made.back(), is_fetch,
        tenants.empty() ? kNoTenant : tenants[static_cast<std::size_t>(position)],
        slots.empty() ? kNoSlot : taken(self, slots[i]));
    if (block != nullptr) {
      made.push_back(block);
    }
  }
  return blocks_in(self, made);
}

PyObject* reserve_all(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3, 2);
    return reserve_at(self, args, count > 3 && args[3] == Py_True, {}, count == 5 ? args[4] : Py_None);
  });
}

// A number of a writer.
flexkv::index::Writer writer_in(PyObject* object) {
  constexpr long kMost = std::numeric_limits<flexkv::index::Writer>::max();
  const long writer = PyLong_AsLong(object);
  if (PyErr_Occurred() == nullptr && (writer < 1 || writer > kMost)) {
    PyErr_Format(PyExc_ValueError, "writer %ld; allowed: 1 to %ld", writer, kMost);
  }
  if (PyErr_Occurred() != nullptr) {
    throw PythonError{};
  }
  return static_cast<flexkv::index::Writer>(writer);
}

PyObject* take_slots(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2, 1);
    const std::size_t most = PyLong_AsSize_t(args[0]);
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    const bool is_known = count == 3 && args[2] != Py_None;
    return list_of(of(self).take_slots(most, writer_in(args[1]),
                                       is_known ? tenant_in(args[2]) : kUnknownTenant));
  });
}

template <bool (Index::*method)(Slot) const noexcept>
PyObject* says(PyObject* self, PyObject* object) {
  return guarded([&] {
    const long slot = PyLong_AsLong(object);
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    if (slot < 0 || static_cast<std::size_t>(slot) >= of(self).slots()) {
      PyErr_Format(PyExc_ValueError, "slot %ld is none of %zu", slot, of(self).slots());
      throw PythonError{};
    }
    return share((of(self).*method)(static_cast<Slot>(slot)) ? Py_True : Py_False);
  });
}

PyObject* taken_by(PyObject* self, PyObject* writer) {
  return guarded([&] { return list_of(of(self).taken_by(writer_in(writer))); });
}

PyObject* place(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 4, 1);
    const std::vector<Py_ssize_t> slots = numbers_of(args[3]);
    PyObject* const tenants = count == 5 ? args[4] : Py_None;
    return slots.empty() ? blocks_in(self, {}) : reserve_at(self, args, false, slots, tenants);
  });
}

PyObject* give_back(PyObject* self, PyObject* slots) {
  return guarded([&] {
    for (const Py_ssize_t slot : numbers_of(slots)) {
      of(self).give_back(taken(self, slot));
    }
    return none();
  });
}

PyObject* add_reader(PyObject* self, PyObject* memory) {
  return guarded([&] {
    auto holds = std::make_unique<Buffer>(memory, PyBUF_WRITABLE);
    if (holds->size() != of(self).slots() * sizeof(flexkv::index::Hold)) {
      PyErr_Format(PyExc_ValueError, "%zu bytes for holds; allowed: %zu", holds->size(),
                   of(self).slots() * sizeof(flexkv::index::Hold));
      throw PythonError{};
    }
    return number(static_cast<Py_ssize_t>(of(self).holds().add(std::move(holds))));
  });
}

PyObject* remove_reader(PyObject* self, PyObject* reader) {
  return guarded([&] {
    const std::size_t which = PyLong_AsSize_t(reader);
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    if (!of(self).holds().remove(which)) {
      PyErr_Format(PyExc_ValueError, "no reader %zu", which);
      throw PythonError{};
    }
    return none();
  });
}

PyObject* look_at_holds(PyObject* self, PyObject*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>(of(self).look_at_holds())); });
}

template <void (Index::*method)(const std::vector<Block*>&)>
PyObject* with_blocks(PyObject* self, PyObject* blocks) {
  return guarded([&] {
    const std::vector<Block*> all = blocks_of(self, blocks);
    of(self).expel_stale(all);
    (of(self).*method)(all);
    return none();
  });
}

// Does nothing with a block that has left, and whose slot was given to another.
template <void (Index::*method)(Block*)>
PyObject* with_block(PyObject* self, PyObject* object) {
  return guarded([&] {
    if (Block* const block = flexkv::index::block_of(of(self).store(), object); block != nullptr) {
      of(self).expel_stale({block});
      (of(self).*method)(block);
    }
    return none();
  });
}

PyObject* pin(PyObject* self, PyObject* key) {
  return guarded([&] { return block_or_none(self, of(self).pin(flexkv::index::view_of(key))); });
}

PyObject* holds(PyObject* self, PyObject* object) {
  return guarded([&] {
    const Block* const block = flexkv::index::block_of(of(self).store(), object);
    const bool has = block != nullptr && of(self).store().state_of(block) != State::dropped;
    return share(has ? Py_True : Py_False);
  });
}

PyObject* lease_victim(PyObject* self, PyObject*) {
  return guarded([&] { return block_or_none(self, of(self).lease_victim()); });
}

PyObject* lease_to_leave(PyObject* self, PyObject* key) {
  return guarded([&] {
    return block_or_none(self, of(self).lease_to_leave(flexkv::index::view_of(key)));
  });
}

PyObject* began(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    if (of(self).policy().follows_requests()) {
      const Keys keys(args[0]);
      of(self).policy().began(keys.sequence().get(), args[1], args[2]);
    }
    return none();
  });
}

PyObject* ended(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    of(self).policy().ended(args[0], args[1], args[2]);
    return none();
  });
}

PyObject* hit(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 2);
    of(self).hit(Keys(args[0]), args[1]);
    return none();
  });
}

PyObject* touch(PyObject* self, PyObject* keys) {
  return guarded([&] {
    of(self).touch(Keys(keys));
    return none();
  });
}

PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&] {
    of(self).clear();
    return none();
  });
}

PyObject* sweep(PyObject* self, PyObject* limit) {
  return guarded([&] {
    const std::size_t slots = PyLong_AsSize_t(limit);
    if (PyErr_Occurred() != nullptr) {
      throw PythonError{};
    }
    return number(static_cast<Py_ssize_t>(of(self).sweep(slots)));
  });
}

PyObject* settle(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    need_arguments(count, 3);
    of(self).settle(blocks_of(self, args[0]), blocks_of(self, args[1]), blocks_of(self, args[2]));
    return none();
  });
}

PyObject* get_blocks(PyObject* self, void*) {
  return guarded([&] {
    return blocks_in(self, of(self).blocks());
  });
}

PyObject* get_tenants(PyObject* self, void*) {
  return guarded([&] {
    Reference found = own(PyDict_New());
    for (const auto& [tenant, slots] : of(self).policy().slots_of_tenants()) {
      if (PyDict_SetItem(found.get(), own(PyLong_FromUnsignedLong(tenant)).get(),
                         number(static_cast<Py_ssize_t>(slots)).get()) != 0) {
        throw PythonError{};
      }
    }
    return found;
  });
}

PyObject* get_has_room(PyObject* self, void*) {
  return guarded([&] { return share(of(self).has_room() ? Py_True : Py_False); });
}

PyObject* get_changes(PyObject* self, void*) { return share(of(self).changes()).release(); }

template <auto method>
PyObject* get_number(PyObject* self, void*) {
  return guarded([&] { return number(static_cast<Py_ssize_t>((of(self).*method)())); });
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(of(self).ready()); }

int contains(PyObject* self, PyObject* key) {
  try {
    return of(self).has(flexkv::index::view_of(key)) ? 1 : 0;
  } catch (const PythonError&) {
    return -1;
  }
}

constexpr long long kMostSlots = (1LL << 31) - 1;

// BlockIndex(slots, policy, memory, begun)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  long long slots = 0;
  PyObject* policy = nullptr;
  PyObject* memory = nullptr;
  int begun = 0;
  if (PyArg_ParseTuple(args, "LOOp", &slots, &policy, &memory, &begun) == 0) {
    return nullptr;
  }
  if (slots < 0 || slots > kMostSlots) {
    PyErr_Format(PyExc_ValueError, "%lld slots; allowed: 0 to %lld", slots, kMostSlots);
    return nullptr;
  }
  return guarded([&] {
    const auto count = static_cast<std::size_t>(slots);
    std::unique_ptr<Buffer> shared;
    if (memory != Py_None) {
      shared = std::make_unique<Buffer>(memory, PyBUF_WRITABLE);
      if (shared->size() != flexkv::index::Places(count).bytes()) {
        PyErr_Format(PyExc_ValueError, "%zu bytes for an index; allowed: %zu", shared->size(),
                     flexkv::index::Places(count).bytes());
        throw PythonError{};
      }
    }
    if (begun != 0 &&
        (shared == nullptr || !flexkv::index::is_index(shared->start(), shared->size()))) {
      flexkv::index::refuse_memory();
    }
    return Self::make(type, count, policy, std::move(shared), begun != 0);
  });
}

PyMethodDef methods[] = {
    {"watch", watch, METH_NOARGS, nullptr},
    {"lookup", flexkv::index::lookup<reading_of>, METH_O, nullptr},
    {"present", flexkv::index::present<reading_of>, METH_O, nullptr},
    {"missing", flexkv::index::missing<reading_of>, METH_O, nullptr},
    {"collect", collect, METH_O, nullptr},
    {"lease", lease, METH_O, nullptr},
    {"release", with_blocks<&Index::release>, METH_O, nullptr},
    {"release_unused", with_blocks<&Index::release_unused>, METH_O, nullptr},
    {"reserve", erased(reserve), METH_FASTCALL, nullptr},
    {"reserve_all", erased(reserve_all), METH_FASTCALL, nullptr},
    {"take_slots", erased(take_slots), METH_FASTCALL, nullptr},
    {"is_taken", says<&Index::is_taken>, METH_O, nullptr},
    {"is_taken_since_clear", says<&Index::is_taken_since_clear>, METH_O, nullptr},
    {"taken_by", taken_by, METH_O, nullptr},
    {"place", erased(place), METH_FASTCALL, nullptr},
    {"give_back", give_back, METH_O, nullptr},
    {"add_reader", add_reader, METH_O, nullptr},
    {"remove_reader", remove_reader, METH_O, nullptr},
    {"look_at_holds", look_at_holds, METH_NOARGS, nullptr},
    {"publish", with_blocks<&Index::publish>, METH_O, nullptr},
    {"abandon", with_blocks<&Index::abandon>, METH_O, nullptr},
    {"discard", with_blocks<&Index::discard>, METH_O, nullptr},
    {"drop", with_blocks<&Index::drop>, METH_O, nullptr},
    {"pin", pin, METH_O, nullptr},
    {"unpin", with_block<&Index::unpin>, METH_O, nullptr},
    {"holds", holds, METH_O, nullptr},
    {"lease_victim", lease_victim, METH_NOARGS, nullptr},
    {"lease_to_leave", lease_to_leave, METH_O, nullptr},
    {"keep", with_block<&Index::keep>, METH_O, nullptr},
    {"retire", with_block<&Index::retire>, METH_O, nullptr},
    {"began", erased(began), METH_FASTCALL, nullptr},
    {"ended", erased(ended), METH_FASTCALL, nullptr},
    {"hit", erased(hit), METH_FASTCALL, nullptr},
    {"touch", touch, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"sweep", sweep, METH_O, nullptr},
    {"settle", erased(settle), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"num_slots", get_number<&Index::slots>, nullptr, nullptr, nullptr},
    {"free_slots", get_number<&Index::free_slots>, nullptr, nullptr, nullptr},
    {"has_room", get_has_room, nullptr, nullptr, nullptr},
    {"stale_blocks", get_number<&Index::stale>, nullptr, nullptr, nullptr},
    {"evictions", get_number<&Index::evictions>, nullptr, nullptr, nullptr},
    {"pinned_blocks", get_number<&Index::pinned>, nullptr, nullptr, nullptr},
    {"tenants", get_tenants, nullptr, nullptr, nullptr},
    {"changes", get_changes, nullptr, nullptr, nullptr},
    {"blocks", get_blocks, nullptr, nullptr, nullptr},
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

PyType_Spec spec = {"flexkv_kernels.block_index.BlockIndex", sizeof(Self), 0,
                    Py_TPFLAGS_DEFAULT, slots};

}  // namespace

// A new reference to the type; null, with an exception set, if it cannot be made.
PyObject* fkv_block_index_type(PyObject* states) {
  return guarded([&] {
    flexkv::index::make_block_types(states);
    return own(PyType_FromSpec(&spec));
  });
}

std::uint64_t fkv_block_index_bytes(std::uint64_t slots) {
  return flexkv::index::Places(static_cast<std::size_t>(slots)).bytes();
}

// The same for the keys that calls of an index take.
PyObject* fkv_packed_keys_type(void) { return guarded(flexkv::index::make_packed_keys_type); }
