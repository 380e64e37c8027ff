// SPDX-License-Identifier: Apache-2.0
//
// An index begins again from what is certain, after an error that may have lost leases.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "index.hpp"

namespace flexkv::index {

void Index::settle(const std::vector<Block*>& leased, const std::vector<Block*>& writing,
                   const std::vector<Block*>& pinned) {
  sweep(store_.size());
  std::vector<bool> was_evictable(store_.size());
  for_each([&](const Block* block) {
    was_evictable[static_cast<std::size_t>(store_.slot_of(block))] = block->evictable();
  });
  const std::unordered_set<Block*> written(writing.begin(), writing.end());
  for_each([&](Block* block) {
    if (block->state == State::writing && written.count(block) == 0) {
      untable(block);
      end_life(block);
    }
  });
  held_.clear();
  count_uses(leased, pinned);
  free_.clear();
  held_slots_.clear();
  std::vector<bool> used(slots());
  for (Slot slot = 0; static_cast<std::size_t>(slot) < slots(); ++slot) {
    used[static_cast<std::size_t>(slot)] = is_taken(slot);
  }
  const auto keep = [&](const Block* block) {
    used[static_cast<std::size_t>(store_.slot_of(block))] = true;
  };
  for_each(keep);
  std::for_each(leased.begin(), leased.end(), keep);
  std::for_each(writing.begin(), writing.end(), keep);
  for (std::size_t slot = used.size(); slot > 0; --slot) {
    if (!used[slot - 1]) {
      free_.push_back(static_cast<Slot>(slot - 1));
    }
  }
  inform_policy(was_evictable);
}

// Counts the leases and the pins, of which these are all, and the children of all blocks.
void Index::count_uses(const std::vector<Block*>& leased, const std::vector<Block*>& pinned) {
  const auto reset = [](Block* block) {
    block->leaving = false;
    block->leases = 0;
    block->pins = 0;
    block->children = 0;
  };
  for_each(reset);
  std::for_each(leased.begin(), leased.end(), reset);
  for (Block* const block : leased) {
    ++block->leases;
  }
  pinned_ = 0;
  for (Block* const block : pinned) {
    if (block->state != State::dropped) {
      pinned_ += block->pins == 0;
      ++block->pins;
    }
  }
  for_each([&](const Block* block) {
    if (Block* const parent = store_.parent_of(block); parent != nullptr) {
      ++parent->children;
    }
  });
}

// Reports what may be evicted and might not before. A policy that an error may have torn begins anew.
void Index::inform_policy(const std::vector<bool>& was_evictable) {
  std::vector<Block*> ready;
  for_each([&](Block* block) {
    if (block->state == State::ready) {
      ready.push_back(block);
    }
  });
  const bool is_torn = policy_->may_be_torn();
  if (is_torn) {
    std::sort(ready.begin(), ready.end(),
              [](const Block* one, const Block* other) { return one->used < other->used; });
    policy_->forget_all();
    for (Block* const block : ready) {
      policy_->inserted(block);
    }
  }
  for (Block* const block : ready) {
    const bool was = !is_torn && was_evictable[static_cast<std::size_t>(store_.slot_of(block))];
    if (block->evictable() && !was) {
      policy_->released(block);
    } else if (was && !block->evictable()) {
      policy_->held(block);
    }
  }
}

}  // namespace flexkv::index
