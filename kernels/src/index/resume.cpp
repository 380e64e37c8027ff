// SPDX-License-Identifier: Apache-2.0
//
// An index goes on in memory whose owner has ended, perhaps in the middle of a change.
#include <algorithm>
#include <vector>

#include "index.hpp"

namespace flexkv::index {

// The blocks that readers could lease stay, with all that they build on; nothing is known of their uses.
// Slots that were given to a writer stay its. Readers may lease meanwhile.
void Index::resume() {
  const Reading& reading = table_.reading();
  std::vector<Slot> ready;
  for (std::size_t place = 0; place < reading.places(); ++place) {
    // An entry that was being moved is there twice, or once and torn.
    const Reading::Said said = reading.at(place);
    if (said.slot >= 0 && static_cast<std::size_t>(said.slot) < slots() && said.is_whole &&
        said.ready && said.epoch == store_.epoch()) {
      const StoredKey& key = reading.key(said.slot);
      if (key.version % 2 == 0 && key.size <= kMostKeyBytes &&
          reading.hash(key.view()) == said.hash) {
        ready.push_back(said.slot);
      }
    }
  }
  std::sort(ready.begin(), ready.end());
  ready.erase(std::unique(ready.begin(), ready.end()), ready.end());
  table_.empty();
  std::vector<bool> left(slots());  // those of `ready` that were not looked at
  for (const Slot slot : ready) {
    left[static_cast<std::size_t>(slot)] = true;
  }
  std::vector<Slot> prefix;
  for (const Slot last : ready) {
    for (Slot slot = last; slot >= 0 && static_cast<std::size_t>(slot) < slots() &&
                           left[static_cast<std::size_t>(slot)];
         slot = reading.key(slot).parent) {
      left[static_cast<std::size_t>(slot)] = false;
      prefix.push_back(slot);
    }
    while (!prefix.empty() && enter(prefix.back())) {
      prefix.pop_back();
    }
    prefix.clear();
  }
  for (Slot slot = static_cast<Slot>(slots()) - 1; slot >= 0; --slot) {
    if (Block* const block = &store_[slot]; !block->tabled) {
      store_.set_leasable(block, false);
      if (!is_taken(slot)) {
        free_.push_back(slot);
      } else if (counts_tenants_) {
        policy_->slot_taken(store_.tenant_of(slot));
      }
    }
  }
  fence();
}

// Enters the ready block in a slot. Returns false if the block that it builds on is not there.
bool Index::enter(Slot slot) {
  const StoredKey& key = store_.stored_key(slot);
  const Py_hash_t hash = reading().hash(key.view());
  Block* parent = nullptr;
  if (key.parent != kNoSlot) {
    const bool is_slot = key.parent >= 0 && static_cast<std::size_t>(key.parent) < slots();
    parent = is_slot ? &store_[key.parent] : nullptr;
    if (parent == nullptr || !parent->tabled || parent->hash != key.parent_hash) {
      return false;
    }
  }
  if (table_.find_any(key.view(), hash) != nullptr) {
    return false;
  }
  attach(parent);
  Block* const block = store_.resume_life(slot, hash, parent);
  if (parent != nullptr) {
    store_.link(block);
  }
  add_to_table(block);
  store_.set_writer(slot, kNoWriter);
  policy_->inserted(block);
  block->state = State::ready;
  table_.set_ready(block);
  block->used = ++uses_;
  ++ready_;
  if (block->evictable()) {
    policy_->released(block);
  }
  return true;
}

}  // namespace flexkv::index
