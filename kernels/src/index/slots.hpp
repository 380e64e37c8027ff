// SPDX-License-Identifier: Apache-2.0
//
// The index of a directory on disk: which block is in which slot, and which leaves next. Without I/O.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "shared_policy.hpp"
#include "slot_rows.hpp"

namespace flexkv::index {

// What flexkv_kernels.block_index.SlotIndex says, whose methods have these names. What calls Python may
// throw PythonError.
class Slots : public SlotRows {
 public:
  explicit Slots(std::size_t slots) : SlotRows(slots) {}
  ~Slots() { follow(nullptr); }

  std::size_t num_slots() const noexcept { return size(); }
  std::size_t free_slots() const noexcept { return size() - taken(); }
  std::size_t ready() const noexcept { return ready_; }
  std::size_t stale() const noexcept { return stale_; }
  std::size_t evictions() const noexcept { return evictions_; }
  std::size_t noted() const noexcept { return noted_; }
  std::size_t usable_slots() const noexcept { return size() - in_use_; }
  PyObject* changes() const noexcept { return changes_.get(); }

  void follow(std::shared_ptr<SharedPolicy> policy) {
    if (policy_ != nullptr) {
      policy_->indexes[number_] = nullptr;
    }
    policy_ = std::move(policy);
    if (policy_ == nullptr) {
      restored_ = {};
      return;
    }
    number_ = static_cast<std::uint16_t>(policy_->indexes.size());
    policy_->indexes.push_back(this);
    policy_->keys.insert(policy_->keys.end(), keys().begin(), keys().end());
  }
  const std::shared_ptr<SharedPolicy>& policy() const noexcept { return policy_; }

  // The slot of a block that is not stale, or none.
  Slot find(KeyView key) const noexcept {
    const Slot slot = find_any(key);
    return slot != kNoSlot && is_current(slot) ? slot : kNoSlot;
  }
  bool is_ready(Slot slot) const noexcept {
    return slot != kNoSlot && row(slot).state == SlotState::ready && is_current(slot);
  }

  // Enters a record of a table. Returns the slot whose record does not count, because that of another
  // slot with this key is later, or none.
  Slot enter(Slot slot, KeyView key, const char* checksum, std::int64_t generation,
             std::uint32_t time) {
    const Slot known = find_any(key);
    if (known != kNoSlot) {
      if (row(known).recorded >= generation) {
        return slot;
      }
      take_out(known);
    }
    make_fit(key);
    put(slot, key, SlotState::ready);
    row(slot).recorded = generation;
    row(slot).parent = kNoSlot;
    std::memcpy(row(slot).checksum, checksum, kChecksumBytes);
    set_time(slot, time);
    return known;
  }

  // Ends the entering. Calls nothing of Python.
  void begin() {
    for (Slot slot = 0; slot < ring(); ++slot) {
      if (row(slot).state == SlotState::ready) {
        restored_.push_back(slot);
      }
    }
    count_free(restored_.empty() ? kNoSlot : restored_.back());
    blocks_ = ready_ = restored_.size();
    std::sort(restored_.begin(), restored_.end(),
              [&](Slot one, Slot other) { return row(one).recorded > row(other).recorded; });
    std::int64_t age = 0;
    for (const Slot slot : restored_) {
      row(slot).recorded = -age++;
      link(slot, row(ring()).previous);
    }
  }

  bool is_reporting() const noexcept { return !restored_.empty(); }

  void report_restored(std::size_t limit) {
    for (; limit > 0 && is_reporting() && policy_ != nullptr; --limit) {
      const Slot slot = restored_.back();
      restored_.pop_back();
      if (!is_ready(slot) || row(slot).known) {
        continue;
      }
      if (place_of(key_of(slot), this).slot != kNoSlot) {
        expel(slot);
        continue;
      }
      report_ready(slot, nullptr);
      if (!row(slot).is_held()) {
        report_released(slot);
      }
    }
  }

