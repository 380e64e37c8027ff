// SPDX-License-Identifier: Apache-2.0
#include "index.hpp"

#include <algorithm>

namespace flexkv::index {

Index::Index(std::size_t slots, PyObject* policy, std::unique_ptr<python::Buffer> shared, bool begun)
    : shared_(std::move(shared)),
      memory_(slots, shared_ == nullptr ? nullptr : shared_->start(), begun),
      store_(memory_),
      table_(memory_, store_),
      policy_(PyTuple_Check(policy) != 0 ? make_tenants(policy, store_, table_)
              : policy == Py_None        ? make_lru(store_)
                                         : make_policy(policy, store_, table_)),
      counts_tenants_(policy_->counts_tenants()) {
  free_.reserve(slots);
  if (begun) {
    resume();
    return;
  }
  for (std::size_t slot = slots; slot > 0; --slot) {
    free_.push_back(static_cast<Slot>(slot - 1));
  }
}

void Index::watch() {
  sweep(store_.size());  // a stale block that leaves later would count as a change
  changes_ = own(PyDict_New());
  for_each([&](const Block* block) {
    if (block->state == State::ready) {
      note(block, true);
    }
  });
}

std::vector<Block*> Index::blocks() {
  std::vector<Block*> there;
  for_each([&](Block* block) {
    if (!store_.is_stale(block)) {
      there.push_back(block);
    }
  });
  return there;
}

std::vector<Block*> Index::lease(const Keys& keys) {
  const auto count = static_cast<std::size_t>(keys.size());
  std::vector<Block*> found;
  found.reserve(count);
  table_.find_each(keys, [&](Py_ssize_t, Block* block) {
    if (is_ready(block)) {
      found.push_back(block);
    }
    return is_ready(block);
  });
  if (found.size() < count) {
    return {};
  }
  for (Block* const block : found) {
    hold(block);
    ++block->leases;
  }
  return found;
}

void Index::release(const std::vector<Block*>& blocks) {
  long long use = uses_ += static_cast<long long>(blocks.size());
  for (Block* const block : blocks) {
    block->use(use--);
    end_lease(block);
  }
}

void Index::release_unused(const std::vector<Block*>& blocks) {
  for (Block* const block : blocks) {
    end_lease(block);
  }
}

Block* Index::reserve(KeyView key, Py_hash_t hash, const KeyView* after, Block* near, bool fetched,
                      Tenant tenant, Slot given) {
  if (key.size() > kMostKeyBytes) {
    PyErr_Format(PyExc_ValueError, "a key has %zu bytes; allowed: up to %zu", key.size(),
                 kMostKeyBytes);
    throw PythonError{};
  }
  if (Block* const known = table_.find_any(key, hash); known != nullptr) {
    if (!store_.is_stale(known)) {
      return nullptr;
    }
    expel(known);
  }
  Block* parent = nullptr;
  if (after != nullptr) {
    parent = near != nullptr && store_.key_of(near) == *after ? near : table_.find(*after);
    if (parent == nullptr) {
      return nullptr;
    }
  }
  // From now on: the parent must not be evicted to make room for its child.
  attach(parent);
  Slot slot = kNoSlot;
  Block* block = nullptr;
  try {
    slot = given == kNoSlot ? take_slot(tenant) : given;
    if (slot != kNoSlot) {
      const Tenant before = store_.tenant_of(slot);
      block = store_.begin_life(slot, key, hash, parent, tenant);
      store_.set_writer(slot, kNoWriter);
      if (counts_tenants_ && given != kNoSlot) {
        policy_->slot_returned(before);
      }
    }
  } catch (...) {
    PyObject *kind = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&kind, &error, &trace);  // the policy is called without an error set
    if (slot != given) {
      free_.push_back(slot);
    }
    detach(parent, 0);
    PyErr_Restore(kind, error, trace);
    throw;
  }
  if (block == nullptr) {
    detach(parent, 0);
    return nullptr;
  }
  block->fetched = fetched;
  if (parent != nullptr) {
    store_.link(block);
  }
  add_to_table(block);
  return block;
}

