// SPDX-License-Identifier: Apache-2.0
//
// Keys, slots, states, leases and pins of a tier's blocks. See flexkv.index.block_index, whose rules it keeps.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "block.hpp"
#include "holds.hpp"
#include "policy.hpp"
#include "table.hpp"

namespace flexkv::index {

// All methods may throw PythonError and std::bad_alloc.
class Index {
 public:
  // `policy` is None for the least recently used first, or a tuple for `make_tenants`. The index lies in
  // `shared` if that is not null, and has the size for it. If `begun`, its owner has ended: see `resume`.
  // Throws PythonError if the policy has blocks already.
  Index(std::size_t slots, PyObject* policy, std::unique_ptr<python::Buffer> shared, bool begun);
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  std::size_t slots() const noexcept { return store_.size(); }
  std::size_t free_slots() const noexcept { return free_.size(); }
  std::size_t ready() const noexcept { return ready_; }
  std::size_t stale() const noexcept { return stale_; }
  long long evictions() const noexcept { return evictions_; }
  long long pinned() const noexcept { return pinned_; }
  PyObject* changes() const noexcept { return changes_ ? changes_.get() : Py_None; }
  BlockStore& store() noexcept { return store_; }
  Policy& policy() noexcept { return *policy_; }

  void watch();
  bool has(KeyView key) const noexcept { return table_.find(key) != nullptr; }

  // Those that are ready or being written, by slot.
  std::vector<Block*> blocks();

  // The table, as readers of it have it.
  const Reading& reading() const noexcept { return table_.reading(); }

  // The ready blocks of all keys, with a lease each; empty if one is missing.
  std::vector<Block*> lease(const Keys& keys);
  void release(const std::vector<Block*>& blocks);
  void release_unused(const std::vector<Block*>& blocks);

  // A block in state writing for a key, which has this hash, or null: see BlockIndex.reserve. It builds
  // on the block of `after`, or on none if that is null. `near` is a block in the index, which may be
  // that of `after`, or null. It is `fetched` if a lower tier will give its bytes, and counts for
  // `tenant`. It gets the slot `given`, one of `take_slots`, or any if that is none.
  Block* reserve(KeyView key, Py_hash_t hash, const KeyView* after, Block* near, bool fetched,
                 Tenant tenant = kNoTenant, Slot given = kNoSlot);
  void publish(const std::vector<Block*>& blocks);
  void abandon(const std::vector<Block*>& blocks);
  void discard(const std::vector<Block*>& blocks);
  void drop(const std::vector<Block*>& blocks);
  Block* pin(KeyView key);
  void unpin(Block* block);
  bool has_room();
  Block* lease_victim();
  Block* lease_to_leave(KeyView key);
  void retire(Block* block);
  void keep(Block* block);
  void hit(const Keys& keys, PyObject* context);
  void touch(const Keys& keys);

  // All blocks are stale from now on, which no call that takes keys finds.
  void clear();
  void settle(const std::vector<Block*>& leased, const std::vector<Block*>& writing,
              const std::vector<Block*>& pinned);

  // Up to `most` slots for a writer, which have no block until `reserve` gives a block one of them, or
  // `give_back`. Evicts blocks for them. The writer stores for `tenant`.
  std::vector<Slot> take_slots(std::size_t most, Writer writer, Tenant tenant = kUnknownTenant);
  bool is_taken(Slot slot) const noexcept { return store_.writer_of(slot) != kNoWriter; }
  std::vector<Slot> taken_by(Writer writer) const;

  // Whether the slot was taken since the last `clear`.
  bool is_taken_since_clear(Slot slot) const noexcept {
    return is_taken(slot) && store_.has_current_writer(slot);
  }
  void give_back(Slot slot);

  // Readers of the shared memory, which hold slots.
  Holds& holds() noexcept { return holds_; }

  // Looks again at the slots that readers held. Returns how many of them they still hold.
  std::size_t look_at_holds();

  // Takes stale blocks out of the tables, and looks at `limit` slots for them. Returns how many
  // stale blocks are left.
  std::size_t sweep(std::size_t limit);

  // Takes these out of the tables if they are stale, before any other call that takes blocks.
  void expel_stale(const std::vector<Block*>& blocks);

 private:
  static bool is_ready(const Block* block) noexcept {
    return block != nullptr && block->state == State::ready;
  }
  void resume();
  bool enter(Slot slot);
  void count_uses(const std::vector<Block*>& leased, const std::vector<Block*>& pinned);
  void inform_policy(const std::vector<bool>& was_evictable);
  void hold(Block* block);
  void begin_leaving(Block* block);
  void end_lease(Block* block);
  Slot take_slot(Tenant asking);
  Block* next_victim(Tenant asking);
  bool is_held_outside(Slot slot) const noexcept;
  void attach(Block* parent);
  void detach(Block* parent, long long used);
  void remove(Block* block);
  void take_out(Block* block);
  void add_to_table(Block* block);
  void untable(Block* block);
  void end_life(Block* block);
  void expel(Block* block);
  void sweep_for_room();
  void note(const Block* block, bool became_ready);

  // Calls `function` with each block in the table, stale ones too, by slot.
  template <typename Function>
  void for_each(Function function) {
    for (std::size_t slot = 0; slot < store_.size(); ++slot) {
      if (Block* const block = &store_[static_cast<Slot>(slot)]; block->tabled) {
        function(block);
      }
    }
  }

  std::unique_ptr<python::Buffer> shared_;
  Memory memory_;
  BlockStore store_;
  BlockTable table_;
  std::vector<Slot> free_;
  Holds holds_;
  std::vector<Block*> held_;       // have a lease, because readers hold them
  std::vector<Slot> held_slots_;   // free, but for their readers
  std::unique_ptr<Policy> policy_;
  bool counts_tenants_;
  Reference changes_;
  std::size_t ready_ = 0;
  std::size_t tabled_ = 0;  // blocks in the table
  std::size_t stale_ = 0;   // of them
  std::size_t swept_ = 0;   // the slots before this one have no stale block
  int resets_ = 0;          // since there was no stale block
  long long uses_ = 0;
  long long evictions_ = 0;
  long long pinned_ = 0;
};

}  // namespace flexkv::index
