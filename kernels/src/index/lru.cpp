// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "policy.hpp"

namespace flexkv::index {

namespace {

// A queue of the slots whose blocks may leave, by their last use. A slot has one entry at most. It is
// corrected when it comes to the front: its block may be held, used since, or another one by then.
class Lru final : public Policy {
 public:
  explicit Lru(const std::vector<Block*>& blocks) : blocks_(blocks), queued_(blocks.size()) {}

  void began(PyObject*, PyObject*, PyObject*, PyObject*) override {}
  void ended(PyObject*, PyObject*, PyObject*) override {}
  void inserted(Block*) override {}
  void hit(Block*, PyObject*) override {}
  void touched(Block*) override {}
  void held(Block*) override {}
  void evicted(Block*) override {}

  void released(Block* block) override {
    const auto slot = static_cast<std::size_t>(block->slot);
    if (!queued_[slot]) {
      push(block);
      queued_[slot] = true;
    }
  }

  Block* victim(PyObject*) override {
    while (!entries_.empty()) {
      const Entry first = entries_.front();
      Block* const block = blocks_[first.slot];
      const bool stays = block != nullptr && block->evictable();
      if (stays && block->used == first.used) {
        return block;
      }
      std::pop_heap(entries_.begin(), entries_.end(), is_later);
      entries_.pop_back();
      if (stays) {
        push(block);
      } else {
        queued_[first.slot] = false;
      }
    }
    return nullptr;
  }

  void clear() override {
    entries_.clear();
    queued_.assign(queued_.size(), false);
  }

  bool follows_requests() const noexcept override { return false; }

 private:
  struct Entry {
    long long used;
    std::size_t slot;
  };

  static bool is_later(const Entry& one, const Entry& other) noexcept {
    return one.used > other.used;
  }

  void push(Block* block) {
    entries_.push_back({block->used, static_cast<std::size_t>(block->slot)});
    std::push_heap(entries_.begin(), entries_.end(), is_later);
  }

  const std::vector<Block*>& blocks_;
  std::vector<Entry> entries_;
  std::vector<bool> queued_;
};

}  // namespace

std::unique_ptr<Policy> make_lru(const std::vector<Block*>& blocks) {
  return std::make_unique<Lru>(blocks);
}

}  // namespace flexkv::index