  Slot reserve(KeyView key, const KeyView* after, Slot behind) {
    make_fit(key);
    Place parent;
    if (policy_ == nullptr) {
      drop_stale(key);
      const Slot before = after == nullptr ? kNoSlot : find(*after);
      if (!make_room(before)) {
        return kNoSlot;
      }
      behind = before == kNoSlot ? behind : before;
    } else {
      for (Slots* const each : policy_->indexes) {
        if (each != nullptr) {
          each->drop_stale(key);
        }
      }
      parent = after == nullptr ? Place{} : place_of(*after, nullptr);
      hold(parent);  // it must not be evicted to make room for its child
      if (!has_room_for_child(parent)) {
        return kNoSlot;
      }
    }
    const Slot slot = take_free();
    put(slot, key, SlotState::writing);
    SlotRow& made = row(slot);
    made.resets = resets_;
    made.uses = 1;
    made.recorded = ++writes_;
    made.parent = parent.slot;
    if (parent.slot != kNoSlot) {
      made.parent_index = parent.index->number_;
      made.parent_life = parent.row().life;
    }
    ++in_use_;
    ++blocks_;
    link(slot, behind == kNoSlot || row(behind).state == SlotState::none ? ring() : behind);
    return slot;
  }

  bool publish(Slot slot, const char* checksum) {
    if (row(slot).state != SlotState::writing || !is_current(slot)) {
      return false;
    }
    row(slot).state = SlotState::ready;
    ++ready_;
    std::memcpy(row(slot).checksum, checksum, kChecksumBytes);
    note(slot, true);
    if (policy_ != nullptr) {
      // Writes end in any order. If the block that it builds on is still being written, the policy gets
      // the nearest one before that which is ready; later it gets the other as the next one of the same.
      Place before = parent_of(slot);
      for (int steps = 1; before.slot != kNoSlot && !before.row().known; ++steps) {
        before = steps < kMostSteps ? before.index->parent_of(before.slot) : Place{};
      }
      report_ready(slot, before.slot == kNoSlot ? nullptr : before.index->key_at(before.slot));
    }
    release(slot);
    return true;
  }

  void lease(Slot slot) {
    if (!row(slot).is_held()) {
      report_held(slot);
    }
    in_use_ += row(slot).uses++ == 0;
  }

  void release(Slot slot) {
    if (--row(slot).uses > 0) {
      return;
    }
    --in_use_;
    if (!is_ready(slot)) {
      expel(slot);
    } else if (!row(slot).is_held()) {
      report_released(slot);
    }
  }

  void discard(Slot slot) { forget(slot); }

  std::vector<Slot> touch(const Keys& keys) {
    std::vector<Slot> outdated;
    const std::int64_t oldest = writes_ - static_cast<std::int64_t>(size() / 2);
    for (Py_ssize_t i = keys.size(); i > 0; --i) {
      const Slot slot = find(keys[i - 1]);
      if (slot == kNoSlot) {
        continue;
      }
      unlink(slot);
      link(slot, ring());
      if (is_ready(slot) && (!outdated.empty() || row(slot).recorded < oldest)) {
        row(slot).recorded = writes_;
        outdated.push_back(slot);
      }
    }
    return outdated;
  }

  std::vector<Slot> end_uses(const std::vector<Slot>& used) {
    std::unordered_map<Slot, std::int32_t> uses;
    std::for_each(used.begin(), used.end(), [&](Slot slot) { ++uses[slot]; });
    std::vector<Slot> erased;
    for (Slot slot = 0; slot < reached(); ++slot) {
      if (row(slot).uses > 0 && !is_ready(slot) && uses.count(slot) == 0) {
        erased.push_back(slot);
      }
    }
    for (const Slot slot : erased) {
      forget(slot);
      uses[slot] = 1;
    }
    in_use_ = uses.size();
    for (Slot slot = 0; slot < reached(); ++slot) {
      const auto found = uses.find(slot);
      const bool was_held = row(slot).is_held();
      row(slot).uses = found == uses.end() ? 0 : found->second;
      if (is_ready(slot) && was_held != row(slot).is_held()) {
        was_held ? report_released(slot) : report_held(slot);
      }
    }
    return erased;
  }

  std::vector<Slot> take_old(std::uint32_t oldest, std::size_t most, std::size_t searched) {
    std::vector<Slot> old;
    for (std::size_t left = std::min(searched, size()); left > 0 && old.size() < most; --left) {
      const auto slot = static_cast<Slot>(searched_);
      searched_ = (searched_ + 1) % size();
      if (time_of(slot) != 0 && time_of(slot) < oldest && is_ready(slot)) {
        old.push_back(slot);
      }
    }
    std::for_each(old.begin(), old.end(), [&](Slot slot) { lease(slot); });
    return old;
  }

  void clear() noexcept {
    ++resets_;
    stale_ = blocks_;
    ready_ = 0;
  }

