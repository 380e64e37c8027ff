// SPDX-License-Identifier: Apache-2.0
//
// A block that has a slot, as an object of Python. See flexkv.index.Block.
#pragma once

#include <cstdint>

#include "../python/object.hpp"

namespace flexkv::index {

using python::Items;
using python::own;
using python::PythonError;
using python::Reference;
using python::share;

enum class State : std::uint8_t { writing, ready, dropped };

struct Block {
  PyObject_HEAD
  PyObject* key;  // owned; bytes
  State state;    // beside the key: a lookup reads both, seldom from the processor's caches
  int slot;
  Block* parent;  // owned; the block that it builds on, or null
  Py_hash_t hash;
  long long used;     // number of its last use
  long long leaving;  // its `used` when `lease_victim` leased it, or 0
  int leases;
  int pins;
  int children;  // blocks with a slot that build on it, without those that `lease_victim` leased

  // Whether the block may be evicted. The policy knows every other block as held.
  bool evictable() const noexcept {
    return state == State::ready && leases == 0 && children == 0 && pins == 0;
  }
};

// The type of blocks, which have one of these three objects as their `state`. Throws PythonError.
PyTypeObject* make_block_type(PyObject* states);

// A new reference to a block in state writing. Throws PythonError.
Block* make_block(PyTypeObject* type, PyObject* key, Py_hash_t hash, Block* parent);

inline PyObject* object_of(Block* block) noexcept { return reinterpret_cast<PyObject*>(block); }

}  // namespace flexkv::index
