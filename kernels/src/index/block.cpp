// SPDX-License-Identifier: Apache-2.0
#include "block.hpp"

#include <structmember.h>

#include <cstddef>

namespace flexkv::index {

namespace {

PyObject* states_of_blocks[3];

PyObject* get_state(PyObject* self, void*) {
  PyObject* const state =
      states_of_blocks[static_cast<int>(reinterpret_cast<Block*>(self)->state_now())];
  Py_INCREF(state);
  return state;
}

void free_block(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  unlink(reinterpret_cast<Block*>(self));
  Py_XDECREF(reinterpret_cast<Block*>(self)->key);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// A prefix may be longer than the stack allows for a call of each block: it goes block by block.
void destroy(PyObject* self) {
  Block* next = reinterpret_cast<Block*>(self)->parent;
  free_block(self);
  while (next != nullptr && Py_REFCNT(object_of(next)) == 1) {
    Block* const parent = next->parent;
    next->parent = nullptr;
    Py_DECREF(object_of(next));
    next = parent;
  }
  Py_XDECREF(object_of(next));
}

PyMemberDef members[] = {
    {"key", T_OBJECT_EX, offsetof(Block, key), READONLY, nullptr},
    {"slot", T_INT, offsetof(Block, slot), READONLY, nullptr},
    {"parent", T_OBJECT, offsetof(Block, parent), READONLY, nullptr},
    {"leases", T_INT, offsetof(Block, leases), READONLY, nullptr},
    {"used", T_LONGLONG, offsetof(Block, used), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"state", get_state, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr},
};

PyType_Spec spec = {"flexkv_kernels.block_index.Block", sizeof(Block), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

PyTypeObject* make_block_type(PyObject* states) {
  for (Py_ssize_t i = 0; i < 3; ++i) {
    PyObject* const state = PySequence_GetItem(states, i);
    if (state == nullptr) {
      throw PythonError{};
    }
    states_of_blocks[i] = state;
  }
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw PythonError{};
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

void link(Block* block) noexcept {
  Block*& first = block->parent->first_child;
  block->next_sibling = first;
  if (first != nullptr) {
    first->linked_by = &block->next_sibling;
  }
  block->linked_by = &first;
  first = block;
}

void unlink(Block* block) noexcept {
  if (block->linked_by != nullptr) {
    *block->linked_by = block->next_sibling;
    if (block->next_sibling != nullptr) {
      block->next_sibling->linked_by = block->linked_by;
    }
    block->linked_by = nullptr;
  }
}

Block* make_block(PyTypeObject* type, PyObject* key, Py_hash_t hash, Block* parent,
                  const Epoch* now) {
  auto* const block = reinterpret_cast<Block*>(PyType_GenericAlloc(type, 0));  // zeroed
  if (block == nullptr) {
    throw PythonError{};
  }
  Py_INCREF(key);
  Py_XINCREF(object_of(parent));
  block->key = key;
  block->parent = parent;
  block->hash = hash;
  block->now = now;
  block->epoch = *now;
  block->slot = -1;
  return block;
}

}  // namespace flexkv::index