  void sweep(std::size_t limit) {
    for (std::size_t count = std::min(limit, stale_); count > 0; --count) {
      expel(row(ring()).previous);
    }
  }

  bool has_room() const noexcept { return has_free() || stale_ > 0; }

  bool has_victim() const { return policy_ != nullptr && victim() != kNoSlot; }

  void watch() {
    changes_ = own(PyDict_New());
    noted_ = blocks_ > 0 ? 0 : size();
  }

  bool has_changes_before(std::size_t stop) const {
    return changes_ && (PyDict_Size(changes_.get()) > 0 || stale_ > 0 || noted_ < stop);
  }

  bool has_changes() const { return has_changes_before(size()); }

  // Stale blocks leave first: nobody knows of those in later slots.
  void note_changes(std::size_t limit, std::size_t stop) {
    sweep(limit);
    const std::size_t end = std::min(noted_ + kNotedSlots, stop);
    while (static_cast<std::size_t>(PyDict_Size(changes_.get())) < limit && noted_ < end &&
           stale_ == 0) {
      const auto slot = static_cast<Slot>(noted_++);
      if (is_ready(slot)) {
        note(slot, true);
      }
    }
  }

  bool is_reported(KeyView key) const {
    const Slot slot = find_any(key);
    const bool is_noted =
        slot != kNoSlot && at(slot) < noted_ && row(slot).state == SlotState::ready;
    return is_noted != (changes_ && is_changed(bytes_of(key)));
  }

 private:
  // Blocks of a prefix that are looked at for one that is ready, or of the order of use for one to evict
  // if that of the policy is in another directory. Not tuned.
  static constexpr int kMostSteps = 256;

  // Slots that a drain of changes looks at for blocks that were there before `watch`. Not tuned.
  static constexpr std::size_t kNotedSlots = 8192;

  struct Place {
    Slots* index = nullptr;
    Slot slot = kNoSlot;

    SlotRow& row() const noexcept { return index->row(slot); }
  };

  bool is_current(Slot slot) const noexcept { return row(slot).resets == resets_; }
  bool is_stale(Slot slot) const noexcept {
    return row(slot).state != SlotState::none && !is_current(slot);
  }

  // The policy reads the keys that it knows where they are.
  void make_fit(KeyView key) {
    if (fit(key.size()) && policy_ != nullptr) {
      policy_->keys.push_back(keys().back());
    }
  }

  // Forgets the block in a slot, which becomes free if `frees` and it is not in use. The policy comes
  // last: if it raises, the block has left all the same.
  void forget(Slot slot, bool frees = false) {
    SlotRow& left = row(slot);
    if (left.state == SlotState::none) {
      return;
    }
    if (left.state == SlotState::ready) {
      note(slot, false);
    }
    const bool was_known = left.known;
    const Place parent = parent_of(slot);
    --blocks_;
    ready_ -= is_ready(slot);
    stale_ -= is_stale(slot);
    take_out(slot);
    unlink(slot);
    left.known = false;
    left.parent = kNoSlot;
    left.children = 0;
    ++left.life;
    if (frees && left.uses == 0) {
      set_free(slot);
    }
    if (was_known) {
      policy_->evicted(key_at(slot));
    }
    end_hold(parent);
  }

  // Forgets the block of a slot, if it has one. The slot becomes free now or with its last use.
  void expel(Slot slot) {
    if (row(slot).state != SlotState::none) {
      forget(slot, true);
    } else if (row(slot).uses == 0) {
      set_free(slot);
    }
  }

  void drop_stale(KeyView key) {
    const Slot slot = stale_ > 0 ? find_any(key) : kNoSlot;
    if (slot != kNoSlot && is_stale(slot)) {
      expel(slot);
    }
  }

  // The slot of the least recently used block that is not in use, and was used before that of the slot
  // `before`; or none.
  Slot oldest(Slot before) const noexcept {
    Slot slot = row(ring()).previous;
    while (slot != ring() && slot != before && row(slot).uses > 0) {
      slot = row(slot).previous;
    }
    return slot == ring() || slot == before ? kNoSlot : slot;
  }

  // Evicts, unless a slot is free; without a policy, a block that was used before that of a slot. Returns
  // whether a slot is free now.
  bool make_room(Slot before = kNoSlot) {
    while (!has_free()) {
      Slot slot = policy_ == nullptr || stale_ > 0 ? oldest(before) : kNoSlot;
      if (policy_ != nullptr && (slot == kNoSlot || !is_stale(slot))) {
        slot = victim();
        slot = slot == kNoSlot ? oldest_not_held() : slot;
      }
      if (slot == kNoSlot) {
        return false;
      }
      evictions_ += is_current(slot);
      expel(slot);
    }
    return true;
  }