void Index::publish(const std::vector<Block*>& blocks) {
  long long use = uses_ += static_cast<long long>(blocks.size());
  for (Block* const block : blocks) {
    const long long used = use--;
    if (block->state == State::dropped) {
      free_.push_back(store_.slot_of(block));
      continue;
    }
    policy_->inserted(block);  // what may raise comes first: the block is being written until then
    block->state = State::ready;
    store_.set_leasable(block, true);
    table_.set_ready(block);
    block->used = used;
    ++ready_;
    note(block, true);
    if (block->evictable()) {
      policy_->released(block);
    }
  }
}

void Index::abandon(const std::vector<Block*>& blocks) {
  discard(blocks);
  for (Block* const block : blocks) {
    free_.push_back(store_.slot_of(block));
  }
}

void Index::discard(const std::vector<Block*>& blocks) {
  for (Block* const block : blocks) {
    if (block->state == State::writing) {
      take_out(block);
    }
  }
}

void Index::drop(const std::vector<Block*>& blocks) {
  for (Block* const block : blocks) {
    if (block->state == State::ready) {
      remove(block);
    }
  }
}

Block* Index::pin(KeyView key) {
  Block* const block = table_.find(key);
  if (block != nullptr) {
    hold(block);
    pinned_ += block->pins == 0;
    const bool attached = block->attached();
    ++block->pins;
    if (!attached) {
      attach(store_.parent_of(block));
    }
  }
  return block;
}

void Index::unpin(Block* block) {
  --block->pins;  // of a block that has left, whose pins ended with it, to less than none
  if (block->state == State::dropped) {
    return;
  }
  pinned_ -= block->pins == 0;
  if (!block->attached()) {
    detach(store_.parent_of(block), block->used);
  }
  if (block->evictable()) {
    policy_->released(block);
  }
}

bool Index::has_room() {
  sweep_for_room();
  return !free_.empty() || next_victim(kUnknownTenant) != nullptr;
}

Block* Index::lease_victim() {
  if (stale_ > 0) {
    return nullptr;  // their slots become free first
  }
  Block* const block = next_victim(kUnknownTenant);
  if (block != nullptr) {
    begin_leaving(block);
  }
  return block;
}

Block* Index::lease_to_leave(KeyView key) {
  Block* const block = table_.find(key);
  if (stale_ > 0 || block == nullptr || !block->evictable()) {
    return nullptr;
  }
  begin_leaving(block);
  return block;
}

void Index::begin_leaving(Block* block) {
  hold(block);
  ++block->leases;
  detach(store_.parent_of(block), block->used);
  block->leaving = true;
  block->was_used = false;
}

void Index::retire(Block* block) {
  const bool attached = block->attached();
  const bool used = attached || block->leases > 1 || block->was_used ||
                    is_held_outside(store_.slot_of(block));
  if (block->state == State::ready && !used) {
    remove(block);
    ++evictions_;
  }
  keep(block);
}

void Index::keep(Block* block) {
  const bool attached = block->attached();
  block->leaving = false;
  if (block->state == State::ready && !attached) {
    attach(store_.parent_of(block));
  }
  end_lease(block);
}

void Index::hit(const Keys& keys, PyObject* context) {
  uses_ += keys.size();
  table_.find_each(keys, [&](Py_ssize_t i, Block* block) {
    if (is_ready(block)) {
      block->use(uses_ - i);
      policy_->hit(block, context);
    }
    return true;
  });
}

void Index::touch(const Keys& keys) {
  uses_ += keys.size();
  table_.find_each(keys, [&](Py_ssize_t i, Block* block) {
    if (is_ready(block)) {
      block->use(uses_ - i);
      if (block->evictable()) {
        policy_->touched(block);
      }
    }
    return true;
  });
}

void Index::clear() {
  if (stale_ == 0) {
    resets_ = 0;
  }
  if (++resets_ == kEpochs) {
    sweep(store_.size());  // else the blocks of the first reset would be current again
    resets_ = 1;
  }
  store_.begin_epoch();
  stale_ = tabled_;
  swept_ = 0;
  ready_ = 0;
  pinned_ = 0;
}

