// SPDX-License-Identifier: Apache-2.0
#include "handle.hpp"

#include <structmember.h>

#include <cstddef>

#include "../python/calls.hpp"

namespace flexkv::index {

namespace {

using python::guarded;
using python::Items;
using python::none;
using python::number;

PyTypeObject* block_type = nullptr;
PyTypeObject* blocks_type = nullptr;
PyObject* states_of_blocks[3];

struct Handle {
  PyObject_HEAD
  BlockStore* store;  // null once the slot was given to another block, or the index has ended
  Slot slot;
  PyObject* key;  // owned; null until somebody has asked for it

  Block* block() const noexcept { return store == nullptr ? nullptr : &(*store)[slot]; }
};

Handle* handle(PyObject* object) noexcept { return reinterpret_cast<Handle*>(object); }

Reference bytes_of(KeyView key) {
  return own(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size())));
}

Reference make_handle(BlockStore* store, Slot slot) {
  Reference made = own(PyType_GenericAlloc(block_type, 0));
  handle(made.get())->store = store;
  handle(made.get())->slot = slot;
  return made;
}

void destroy_handle(PyObject* self) noexcept {
  PyTypeObject* const type = Py_TYPE(self);
  if (Block* const block = handle(self)->block(); block != nullptr) {
    block->handle = nullptr;
    --handle(self)->store->handles;
  }
  Py_XDECREF(handle(self)->key);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* get_key(PyObject* self, void*) {
  return guarded([&] {
    PyObject*& key = handle(self)->key;
    if (key == nullptr) {
      const BlockStore* const store = handle(self)->store;
      key = bytes_of(store == nullptr ? KeyView() : store->key_of(handle(self)->slot)).release();
    }
    return share(key);
  });
}

PyObject* get_state(PyObject* self, void*) {
  const Block* const block = handle(self)->block();
  const State state = block == nullptr ? State::dropped : handle(self)->store->state_of(block);
  return share(states_of_blocks[static_cast<int>(state)]).release();
}

PyObject* get_parent(PyObject* self, void*) {
  return guarded([&] {
    const Block* const block = handle(self)->block();
    Block* const parent = block == nullptr ? nullptr : handle(self)->store->parent_of(block);
    return parent == nullptr ? none() : handle_of(*handle(self)->store, parent);
  });
}

PyObject* get_parent_key(PyObject* self, void*) {
  return guarded([&] {
    const Block* const block = handle(self)->block();
    if (block == nullptr || block->parent == kNoSlot) {
      return none();
    }
    return bytes_of(handle(self)->store->parent_key_of(block));
  });
}

PyObject* get_tenant(PyObject* self, void*) {
  const Block* const block = handle(self)->block();
  const Tenant tenant = block == nullptr ? kNoTenant : handle(self)->store->tenant_of(handle(self)->slot);
  return PyLong_FromUnsignedLong(tenant);
}

PyObject* get_leases(PyObject* self, void*) {
  const Block* const block = handle(self)->block();
  return PyLong_FromLong(block == nullptr ? 0 : block->leases);
}

PyObject* get_used(PyObject* self, void*) {
  const Block* const block = handle(self)->block();
  return PyLong_FromLongLong(block == nullptr ? 0 : block->used);
}

PyMemberDef block_members[] = {
    {"slot", T_INT, offsetof(Handle, slot), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef block_properties[] = {
    {"key", get_key, nullptr, nullptr, nullptr},
    {"state", get_state, nullptr, nullptr, nullptr},
    {"parent", get_parent, nullptr, nullptr, nullptr},
    {"parent_key", get_parent_key, nullptr, nullptr, nullptr},
    {"tenant", get_tenant, nullptr, nullptr, nullptr},
    {"leases", get_leases, nullptr, nullptr, nullptr},
    {"used", get_used, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot block_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_handle)},
    {Py_tp_members, block_members},
    {Py_tp_getset, block_properties},
    {0, nullptr},
};

PyType_Spec block_spec = {"flexkv_kernels.block_index.Block", sizeof(Handle), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots};

// A block by its slot, as long as the slot has no other one.
struct Name {
  Slot slot;
  std::uint32_t life;
};

// Some blocks in a row.
struct Row {
  PyObject_HEAD
  PyObject* owner;  // owned; of the store
  BlockStore* store;
  std::vector<Name>* names;

  // The block, or null if its slot has another one.
  Block* block_at(std::size_t i) const noexcept {
    Block* const block = &(*store)[(*names)[i].slot];
    return block->life == (*names)[i].life ? block : nullptr;
  }
};

Row* row(PyObject* object) noexcept { return reinterpret_cast<Row*>(object); }

Reference make_row(PyObject* owner, BlockStore& store, std::vector<Name> names) {
  Reference made = own(PyType_GenericAlloc(blocks_type, 0));
  row(made.get())->owner = share(owner).release();
  row(made.get())->store = &store;
  row(made.get())->names = new std::vector<Name>(std::move(names));
  return made;
}

void destroy_row(PyObject* self) noexcept {
  PyTypeObject* const type = Py_TYPE(self);
  delete row(self)->names;
  Py_XDECREF(row(self)->owner);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(row(self)->names->size()); }

Reference block_in(const Row& row, std::size_t i) {
  Block* const block = row.block_at(i);
  return block == nullptr ? make_handle(nullptr, (*row.names)[i].slot) : handle_of(*row.store, block);
}

PyObject* item(PyObject* self, Py_ssize_t i) {
  if (i < 0 || i >= length(self)) {
    PyErr_SetString(PyExc_IndexError, "no such block");
    return nullptr;
  }
  return guarded([&] { return block_in(*row(self), static_cast<std::size_t>(i)); });
}

PyObject* subscript(PyObject* self, PyObject* index) {
  return guarded([&] {
    const std::vector<Name>& names = *row(self)->names;
    const auto count = static_cast<Py_ssize_t>(names.size());
    if (PySlice_Check(index) == 0) {
      const Py_ssize_t i = PyNumber_AsSsize_t(index, PyExc_IndexError);
      if (i == -1 && PyErr_Occurred() != nullptr) {
        throw PythonError{};
      }
      return own(item(self, i < 0 ? i + count : i));
    }
    Py_ssize_t start = 0;
    Py_ssize_t stop = 0;
    Py_ssize_t step = 0;
    if (PySlice_Unpack(index, &start, &stop, &step) != 0) {
      throw PythonError{};
    }
    const Py_ssize_t size = PySlice_AdjustIndices(count, &start, &stop, step);
    std::vector<Name> part(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < part.size(); ++i) {
      part[i] = names[static_cast<std::size_t>(start + static_cast<Py_ssize_t>(i) * step)];
    }
    return make_row(row(self)->owner, *row(self)->store, std::move(part));
  });
}

template <typename Function>
Reference list_of(const Row& row, Function function) {
  Reference list = own(PyList_New(static_cast<Py_ssize_t>(row.names->size())));
  for (std::size_t i = 0; i < row.names->size(); ++i) {
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), function(i).release());
  }
  return list;
}

