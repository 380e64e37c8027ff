// SPDX-License-Identifier: Apache-2.0
//
// What picks the victims of an index: the order of use, which it keeps itself, or a policy of
// flexkv.eviction.
#pragma once

#include <memory>

#include "block.hpp"
#include "table.hpp"

namespace flexkv::index {

// See flexkv.eviction.EvictionPolicy. All calls may throw PythonError and std::bad_alloc.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual void began(PyObject* keys, PyObject* context, PyObject* now) = 0;
  virtual void ended(PyObject* request_id, PyObject* output_tokens, PyObject* now) = 0;
  virtual void inserted(Block* block) = 0;
  virtual void hit(Block* block, PyObject* context) = 0;
  virtual void touched(Block* block) = 0;
  virtual void held(Block* block) = 0;
  virtual void released(Block* block) = 0;
  virtual void evicted(Block* block) = 0;
  // The block to evict next, or null.
  virtual Block* victim() = 0;
  // Whether `began` looks at anything.
  virtual bool follows_requests() const noexcept = 0;
  // Forgets all blocks.
  virtual void forget_all() {}
  // Whether an error in the middle of a call may leave it in a state that no call leaves.
  virtual bool may_be_torn() const noexcept { return false; }
};

// Least recently used first.
std::unique_ptr<Policy> make_lru(BlockStore& store);

// Calls an object of Python, which it keeps alive. Throws PythonError.
std::unique_ptr<Policy> make_policy(PyObject* policy, BlockStore& store, const BlockTable& table);

}  // namespace flexkv::index