std::size_t Index::sweep(std::size_t limit) {
  for (; stale_ > 0 && limit > 0; --limit) {
    Block* const block = &store_[static_cast<Slot>(swept_)];
    if (block->tabled && store_.is_stale(block)) {
      expel(block);
    }
    swept_ = (swept_ + 1) % store_.size();
  }
  return stale_;
}

void Index::expel_stale(const std::vector<Block*>& blocks) {
  if (stale_ == 0) {
    return;
  }
  for (Block* const block : blocks) {
    if (store_.is_stale(block)) {
      expel(block);
    }
  }
}

// The block is no victim from now on, whatever the reason.
void Index::hold(Block* block) {
  if (block->evictable()) {
    policy_->held(block);
  }
}

void Index::end_lease(Block* block) {
  --block->leases;
  if (block->leases != 0) {
    return;
  }
  if (block->state == State::dropped) {
    free_.push_back(store_.slot_of(block));
  } else if (block->evictable()) {
    policy_->released(block);
  }
}

// A free slot, or that of a victim, or none; for a block of the tenant `asking`.
Slot Index::take_slot(Tenant asking) {
  while (true) {
    sweep_for_room();
    Slot slot = kNoSlot;
    if (!free_.empty()) {
      slot = free_.back();
      free_.pop_back();
    } else if (Block* const block = next_victim(asking); block != nullptr) {
      remove(block);
      ++evictions_;
      slot = store_.slot_of(block);
    }
    if (slot == kNoSlot || !is_held_outside(slot)) {
      return slot;
    }
    held_slots_.push_back(slot);
  }
}

// The block to evict next, or null. Those that readers hold have a lease until they let go.
Block* Index::next_victim(Tenant asking) {
  Block* block = policy_->victim(asking);
  while (block != nullptr && is_held_outside(store_.slot_of(block))) {
    held_.push_back(block);
    hold(block);
    ++block->leases;
    block = policy_->victim(asking);
  }
  return block;
}

// Whether a reader holds the slot. If its block has left, none comes to hold it after this.
bool Index::is_held_outside(Slot slot) const noexcept {
  if (holds_.empty()) {
    return false;
  }
  fence();
  return holds_.has(slot);
}

std::size_t Index::look_at_holds() {
  std::erase_if(held_slots_, [&](Slot slot) {
    const bool is_free = !is_held_outside(slot);
    if (is_free) {
      free_.push_back(slot);
    }
    return is_free;
  });
  std::vector<Block*> ended;
  std::erase_if(held_, [&](Block* block) {
    const bool is_free = !is_held_outside(store_.slot_of(block));
    if (is_free) {
      ended.push_back(block);
    }
    return is_free;
  });
  expel_stale(ended);
  release_unused(ended);
  return held_.size() + held_slots_.size();
}

std::vector<Slot> Index::take_slots(std::size_t most, Writer writer, Tenant tenant) {
  std::vector<Slot> slots;
  while (slots.size() < most) {
    const Slot slot = take_slot(tenant);
    if (slot == kNoSlot) {
      break;
    }
    store_.set_writer(slot, writer);
    if (counts_tenants_) {
      store_.set_tenant(slot, tenant);
      policy_->slot_taken(tenant);
    }
    slots.push_back(slot);
  }
  return slots;
}

std::vector<Slot> Index::taken_by(Writer writer) const {
  std::vector<Slot> taken;
  for (Slot slot = 0; static_cast<std::size_t>(slot) < slots(); ++slot) {
    if (store_.writer_of(slot) == writer) {
      taken.push_back(slot);
    }
  }
  return taken;
}

void Index::give_back(Slot slot) {
  store_.set_writer(slot, kNoWriter);
  if (counts_tenants_) {
    policy_->slot_returned(store_.tenant_of(slot));
  }
  free_.push_back(slot);
}

// One more block holds `parent`, which it builds on; null for none.
void Index::attach(Block* parent) {
  for (; parent != nullptr; parent = store_.parent_of(parent)) {
    hold(parent);
    const bool attached = parent->attached();
    ++parent->children;
    if (attached) {
      return;
    }
  }
}