PyObject* get_slots(PyObject* self, void*) {
  return guarded([&] {
    return list_of(*row(self), [&](std::size_t i) { return number((*row(self)->names)[i].slot); });
  });
}

PyObject* get_keys(PyObject* self, void*) {
  return guarded([&] {
    const Row& all = *row(self);
    return list_of(all, [&](std::size_t i) {
      const Block* const block = all.block_at(i);
      return bytes_of(block == nullptr ? KeyView() : all.store->key_of(block));
    });
  });
}

PyGetSetDef blocks_properties[] = {
    {"slots", get_slots, nullptr, nullptr, nullptr},
    {"keys", get_keys, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot blocks_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_row)},
    {Py_tp_getset, blocks_properties},
    {Py_sq_length, reinterpret_cast<void*>(length)},
    {Py_sq_item, reinterpret_cast<void*>(item)},
    {Py_mp_length, reinterpret_cast<void*>(length)},
    {Py_mp_subscript, reinterpret_cast<void*>(subscript)},
    {0, nullptr},
};

PyType_Spec blocks_spec = {"flexkv_kernels.block_index.BlockRow", sizeof(Row), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, blocks_slots};

[[noreturn]] void no_block(PyObject* object) {
  PyErr_Format(PyExc_TypeError, "%R is no block of this index", object);
  throw PythonError{};
}

}  // namespace

void make_block_types(PyObject* states) {
  for (Py_ssize_t i = 0; i < 3; ++i) {
    states_of_blocks[i] = own(PySequence_GetItem(states, i)).release();
  }
  block_type = reinterpret_cast<PyTypeObject*>(own(PyType_FromSpec(&block_spec)).release());
  blocks_type = reinterpret_cast<PyTypeObject*>(own(PyType_FromSpec(&blocks_spec)).release());
}

Reference handle_of(BlockStore& store, Block* block) {
  if (block->handle != nullptr) {
    return share(block->handle);
  }
  Reference made = make_handle(&store, store.slot_of(block));
  block->handle = made.get();
  ++store.handles;
  return made;
}

void detach_handle(BlockStore& store, Block* block) noexcept {
  if (block->handle == nullptr) {
    return;
  }
  Handle& left = *handle(block->handle);
  if (left.key == nullptr) {
    const KeyView key = store.key_of(block);
    left.key = PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()));
    if (left.key == nullptr) {
      PyErr_Clear();  // no memory: the key is empty
    }
  }
  left.store = nullptr;
  block->handle = nullptr;
  --store.handles;
}

Reference make_blocks(PyObject* owner, BlockStore& store, const std::vector<Block*>& blocks) {
  std::vector<Name> names;
  names.reserve(blocks.size());
  for (const Block* const block : blocks) {
    names.push_back({store.slot_of(block), block->life});
  }
  return make_row(owner, store, std::move(names));
}

Block* block_of(const BlockStore& store, PyObject* object) {
  if (Py_TYPE(object) != block_type) {
    no_block(object);
  }
  if (handle(object)->store != nullptr && handle(object)->store != &store) {
    no_block(object);
  }
  return handle(object)->block();
}

std::vector<Block*> blocks_of(BlockStore& store, PyObject* object) {
  std::vector<Block*> blocks;
  const auto add = [&](Block* block) {
    if (block != nullptr) {
      blocks.push_back(block);
    }
  };
  if (Py_TYPE(object) == blocks_type) {
    if (row(object)->store != &store) {
      no_block(object);
    }
    const std::size_t count = row(object)->names->size();
    blocks.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      add(row(object)->block_at(i));
    }
    return blocks;
  }
  const Items items(object);
  blocks.reserve(static_cast<std::size_t>(items.size()));
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    add(block_of(store, items[i]));
  }
  return blocks;
}

}  // namespace flexkv::index
