// SPDX-License-Identifier: Apache-2.0
//
// What picks the victims of an index: the order of use, which it keeps itself, a policy of
// flexkv.eviction, or one of these for each tenant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

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
  // The block to evict next, for a block of the tenant `asking`, or null.
  virtual Block* victim(Tenant asking) = 0;
  // Whether `began` looks at anything.
  virtual bool follows_requests() const noexcept = 0;
  // Forgets all blocks.
  virtual void forget_all() {}
  // Whether an error in the middle of a call may leave it in a state that no call leaves.
  virtual bool may_be_torn() const noexcept { return false; }

  // The tier of the policy may have so many blocks from now on.
  virtual void set_room(std::size_t) noexcept {}

  // Whether it counts the slots of tenants, by the calls that follow.
  virtual bool counts_tenants() const noexcept { return false; }
  virtual void entered(const Block*) noexcept {}
  virtual void left(const Block*) noexcept {}
  virtual void slot_taken(Tenant) noexcept {}
  virtual void slot_returned(Tenant) noexcept {}
  // Of each tenant with a share, and of the others together, the slots with a block or a writer.
  virtual std::vector<std::pair<Tenant, std::size_t>> slots_of_tenants() const { return {}; }
};

// The blocks of one of several policies of an index.
class Portion {
 public:
  using Number = std::uint8_t;
  static constexpr Number kNobody = 255;

  // `owners` has the number of each slot's policy, and outlives this.
  Portion(const std::vector<Number>& owners, Number own) noexcept : owners_(owners), own_(own) {}

  bool has(Slot slot) const noexcept { return owners_[static_cast<std::size_t>(slot)] == own_; }

 private:
  const std::vector<Number>& owners_;
  Number own_;
};

// Least recently used first. Without a portion it has all blocks of the index.
std::unique_ptr<Policy> make_lru(BlockStore& store, const Portion* portion = nullptr);

// Calls an object of Python, which it keeps alive. Throws PythonError.
std::unique_ptr<Policy> make_policy(PyObject* policy, BlockStore& store, const BlockTable& table,
                                    const Portion* portion = nullptr);

// A policy for each tenant: `shares` has a tuple for each, of the tenant's number, the slots of its share
// and the policy, or None for the least recently used first. The first is that of tenants without a
// share of their own. Throws PythonError.
std::unique_ptr<Policy> make_tenants(PyObject* shares, BlockStore& store, const BlockTable& table);

}  // namespace flexkv::index