// A block that was last used so ends its hold on `parent`, which it builds on; null for none.
void Index::detach(Block* parent, long long used) {
  for (; parent != nullptr; parent = store_.parent_of(parent)) {
    --parent->children;
    if (used > parent->used) {
      parent->use(used);
    }
    if (parent->evictable()) {
      policy_->released(parent);
    }
    if (parent->attached()) {
      return;
    }
    used = parent->used;
  }
}

// Removes a ready block, and before it all blocks that build on it: no prefix would lead to them.
void Index::remove(Block* block) {
  Block* last = block;
  while (true) {
    while (last->first_child != kNoSlot) {
      last = &store_[last->first_child];
    }
    Block* const parent = store_.parent_of(last);
    if (last->state == State::ready) {
      policy_->evicted(last);
    }
    if (last == block) {
      take_out(last);
      return;
    }
    if (last->state == State::ready && last->leases == 0) {
      free_.push_back(store_.slot_of(last));
    }
    take_out(last);
    last = parent;
  }
}

// Takes the block out of the tables, and ends its hold on the block before it.
void Index::take_out(Block* block) {
  Block* const parent = store_.parent_of(block);
  if (parent != nullptr) {
    // Often the next that leaves, and the one after it. Their memory is seldom in the processor's
    // caches.
    reading().prefetch(parent->hash);
    if (const Block* const second = store_.parent_of(parent); second != nullptr) {
      reading().prefetch(second->hash);
      reading().prefetch_key(store_.slot_of(second));
      if (second->parent != kNoSlot) {
        __builtin_prefetch(&store_[second->parent]);
      }
    }
  }
  untable(block);
  const bool attached = block->attached();
  end_life(block);
  if (attached) {
    detach(parent, block->used);
  }
}

// The block, which is in no table any more, counts no longer.
void Index::end_life(Block* block) {
  const bool was_ready = block->state == State::ready;
  ready_ -= was_ready;
  pinned_ -= block->pins > 0;
  block->pins = 0;
  block->state = State::dropped;
  store_.unlink(block);
  if (was_ready) {
    note(block, false);
  }
}

// Ends the life of a stale block: no other block builds on it but stale ones. A slot in use becomes
// free when its writer or its last reader is done. The policy comes last: if it raises for this
// block, and would each time, the block has left all the same.
void Index::expel(Block* block) {
  const bool is_ready = block->state == State::ready;
  untable(block);
  store_.unlink(block);
  --stale_;
  block->pins = 0;
  block->state = State::dropped;
  if (is_ready && block->leases == 0) {
    free_.push_back(store_.slot_of(block));
  }
  if (is_ready) {
    note(block, false);
    policy_->evicted(block);
  }
}

void Index::add_to_table(Block* block) {
  table_.add(block);
  block->tabled = true;
  ++tabled_;
  if (counts_tenants_) {
    policy_->entered(block);
  }
}

void Index::untable(Block* block) {
  store_.set_leasable(block, false);
  table_.remove(block);
  --tabled_;
  block->tabled = false;
  if (counts_tenants_) {
    policy_->left(block);
  }
}

// Ends with a free slot, or without a stale block. Not tuned: a few microseconds a round.
void Index::sweep_for_room() {
  constexpr std::size_t kSlots = 16;
  while (free_.empty() && stale_ > 0) {
    sweep(kSlots);
  }
}

// A block became ready or left. Two changes of one block that no reader has taken are none.
void Index::note(const Block* block, bool became_ready) {
  if (!changes_) {
    return;
  }
  const KeyView view = store_.key_of(block);
  const Reference key =
      own(PyBytes_FromStringAndSize(view.data(), static_cast<Py_ssize_t>(view.size())));
  const int is_noted = PyDict_Contains(changes_.get(), key.get());
  if (is_noted < 0 ||
      (is_noted == 1 ? PyDict_DelItem(changes_.get(), key.get())
                     : PyDict_SetItem(changes_.get(), key.get(),
                                      became_ready ? Py_True : Py_False)) != 0) {
    throw PythonError{};
  }
}

}  // namespace flexkv::index
