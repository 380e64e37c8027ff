// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "policy.hpp"

namespace flexkv::index {

namespace {

// A queue of the slots whose blocks may leave, by their last use. A slot has one entry at most. It is
// corrected when it comes to the front: its block may be held, used since, or another one by then.
//
// One entry lies beside the queue. A prefix leaves block by block from its end, and each block becomes
// the next victim when the block behind it has left: that entry never enters the queue.
class Lru final : public Policy {
 public:
  Lru(BlockStore& store, const Portion* portion)
      : store_(store), portion_(portion), queued_(store.size()) {}

  void began(PyObject*, PyObject*, PyObject*) override {}
  void ended(PyObject*, PyObject*, PyObject*) override {}
  void inserted(Block*) override {}
  void hit(Block*, PyObject*) override {}
  void touched(Block*) override {}
  void held(Block*) override {}

  void evicted(Block* block) override {
    if (has_beside_ && beside_.slot == store_.slot_of(block)) {
      has_beside_ = false;
      queued_[index(beside_)] = false;
    }
  }

  void released(Block* block) override {
    const auto slot = static_cast<std::size_t>(store_.slot_of(block));
    if (!queued_[slot]) {
      add(block);
      queued_[slot] = true;
    }
  }

  Block* victim(Tenant) override {
    while (has_beside_ || !entries_.empty()) {
      const bool is_beside =
          has_beside_ && (entries_.empty() || !is_later(beside_, entries_.front()));
      const Entry first = is_beside ? beside_ : entries_.front();
      Block* const block = &store_[first.slot];
      const bool stays = block->tabled && block->evictable() && has(first.slot);
      if (stays && block->used == first.used) {
        return block;
      }
      if (is_beside) {
        has_beside_ = false;
      } else {
        std::pop_heap(entries_.begin(), entries_.end(), is_later);
        entries_.pop_back();
      }
      if (stays) {
        add(block);
      } else {
        queued_[index(first)] = false;
      }
    }
    return nullptr;
  }

  bool follows_requests() const noexcept override { return false; }

 private:
  struct Entry {
    long long used;
    Slot slot;
  };

  static std::size_t index(const Entry& entry) noexcept {
    return static_cast<std::size_t>(entry.slot);
  }

  bool has(Slot slot) const noexcept { return portion_ == nullptr || portion_->has(slot); }

  static bool is_later(const Entry& one, const Entry& other) noexcept {
    return one.used > other.used;
  }

  // Keeps the earlier of the new entry and the one beside the queue out of the queue.
  void add(const Block* block) {
    Entry entry{block->used, store_.slot_of(block)};
    if (!has_beside_) {
      beside_ = entry;
      has_beside_ = true;
      return;
    }
    if (is_later(beside_, entry)) {
      std::swap(beside_, entry);
    }
    entries_.push_back(entry);
    std::push_heap(entries_.begin(), entries_.end(), is_later);
  }

  BlockStore& store_;
  const Portion* portion_;
  std::vector<Entry> entries_;
  Entry beside_{};
  bool has_beside_ = false;
  std::vector<bool> queued_;  // whether a slot has an entry
};

}  // namespace

std::unique_ptr<Policy> make_lru(BlockStore& store, const Portion* portion) {
  return std::make_unique<Lru>(store, portion);
}

}  // namespace flexkv::index
