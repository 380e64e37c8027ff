// SPDX-License-Identifier: Apache-2.0
#include "block.hpp"

#include <algorithm>
#include <atomic>

#include "handle.hpp"

namespace flexkv::index {

BlockStore::~BlockStore() {
  for (std::size_t slot = 0; handles > 0 && slot < size(); ++slot) {
    detach_handle(*this, &blocks_[slot]);
  }
}

Block* BlockStore::parent_of(const Block* block) noexcept {
  if (block->parent == kNoSlot) {
    return nullptr;
  }
  Block* const parent = &(*this)[block->parent];
  return parent->life == block->parent_life ? parent : nullptr;
}

std::string BlockStore::parent_key_of(const Block* block) {
  if (const Block* const parent = parent_of(block); parent != nullptr) {
    return std::string(key_of(parent));
  }
  const auto lost = lost_parents_.find(slot_of(block));
  return lost == lost_parents_.end() ? std::string() : lost->second;
}

Block* BlockStore::begin_life(Slot slot, KeyView key, Py_hash_t hash, const Block* parent,
                              Tenant tenant) {
  Block* const block = &(*this)[slot];
  if (block->handle != nullptr) {
    detach_handle(*this, block);
  }
  if (block->life > 0) {
    keep_key_for_children(block);
  }
  if (!lost_parents_.empty()) {
    lost_parents_.erase(slot);
  }
  set_leasable(block, false);
  std::atomic_thread_fence(std::memory_order_release);  // readers notice before the key changes
  StoredKey& stored = keys_[slot];
  stored.parent = parent == nullptr ? kNoSlot : slot_of(parent);
  stored.parent_hash = parent == nullptr ? 0 : parent->hash;
  stored.tenant = tenant;
  stored.size = static_cast<std::uint8_t>(key.size());
  std::copy(key.begin(), key.end(), stored.bytes);
  return resume_life(slot, hash, parent);
}

Block* BlockStore::resume_life(Slot slot, Py_hash_t hash, const Block* parent) noexcept {
  Block* const block = &(*this)[slot];
  const std::uint32_t life = block->life + 1;
  *block = {};
  block->life = life;
  block->hash = hash;
  block->epoch = epoch();
  block->parent = parent == nullptr ? kNoSlot : slot_of(parent);
  block->parent_life = parent == nullptr ? 0 : parent->life;
  block->first_child = block->next_sibling = block->previous_sibling = kNoSlot;
  return block;
}

// Blocks may be left that build on one that has failed: they have its key, should it come again.
void BlockStore::keep_key_for_children(const Block* block) {
  for (Slot child = block->first_child; child != kNoSlot; child = (*this)[child].next_sibling) {
    lost_parents_[child] = key_of(block);
  }
}

void BlockStore::link(Block* block) noexcept {
  const Slot slot = slot_of(block);
  Slot& first = (*this)[block->parent].first_child;
  block->next_sibling = first;
  block->previous_sibling = kNoSlot;
  if (first != kNoSlot) {
    (*this)[first].previous_sibling = slot;
  }
  first = slot;
}

void BlockStore::unlink(Block* block) noexcept {
  if (block->next_sibling != kNoSlot) {
    (*this)[block->next_sibling].previous_sibling = block->previous_sibling;
  }
  if (block->previous_sibling != kNoSlot) {
    (*this)[block->previous_sibling].next_sibling = block->next_sibling;
  } else if (Block* const parent = parent_of(block);
             parent != nullptr && parent->first_child == slot_of(block)) {
    parent->first_child = block->next_sibling;
  }
  block->next_sibling = block->previous_sibling = kNoSlot;
}

}  // namespace flexkv::index
