// SPDX-License-Identifier: Apache-2.0
//
// The blocks of an index, a record for each slot. No call of Python makes or frees one: a step of an
// engine waits while a store takes thousands of slots.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "../zeroed_array.hpp"
#include "memory.hpp"

namespace flexkv::index {

enum class State : std::uint8_t { writing, ready, dropped };

// What has a slot, or had it last. A slot begins another life with each block that it is given to:
// what names a block by its slot names the life, too.
struct alignas(64) Block {
  Py_hash_t hash;
  long long used;       // number of its last use
  PyObject* handle;     // what stands for it in Python, which clears this at its end, or null
  Slot parent;          // the block that it builds on, or none
  std::uint32_t parent_life;
  std::uint32_t life;
  std::int32_t leases;
  std::int32_t pins;
  std::int32_t children;  // blocks with a slot that build on it and are attached
  // The blocks that build on it and were not removed, those that `lease_victim` leased included.
  Slot first_child;
  Slot next_sibling;
  Slot previous_sibling;
  State state;        // before a reset; see `BlockStore::state_of`
  Epoch epoch;        // of the index when it entered
  bool leaving : 1;   // whether `lease_victim` leased it
  bool was_used : 1;  // whether it was used since then
  bool fetched : 1;   // whether a lower tier gives it
  bool tabled : 1;    // whether the table has it

  // Whether the block holds the one that it builds on. A block that leaves does so only if it has to
  // stay: another block builds on it, or it is pinned.
  bool attached() const noexcept { return !leaving || children > 0 || pins > 0; }

  void use(long long number) noexcept {
    used = number;
    was_used = true;
  }

  // Whether the block, which is not stale, may be evicted. The policy knows every other as held.
  bool evictable() const noexcept {
    return state == State::ready && leases == 0 && children == 0 && pins == 0;
  }
};
static_assert(sizeof(Block) == 64);

// All blocks of an index. Memory that no block has used yet takes no room.
class BlockStore {
 public:
  // `memory` outlives it. Throws std::bad_alloc.
  explicit BlockStore(Memory& memory)
      : header_(memory.header()), blocks_(memory.places().slots), keys_(memory.keys()) {}
  ~BlockStore();
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  std::size_t size() const noexcept { return blocks_.size(); }
  Block& operator[](Slot slot) noexcept { return blocks_[static_cast<std::size_t>(slot)]; }
  Slot slot_of(const Block* block) const noexcept {
    return static_cast<Slot>(block - &blocks_[0]);
  }

  const StoredKey& stored_key(Slot slot) const noexcept {
    return keys_[slot];
  }
  const StoredKey& stored_key(const Block* block) const noexcept {
    return stored_key(slot_of(block));
  }
  KeyView key_of(Slot slot) const noexcept { return stored_key(slot).view(); }
  KeyView key_of(const Block* block) const noexcept { return stored_key(block).view(); }
  Block* block_of(const StoredKey* key) noexcept {
    return &blocks_[static_cast<std::size_t>(key - keys_)];
  }

  // The block that this one builds on. Null if it builds on none, or if that one has left and its slot
  // has another block.
  Block* parent_of(const Block* block) noexcept;

  // The key of the block that this one builds on, whether that has left or not; empty if it builds on
  // none.
  std::string parent_key_of(const Block* block);

  // Begins a life of a slot that is in no table, in state writing. Throws PythonError.
  Block* begin_life(Slot slot, KeyView key, Py_hash_t hash, const Block* parent, Tenant tenant);

  // The same for a block whose key an owner of the memory before this one has written.
  Block* resume_life(Slot slot, Py_hash_t hash, const Block* parent) noexcept;

  // Puts the block into the list of the block that it builds on, or takes it out.
  void link(Block* block) noexcept;
  void unlink(Block* block) noexcept;

  // All blocks are of a reset from now on. No block is left of seven epochs ago.
  void begin_epoch() noexcept { store_word(header_.resets, header_.resets + 1); }
  Epoch epoch() const noexcept { return epoch_after(header_.resets); }

  // Whether readers of the memory may lease the block in a slot. Once they may not, the slot waits for
  // those that have.
  void set_leasable(const Block* block, bool leasable) noexcept {
    std::uint32_t& version = keys_[slot_of(block)].version;
    if ((version % 2 == 0) != leasable) {
      store_word(version, version + 1);
    }
  }

  // The writer to whom a slot was given. It has no block then.
  Writer writer_of(Slot slot) const noexcept { return keys_[slot].writer; }
  void set_writer(Slot slot, Writer writer) noexcept {
    store_word(keys_[slot].resets, header_.resets);
    store_word(keys_[slot].writer, writer);
  }

  // Whether there was no reset since the slot was given to its writer.
  bool has_current_writer(Slot slot) const noexcept { return keys_[slot].resets == header_.resets; }

  // The tenant of the block in a slot, or of the slot's writer.
  Tenant tenant_of(Slot slot) const noexcept { return keys_[slot].tenant; }
  void set_tenant(Slot slot, Tenant tenant) noexcept { keys_[slot].tenant = tenant; }

  // Whether it entered before the last reset.
  bool is_of_reset(const Block* block) const noexcept { return block->epoch != epoch(); }

  // Whether a reset has dropped the block, and the index has not yet noticed.
  bool is_stale(const Block* block) const noexcept {
    return block->state != State::dropped && is_of_reset(block);
  }

  State state_of(const Block* block) const noexcept {
    return is_stale(block) ? State::dropped : block->state;
  }

  // Of `Block::handle`.
  std::size_t handles = 0;

 private:
  void keep_key_for_children(const Block* block);

  Header& header_;
  ZeroedArray<Block> blocks_;
  StoredKey* keys_;
  // By slot, the key of the block that this slot's builds on, if the slot of that has another block.
  std::unordered_map<Slot, std::string> lost_parents_;
};

}  // namespace flexkv::index
