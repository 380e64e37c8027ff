// SPDX-License-Identifier: Apache-2.0
//
// A block that has a slot, as an object of Python. See flexkv.index.block_index.Block.
#pragma once

#include <cstdint>

#include "keys.hpp"

namespace flexkv::index {

enum class State : std::uint8_t { writing, ready, dropped };

// The time between two resets of an index. Its number begins again after eight of them.
using Epoch = std::uint8_t;
inline constexpr Epoch kEpochs = 8;

struct Block {
  PyObject_HEAD
  PyObject* key;  // owned; bytes
  State state;    // before a reset; see `state_now`
  bool leaving;   // whether `lease_victim` leased it
  bool was_used;  // whether it was used since then
  Epoch epoch;    // of the index when it entered
  bool fetched;   // whether a lower tier gives it
  int slot;
  Block* parent;  // owned; the block that it builds on, or null
  Py_hash_t hash;
  long long used;    // number of its last use
  const Epoch* now;  // the epoch of its index, which clears `state` before it ends
  int leases;
  int pins;
  int children;  // blocks with a slot that build on it and are attached
  // The blocks that build on it and were not removed, those that `lease_victim` leased included.
  Block* first_child;
  Block* next_sibling;
  Block** linked_by;  // what points to it in the list of its parent, or null

  // Whether the block holds the one that it builds on. A block that leaves does so only if it has to
  // stay: another block builds on it, or it is pinned.
  bool attached() const noexcept { return !leaving || children > 0 || pins > 0; }

  // Whether a reset has dropped the block, and the index has not yet noticed.
  bool is_stale() const noexcept { return state != State::dropped && is_of_reset(); }

  // Whether it entered before the last reset.
  bool is_of_reset() const noexcept { return epoch != *now; }

  State state_now() const noexcept { return is_stale() ? State::dropped : state; }

  void use(long long number) noexcept {
    used = number;
    was_used = true;
  }

  // Whether the block, which is not stale, may be evicted. The policy knows every other as held.
  bool evictable() const noexcept {
    return state == State::ready && leases == 0 && children == 0 && pins == 0;
  }
};

// The type of blocks, which have one of these three objects as their `state`. Throws PythonError.
PyTypeObject* make_block_type(PyObject* states);

// Puts the block into the list of the block that it builds on, or takes it out. A block that is freed
// leaves the list by itself.
void link(Block* block) noexcept;
void unlink(Block* block) noexcept;

// A new reference to a block in state writing. `now` is the epoch of its index. Throws PythonError.
Block* make_block(PyTypeObject* type, PyObject* key, Py_hash_t hash, Block* parent,
                  const Epoch* now);

inline PyObject* object_of(Block* block) noexcept { return reinterpret_cast<PyObject*>(block); }

}  // namespace flexkv::index