  // `make_room`. Without room, the hold on the parent ends.
  bool has_room_for_child(const Place& parent) {
    try {
      if (make_room()) {
        return true;
      }
    } catch (const PythonError&) {
      PyObject *kind = nullptr, *error = nullptr, *trace = nullptr;
      PyErr_Fetch(&kind, &error, &trace);  // the policy is called without an error set
      end_hold(parent);
      PyErr_Restore(kind, error, trace);
      throw;
    }
    end_hold(parent);
    return false;
  }

  // The slot of the block that the policy would evict next, or none if that is not here.
  Slot victim() const {
    return policy_->with_victim([&](KeyView key) { return find_any(key); });
  }

  // The slot of the least recently used block that is not held, of so many as may be looked at; or none.
  Slot oldest_not_held() const noexcept {
    Slot slot = row(ring()).previous;
    for (int steps = 0; steps < kMostSteps && slot != ring(); ++steps) {
      if (!row(slot).is_held()) {
        return slot;
      }
      slot = row(slot).previous;
    }
    return kNoSlot;
  }

  // Where the block of a key is, in any index but one.
  Place place_of(KeyView key, const Slots* but) const {
    for (Slots* const each : policy_->indexes) {
      const Slot slot = each == nullptr || each == but ? kNoSlot : each->find(key);
      if (slot != kNoSlot) {
        return {each, slot};
      }
    }
    return {};
  }

  // Where the block is that the one in a slot builds on, unless it has left.
  Place parent_of(Slot slot) const {
    const SlotRow& child = row(slot);
    Slots* const index = policy_ == nullptr || child.parent == kNoSlot
                             ? nullptr
                             : policy_->indexes[child.parent_index];
    const bool is_there = index != nullptr && index->row(child.parent).life == child.parent_life;
    return is_there ? Place{index, child.parent} : Place{};
  }

  // One more block with a slot builds on `parent`, or one less.
  static void hold(const Place& parent) {
    if (parent.slot != kNoSlot) {
      if (!parent.row().is_held()) {
        parent.index->report_held(parent.slot);
      }
      ++parent.row().children;
    }
  }
  static void end_hold(const Place& parent) {
    if (parent.slot != kNoSlot) {
      --parent.row().children;
      if (!parent.row().is_held()) {
        parent.index->report_released(parent.slot);
      }
    }
  }

  void report_ready(Slot slot, const char* after) {
    policy_->inserted(key_at(slot), after);
    row(slot).known = true;
  }
  void report_held(Slot slot) const {
    if (row(slot).known) {
      policy_->held(key_at(slot));
    }
  }
  void report_released(Slot slot) const {
    if (row(slot).known) {
      policy_->released(key_at(slot));
    }
  }

  static Reference bytes_of(KeyView key) {
    return own(PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size())));
  }
  Reference object_of(Slot slot) const { return bytes_of(key_of(slot)); }

  bool is_changed(const Reference& key) const {
    const int is_in = PyDict_Contains(changes_.get(), key.get());
    if (is_in < 0) {
      throw PythonError{};
    }
    return is_in == 1;
  }

  // A block became ready or left. Two changes of one block that no reader has taken are none.
  void note(Slot slot, bool became_ready) {
    if (!changes_ || at(slot) >= noted_) {
      return;
    }
    const Reference key = object_of(slot);
    if ((is_changed(key) ? PyDict_DelItem(changes_.get(), key.get())
                         : PyDict_SetItem(changes_.get(), key.get(),
                                          became_ready ? Py_True : Py_False)) != 0) {
      throw PythonError{};
    }
  }

  std::uint32_t resets_ = 0;
  std::size_t blocks_ = 0, ready_ = 0, stale_ = 0, in_use_ = 0, evictions_ = 0;
  std::int64_t writes_ = 0;
  std::size_t searched_ = 0;
  std::vector<Slot> restored_;  // that the policy has to learn of, newest first
  std::shared_ptr<SharedPolicy> policy_;
  std::uint16_t number_ = 0;  // in the policy's indexes
  Reference changes_;         // null when not watched
  std::size_t noted_ = 0;     // slots, from the first on, whose changes are noted as they occur
};

}  // namespace flexkv::index
